//! A device without the driver API: loads PTX text, runs kernels, and gives access to their memory. For tests of instructions.

use std::collections::HashSet;
use std::sync::Arc;

use cudaemu::bytecode::{DecodedModule, Global};
use cudaemu::decode::decode;
use cudaemu::exec::{self, ExecutorConfig, Launch, LaunchOutcome};
use cudaemu::mem::AddressSpace;
use cudaemu::{isa, ptx};

/// A device, and the instruction rows that its kernels have executed.
pub(crate) struct Device {
    space: AddressSpace,
    machine: ExecutorConfig,
    /// Rows of the instruction table that were executed.
    executed: HashSet<u32>,
}

/// A loaded module.
pub(crate) struct Module {
    code: Arc<DecodedModule>,
    globals: Arc<[u64]>,
}

/// Arguments of a launch, packed one after another, each aligned to its size.
#[derive(Default)]
pub(crate) struct Params(Vec<u8>);

impl Params {
    /// Appends an argument.
    pub(crate) fn add(mut self, bytes: &[u8]) -> Self {
        self.0.resize(self.0.len().next_multiple_of(bytes.len().max(1)), 0);
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn pointer(self, address: u64) -> Self {
        self.add(&address.to_le_bytes())
    }
}

impl Device {
    pub(crate) fn new() -> Self {
        let machine = ExecutorConfig {
            sms: 4,
            threads: 1,
            max_instructions: 1 << 24,
            report_only: false,
            local_bytes: 1 << 16,
            counting: false,
            footprint: false,
        };
        Self { space: AddressSpace::new(&[1 << 30]).expect("address space"), machine, executed: HashSet::new() }
    }

    /// Allocates memory with these bytes.
    pub(crate) fn upload(&self, bytes: &[u8]) -> u64 {
        let allocation = self.space.alloc(0, bytes.len() as u64, "test").expect("memory");
        self.space.snapshot().write(allocation.base(), bytes).expect("write");
        allocation.base()
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.space.snapshot().write(address, bytes).expect("write");
    }

    pub(crate) fn download(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.space.snapshot().read(address, &mut out).expect("read");
        out
    }

    /// Loads a module; its variables get their initial bytes, but addresses in initialisers stay zero.
    #[track_caller]
    pub(crate) fn load(&self, text: &str) -> Module {
        let module = ptx::parse(text).unwrap_or_else(|error| panic!("{error}"));
        let code = decode(&module, text).unwrap_or_else(|error| panic!("{error}"));
        let place = |global: &Global| {
            let mut bytes = global.init.clone().unwrap_or_default();
            bytes.resize(global.bytes as usize, 0);
            let allocation = if global.constant {
                self.space.alloc_constant(0, global.bytes, "test")
            } else {
                self.space.alloc(0, global.bytes, "test")
            };
            let base = allocation.expect("memory").base();
            self.write(base, &bytes);
            base
        };
        let globals = code.globals.iter().map(place).collect();
        Module { code: Arc::new(code), globals }
    }

    /// Runs a kernel until it ends or faults.
    #[track_caller]
    pub(crate) fn launch(
        &mut self,
        module: &Module,
        kernel: &str,
        grid: u32,
        block: u32,
        params: Params,
    ) -> LaunchOutcome {
        let function = module.code.functions.iter().position(|f| &*f.name == kernel);
        let launch = Launch {
            code: Arc::clone(&module.code),
            function: function.unwrap_or_else(|| panic!("no kernel {kernel}")),
            grid: [grid, 1, 1],
            block: [block, 1, 1],
            dynamic_shared: 0,
            params: params.0.into(),
            globals: Arc::clone(&module.globals),
            device: 0,
            peers: 1,
            id: 1,
        };
        assert_eq!(launch.params.len() as u32, launch.kernel().param_bytes, "{kernel}: bytes of parameters");
        let outcome = exec::run_grid(&launch, &self.space.snapshot(), &self.machine);
        let ran = outcome.profile.warps.iter().zip(&module.code.insts).filter(|(warps, _)| **warps > 0);
        self.executed.extend(ran.map(|(_, inst)| inst.row));
        outcome
    }

    /// Runs a kernel that must succeed.
    #[track_caller]
    pub(crate) fn run(&mut self, module: &Module, kernel: &str, grid: u32, block: u32, params: Params) {
        if let Err(report) = self.launch(module, kernel, grid, block, params).result {
            panic!("{report}");
        }
    }

    /// Fails if a row of these instructions (given by the first words of their opcodes) was never executed on this device.
    #[track_caller]
    pub(crate) fn assert_executed_all(&self, instructions: &[&str]) {
        let rows = isa::table().rows().iter().enumerate();
        let missing: Vec<&str> = rows
            .filter(|(index, row)| {
                let first = row.name.split('.').next().unwrap_or_default();
                instructions.contains(&first) && !self.executed.contains(&(*index as u32))
            })
            .map(|(_, row)| &*row.name)
            .collect();
        assert!(missing.is_empty(), "{} rows were never executed: {missing:?}", missing.len());
    }
}

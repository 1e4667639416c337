//! Kernel launches: input and result of the executor.

use std::sync::Arc;

use crate::bytecode::{DecodedModule, Function};
use crate::fault::FaultReport;

use crate::exec_context::MemoryCounts;
use crate::mem::MovedBytes;

/// One validated kernel launch: the driver has checked limits and the size of the parameters.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The module's code.
    pub code: Arc<DecodedModule>,
    /// Index of the kernel in [`DecodedModule::functions`].
    pub function: usize,
    /// Blocks in x, y, z, each at least 1.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z, each at least 1, at most 1024 in total.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// The parameter block, exactly [`Function::param_bytes`] long.
    pub params: Arc<[u8]>,
    /// Device addresses of [`DecodedModule::globals`].
    pub globals: Arc<[u64]>,
    /// Ordinal of its device.
    pub device: u32,
    /// Devices whose memory it may access, its own included, as a bit mask.
    pub peers: u64,
    /// `%gridid`: number of the launch in its context.
    pub id: u64,
}

impl Launch {
    /// The kernel.
    pub fn kernel(&self) -> &Function {
        &self.code.functions[self.function]
    }

    /// Number of threads in a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Number of blocks in the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// Offset of dynamic shared memory.
    pub fn dynamic_shared_start(&self) -> u32 {
        let kernel = self.kernel();
        kernel.shared_bytes.next_multiple_of(kernel.dynamic_shared_align.max(16))
    }

    /// Shared memory of a block in bytes: static, padding, dynamic.
    pub fn shared_bytes(&self) -> u32 {
        if self.dynamic_shared == 0 {
            self.kernel().shared_bytes
        } else {
            self.dynamic_shared_start() + self.dynamic_shared
        }
    }
}

/// Configuration of the executor.
#[derive(Clone, Debug)]
pub struct ExecutorConfig {
    /// Number of multiprocessors of the device: `%nsmid`.
    pub sms: u32,
    /// Host threads that run blocks.
    pub threads: usize,
    /// Limit of warp instructions of one block, after which a launch counts as endless.
    pub max_instructions: u64,
    /// Faults that hardware would not notice are reported and the kernel continues, instead of ending it.
    pub report_only: bool,
    /// Local memory per thread in bytes, for the frames of all active calls.
    pub local_bytes: u32,
    /// Whether to count memory traffic and bank conflicts.
    pub counting: bool,
    /// Whether to count distinct bytes touched (costs a bitmap per allocation).
    pub footprint: bool,
}

/// Result of a launch.
#[derive(Clone, Debug)]
pub struct LaunchOutcome {
    /// The fault that ended it: the one of the lowest block among the blocks that were running.
    pub result: Result<(), Box<FaultReport>>,
    /// Faults that did not end it ([`ExecutorConfig::report_only`]): the first ones of each worker thread.
    pub warnings: Vec<FaultReport>,
    /// Number of further warnings, which were dropped.
    pub more_warnings: u64,
    /// Counts of executed instructions.
    pub profile: Profile,
    /// Memory traffic, zeros unless counted.
    pub counts: MemoryCounts,
    /// Distinct bytes of global memory read and written, if counted.
    pub footprint: Option<[u64; 2]>,
    /// Bytes that it moved; zeros if no distinct bytes were counted.
    pub moved: MovedBytes,
}

/// Execution counts of each instruction of the module.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Warp instructions, by index in [`DecodedModule::insts`].
    pub warps: Vec<u64>,
    /// Lane instructions: executions by lanes whose guard was true.
    pub lanes: Vec<u64>,
}

impl Profile {
    /// Zero counts for a module.
    pub fn new(code: &DecodedModule) -> Self {
        Self { warps: vec![0; code.insts.len()], lanes: vec![0; code.insts.len()] }
    }

    /// Adds the counts of another profile of the same module.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in [(&mut self.warps, &other.warps), (&mut self.lanes, &other.lanes)] {
            sum.iter_mut().zip(more).for_each(|(a, b)| *a += b);
        }
    }

    /// Sum of all lane instructions.
    pub fn total_lanes(&self) -> u64 {
        self.lanes.iter().sum()
    }
}

//! Launches of small handwritten kernels.

mod flow;
mod progress;

use std::sync::Arc;

use super::{ExecutorConfig, Launch, LaunchOutcome, run_grid};
use crate::fault::FaultKind;
use crate::mem::AddressSpace;
use crate::{decode, ptx};

/// A launch of a kernel `k` whose only parameter is the address of `out`. In its body, `%r0` is `threadIdx.x`, `%r22` the index
/// of the thread in the grid, `%rd1` the address of `out`, and `%rd3` the address of the thread's word of it.
pub(super) struct TestLaunch {
    pub(super) body: String,
    /// Device functions and module variables, before the kernel.
    pub(super) functions: String,
    pub(super) grid: u32,
    pub(super) block: u32,
    pub(super) report_only: bool,
    pub(super) max_instructions: u64,
}

/// Result of [`TestLaunch::run`].
pub(super) struct RunResult {
    pub(super) outcome: LaunchOutcome,
    pub(super) out: Vec<u32>,
}

impl TestLaunch {
    pub(super) fn new(body: &str) -> Self {
        Self {
            body: body.into(),
            functions: String::new(),
            grid: 1,
            block: 32,
            report_only: false,
            max_instructions: 1 << 24,
        }
    }

    /// Runs the kernel; `out` has one word per thread, initially zero.
    pub(super) fn run(&self) -> RunResult {
        let text = format!(
            ".version 7.0\n.target sm_80\n.address_size 64\n{}\n.visible .entry k(.param .u64 out) {{\n\
             .reg .pred %p<8>; .reg .b32 %r<24>; .reg .b64 %rd<8>;\n\
             ld.param.u64 %rd1, [out];\n mov.u32 %r20, %ctaid.x; mov.u32 %r21, %ntid.x; mov.u32 %r0, %tid.x;\n\
             mad.lo.s32 %r22, %r20, %r21, %r0; mul.wide.u32 %rd2, %r22, 4; add.s64 %rd3, %rd1, %rd2;\n{}\n}}\n",
            self.functions, self.body
        );
        let module = ptx::parse(&text).unwrap_or_else(|e| unreachable!("{e}"));
        let code = decode::decode(&module, &text).unwrap_or_else(|e| unreachable!("{e}"));
        let function = code.functions.iter().position(|f| f.entry).unwrap_or_default();
        let space = AddressSpace::new(&[1 << 30]).unwrap_or_else(|e| unreachable!("{e}"));
        let threads = (self.grid * self.block) as usize;
        let out = space.alloc(0, threads as u64 * 4, "test").unwrap_or_else(|e| unreachable!("{e}"));
        let written = space.snapshot().write(out.base(), &vec![0; threads * 4]);
        written.unwrap_or_else(|e| unreachable!("{e}"));
        let globals: Vec<u64> = code
            .globals
            .iter()
            .map(|global| {
                let memory = space.alloc(0, global.bytes, "test").unwrap_or_else(|e| unreachable!("{e}"));
                let view = space.snapshot();
                let bytes = global.init.clone().unwrap_or_default();
                view.write(memory.base(), &bytes).unwrap_or_else(|e| unreachable!("{e}"));
                memory.base()
            })
            .collect();
        let view = space.snapshot();
        let launch = Launch {
            code: Arc::new(code),
            function,
            grid: [self.grid, 1, 1],
            block: [self.block, 1, 1],
            dynamic_shared: 0,
            params: out.base().to_le_bytes().into(),
            globals: globals.into(),
            device: 0,
            peers: 1,
            id: 1,
        };
        let machine = ExecutorConfig {
            sms: 4,
            threads: 2,
            max_instructions: self.max_instructions,
            report_only: self.report_only,
            local_bytes: 4096,
            counting: true,
            footprint: true,
        };
        let outcome = run_grid(&launch, &view, &machine);
        let mut bytes = vec![0; threads * 4];
        view.read(out.base(), &mut bytes).unwrap_or_else(|e| unreachable!("{e}"));
        let out = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        RunResult { outcome, out }
    }

    /// The word that each thread wrote; the launch must succeed.
    pub(super) fn values(&self) -> Vec<u32> {
        let ran = self.run();
        ran.outcome.result.unwrap_or_else(|report| unreachable!("{report}"));
        ran.out
    }

    /// The fault that ended the launch.
    pub(super) fn fault(&self) -> Option<FaultKind> {
        self.run().outcome.result.err().map(|report| report.fault.kind)
    }
}

//! Worker state: memory views, counts and warnings of one thread that runs blocks of a launch.

use std::sync::Arc;

use crate::fault::Fault;
use crate::mem::{Footprint, MemorySnapshot};

use super::launch::{ExecutorConfig, Launch};
use crate::exec_context::{
    AsyncCopies, DiagnosticSink, ExecContext, Global, Local, MemoryCounts, Registers, SectorSet, Shared,
};

/// Maximum warnings that a worker keeps per launch: a kernel with one mistake usually repeats it in every thread.
const WARNINGS: u64 = 64;

/// A fault that did not end the launch.
#[derive(Debug)]
pub(super) struct Warning {
    pub(super) fault: Box<Fault>,
    pub(super) warp: u32,
    pub(super) line: u32,
}

/// One worker's view of memory, its counts and its warnings.
#[derive(Debug)]
pub(super) struct Worker {
    global: Global,
    counts: MemoryCounts,
    sink: WorkerSink,
}

/// The worker's diagnostic sink.
#[derive(Debug)]
struct WorkerSink {
    report_only: bool,
    warnings: Vec<Warning>,
    /// Number of warnings of this launch so far.
    count: u64,
}

impl DiagnosticSink for WorkerSink {
    fn report(&mut self, fault: Box<Fault>, warp: u32, line: u32) -> Result<(), Box<Fault>> {
        if !self.report_only {
            return Err(fault);
        }
        self.count += 1;
        if self.count <= WARNINGS {
            self.warnings.push(Warning { fault, warp, line });
        }
        Ok(())
    }
}

/// State of the warp that runs.
pub(super) struct RunningWarp<'a> {
    pub(super) regs: &'a mut Registers,
    pub(super) local: &'a mut Local,
    pub(super) copies: &'a mut AsyncCopies,
    pub(super) shared: &'a mut Shared,
    pub(super) block_sectors: &'a mut SectorSet,
    pub(super) warp: u32,
    pub(super) block: [u32; 3],
    pub(super) clock: u64,
}

impl Worker {
    pub(super) fn new(
        launch: &Launch,
        view: &Arc<MemorySnapshot>,
        machine: &ExecutorConfig,
        footprint: Option<Arc<Footprint>>,
    ) -> Self {
        let counting = machine.counting;
        Self {
            global: Global::new(view.clone(), launch.device, launch.peers, counting, footprint),
            counts: MemoryCounts::default(),
            sink: WorkerSink { report_only: machine.report_only, warnings: Vec::new(), count: 0 },
        }
    }

    /// The execution context for a turn of a warp.
    pub(super) fn exec_context<'a>(&'a mut self, launch: &'a Launch, running: RunningWarp<'a>) -> ExecContext<'a> {
        let RunningWarp { regs, local, copies, shared, block_sectors, warp, block, clock } = running;
        ExecContext {
            regs,
            active: 0,
            live: 0,
            global: &mut self.global,
            shared,
            local,
            copies,
            params: &launch.params,
            frame: 0,
            counts: &mut self.counts,
            block_sectors,
            console: &mut self.sink,
            warp,
            block,
            shape: launch.block,
            padding: 0,
            line: 0,
            clock,
        }
    }

    /// Takes the warnings since the last call.
    pub(super) fn take_warnings(&mut self) -> Vec<Warning> {
        std::mem::take(&mut self.sink.warnings)
    }

    /// Number of warnings that were dropped.
    pub(super) fn more_warnings(&self) -> u64 {
        self.sink.count.saturating_sub(WARNINGS)
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> &MemoryCounts {
        &self.counts
    }
}

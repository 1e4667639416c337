//! Execution of a grid: distributes its blocks over worker threads.
//!
//! A worker takes a new block when all its blocks have ended, or when one has run for so long that it may be waiting for
//! another block.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::fault::{Fault, FaultKind, FaultReport};
use crate::mem::{Footprint, MemorySnapshot};

use super::Worker;
use super::block::{Block, BlockFault, initial_registers};
use super::launch::{ExecutorConfig, Launch, LaunchOutcome, Profile};
use crate::exec_context::{MemoryCounts, Registers};

/// Time slice: warp instructions that a block may run before the worker's next block gets a turn.
const TURN: u64 = 1 << 22;
/// Maximum blocks that a worker keeps in execution.
const HELD: usize = 32;

/// State that the workers share.
struct Grid<'a> {
    launch: &'a Launch,
    machine: &'a ExecutorConfig,
    view: &'a Arc<MemorySnapshot>,
    template: Registers,
    footprint: Option<Arc<Footprint>>,
    blocks: u64,
    next: AtomicU64,
    /// Lowest index of a failed block; later blocks need not continue.
    failed: AtomicU64,
    sum: Mutex<Sum>,
}

#[derive(Default)]
struct Sum {
    fault: Option<(u64, FaultReport)>,
    warnings: Vec<(u64, FaultReport)>,
    more_warnings: u64,
    profile: Profile,
    counts: MemoryCounts,
}

/// Executes a launch to its end.
pub fn run_grid(launch: &Launch, view: &Arc<MemorySnapshot>, machine: &ExecutorConfig) -> LaunchOutcome {
    let blocks = launch.blocks();
    let grid = Grid {
        launch,
        machine,
        view,
        template: initial_registers(launch, machine),
        footprint: machine.footprint.then(|| Arc::new(Footprint::new(view.clone()))),
        blocks,
        next: AtomicU64::new(0),
        failed: AtomicU64::new(u64::MAX),
        sum: Mutex::new(Sum { profile: Profile::new(&launch.code), ..Sum::default() }),
    };
    let workers = machine.threads.clamp(1, usize::try_from(blocks).unwrap_or(usize::MAX).max(1));
    std::thread::scope(|scope| {
        for _ in 1..workers {
            scope.spawn(|| grid.work());
        }
        grid.work();
    });
    let footprint = grid.footprint.as_ref().map(|f| [f.read_bytes(), f.written_bytes()]);
    let moved = grid.footprint.as_ref().map(|f| f.moved_bytes(launch.device)).unwrap_or_default();
    let mut sum = grid.sum.into_inner().unwrap_or_else(PoisonError::into_inner);
    sum.warnings.sort_by_key(|(block, _)| *block);
    LaunchOutcome {
        result: sum.fault.map_or(Ok(()), |(_, report)| Err(Box::new(report))),
        warnings: sum.warnings.into_iter().map(|(_, report)| report).collect(),
        more_warnings: sum.more_warnings,
        profile: sum.profile,
        counts: sum.counts,
        footprint,
        moved,
    }
}

impl Grid<'_> {
    /// One worker: runs blocks until none are left.
    fn work(&self) {
        let mut worker = Worker::new(self.launch, self.view, self.machine, self.footprint.clone());
        let mut profile = Profile::new(&self.launch.code);
        let mut held: VecDeque<Block> = VecDeque::new();
        let mut spare: Vec<Block> = Vec::new();
        let mut warnings = Vec::new();
        loop {
            let block = if held.len() < HELD { self.take(&mut spare) } else { None };
            let Some(mut block) = block.or_else(|| held.pop_front()) else { break };
            if self.is_over(&block) {
                continue;
            }
            let mut budget = TURN.min(self.machine.max_instructions.saturating_add(1));
            let ended = block.run(self.launch, self.machine, &mut worker, &mut profile, &mut budget);
            for warning in worker.take_warnings() {
                let report = self.report(&block, *warning.fault, warning.warp as usize, warning.line);
                warnings.push((block.index, report));
            }
            match ended {
                Err(fault) => self.fail(&block, fault),
                Ok(true) => spare.push(block),
                Ok(false) if block.executed() > self.machine.max_instructions => self.fail(&block, block.endless()),
                Ok(false) => held.push_back(block),
            }
        }
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        sum.profile.add(&profile);
        sum.counts.add(worker.counts());
        sum.warnings.append(&mut warnings);
        sum.more_warnings += worker.more_warnings();
    }

    /// Whether a block need not continue because another one failed. Blocks with a lower index continue, since their fault
    /// would be reported first.
    fn is_over(&self, block: &Block) -> bool {
        block.index > self.failed.load(Ordering::Relaxed)
    }

    /// Takes and starts the next block of the grid.
    fn take(&self, spare: &mut Vec<Block>) -> Option<Block> {
        if self.next.load(Ordering::Relaxed) >= self.blocks {
            return None;
        }
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.blocks && index <= self.failed.load(Ordering::Relaxed)).then(|| self.start(index, spare))
    }

    fn start(&self, index: u64, spare: &mut Vec<Block>) -> Block {
        let mut block = spare.pop().unwrap_or_else(|| Block::new(self.launch, self.machine, &self.template));
        block.start(index, self.launch, self.machine, &self.template);
        block
    }

    fn fail(&self, block: &Block, fault: BlockFault) {
        let line = self.launch.code.insts.get(fault.stopped.pc as usize).map_or(0, |inst| inst.line);
        let report = self.report(block, *fault.stopped.fault, fault.warp, line);
        self.failed.fetch_min(block.index, Ordering::Relaxed);
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        // Rank deadlocks and exceeded limits behind other faults: a block may wait forever because another one failed.
        let rank = |index: u64, kind: &FaultKind| {
            (matches!(kind, FaultKind::InstructionLimit | FaultKind::Deadlock(_)), index)
        };
        let earlier = |(first, other): &(u64, FaultReport)| {
            rank(*first, &other.fault.kind) < rank(block.index, &report.fault.kind)
        };
        if !sum.fault.as_ref().is_some_and(earlier) {
            sum.fault = Some((block.index, report));
        }
    }

    fn report(&self, block: &Block, fault: Fault, warp: usize, line: u32) -> FaultReport {
        let (at, thread) = block.thread(warp, fault.lane, self.launch);
        let text = (line as usize).checked_sub(1).and_then(|index| self.launch.code.lines.get(index));
        FaultReport {
            fault,
            kernel: self.launch.kernel().name.to_string(),
            block: at,
            thread,
            line,
            text: text.map_or(String::new(), |text| text.trim().to_owned()),
        }
    }
}

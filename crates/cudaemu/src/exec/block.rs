//! Execution of a block: runs its warps in turn until all have exited.

use crate::bytecode::{Constant, SpecialRegister};
use crate::fault::{Fault, FaultKind};

use super::barrier::Barriers;
use super::divergence::LaneGroups;
use super::launch::{ExecutorConfig, Launch};
use super::warp::{BlockContext, WarpFault, WarpStatus};
use super::worker::RunningWarp;
use super::{Profile, Worker};
use crate::exec_context::{AsyncCopies, Lanes, Local, Registers, SectorSet, Shared};

/// Warp instructions of one turn of a warp.
const TURN: u64 = 1 << 16;

/// A warp with its registers, local memory and lane groups.
#[derive(Debug)]
struct Warp {
    flow: LaneGroups,
    regs: Registers,
    local: Local,
    copies: AsyncCopies,
    clock: u64,
}

/// A block in execution. It can be suspended between turns and resumed.
#[derive(Debug)]
pub(super) struct Block {
    /// Linear index in the grid, x fastest.
    pub(super) index: u64,
    /// `blockIdx`.
    block_idx: [u32; 3],
    warps: Vec<Warp>,
    shared: Shared,
    read_sectors: SectorSet,
    barriers: Barriers,
    /// Warp instructions executed since the start of the block.
    executed: u64,
}

/// A fault with the thread that caused it.
#[derive(Debug)]
pub(super) struct BlockFault {
    pub(super) stopped: WarpFault,
    pub(super) warp: usize,
}

/// The initial registers of every warp of a launch, except those that differ between threads or blocks.
pub(super) fn initial_registers(launch: &Launch, config: &ExecutorConfig) -> Registers {
    let kernel = launch.kernel();
    let mut registers = Registers::new(&kernel.registers);
    for &(slot, constant) in &kernel.constants {
        let value = match constant {
            Constant::Bits(bits) => bits,
            Constant::Global(index, offset) => {
                launch.globals.get(index as usize).copied().unwrap_or(0).wrapping_add_signed(offset)
            }
            Constant::DynamicShared(offset) => u64::from(launch.dynamic_shared_start()).wrapping_add_signed(offset),
            Constant::Special(special) => special_of_launch(special, launch, config),
        };
        registers.set_any(slot, &[value; 32], u32::MAX);
    }
    registers
}

/// The value of a special register that is constant for the whole launch; 0 for the others.
fn special_of_launch(special: SpecialRegister, launch: &Launch, config: &ExecutorConfig) -> u64 {
    let axis = |values: &[u32; 3], axis: u8| values.get(usize::from(axis)).map_or(0, |&v| u64::from(v));
    match special {
        SpecialRegister::Ntid(a) => axis(&launch.block, a),
        SpecialRegister::Nctaid(a) | SpecialRegister::NclusterId(a) => axis(&launch.grid, a),
        // Each cluster is one block: 1 in x, y and z; the fourth component is 0.
        SpecialRegister::ClusterNctaid(a) => u64::from(a < 3),
        SpecialRegister::ClusterNctarank => 1,
        SpecialRegister::NwarpId => u64::from(launch.threads().div_ceil(32)),
        SpecialRegister::NsmId => u64::from(config.sms),
        SpecialRegister::GridId => launch.id,
        SpecialRegister::DynamicSmemSize => u64::from(launch.dynamic_shared),
        SpecialRegister::TotalSmemSize | SpecialRegister::AggrSmemSize => u64::from(launch.shared_bytes()),
        _ => 0,
    }
}

impl Block {
    /// Memory for a block, to be initialised by [`Block::start`].
    pub(super) fn new(launch: &Launch, config: &ExecutorConfig, template: &Registers) -> Self {
        let warps = launch.threads().div_ceil(32);
        let warp = |_| Warp {
            flow: LaneGroups::default(),
            regs: template.clone(),
            local: Local::new(config.local_bytes),
            copies: AsyncCopies::default(),
            clock: 0,
        };
        Self {
            index: 0,
            block_idx: [0; 3],
            warps: (0..warps).map(warp).collect(),
            shared: Shared::new(launch.shared_bytes(), launch.threads(), config.counting),
            read_sectors: SectorSet::default(),
            barriers: Barriers::default(),
            executed: 0,
        }
    }

    /// Initialises this value as block `index` of the grid.
    pub(super) fn start(&mut self, index: u64, launch: &Launch, config: &ExecutorConfig, template: &Registers) {
        let [nx, ny, _] = launch.grid.map(u64::from);
        self.index = index;
        self.block_idx = [index % nx, index / nx % ny, index / nx / ny].map(|v| v as u32);
        self.shared.reset();
        self.read_sectors.clear();
        self.barriers.reset(launch.threads());
        self.executed = 0;
        let kernel = launch.kernel();
        for (number, warp) in self.warps.iter_mut().enumerate() {
            let first = number as u32 * 32;
            let lanes = launch.threads() - first;
            let mask = if lanes >= 32 { u32::MAX } else { (1 << lanes) - 1 };
            warp.flow.start(mask, launch.function as u32, kernel.start);
            warp.regs.clone_from(template);
            warp.local.reset();
            warp.copies.reset();
            warp.clock = 0;
            for &(slot, constant) in &kernel.constants {
                if let Constant::Special(special) = constant
                    && let Some(lanes) = special_of_threads(special, first, self.block_idx, index, launch, config)
                {
                    warp.regs.set_any(slot, &lanes, u32::MAX);
                }
            }
        }
    }

    /// Runs the warps for about `budget` warp instructions, which it counts down. Returns true when all warps have exited.
    pub(super) fn run(
        &mut self,
        launch: &Launch,
        config: &ExecutorConfig,
        worker: &mut Worker,
        profile: &mut Profile,
        budget: &mut u64,
    ) -> Result<bool, BlockFault> {
        // Set after a round in which no warp advanced: the next round releases lanes that wait for lanes at a block barrier.
        // If no warp advances in that round either, the block is deadlocked.
        let mut release_waiting = false;
        loop {
            let (mut ran, mut ended) = (false, true);
            for number in 0..self.warps.len() {
                let warp = &mut self.warps[number];
                if warp.flow.ended() {
                    continue;
                }
                let turn = TURN.min(*budget);
                let mut left = turn;
                let mut block_context = BlockContext {
                    code: &launch.code,
                    barriers: &mut self.barriers,
                    warp: number,
                    local_bytes: config.local_bytes,
                    profile,
                };
                let running = RunningWarp {
                    regs: &mut warp.regs,
                    local: &mut warp.local,
                    copies: &mut warp.copies,
                    shared: &mut self.shared,
                    block_sectors: &mut self.read_sectors,
                    warp: number as u32,
                    block: self.block_idx,
                    clock: warp.clock,
                };
                let mut cx = worker.exec_context(launch, running);
                let result = warp.flow.run(&mut cx, &mut block_context, &mut left, release_waiting);
                warp.clock = cx.clock;
                let used = turn - left;
                *budget -= used;
                self.executed += used;
                let status = result.map_err(|stopped| BlockFault { stopped, warp: number })?;
                ran |= used > 0 || status == WarpStatus::Ended;
                ended &= status == WarpStatus::Ended;
            }
            if ended {
                return Ok(true);
            }
            if *budget == 0 {
                return Ok(false);
            }
            if !ran {
                if release_waiting {
                    return Err(self.deadlock());
                }
                release_waiting = true;
            } else {
                release_waiting = false;
            }
        }
    }

    /// The fault for a block in which no warp can continue; it names the first waiting one.
    fn deadlock(&self) -> BlockFault {
        let waiting = self.warps.iter().position(|w| !w.flow.ended()).unwrap_or(0);
        let (pc, mask) = self.warps.get(waiting).map_or((0, 1), |w| w.flow.place());
        let fault = Fault::new(FaultKind::Deadlock(self.barriers.describe()), mask.trailing_zeros() as usize & 31);
        BlockFault { stopped: WarpFault { fault, pc }, warp: waiting }
    }

    /// Warp instructions executed since the start of the block.
    pub(super) fn executed(&self) -> u64 {
        self.executed
    }

    /// The fault for exceeding the instruction limit, with the block's current position.
    pub(super) fn endless(&self) -> BlockFault {
        let running = self.warps.iter().position(|w| !w.flow.ended()).unwrap_or(0);
        let (pc, mask) = self.warps.get(running).map_or((0, 1), |w| w.flow.place());
        let fault = Fault::new(FaultKind::InstructionLimit, mask.trailing_zeros() as usize & 31);
        BlockFault { stopped: WarpFault { fault, pc }, warp: running }
    }

    /// `blockIdx`, and `threadIdx` of a lane.
    pub(super) fn thread(&self, warp: usize, lane: u8, launch: &Launch) -> ([u32; 3], [u32; 3]) {
        (self.block_idx, thread_at(warp as u32 * 32 + u32::from(lane), launch.block))
    }
}

/// `threadIdx` of a thread, from its linear number in the block.
pub(super) fn thread_at(number: u32, [nx, ny, _]: [u32; 3]) -> [u32; 3] {
    [number % nx, number / nx % ny, number / nx / ny]
}

/// The value of a special register that differs between threads or blocks; `None` for the others.
fn special_of_threads(
    special: SpecialRegister,
    first: u32,
    block_idx: [u32; 3],
    index: u64,
    launch: &Launch,
    config: &ExecutorConfig,
) -> Option<Lanes<u64>> {
    let lanes = |value: &dyn Fn(u32) -> u32| std::array::from_fn(|lane| u64::from(value(lane as u32)));
    let below = |lane: u32| (1u32 << lane) - 1;
    Some(match special {
        SpecialRegister::Tid(axis) => {
            let axis = usize::from(axis);
            lanes(&|lane| thread_at(first + lane, launch.block).get(axis).copied().unwrap_or(0))
        }
        SpecialRegister::Ctaid(axis) | SpecialRegister::ClusterId(axis) => {
            lanes(&|_| block_idx.get(usize::from(axis)).copied().unwrap_or(0))
        }
        SpecialRegister::LaneId => lanes(&|lane| lane),
        SpecialRegister::WarpId => lanes(&|_| first / 32),
        SpecialRegister::SmId => lanes(&|_| (index % u64::from(config.sms.max(1))) as u32),
        SpecialRegister::LanemaskEq => lanes(&|lane| 1 << lane),
        SpecialRegister::LanemaskLt => lanes(&below),
        SpecialRegister::LanemaskLe => lanes(&|lane| below(lane) | 1 << lane),
        SpecialRegister::LanemaskGt => lanes(&|lane| !(below(lane) | 1 << lane)),
        SpecialRegister::LanemaskGe => lanes(&|lane| !below(lane)),
        _ => return None,
    })
}

//! A launch: what is run, on what, and what came of it.

use std::fmt;
use std::sync::Arc;

use crate::bytecode::{DecodedModule, Function};
use crate::fault::FaultReport;

use crate::exec_context::MemoryCounts;

/// One kernel launch, validated: the driver has checked limits and parameter bytes.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The module.
    pub code: Arc<DecodedModule>,
    /// Index of the kernel in [`Code::functions`].
    pub function: usize,
    /// Blocks in x, y, z; none is 0.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z; at most 1024 together, none is 0.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// The parameter block, exactly [`Function::param_bytes`] long.
    pub params: Arc<[u8]>,
    /// Device addresses of [`Code::globals`].
    pub globals: Arc<[u64]>,
    /// All blocks run at once, so that they can wait for each other.
    pub cooperative: bool,
    /// The device it runs on.
    pub device: u32,
    /// Devices whose memory it may touch, itself included: one bit each.
    pub peers: u64,
    /// Address of eight bytes, zero at first, through which the blocks of cooperative launches meet: the compiler's library for groups
    /// finds it in `%envreg1` (upper half) and `%envreg2`. 0 where there is none.
    pub workspace: u64,
    /// `%gridid`: counts the launches of a context.
    pub id: u64,
}

impl Launch {
    /// The kernel.
    pub fn kernel(&self) -> &Function {
        &self.code.functions[self.function]
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Blocks of the grid.
    pub fn blocks(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    /// Where dynamic shared memory starts.
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

/// Where the text of the device's printf goes.
pub type PrintSink = Arc<dyn Fn(&str) + Send + Sync>;

/// What runs launches.
#[derive(Clone)]
pub struct ExecutorConfig {
    /// Multiprocessors that the device claims: `%nsmid`.
    pub sms: u32,
    /// Threads of this process that run blocks.
    pub threads: usize,
    /// Warp instructions of one block after which a launch is called endless.
    pub max_instructions: u64,
    /// Faults that only the checker sees are reported and the kernel goes on, instead of ending it.
    pub report_only: bool,
    /// Local memory a thread may use, in bytes: frames of all active calls.
    pub local_bytes: u32,
    /// Count memory traffic and bank conflicts.
    pub counting: bool,
    /// Count distinct bytes touched (costs a bitmap per allocation).
    pub footprint: bool,
    /// Output of printf.
    pub print: PrintSink,
}

impl fmt::Debug for ExecutorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("sms", &self.sms).field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// What came of a launch.
#[derive(Clone, Debug)]
pub struct LaunchOutcome {
    /// The first fault that ended it (of the lowest block among those that were running).
    pub result: Result<(), Box<FaultReport>>,
    /// Faults that did not end it ([`Machine::report_only`]): the first ones of each thread of the emulator.
    pub warnings: Vec<FaultReport>,
    /// How many more there were.
    pub more_warnings: u64,
    /// Instructions executed.
    pub profile: Profile,
    /// Memory traffic, if counted.
    pub counts: MemoryCounts,
    /// Distinct bytes of global memory read and written, if counted.
    pub footprint: Option<[u64; 2]>,
}

/// How often each instruction of the module ran.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Warp instructions, by index in [`Code::insts`].
    pub warps: Vec<u64>,
    /// Lane instructions: the lanes whose guard held.
    pub lanes: Vec<u64>,
}

impl Profile {
    /// Zeros for a module.
    pub fn new(code: &DecodedModule) -> Self {
        Self { warps: vec![0; code.insts.len()], lanes: vec![0; code.insts.len()] }
    }

    /// Adds another one of the same module.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in [(&mut self.warps, &other.warps), (&mut self.lanes, &other.lanes)] {
            sum.iter_mut().zip(more).for_each(|(a, b)| *a += b);
        }
    }

    /// Lane instructions in all.
    pub fn total_lanes(&self) -> u64 {
        self.lanes.iter().sum()
    }
}

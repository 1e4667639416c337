//! One graph over many devices: pure passes over data, then one executor.
//!
//! | pass | from | to |
//! |---|---|---|
//! | `assign` | a [`Task`] and what the devices support | a device for each node, and why |
//! | `split` | the devices | runs of nodes on one device, and the replicas that each needs of others' tensors |
//! | `memory` | lifetimes | a spot in an arena for each tensor; what comes from elsewhere in a ring of `depth` copies |
//! | `plan` | all of it | steps on lanes, each with the moments of other lanes that it waits for |
//! | `verify` | a plan | that every access finds the bytes it should, in whatever order the lanes run |
//! | `exec` | a plan | queues at work |
//!
//! # Lanes and moments
//! A lane is a queue: what is on it runs in order. Each device has one lane that computes and, where several runs are under way
//! at once (`depth` > 1), one that brings what it needs from elsewhere, so that the next run's inputs come while this one
//! computes. Lanes are ordered by marks alone: a step waits for a mark of this run, or of one some runs ago.
//!
//! # Nobody waits for ever
//! The host submits steps in one order, and each waits only for marks of steps submitted before it. So of what is not done
//! the step submitted first can always go on, in whatever way its lane waits: in the device, in a thread before a connection, or in
//! the host, which a full lane makes wait too. What a lane's thread holds back is later than what it waits for.
//!
//! # Memory
//! Slots of a task's graph are memories. A stored one lies on its device. A computed one lies in the arena of the device whose
//! nodes write it, its home. What another device reads of it, and what the host writes, is a replica there.
//!
//! # Example
//! ```
//! use fanout::cpu::{CpuDevice, Path};
//! use fanout::device::{Account, Device};
//! use fanout::ops::{binary::Binary, unary::Unary};
//! use fanout::sched::{Options, Scheduler, TaskBuilder};
//! use fanout::tensor::DType;
//! use std::sync::Arc;
//!
//! // z = x^2 + x: the square on one device, the sum on another.
//! let mut b = TaskBuilder::new();
//! let x = b.input("x", DType::F32, [4, 1, 1, 1])?;
//! let square = b.node(Unary::Sqr, &[Some(x)])?;
//! b.pin(0)?;
//! let z = b.node(Binary::Add, &[Some(square), Some(x)])?;
//! b.pin(1)?;
//! b.output(z)?;
//! let task = Arc::new(b.build()?);
//!
//! let cpu = |name| CpuDevice::new(name, 1, Path::Fast, 1 << 20).map(|device| device as Arc<dyn Device>);
//! let account = Account::new(1 << 20);
//! let mut scheduler = Scheduler::new(vec![cpu("CPU0")?, cpu("CPU1")?], Options::default(), &account)?;
//! let mut plan = scheduler.build(&task)?;
//! scheduler.run(&mut plan, &[(x, bytemuck::bytes_of(&[1.0f32, 2.0, 3.0, 4.0]))])?;
//! let bytes = scheduler.read(&plan, z)?.wait(None)?;
//! assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(&[2.0, 6.0, 12.0, 20.0]));
//! assert_eq!((plan.plan().splits(), plan.plan().copies()), (2, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assign;
mod compare;
mod copy_paths;
mod exec;
mod memory;
mod plan;
mod plan_report;
mod split;
mod task;
#[cfg(test)]
mod tests;
mod verify;

pub use compare::{CompareReporter, compare};
pub use exec::{ObservedNode, Observer, PreparedPlan, Scheduler, TransferCounts};
pub use plan_report::MemoryRequirement;
pub use task::{Storage, Task, TaskBuilder};

use copy_paths::CopyPaths;

use crate::device::{Device, DeviceError, DeviceId, Unsupported};
use crate::graph::TensorId;
use crate::ops::OpCode;
use crate::setters::setters;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Devices in order of preference: where nothing else decides, the first that can.
pub type Devices = [Arc<dyn Device>];

/// Why a task cannot be planned or run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SchedError {
    /// A device number beyond the list: the caller's mistake.
    #[error("{what} is on device {device}, of {devices}")]
    UnknownDevice {
        /// What names the device.
        what: String,
        /// Its number.
        device: usize,
        /// How many there are.
        devices: usize,
    },
    /// A node that no device runs, or not the one where it has to run.
    #[error("{node} runs nowhere: {}", reasons(refusals))]
    NoDeviceForNode {
        /// The node: its tensor's name and its op.
        node: String,
        /// What each device lacks.
        refusals: Vec<(String, Unsupported)>,
    },
    /// A tensor larger than the largest buffer of its device.
    #[error("{tensor} needs {bytes} bytes on {device}, whose largest buffer is {limit}")]
    TensorTooLarge {
        /// The tensor.
        tensor: String,
        /// The device.
        device: String,
        /// What it needs.
        bytes: u64,
        /// What there is.
        limit: u64,
    },
    /// No device to run anything on.
    #[error("a scheduler needs a device")]
    NoDevices,
    /// A run whose task has a stored tensor that was only planned.
    #[error("stored tensor {name:?} has no memory: give its region when the task is built")]
    StoredWithoutRegion {
        /// The tensor.
        name: String,
    },
    /// A tensor that a run does not leave behind.
    #[error("tensor {name:?} cannot be read after a run: say so with TaskBuilder::output")]
    NotAnOutput {
        /// The tensor.
        name: String,
    },
    /// An output that is not there: no run has left it, or its memory has been used for something else since.
    #[error("tensor {name:?} is not there: read it after a run of its plan, before another run or a larger plan")]
    OutputExpired {
        /// The tensor.
        name: String,
    },
    /// A stored tensor whose region is another device's: the caller's mistake.
    #[error("stored tensor {name:?} is said to lie on {device}, and its region is on {owner}")]
    RegionOnOtherDevice {
        /// The tensor.
        name: String,
        /// Where the task says that it lies.
        device: String,
        /// Whose memory its region is in.
        owner: String,
    },
    /// Bytes for a tensor that takes none: the caller's mistake.
    #[error("a run was given bytes for tensor {name:?}, which is no input or was given some already")]
    UnexpectedInput {
        /// The tensor.
        name: String,
    },
    /// The bytes of an input that a run needs are missing or of another length.
    #[error("input {name:?} takes {want} bytes and was given {got}")]
    InputLength {
        /// The tensor.
        name: String,
        /// Its size.
        want: usize,
        /// What was given.
        got: String,
    },
    /// Devices with less memory than a plan needs.
    #[error("not enough memory: {}", needs.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NotEnoughMemory {
        /// Every device's share.
        needs: Vec<MemoryRequirement>,
    },
    /// A plan that another scheduler prepared, or that was made for other devices: the caller's mistake.
    #[error("the plan is another scheduler's, or was made for other devices")]
    ForeignPlan,
    /// An earlier run ended half-way: nothing can be said of what is done since.
    #[error("an earlier run failed or was aborted half-way: see Scheduler::reset")]
    RunIncomplete,
    /// The abort flag was raised.
    #[error("the run was aborted")]
    Aborted,
    /// The host gave no thread.
    #[error("a thread could not be started: {0}")]
    ThreadSpawn(std::io::Error),
    /// A bug of ours: please report it.
    #[error("bug in fanout's scheduler: {0}")]
    Bug(&'static str),
    /// A bug of ours: a plan that would not do what its task says. Only debug builds look.
    #[error("bug in fanout's scheduler: {0}")]
    InvalidPlan(String),
    /// A device failed.
    #[error("{device}: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What happened.
        source: DeviceError,
    },
}

impl SchedError {
    /// A device's failure.
    pub(crate) fn from_device(device: &str, source: DeviceError) -> SchedError {
        SchedError::Device { device: device.to_owned(), source }
    }
}

fn reasons(refusals: &[(String, Unsupported)]) -> String {
    refusals.iter().map(|(device, no)| format!("on {device}, {no}")).collect::<Vec<_>>().join("; ")
}

/// How tasks are planned.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How many runs a device may be ahead of those that wait for it: what devices get from elsewhere is kept in so many copies.
    /// From 1 to [`Options::MAX_DEPTH`]; what lies outside is taken for the nearest of them.
    pub depth: usize,
    /// Whether weights in the host's memory may be brought to a device that is better at using them.
    pub offload: bool,
}

setters!(Options {
    with_depth depth: usize,
    with_offload offload: bool,
});

impl Options {
    /// The most runs that may be under way at once.
    pub const MAX_DEPTH: usize = 64;

    /// The depth that plans get.
    fn depth(&self) -> usize {
        self.depth.clamp(1, Options::MAX_DEPTH)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options { depth: 1, offload: true }
    }
}

/// Where a node runs, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Assignment {
    pub(crate) device: usize,
    pub(crate) reason: AssignReason,
}

/// What decided where a node runs; the first that applies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AssignReason {
    /// Whoever made the task.
    Pinned,
    /// It writes memory that lies there.
    Destination,
    /// A device takes it although its weights lie in the host's memory.
    Offload,
    /// The largest stored tensor that it reads lies there.
    Stored,
    /// Its neighbours in the list run there.
    Neighbour,
    /// No better place supports it.
    LastResort,
}

/// A graph cut into splits.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct SplitGraph {
    pub(crate) splits: Vec<Split>,
    pub(crate) replicas: Vec<Replica>,
    /// By slot: the device whose memory holds it; `None` for inputs.
    pub(crate) homes: Vec<Option<usize>>,
}

/// Consecutive nodes that run on one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    pub(crate) device: usize,
    pub(crate) nodes: Range<usize>,
    /// Replicas that its nodes read, by slot and start of their ranges. Those of one slot are disjoint.
    pub(crate) reads: Vec<u32>,
}

/// A copy of some bytes of a slot on a device that is not the slot's home. It is made once in a run, before the first split
/// that reads it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Replica {
    pub(crate) device: usize,
    pub(crate) slot: u32,
    pub(crate) range: Range<usize>,
    pub(crate) origin: ReplicaOrigin,
    /// The first split that reads it.
    pub(crate) first_split: usize,
    /// The last node that reads it.
    pub(crate) last_node: usize,
}

impl Replica {
    /// Whether it has these bytes of a slot.
    pub(crate) fn covers(&self, slot: u32, bytes: &Range<usize>) -> bool {
        self.slot == slot && self.range.start <= bytes.start && bytes.end <= self.range.end
    }
}

/// Where the bytes of a replica come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplicaOrigin {
    /// The host, at the start of a run.
    Host,
    /// Another device, the slot's home.
    Device(usize),
    /// As `Device`, but only those experts of a stored tensor that `ids` names, which its nodes read on the replica's device.
    Experts { home: usize, ids: TensorId },
}

/// Where things lie on the devices.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MemoryLayout {
    /// By device.
    pub(crate) arenas: Vec<ArenaSizes>,
    /// By slot: computed ones that lie in an arena.
    pub(crate) slots: Vec<Option<Allocation>>,
    /// By replica.
    pub(crate) replicas: Vec<Allocation>,
}

/// Memory that a plan needs on a device: sizes of buffers, in bytes, none larger than the device's largest.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ArenaSizes {
    pub(crate) arena: Vec<u64>,
    /// Of one of the `depth` copies.
    pub(crate) ring: Vec<u64>,
}

/// Bytes in a device's room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allocation {
    pub(crate) kind: ArenaKind,
    /// Which of the area's buffers.
    pub(crate) buffer: u32,
    pub(crate) offset: u64,
    /// What the device wants reserved: at least what is used.
    pub(crate) bytes: u64,
}

/// A part of a device's room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum ArenaKind {
    /// What lives within a run, in its order on the device's computing lane.
    Arena,
    /// What comes from elsewhere while earlier runs may still compute, and what far devices copy from while later ones do: one
    /// copy for each run under way.
    Ring,
}

/// A task's way over the devices: what to do, in which order, and what waits for what.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) task: Arc<Task>,
    /// Names of the devices.
    pub(crate) devices: Vec<String>,
    /// Their identities.
    pub(crate) device_ids: Vec<DeviceId>,
    pub(crate) copy_paths: CopyPaths,
    /// By node.
    pub(crate) assignments: Vec<Assignment>,
    pub(crate) split_graph: SplitGraph,
    pub(crate) layout: MemoryLayout,
    pub(crate) queues: Vec<QueueId>,
    /// One run, in the order the host submits it.
    pub(crate) steps: Vec<PlanStep>,
    /// How many marks the steps of one run make: they are numbered from 0.
    pub(crate) marks: u32,
    /// Runs that may be under way at once. Run `i` uses copy `i % depth` of each ring.
    pub(crate) depth: usize,
}

/// A queue of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct QueueId {
    pub(crate) device: usize,
    pub(crate) role: QueueRole,
}

/// What a lane is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum QueueRole {
    /// Runs nodes; with a depth of 1 it also brings replicas.
    Compute,
    /// Brings replicas while the other computes.
    Transfer,
}

/// Something on a lane: first its waits, then its work, then its mark.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlanStep {
    pub(crate) queue: usize,
    pub(crate) waits: Vec<StepWait>,
    pub(crate) action: StepAction,
    /// Its number, where someone waits for it or it is the last of its lane.
    pub(crate) mark: Option<u32>,
}

/// A moment that a lane waits for: a mark, of this run (`ago` 0) or of one some runs before. What lies before the first run
/// has been reached.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StepWait {
    pub(crate) mark: u32,
    pub(crate) runs_ago: u32,
}

/// What a step does. Numbers are those of replicas and splits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepAction {
    /// The host writes a replica of an input.
    UploadInput(u32),
    /// A replica is copied from its home by this lane's device.
    DeviceCopy(u32),
    /// The bytes of a replica leave its home for the host, on the home's computing lane.
    Download(u32),
    /// The bytes of the [`Work::Fetch`] of a replica, which has been waited for, are written to it.
    UploadStaged(u32),
    /// The experts of a replica that are used are copied from its home. The host waits for their numbers.
    CopyExperts(u32),
    /// The nodes of a split.
    RunSplit(u32),
}

/// What a node is called in messages.
pub(crate) fn node_name(task: &Task, node: usize) -> String {
    let Some(node) = task.graph().nodes().get(node) else { return format!("node {node}") };
    let (op, name): (OpCode, _) = (node.op.code(), task.name(node.dst));
    if name.is_empty() { format!("{op} (tensor {})", node.dst.0) } else { format!("{op} {name:?}") }
}

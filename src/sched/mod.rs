//! Scheduler: partitions one graph over many devices, inserts copies, allocates memory and runs the result on device queues.
//!
//! Planning is a sequence of pure passes over data; only `exec` touches devices' memory. Start reading with `plan`.
//!
//! | pass | input | output |
//! |---|---|---|
//! | [`tensor_group`] (optional) | a task for groups of devices | the task of all devices, with collectives |
//! | `assign` | a [`Task`] and the ops that each device supports | a device for each node, and the reason |
//! | `split` | the assignment | splits (consecutive nodes on one device), and the replicas of remote tensors that they read |
//! | `memory` | lifetimes | an allocation in an arena for each tensor; a ring with `depth` copies for replicas |
//! | `plan` | all of the above | steps on queues, each with the marks of other queues that it waits for (with wait elimination) |
//! | `verify` | a plan | an error unless every access finds the right bytes, however the queues interleave |
//! | `exec` | a plan | open queues, allocated arenas, submitted runs |
//!
//! Before any of this, [`planner`] predicts rates of a language model on measured devices, and chooses layers and groups.
//!
//! `copy_paths` records which device pairs copy without the host, `plan_report` prints plans and their memory needs, and
//! `compare` runs a plan and a reference device side by side. [`sampling`] adds nodes to a task that sample tokens from logits. The
//! scheduler contains no kernels and no transport: both are behind [`Device`].
//!
//! [`batching`] is for runtimes: several sequences that share the runs of a model.
//!
//! # Queues and marks
//! The steps of a queue run in order. Each device has one compute queue. With several runs in flight (`depth` > 1) a device
//! also has a transfer queue for its replicas, so that the inputs of the next run arrive while the current run computes. Only
//! marks order different queues: a step waits for a mark of the current run or of an earlier run.
//!
//! # No deadlocks
//! The host submits the steps of all queues in one order, and each step waits only for marks of steps submitted before it.
//! Therefore the earliest unfinished step can always proceed. This holds wherever a queue waits: in the device, in the staging
//! thread of a queue, or in the host when a full queue applies backpressure. A staging thread delays only steps that were
//! submitted after the step that it waits for.
//!
//! A program with collective nodes also waits for the programs of other ranks, which are submitted later. It cannot deadlock:
//! all ranks run the collectives of a group in one order, which `verify` checks, and a program that waits at a collective holds
//! neither its device nor a thread. For the same reason [`Scheduler::run`] executes no node on the calling thread if the task has
//! groups.
//!
//! # Memory
//! Each slot of a task's graph is one memory. A stored slot lies in its region on its device. A computed slot lies in an arena
//! of its home, the device that writes it. If another device reads a slot, or if the host writes the slot as an input, the
//! reading device holds a replica.
//!
//! # Example
//! ```
//! use fanout::cpu::{CpuDevice, MathMode};
//! use fanout::device::{MemoryBudget, Device};
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
//! let cpu = |name| CpuDevice::new(name, 1, MathMode::Fast, 1 << 20).map(|device| device as Arc<dyn Device>);
//! let budget = MemoryBudget::new(1 << 20);
//! let mut scheduler = Scheduler::new(vec![cpu("CPU0")?, cpu("CPU1")?], Options::default(), &budget)?;
//! let mut plan = scheduler.build(&task)?;
//! scheduler.run(&mut plan, &[(x, bytemuck::bytes_of(&[1.0f32, 2.0, 3.0, 4.0]))])?;
//! let bytes = scheduler.read(&plan, z)?.wait(None)?;
//! assert_eq!(bytes, bytemuck::cast_slice::<f32, u8>(&[2.0, 6.0, 12.0, 20.0]));
//! assert_eq!((plan.plan().splits(), plan.plan().copies()), (2, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assign;
pub mod batching;
mod compare;
mod copy_paths;
mod exec;
mod memory;
mod plan;
mod plan_report;
pub mod planner;
pub mod sampling;
mod split;
mod task;
pub mod tensor_group;
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
use crate::size::Bytes;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;

/// Devices in order of preference: if no placement rule decides, the first device that supports a node runs it.
pub type Devices = [Arc<dyn Device>];

/// Errors of planning, preparing or running a task.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SchedError {
    /// A device index out of range (caller's error).
    #[error("{what} names device {device}, but there are {devices} devices, numbered from 0")]
    UnknownDevice {
        /// The node or stored tensor that names the device.
        what: String,
        /// The index.
        device: usize,
        /// The number of devices.
        devices: usize,
    },
    /// No device supports a node, or the device that must run the node does not support it.
    #[error("cannot place {node}: {}", reasons(refusals))]
    NoDeviceForNode {
        /// The node: its op and its tensor's name.
        node: String,
        /// By device name: why the device cannot run the node.
        refusals: Vec<(String, Unsupported)>,
    },
    /// A tensor is larger than the largest buffer of its device.
    #[error("{tensor} needs {} on {device}, whose largest buffer is {}", Bytes(*bytes), Bytes(*limit))]
    TensorTooLarge {
        /// The tensor.
        tensor: String,
        /// The device.
        device: String,
        /// Bytes that the tensor needs.
        bytes: u64,
        /// Bytes of the device's largest buffer.
        limit: u64,
    },
    /// The device list is empty.
    #[error("a scheduler needs at least one device")]
    NoDevices,
    /// A stored tensor was declared without a region. Such a task can be planned, but not prepared or run.
    #[error("stored tensor {name:?} has no memory: pass its region to TaskBuilder::stored")]
    StoredWithoutRegion {
        /// The tensor.
        name: String,
    },
    /// The tensor is neither an output nor stored, so a run may overwrite it.
    #[error("tensor {name:?} cannot be read after a run: declare it with TaskBuilder::output")]
    NotAnOutput {
        /// The tensor.
        name: String,
    },
    /// The output is not in memory: no run has written it, or a later run or a larger plan has reused its memory.
    #[error(
        "output {name:?} is not in memory: read it after a run of its plan and before the next run or a larger plan"
    )]
    OutputExpired {
        /// The tensor.
        name: String,
    },
    /// The region of a stored tensor is in another device's memory than the task declares (caller's error).
    #[error("stored tensor {name:?} is declared on {device}, but its region is on {owner}")]
    RegionOnOtherDevice {
        /// The tensor.
        name: String,
        /// The device that the task declares.
        device: String,
        /// The device that owns the region's memory.
        owner: String,
    },
    /// A run was given bytes for a tensor that is not an input, or twice for the same input (caller's error).
    #[error("a run was given bytes for tensor {name:?}, which is not an input or was given twice")]
    UnexpectedInput {
        /// The tensor.
        name: String,
    },
    /// The bytes of an input are missing or have the wrong length.
    #[error("input {name:?} needs {want} bytes, got {got}")]
    InputLength {
        /// The tensor.
        name: String,
        /// The input's size in bytes.
        want: usize,
        /// The number of bytes given, or `none`.
        got: String,
    },
    /// The plan needs more memory than the devices have free.
    #[error("not enough memory: {}", needs.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NotEnoughMemory {
        /// The requirement on each device.
        needs: Vec<MemoryRequirement>,
    },
    /// Another scheduler prepared the plan, or the plan was made for other devices (caller's error).
    #[error("the plan belongs to another scheduler or was made for other devices")]
    ForeignPlan,
    /// An earlier run stopped before all of its steps were submitted, so the state of its tensors is unknown.
    #[error("{}", incomplete_run(stopped_by.as_ref()))]
    RunIncomplete {
        /// The name of the device whose failure stopped the run, and the failure. `None`: it was aborted, or stopped for another reason.
        stopped_by: Option<(String, DeviceError)>,
    },
    /// A node by node run of a task with collective nodes: each of them would wait for the other ranks, which run later.
    #[error("a task with collective nodes cannot run node by node: see TensorSplit::with_copied_collectives")]
    ObservedCollectives,
    /// The abort flag was raised.
    #[error("the run was aborted")]
    Aborted,
    /// The operating system could not start a thread.
    #[error("a thread could not be started: {0}")]
    ThreadSpawn(std::io::Error),
    /// A bug in the scheduler: please report it.
    #[error("bug in fanout's scheduler: {0}")]
    Bug(&'static str),
    /// A bug in the scheduler: the verifier rejected a plan. Only debug builds run the verifier.
    #[error("bug in fanout's scheduler: {0}")]
    InvalidPlan(String),
    /// A device operation failed.
    #[error("{}", error.text_on(device))]
    Device {
        /// The device's name.
        device: String,
        /// The device's error.
        error: DeviceError,
    },
}

impl SchedError {
    /// Adds the device's name to its error.
    pub(crate) fn from_device(device: &str, error: DeviceError) -> SchedError {
        SchedError::Device { device: device.to_owned(), error }
    }

    /// The name of the device whose failure this error reports, and the failure.
    pub fn device_failure(&self) -> Option<(&str, &DeviceError)> {
        match self {
            SchedError::Device { device, error } | SchedError::RunIncomplete { stopped_by: Some((device, error)) } => {
                Some((device, error))
            }
            _ => None,
        }
    }

    /// The server whose lost connection is the cause ([`DeviceError::lost_endpoint`]).
    pub fn lost_endpoint(&self) -> Option<&str> {
        self.device_failure()?.1.lost_endpoint()
    }
}

fn incomplete_run(stopped_by: Option<&(String, DeviceError)>) -> String {
    const INCOMPLETE: &str = "an earlier run stopped before all of its steps were submitted";
    match stopped_by {
        None => format!("{INCOMPLETE}: call Scheduler::reset"),
        Some((device, error)) => {
            let remedy = match error.root() {
                DeviceError::ConnectionLost { .. } => "connect again, and make a scheduler of the new devices",
                DeviceError::Lost { .. } => "start the process of the device again",
                _ => "call Scheduler::reset",
            };
            format!("{INCOMPLETE}, because of {}; {remedy}", error.text_on(device))
        }
    }
}

fn reasons(refusals: &[(String, Unsupported)]) -> String {
    refusals.iter().map(|(device, no)| format!("on {device}, {no}")).collect::<Vec<_>>().join("; ")
}

/// Planning options.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Pipeline depth: the number of runs in flight, and of the ring copies of each replica. Clamped to 1 ..=
    /// [`Options::MAX_DEPTH`].
    pub depth: usize,
    /// Whether weights in CPU memory may be copied, in each run, to a device that prefers to run their nodes.
    pub offload: bool,
}

setters!(Options {
    with_depth depth: usize,
    with_offload offload: bool,
});

impl Options {
    /// Maximum number of runs in flight.
    pub const MAX_DEPTH: usize = 64;

    /// The clamped depth.
    fn depth(&self) -> usize {
        self.depth.clamp(1, Options::MAX_DEPTH)
    }
}

impl Default for Options {
    fn default() -> Options {
        Options { depth: 1, offload: true }
    }
}

/// The device of a node, and the rule that chose it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Assignment {
    pub(crate) device: usize,
    pub(crate) reason: AssignReason,
}

/// Placement rules in order of precedence: the first rule that applies decides where a node runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum AssignReason {
    /// The task pins the node to the device ([`TaskBuilder::pin`]).
    Pinned,
    /// The node writes memory of the device.
    Destination,
    /// The device prefers to run the node although its weights are in CPU memory ([`crate::device::Support::Offload`]).
    Offload,
    /// The largest stored tensor that the node reads is on the device.
    Stored,
    /// An adjacent node in execution order runs on the device.
    Neighbour,
    /// No other rule applies: of the devices that support the node, this one holds the most bytes of its sources.
    LastResort,
}

/// The partition of a graph into splits.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct SplitGraph {
    pub(crate) splits: Vec<Split>,
    pub(crate) replicas: Vec<Replica>,
    /// By slot: its home, the device that holds its memory; `None` for inputs.
    pub(crate) homes: Vec<Option<usize>>,
}

/// Consecutive nodes that run on one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Split {
    pub(crate) device: usize,
    pub(crate) nodes: Range<usize>,
    /// Replicas that its nodes read, sorted by slot and start of range. The replicas of one slot are disjoint.
    pub(crate) reads: Vec<u32>,
}

/// A copy of some bytes of a slot on a device that is not the slot's home. Each run makes it once, before the first split that
/// reads it.
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
    /// Whether the replica contains these bytes of a slot.
    pub(crate) fn covers(&self, slot: u32, bytes: &Range<usize>) -> bool {
        self.slot == slot && self.range.start <= bytes.start && bytes.end <= self.range.end
    }
}

/// The source of a replica's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplicaOrigin {
    /// The host, at the start of a run (an input).
    Host,
    /// The slot's home device.
    Device(usize),
    /// As `Device`, but only the experts of a stored tensor that tensor `ids` names (MUL_MAT_ID). The ids are read on the
    /// replica's device.
    Experts { home: usize, ids: TensorId },
}

/// Memory layout: arena sizes, and an allocation for each computed slot and replica.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct MemoryLayout {
    /// By device.
    pub(crate) arenas: Vec<ArenaSizes>,
    /// By slot: `Some` for computed slots that a node touches.
    pub(crate) slots: Vec<Option<Allocation>>,
    /// By replica.
    pub(crate) replicas: Vec<Allocation>,
}

/// Sizes in bytes of the arena buffers that a plan needs on a device. No size exceeds the device's largest buffer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct ArenaSizes {
    pub(crate) arena: Vec<u64>,
    /// Buffers of one of the `depth` ring copies.
    pub(crate) ring: Vec<u64>,
}

/// A byte range in an arena buffer of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allocation {
    pub(crate) kind: ArenaKind,
    /// Index among the buffers of this kind.
    pub(crate) buffer: u32,
    pub(crate) offset: u64,
    /// Bytes reserved: at least the tensor's size, and as many as [`Device::alloc_size`] requires.
    pub(crate) bytes: u64,
}

/// The two kinds of arena memory on a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum ArenaKind {
    /// Tensors that only the device's compute queue accesses, in order: one copy, reused within a run and by the next run.
    Arena,
    /// Replicas, which are written while earlier runs may still compute, and slots that devices of other domains copy from
    /// while later runs compute: one copy for each run in flight.
    Ring,
}

/// An execution plan: the steps of one run, their queues, their order, and the marks that each step waits for.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) task: Arc<Task>,
    /// By device: its name.
    pub(crate) devices: Vec<String>,
    /// By device: its identity.
    pub(crate) device_ids: Vec<DeviceId>,
    pub(crate) copy_paths: CopyPaths,
    /// By node: its device and the rule that chose it.
    pub(crate) assignments: Vec<Assignment>,
    pub(crate) split_graph: SplitGraph,
    pub(crate) layout: MemoryLayout,
    pub(crate) queues: Vec<QueueId>,
    /// The steps of one run, in submission order.
    pub(crate) steps: Vec<PlanStep>,
    /// The number of marks that the steps of one run make, numbered from 0.
    pub(crate) marks: u32,
    /// The maximum number of runs in flight. Run `i` uses copy `i % depth` of each ring.
    pub(crate) depth: usize,
}

/// A queue of a plan: a device and a role.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct QueueId {
    pub(crate) device: usize,
    pub(crate) role: QueueRole,
}

/// The purpose of a queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum QueueRole {
    /// Runs nodes. With a depth of 1 it also makes replicas.
    Compute,
    /// Makes replicas while the device's compute queue runs nodes.
    Transfer,
}

/// A step on a queue: first its waits, then its action, then its mark.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PlanStep {
    pub(crate) queue: usize,
    pub(crate) waits: Vec<StepWait>,
    pub(crate) action: StepAction,
    /// The mark after the action, where a step of another queue waits for it or the step is the last of its queue.
    pub(crate) mark: Option<u32>,
}

/// A mark that a step waits for, of the current run (`runs_ago` 0) or of an earlier run. Waits for runs before the first one
/// are no-ops.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct StepWait {
    pub(crate) mark: u32,
    pub(crate) runs_ago: u32,
}

/// The action of a step, with the index of its replica or split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepAction {
    /// The host writes a replica of an input.
    UploadInput(u32),
    /// The queue's device copies a replica from its home (peer copy).
    DeviceCopy(u32),
    /// Host-staged copy, first half: downloads the bytes of a replica to the host, on the compute queue of their home.
    Download(u32),
    /// Host-staged copy, second half: waits for the bytes of the replica's [`StepAction::Download`] and uploads them.
    UploadStaged(u32),
    /// Copies the used experts of a replica from its home. The host waits for the expert ids.
    CopyExperts(u32),
    /// Runs the nodes of a split.
    RunSplit(u32),
}

/// A node's label in messages: its op, and its tensor's name or number.
pub(crate) fn node_name(task: &Task, node: usize) -> String {
    let Some(node) = task.graph().nodes().get(node) else { return format!("node {node}") };
    let (op, name): (OpCode, _) = (node.op.code(), task.name(node.dst));
    if name.is_empty() { format!("{op} (tensor {})", node.dst.index()) } else { format!("{op} {name:?}") }
}

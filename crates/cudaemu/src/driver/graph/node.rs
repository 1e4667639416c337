//! What the nodes of graphs do.

use std::sync::Arc;

use crate::driver::copy::{CopyPointer, Extent, Pitch};
use crate::driver::launch::LaunchRequest;
use crate::engine::{HostCall, KernelLaunch, Memcpy, Memset, Payload, StreamOp};
use crate::handle::{ContextId, EventId, GraphId, Handle};

/// A node's work.
#[derive(Clone, Debug)]
pub enum GraphNode {
    /// A kernel.
    Kernel(Box<KernelNode>),
    /// A copy.
    Memcpy(Box<CopyNode>),
    /// A memset.
    Memset(Memset, ContextId),
    /// A function of the program.
    Host(HostCall),
    /// Another graph, which belongs to this node.
    Child(GraphId),
    /// Nothing.
    Empty,
    /// Waiting for an event.
    Wait(EventId),
    /// Recording an event.
    Record(EventId),
    /// Memory of the graph begins to be used.
    Alloc(AllocNode),
    /// Memory of a graph is no longer used.
    Free(u64),
    /// Values in memory are written or awaited, one after another.
    Values(Vec<MemOp>, ContextId),
}

/// A kernel with its parameters.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// As the program asked for it; the stream means nothing.
    pub request: LaunchRequest,
    /// Checked, and ready to run.
    pub launch: KernelLaunch,
    /// Whose it is.
    pub context: ContextId,
    /// Priority, as it was set.
    pub priority: i32,
    /// Address of each parameter within the block that `launch` holds: what `cuGraphKernelNodeGetParams` gives.
    pub pointers: Arc<[u64]>,
}

/// A copy.
#[derive(Clone, Debug)]
pub struct CopyNode {
    /// As the program asked for it.
    pub request: CopyRequest,
    /// Checked, and ready to run.
    pub copy: Memcpy,
    /// Whose it is.
    pub context: ContextId,
}

/// A copy as a call names it.
#[derive(Clone, Copy, Debug)]
pub struct CopyRequest {
    /// To where.
    pub to: CopyPointer,
    /// How rows lie there.
    pub to_pitch: Pitch,
    /// From where.
    pub from: CopyPointer,
    /// How rows lie there.
    pub from_pitch: Pitch,
    /// What.
    pub extent: Extent,
}

/// Memory of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocNode {
    /// Where.
    pub address: u64,
    /// How much.
    pub bytes: u64,
    /// On which device.
    pub device: u32,
}

/// A value that is written or awaited.
#[derive(Clone, Copy, Debug)]
pub enum MemOp {
    /// Address, value, bytes.
    Write(u64, u64, u32),
    /// Address, value, bytes, condition.
    Await(u64, u64, u32, crate::engine::WaitCondition),
}

/// Why an instantiated graph cannot take over a node: `CUgraphExecUpdateResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeUpdateError {
    /// Another kind of node.
    Kind = 3,
    /// Parameters that have to stay.
    Parameters = 5,
    /// Nodes that cannot change at all.
    Unsupported = 6,
    /// A function of another context.
    Function = 7,
}

impl Payload for GraphNode {
    fn child(&self) -> Option<GraphId> {
        match self {
            Self::Child(graph) => Some(*graph),
            _ => None,
        }
    }
}

impl GraphNode {
    /// `CUgraphNodeType`
    pub fn kind(&self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Memcpy(_) => 1,
            Self::Memset(..) => 2,
            Self::Host(_) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Alloc(_) => 10,
            Self::Free(_) => 11,
            Self::Values(..) => 12,
        }
    }

    /// The context it runs in, where it has one of its own.
    pub fn context(&self) -> Option<ContextId> {
        match self {
            Self::Kernel(kernel) => Some(kernel.context),
            Self::Memcpy(copy) => Some(copy.context),
            Self::Memset(_, context) | Self::Values(_, context) => Some(*context),
            _ => None,
        }
    }

    /// Whether it can be switched off.
    pub fn can_be_disabled(&self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Memcpy(_) | Self::Memset(..))
    }

    /// Whether an instantiated node can become another.
    pub fn fits(old: &Self, new: &Self) -> Result<(), NodeUpdateError> {
        match (old, new) {
            (Self::Kernel(old), Self::Kernel(new)) if old.context == new.context => Ok(()),
            (Self::Kernel(_), Self::Kernel(_)) => Err(NodeUpdateError::Function),
            (Self::Memcpy(old), Self::Memcpy(new)) if old.context == new.context && old.copy.same_route(&new.copy) => {
                Ok(())
            }
            (Self::Memset(_, old), Self::Memset(_, new)) | (Self::Values(_, old), Self::Values(_, new))
                if old == new =>
            {
                Ok(())
            }
            (Self::Memcpy(_), Self::Memcpy(_))
            | (Self::Memset(..), Self::Memset(..))
            | (Self::Values(..), Self::Values(..)) => Err(NodeUpdateError::Parameters),
            (Self::Alloc(old), Self::Alloc(new)) if old == new => Ok(()),
            (Self::Free(old), Self::Free(new)) if old == new => Ok(()),
            (Self::Alloc(_), Self::Alloc(_)) | (Self::Free(_), Self::Free(_)) => Err(NodeUpdateError::Unsupported),
            (old, new) if old.kind() == new.kind() => Ok(()),
            _ => Err(NodeUpdateError::Kind),
        }
    }

    /// What runs. Waiting for events and the start and end of memory's use are matters of order: nothing runs for them.
    pub fn work(&self) -> StreamOp {
        match self {
            Self::Kernel(kernel) => StreamOp::Launch(Box::new(kernel.launch.clone())),
            Self::Memcpy(copy) => StreamOp::Memcpy(Box::new(copy.copy.clone())),
            Self::Memset(fill, _) => StreamOp::Memset(fill.clone()),
            Self::Host(call) => StreamOp::Call(call.clone()),
            Self::Record(event) => StreamOp::Record(*event),
            Self::Values(values, _) => StreamOp::Batch(values.iter().map(|value| value.work()).collect()),
            Self::Child(_) | Self::Empty | Self::Wait(_) | Self::Alloc(_) | Self::Free(_) => StreamOp::Wait,
        }
    }

    /// A line for people.
    pub fn label(&self) -> String {
        match self {
            Self::Kernel(kernel) => {
                let launch = &kernel.launch.launch;
                let name = launch.code.functions.get(launch.function).map_or("?", |function| &function.name);
                format!("KERNEL {name} <<<{:?}, {:?}, {}>>>", launch.grid, launch.block, launch.dynamic_shared)
            }
            Self::Memcpy(copy) => {
                let Memcpy { width, height, depth, .. } = copy.copy;
                format!("MEMCPY {width} x {height} x {depth} bytes")
            }
            Self::Memset(fill, _) => {
                format!("MEMSET {:#x} {} x {} of {} bytes", fill.address, fill.width, fill.height, fill.bytes)
            }
            Self::Host(call) => format!("HOST {:#x}", call.raw[0]),
            Self::Child(graph) => format!("GRAPH {:#x}", graph.raw()),
            Self::Empty => "EMPTY".into(),
            Self::Wait(event) => format!("EVENT_WAIT {:#x}", event.raw()),
            Self::Record(event) => format!("EVENT_RECORD {:#x}", event.raw()),
            Self::Alloc(memory) => format!("MEM_ALLOC {:#x}, {} bytes", memory.address, memory.bytes),
            Self::Free(address) => format!("MEM_FREE {address:#x}"),
            Self::Values(values, _) => format!("BATCH_MEM_OP of {}", values.len()),
        }
    }
}

impl MemOp {
    fn work(self) -> StreamOp {
        match self {
            Self::Write(address, value, bytes) => StreamOp::WriteValue(address, value, bytes),
            Self::Await(address, value, bytes, condition) => StreamOp::WaitValue(address, value, bytes, condition),
        }
    }

    /// From a stream's work.
    pub fn of(work: &StreamOp) -> Option<Self> {
        match *work {
            StreamOp::WriteValue(address, value, bytes) => Some(Self::Write(address, value, bytes)),
            StreamOp::WaitValue(address, value, bytes, condition) => {
                Some(Self::Await(address, value, bytes, condition))
            }
            _ => None,
        }
    }
}

//! Operations of graph nodes.

use std::sync::Arc;

use crate::driver::copy::{CopyPointer, Extent, Pitch};
use crate::driver::launch::LaunchRequest;
use crate::engine::{HostCall, KernelLaunch, Memcpy, Memset, Payload, StreamOp};
use crate::handle::{ContextId, EventId, GraphId, Handle};

/// A node's operation.
#[derive(Clone, Debug)]
pub enum GraphNode {
    /// A kernel launch.
    Kernel(Box<KernelNode>),
    /// A copy.
    Memcpy(Box<CopyNode>),
    /// A memset.
    Memset(Memset, ContextId),
    /// A host function of the program.
    Host(HostCall),
    /// A graph that this node owns.
    Child(GraphId),
    /// No operation.
    Empty,
    /// Waits for an event.
    Wait(EventId),
    /// Records an event.
    Record(EventId),
    /// Allocates graph memory.
    Alloc(AllocNode),
    /// Frees graph memory at this address.
    Free(u64),
    /// Writes of and waits for values in memory, in order.
    Values(Vec<MemOp>, ContextId),
}

/// A kernel node.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// The launch as the program requested it; the stream is unused.
    pub request: LaunchRequest,
    /// The checked launch, ready to run.
    pub launch: KernelLaunch,
    /// The context that it runs in.
    pub context: ContextId,
    /// The priority attribute.
    pub priority: i32,
    /// Address of each parameter within the block that `launch` holds, for `cuGraphKernelNodeGetParams`.
    pub pointers: Arc<[u64]>,
}

/// A copy node.
#[derive(Clone, Debug)]
pub struct CopyNode {
    /// The copy as the program requested it.
    pub request: CopyRequest,
    /// The checked copy, ready to run.
    pub copy: Memcpy,
    /// The context that it runs in.
    pub context: ContextId,
}

/// A copy as the program requested it.
#[derive(Clone, Copy, Debug)]
pub struct CopyRequest {
    /// Destination.
    pub to: CopyPointer,
    /// Row and slice distances of the destination.
    pub to_pitch: Pitch,
    /// Source.
    pub from: CopyPointer,
    /// Row and slice distances of the source.
    pub from_pitch: Pitch,
    /// Bytes per row, rows, slices.
    pub extent: Extent,
}

/// Memory of an allocation node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocNode {
    /// Start address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Device ordinal.
    pub device: u32,
}

/// A write of or wait for a value in memory.
#[derive(Clone, Copy, Debug)]
pub enum MemOp {
    /// Writes: address, value, bytes.
    Write(u64, u64, u32),
    /// Waits: address, value, bytes, condition.
    Await(u64, u64, u32, crate::engine::WaitCondition),
}

/// Why an executable graph cannot accept a new node: `CUgraphExecUpdateResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeUpdateError {
    /// The node has another kind.
    Kind = 3,
    /// Parameters differ that cannot be changed.
    Parameters = 5,
    /// Nodes of this kind cannot be changed.
    Unsupported = 6,
    /// The function belongs to another context.
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

    /// The context that it runs in; `None` for nodes without one.
    pub fn context(&self) -> Option<ContextId> {
        match self {
            Self::Kernel(kernel) => Some(kernel.context),
            Self::Memcpy(copy) => Some(copy.context),
            Self::Memset(_, context) | Self::Values(_, context) => Some(*context),
            _ => None,
        }
    }

    /// Whether `cuGraphNodeSetEnabled` accepts the node.
    pub fn can_be_disabled(&self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Memcpy(_) | Self::Memset(..))
    }

    /// Whether node `old` of an executable graph can be replaced by `new`.
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

    /// The stream operation to execute. Event waits and memory nodes only affect ordering and bookkeeping: no operation runs
    /// for them.
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

    /// A one-line label for DOT output.
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

    /// The node for a stream operation; `None` for kinds that need the program's request.
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

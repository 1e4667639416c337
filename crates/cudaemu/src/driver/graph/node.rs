//! What the nodes of graphs do.

use std::sync::Arc;

use crate::driver::copy::{End, Extent, Pitch};
use crate::driver::launch::Request;
use crate::engine::{Call, Copy, Fill, Launch, Payload, Work};
use crate::handle::{ContextId, EventId, GraphId, Handle};

/// A node's work.
#[derive(Clone, Debug)]
pub enum Node {
    /// A kernel.
    Kernel(Box<KernelNode>),
    /// A copy.
    Copy(Box<CopyNode>),
    /// A memset.
    Fill(Fill, ContextId),
    /// A function of the program.
    Host(Call),
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
    Values(Vec<Value>, ContextId),
}

/// A kernel with its parameters.
#[derive(Clone, Debug)]
pub struct KernelNode {
    /// As the program asked for it; the stream means nothing.
    pub request: Request,
    /// Checked, and ready to run.
    pub launch: Launch,
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
    pub copy: Copy,
    /// Whose it is.
    pub context: ContextId,
}

/// A copy as a call names it.
#[derive(Clone, Copy, Debug)]
pub struct CopyRequest {
    /// To where.
    pub to: End,
    /// How rows lie there.
    pub to_pitch: Pitch,
    /// From where.
    pub from: End,
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
pub enum Value {
    /// Address, value, bytes.
    Write(u64, u64, u32),
    /// Address, value, bytes, condition.
    Await(u64, u64, u32, crate::engine::WaitCondition),
}

/// Why an instantiated graph cannot take over a node: `CUgraphExecUpdateResult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Another kind of node.
    Kind = 3,
    /// Parameters that have to stay.
    Parameters = 5,
    /// Nodes that cannot change at all.
    Unsupported = 6,
    /// A function of another context.
    Function = 7,
}

impl Payload for Node {
    fn child(&self) -> Option<GraphId> {
        match self {
            Self::Child(graph) => Some(*graph),
            _ => None,
        }
    }
}

impl Node {
    /// `CUgraphNodeType`
    pub fn kind(&self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill(..) => 2,
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
            Self::Copy(copy) => Some(copy.context),
            Self::Fill(_, context) | Self::Values(_, context) => Some(*context),
            _ => None,
        }
    }

    /// Whether it can be switched off.
    pub fn can_be_disabled(&self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Copy(_) | Self::Fill(..))
    }

    /// Whether an instantiated node can become another.
    pub fn fits(old: &Self, new: &Self) -> Result<(), Refused> {
        match (old, new) {
            (Self::Kernel(old), Self::Kernel(new)) if old.context == new.context => Ok(()),
            (Self::Kernel(_), Self::Kernel(_)) => Err(Refused::Function),
            (Self::Copy(old), Self::Copy(new)) if old.context == new.context && old.copy.same_route(&new.copy) => {
                Ok(())
            }
            (Self::Fill(_, old), Self::Fill(_, new)) | (Self::Values(_, old), Self::Values(_, new)) if old == new => {
                Ok(())
            }
            (Self::Copy(_), Self::Copy(_))
            | (Self::Fill(..), Self::Fill(..))
            | (Self::Values(..), Self::Values(..)) => Err(Refused::Parameters),
            (Self::Alloc(old), Self::Alloc(new)) if old == new => Ok(()),
            (Self::Free(old), Self::Free(new)) if old == new => Ok(()),
            (Self::Alloc(_), Self::Alloc(_)) | (Self::Free(_), Self::Free(_)) => Err(Refused::Unsupported),
            (old, new) if old.kind() == new.kind() => Ok(()),
            _ => Err(Refused::Kind),
        }
    }

    /// What runs. Waiting for events and the start and end of memory's use are matters of order: nothing runs for them.
    pub fn work(&self) -> Work {
        match self {
            Self::Kernel(kernel) => Work::Launch(Box::new(kernel.launch.clone())),
            Self::Copy(copy) => Work::Copy(Box::new(copy.copy.clone())),
            Self::Fill(fill, _) => Work::Fill(fill.clone()),
            Self::Host(call) => Work::Call(call.clone()),
            Self::Record(event) => Work::Record(*event),
            Self::Values(values, _) => Work::Batch(values.iter().map(|value| value.work()).collect()),
            Self::Child(_) | Self::Empty | Self::Wait(_) | Self::Alloc(_) | Self::Free(_) => Work::Wait,
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
            Self::Copy(copy) => {
                let Copy { width, height, depth, .. } = copy.copy;
                format!("MEMCPY {width} x {height} x {depth} bytes")
            }
            Self::Fill(fill, _) => {
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

impl Value {
    fn work(self) -> Work {
        match self {
            Self::Write(address, value, bytes) => Work::WriteValue(address, value, bytes),
            Self::Await(address, value, bytes, condition) => Work::WaitValue(address, value, bytes, condition),
        }
    }

    /// From a stream's work.
    pub fn of(work: &Work) -> Option<Self> {
        match *work {
            Work::WriteValue(address, value, bytes) => Some(Self::Write(address, value, bytes)),
            Work::WaitValue(address, value, bytes, condition) => Some(Self::Await(address, value, bytes, condition)),
            _ => None,
        }
    }
}

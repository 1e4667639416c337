//! A device that records nothing and computes nothing: it takes everything, and is done at once.

use fanout::device::{
    Account, Buffer, Device, DeviceError, DeviceInfo, DeviceKind, MemoryInfo, Point, Program, Queue, Region, Source,
    Support, Ticket, Timeline, Unsupported,
};
use fanout::graph::Graph;
use fanout::ops::{NodeView, OpCode};
use fanout::tensor::TensorDesc;
use std::fmt;
use std::sync::Arc;

/// What a null device says of a node.
type Says = dyn Fn(NodeView<'_>) -> Support + Send + Sync;

/// Whether a null device of another domain than its own copies from that device.
type Copies = dyn Fn(&DeviceInfo) -> bool + Send + Sync;

pub struct Null {
    info: DeviceInfo,
    says: Box<Says>,
    copies: Box<Copies>,
    /// What it claims to have, all of it free.
    memory: u64,
    /// Bytes that it reserves behind each tensor.
    padding: u64,
}

impl Null {
    /// One that supports everything, with 64-byte alignment and no limit of a buffer's size.
    pub fn new(name: &str, kind: DeviceKind) -> Null {
        let info = DeviceInfo::new(name, kind)
            .with_description("computes nothing".to_owned())
            .with_alignment(64)
            .with_domain("null".to_owned());
        Null { info, says: Box::new(|_| Support::Yes), copies: Box::new(|_| false), memory: 1 << 40, padding: 0 }
    }

    /// With other facts.
    pub fn with(mut self, change: impl FnOnce(&mut DeviceInfo)) -> Null {
        change(&mut self.info);
        self
    }

    pub fn memory(self, memory: u64) -> Null {
        Null { memory, ..self }
    }

    /// That wants bytes behind each tensor.
    pub fn pads(self, padding: u64) -> Null {
        Null { padding, ..self }
    }

    /// That says something else of nodes.
    pub fn says(self, says: impl Fn(NodeView<'_>) -> Support + Send + Sync + 'static) -> Null {
        Null { says: Box::new(says), ..self }
    }

    /// That copies from some devices of other domains.
    pub fn copies(self, copies: impl Fn(&DeviceInfo) -> bool + Send + Sync + 'static) -> Null {
        Null { copies: Box::new(copies), ..self }
    }

    /// That refuses these ops.
    pub fn refuses(self, ops: &'static [OpCode]) -> Null {
        self.says(move |node| {
            let op = node.op.code();
            if ops.contains(&op) {
                Support::No(Unsupported { op, reason: "the null device refuses it".to_owned() })
            } else {
                Support::Yes
            }
        })
    }

    /// As a scheduler's list has it.
    pub fn shared(self) -> Arc<dyn Device> {
        Arc::new(self)
    }
}

impl fmt::Debug for Null {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Null({})", self.info.name)
    }
}

impl Device for Null {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn copies_from(&self, other: &DeviceInfo) -> bool {
        self.info.domain == other.domain || (self.copies)(other)
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: self.memory, total: self.memory })
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charge = account.charge(bytes)?;
        Ok(Buffer::new(&self.info.name, bytes, Box::new(()), Box::new(charge)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64 + self.padding
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        (self.says)(node)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        Ok(Program::new(graph, Box::new(())))
    }

    fn queue(&self, _: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        Ok(Box::new(NullQueue(Timeline::new())))
    }
}

struct NullQueue(Arc<Timeline>);

impl Queue for NullQueue {
    fn upload(&mut self, _: Region, _: Option<&TensorDesc>, _: Source<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        Ok(Ticket::ready(vec![0; src.bytes() as usize]))
    }

    fn fill(&mut self, _: Region, _: u8) -> Result<(), DeviceError> {
        Ok(())
    }

    fn copy_from(&mut self, _: Region, _: Region, _: Option<&Point>) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn run(&mut self, _: &Program, _: &Arc<[Region]>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn mark(&mut self) -> Point {
        Point::new(&self.0, 0)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        point.wait(None)
    }
}

//! COMM_ALLREDUCE: a tensor becomes the sum of itself and the other server's, on the device.
//!
//! Small tensors are exchanged as F32: both ends then compute the same bits, because addition is commutative. Large tensors are
//! exchanged as BF16, which halves the bytes; each end adds the received BF16 elements to its own F32 elements, so that the two
//! results differ by the rounding of the shares. llama.cpp's server does the same, and nothing on the connection tells which
//! server is at the other end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use thiserror::Error;

use super::comm_link::CommLink;
use super::exchange::{ExchangeError, ExchangeLimits, Payload};
use crate::device::{
    Device, DeviceError, MemoryBudget, PendingRead, Program, Queue, Region, TRANSFER_CHUNK_BYTES, UploadSource,
};
use crate::graph::{BuildError, Builder, Graph};
use crate::ops::binary::Binary;
use crate::ops::copy::CopyOp;
use crate::rpc::transport::Deadline;
use crate::tensor::{DType, TensorDesc};

/// Number of elements from which a tensor is exchanged as BF16.
const MIN_BF16_ELEMENTS: usize = 32_768;

/// Downloads that are under way at a time.
const MAX_PENDING_DOWNLOADS: usize = 2;

/// Largest host memory of an exchange, in bytes: the pending downloads, the chunk that is sent, and the chunk that is received.
pub(in crate::rpc::server) const MAX_HOST_BYTES: u64 = (MAX_PENDING_DOWNLOADS as u64 + 2) * TRANSFER_CHUNK_BYTES;

/// Limit of the prepared programs per connection. A client sums tensors of one shape per batch size.
const MAX_PROGRAMS: usize = 4;

/// Alignment of a region that is bound to a program, in bytes: more than any device requires.
const BINDING_ALIGNMENT: u64 = 64;

/// Time that a program may run on the session's thread. An addition takes much less.
const INLINE_BUDGET: Duration = Duration::from_millis(100);

/// Why a tensor could not be reduced.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum ReduceError {
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<BuildError> for ReduceError {
    fn from(e: BuildError) -> ReduceError {
        DeviceError::Bug(format!("the graph of a reduction is invalid: {e}")).into()
    }
}

/// Where and within which limits a tensor is reduced.
pub(in crate::rpc::server) struct ReductionTarget<'a> {
    pub(in crate::rpc::server) device: &'a dyn Device,
    pub(in crate::rpc::server) queue: &'a mut dyn Queue,
    /// Whether the programs run on the calling thread.
    pub(in crate::rpc::server) inline: bool,
    /// Charged for scratch memory.
    pub(in crate::rpc::server) budget: &'a Arc<MemoryBudget>,
    /// Maximum time without a byte in either direction, once the peer has begun to send.
    pub(in crate::rpc::server) stall_timeout: Duration,
    /// Maximum time of a wait for the device, and of the whole exchange.
    pub(in crate::rpc::server) reply_timeout: Duration,
    /// Whether the client has closed its connection.
    pub(in crate::rpc::server) hung_up: &'a dyn Fn() -> bool,
}

impl ReductionTarget<'_> {
    fn run(&mut self, program: &Program, bindings: &[&Region]) -> Result<(), DeviceError> {
        let bindings = bindings.iter().map(|&region| region.clone()).collect();
        if self.inline {
            self.queue.run_inline(program, &bindings, INLINE_BUDGET)
        } else {
            self.queue.run(program, &bindings)
        }
    }
}

/// Prepared programs and scratch memory of the reductions on one device.
#[derive(Default)]
pub(in crate::rpc::server) struct Reducer {
    /// The least recently used first.
    programs: VecDeque<(ProgramKey, ReductionPrograms)>,
    /// BF16 elements to send.
    outgoing: Scratch,
    /// Elements that were received.
    incoming: Scratch,
}

/// The properties of a tensor on which the programs depend.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ProgramKey {
    ne: [usize; 4],
    /// Bytes from an aligned address to the tensor.
    offset: u64,
}

/// Programs of a tensor. Slot 0: the memory in which the tensor lies; slot 1: scratch memory.
#[derive(Clone)]
struct ReductionPrograms {
    /// Type of the elements on the connection.
    wire: DType,
    /// Writes the elements to send into slot 1. `None`: they are sent as they are.
    convert: Option<Program>,
    /// Adds slot 1 to the tensor.
    add: Program,
}

impl ReductionPrograms {
    fn prepare(device: &dyn Device, key: ProgramKey) -> Result<ReductionPrograms, ReduceError> {
        let elements: usize = key.ne.iter().product(); // of a valid tensor
        let wire = if elements < MIN_BF16_ELEMENTS { DType::F32 } else { DType::BF16 };
        let convert = match wire {
            DType::F32 => None,
            _ => Some(device.prepare(Arc::new(conversion_graph(key, wire)?))?),
        };
        let add = device.prepare(Arc::new(addition_graph(key, wire)?))?;
        Ok(ReductionPrograms { wire, convert, add })
    }
}

/// The graph `scratch = tensor`, with a conversion to `wire`.
fn conversion_graph(key: ProgramKey, wire: DType) -> Result<Graph, BuildError> {
    let mut builder = Builder::with_separate_slots();
    let tensor = add_tensor(&mut builder, key)?;
    let scratch = builder.leaf(wire, key.ne)?;
    builder.node_into(CopyOp::Cpy, &[Some(tensor)], scratch)?;
    Ok(builder.build())
}

/// The graph `tensor = tensor + scratch`.
fn addition_graph(key: ProgramKey, wire: DType) -> Result<Graph, BuildError> {
    let mut builder = Builder::with_separate_slots();
    let tensor = add_tensor(&mut builder, key)?;
    let scratch = builder.leaf(wire, key.ne)?;
    // In place: a node's result is another tensor than its operands, here with the same memory.
    let sum = builder.view(tensor, TensorDesc::contiguous(DType::F32, key.ne)?, 0)?;
    builder.node_into(Binary::Add, &[Some(tensor), Some(scratch)], sum)?;
    Ok(builder.build())
}

/// Adds the tensor, at its offset in slot 0.
fn add_tensor(builder: &mut Builder, key: ProgramKey) -> Result<crate::graph::TensorId, BuildError> {
    let desc = TensorDesc::contiguous(DType::F32, key.ne)?;
    let offset = key.offset as usize; // below BINDING_ALIGNMENT
    let memory = builder.leaf(DType::I8, [offset + desc.extent(), 1, 1, 1])?;
    builder.view(memory, desc, offset)
}

impl Reducer {
    /// Replaces the tensor at the start of `region` by the sum of itself and the peer's. It must be F32, contiguous and not
    /// empty. Runs in order with the queue's other work, and waits for the peer.
    ///
    /// # Errors
    /// The device or the connection has failed, or the budget is exhausted. The connection is then useless.
    pub(in crate::rpc::server) fn reduce(
        &mut self,
        link: &mut CommLink,
        tensor: &TensorDesc,
        region: &Region,
        mut target: ReductionTarget<'_>,
    ) -> Result<(), ReduceError> {
        let key = ProgramKey { ne: tensor.ne(), offset: region.offset() % BINDING_ALIGNMENT };
        let ReductionPrograms { wire, convert, add } = self.programs(target.device, key)?;
        let bytes = (tensor.elements() * wire.block_bytes()) as u64; // at most the bytes of the tensor
        let _host = target.budget.reserve(MAX_HOST_BYTES.min(2 * bytes))?;
        let whole = region.buffer().region(region.offset() - key.offset, key.offset + region.bytes())?;
        let incoming = self.incoming.region(bytes, &target)?;
        let outgoing = match convert {
            None => region.clone(),
            Some(convert) => {
                let outgoing = self.outgoing.region(bytes, &target)?;
                target.run(&convert, &[&whole, &outgoing])?;
                outgoing
            }
        };
        let limits = ExchangeLimits {
            stall: target.stall_timeout,
            deadline: Deadline::after(target.reply_timeout),
            hung_up: target.hung_up,
        };
        let mut payload = TensorPayload {
            queue: &mut *target.queue,
            reply_timeout: target.reply_timeout,
            outgoing,
            requested: 0,
            downloads: VecDeque::new(),
            incoming: incoming.clone(),
            received: 0,
        };
        link.exchange(bytes, &mut payload, &limits)?;
        Ok(target.run(&add, &[&whole, &incoming])?)
    }

    fn programs(&mut self, device: &dyn Device, key: ProgramKey) -> Result<ReductionPrograms, ReduceError> {
        let found = self.programs.iter().position(|(other, _)| *other == key);
        let programs = match found.and_then(|at| self.programs.remove(at)) {
            Some((_, programs)) => programs,
            None => ReductionPrograms::prepare(device, key)?,
        };
        if self.programs.len() == MAX_PROGRAMS {
            self.programs.pop_front();
        }
        self.programs.push_back((key, programs.clone()));
        Ok(programs)
    }
}

/// Scratch memory of a device that grows on demand.
#[derive(Default)]
struct Scratch(Option<Region>);

impl Scratch {
    /// `bytes` bytes, with the content of an earlier use.
    fn region(&mut self, bytes: u64, target: &ReductionTarget<'_>) -> Result<Region, DeviceError> {
        if self.0.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            // Freed first, so that the budget need not pay for both.
            self.0 = None;
            self.0 = Some(target.device.alloc(bytes, target.budget)?.whole());
        }
        match &self.0 {
            Some(memory) => memory.subregion(0, bytes),
            None => Err(DeviceError::Bug("scratch memory was not allocated".to_owned())),
        }
    }
}

/// The elements of a reduction: downloads those to send, and uploads those received.
struct TensorPayload<'a> {
    queue: &'a mut dyn Queue,
    reply_timeout: Duration,
    outgoing: Region,
    /// Bytes of `outgoing` whose download was requested.
    requested: u64,
    downloads: VecDeque<PendingRead>,
    incoming: Region,
    /// Bytes of `incoming` that were uploaded.
    received: u64,
}

impl Payload for TensorPayload<'_> {
    type Error = ReduceError;

    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, ReduceError> {
        while self.downloads.len() < MAX_PENDING_DOWNLOADS && self.requested < self.outgoing.bytes() {
            let bytes = TRANSFER_CHUNK_BYTES.min(self.outgoing.bytes() - self.requested);
            self.downloads.push_back(self.queue.download(self.outgoing.subregion(self.requested, bytes)?)?);
            self.requested += bytes;
        }
        let Some(download) = self.downloads.pop_front() else { return Ok(None) };
        Ok(Some(download.wait(Some(Instant::now() + self.reply_timeout))?))
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<(), ReduceError> {
        let target = self.incoming.subregion(self.received, bytes.len() as u64)?;
        self.queue.upload(target, None, UploadSource::Borrowed(bytes))?;
        self.received += bytes.len() as u64;
        Ok(())
    }
}

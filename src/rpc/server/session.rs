//! One client's session: what each command does.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::debug;

use super::connection::Connection;
use super::foresight::Foresight;
use super::greeted;
use super::handles::Located;
use super::holdings::Holdings;
use super::outgoing::Outgoing;
use super::programs::Programs;
use super::{Refusal, Shared, bounce, compile};
use crate::device::{Account, Device, DeviceError, Program, Queue, Region, Source};
use crate::rpc::transport;
use crate::rpc::wire::ext::{ExtCommand, Greeting, REVISION, State};
use crate::rpc::wire::{
    Command, CopyTensor, GetTensor, HelloReply, InitTensor, MemsetTensor, PROTOCOL_VERSION, REQUEST_HEADER, Request,
    RequestHeader, Response, SET_TENSOR_HEAD, SetTensorHash, SetTensorHead, graph_cost,
};
use crate::tensor::TensorDesc;

/// Pieces in which a large tensor is read: while one is sent, the next is on its way from the device.
const PIECE: u64 = 1 << 20;

/// How long a program may keep the session from its next message: longer than a token takes, shorter than anyone who
/// hangs up would wait for us to see it.
pub(super) const RUN_PATIENCE: Duration = Duration::from_millis(100);

/// The largest buffer for bodies that is kept between messages: one graph, once, is no reason to hold more.
pub(super) const KEPT_BODY: usize = 4 << 20;

/// How a session ended that did nothing wrong.
pub(super) enum End {
    /// The client closed the connection.
    Closed,
    /// It did so before it said anything.
    Silent,
}

/// Why a session ended that could not go on.
pub(super) struct Failure {
    /// The command it answers, once that is known.
    command: Option<&'static str>,
    reason: Refusal,
    /// Where a client hears of it that has greeted.
    out: Option<Arc<Outgoing>>,
}

impl Failure {
    pub(super) fn new(command: Option<&'static str>, reason: impl Into<Refusal>) -> Failure {
        Failure { command, reason: reason.into(), out: None }
    }

    /// A failure of a client that has greeted.
    pub(super) fn told(self, out: Arc<Outgoing>) -> Failure {
        Failure { out: Some(out), ..self }
    }

    /// Tells the client, where there are words for it and there is a socket to say them, and closes the connection.
    pub(super) fn tell(self) {
        match (&self.out, &self.reason) {
            (Some(out), Refusal::Broken(_)) => out.close(),
            (Some(out), _) => out.refuse(&self.to_string()),
            (None, _) => {}
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { command, reason, .. } = self;
        match command {
            Some(command) => write!(f, "{command}: {reason}"),
            None => write!(f, "{reason}"),
        }
    }
}

/// Serves a connection to its end. Everything the client had is freed when this returns.
pub(super) fn run(shared: &Arc<Shared>, connection: transport::Connection) -> Result<End, Failure> {
    let config = &shared.config;
    let peer = connection.peer();
    let connection = Connection::new(connection, config.handshake_timeout, config.stall_timeout);
    let lanes = shared.devices.iter().map(|device| Lane { device, queue: None });
    let mut session = Session {
        connection,
        holdings: Holdings::new(shared, peer),
        lanes: lanes.collect(),
        programs: Programs::default(),
        foresight: Foresight::default(),
    };
    let mut body = Vec::new();
    let Some(header) = session.header()? else { return Ok(End::Silent) };
    session.message(header, &mut body, Session::hello)?;
    let Some(header) = session.header()? else { return Ok(End::Closed) };
    if header[0] == ExtCommand::Greet as u8 {
        return greeted::run(shared, session.connection, session.holdings, header, body);
    }
    session.serve(header, &mut body)
}

struct Session<'a> {
    connection: Connection,
    holdings: Holdings<'a>,
    /// By the devices' positions.
    lanes: Vec<Lane<'a>>,
    programs: Programs,
    foresight: Foresight,
}

/// A session's work on one device.
struct Lane<'a> {
    device: &'a Arc<dyn Device>,
    /// Made for its first work: most connections only ask.
    queue: Option<Box<dyn Queue>>,
}

impl Lane<'_> {
    fn queue(&mut self, account: &Arc<Account>) -> Result<&mut Box<dyn Queue>, DeviceError> {
        match &mut self.queue {
            Some(queue) => Ok(queue),
            none => Ok(none.insert(self.device.queue(account)?)),
        }
    }
}

impl<'a> Session<'a> {
    fn header(&mut self) -> Result<Option<[u8; REQUEST_HEADER]>, Failure> {
        self.connection.header().map_err(|e| Failure::new(None, e))
    }

    fn serve(&mut self, mut header: [u8; REQUEST_HEADER], body: &mut Vec<u8>) -> Result<End, Failure> {
        loop {
            self.message(header, body, Self::command)?;
            self.foresee();
            match self.header()? {
                Some(next) => header = next,
                None => return Ok(End::Closed),
            }
        }
    }

    /// Uses the time until the next message.
    fn foresee(&mut self) {
        let Some((device, region)) = self.foresight.next() else { return };
        let lane = self.lanes.get_mut(device as usize);
        if let Some(Ok(queue)) = lane.map(|lane| lane.queue(&self.holdings.account)) {
            self.foresight.prepare(&region, &mut **queue, || self.connection.is_due());
        }
    }

    /// Checks a header and hands its message on; every error is about this message's command.
    fn message(
        &mut self,
        header: [u8; REQUEST_HEADER],
        body: &mut Vec<u8>,
        handle: fn(&mut Self, Command, usize, &mut Vec<u8>) -> Result<(), Refusal>,
    ) -> Result<(), Failure> {
        if header[0] == ExtCommand::Greet as u8 {
            return Err(Failure::new(Some(ExtCommand::Greet.name()), Refusal::GreetSecond));
        }
        let header = RequestHeader::decode(&header).map_err(|e| Failure::new(None, e))?;
        let done = header.body_len(&self.holdings.shared.config.limits).map_err(Refusal::from);
        let done = done.and_then(|len| handle(self, header.command, len, body));
        if body.capacity() > KEPT_BODY {
            *body = Vec::new();
        }
        done.map_err(|e| Failure::new(Some(header.command.name()), e))
    }

    fn hello(&mut self, command: Command, len: usize, body: &mut Vec<u8>) -> Result<(), Refusal> {
        if command != Command::Hello {
            return Err(Refusal::HelloFirst(command));
        }
        self.connection.body(len, body)?;
        self.connection.handshaken();
        let current = len > 0;
        let conn_caps = current.then_some([0; 24]);
        let state = self.holdings.shared.state();
        let greeting = Greeting { revision: REVISION, state }.to_byte();
        self.connection.send(&Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps, greeting }))?;
        match state {
            _ if !current => Err(Refusal::OldClient),
            State::Ready => Ok(()),
            State::Full | State::Draining => Err(Refusal::Draining),
        }
    }

    fn command(&mut self, command: Command, len: usize, body: &mut Vec<u8>) -> Result<(), Refusal> {
        if command == Command::SetTensor {
            return self.set_tensor(len);
        }
        self.connection.body(len, body)?;
        if command == Command::GraphCompute {
            return self.graph_compute(len, body);
        }
        match Request::decode(command, &body[..len], &self.holdings.shared.config.limits)? {
            Request::AllocBuffer(request) => {
                let response = self.holdings.alloc_buffer(&request)?;
                self.reply(&response)
            }
            Request::GetAlignment(request) => {
                let alignment = self.lane(request.device)?.device.info().alignment;
                self.reply(&Response::GetAlignment(alignment))
            }
            Request::GetMaxSize(request) => {
                let max = self.lane(request.device)?.device.info().max_buffer;
                self.reply(&Response::GetMaxSize(max))
            }
            Request::BufferGetBase(request) => {
                let response = self.holdings.buffer_base(request.remote_ptr)?;
                self.reply(&response)
            }
            Request::FreeBuffer(request) => {
                let entry = self.holdings.handles.remove(request.remote_ptr)?;
                self.programs.forget(entry.buffer.id());
                Ok(())
            }
            Request::BufferClear(request) => {
                let entry = self.holdings.handles.get(request.remote_ptr)?;
                let (device, region) = (entry.device, entry.buffer.whole());
                self.fill(device, region, request.value)
            }
            Request::SetTensorHash(request) => self.set_tensor_hash(&request),
            Request::GetTensor(request) => self.get_tensor(&request),
            Request::CopyTensor(request) => self.copy_tensor(&request),
            Request::GetDeviceMemory(request) => {
                let response = self.holdings.device_memory(request.device)?;
                self.reply(&response)
            }
            Request::InitTensor(request) => self.init_tensor(&request),
            Request::GetAllocSize(request) => {
                let response = self.holdings.alloc_size(&request)?;
                self.reply(&response)
            }
            Request::Hello(_) => Err(Refusal::HelloAgain),
            // No session has more devices than its lanes, whose count came from memory.
            Request::DeviceCount(_) => self.reply(&Response::DeviceCount(self.lanes.len() as u32)),
            Request::GraphRecompute(request) => self.graph_recompute(request.device),
            Request::MemsetTensor(request) => self.memset_tensor(&request),
            Request::SetTensor(_) | Request::GraphCompute(_) => Err(confused()),
        }
    }

    fn reply(&mut self, response: &Response<'_>) -> Result<(), Refusal> {
        Ok(self.connection.send(response)?)
    }

    fn lane(&mut self, device: u32) -> Result<&mut Lane<'a>, Refusal> {
        let count = self.lanes.len();
        self.lanes.get_mut(device as usize).ok_or(Refusal::Device { device, count })
    }

    fn queue(&mut self, device: u32) -> Result<&mut Box<dyn Queue>, Refusal> {
        let account = Arc::clone(&self.holdings.account);
        Ok(self.lane(device)?.queue(&account)?)
    }

    /// The queues of two devices.
    fn two_queues(&mut self, a: u32, b: u32) -> Result<[&mut Box<dyn Queue>; 2], Refusal> {
        let (account, count) = (Arc::clone(&self.holdings.account), self.lanes.len());
        let Ok([a, b]) = self.lanes.get_disjoint_mut([a as usize, b as usize]) else {
            return Err(Refusal::Device { device: a.max(b), count });
        };
        Ok([a.queue(&account)?, b.queue(&account)?])
    }

    fn fill(&mut self, device: u32, region: Region, value: u8) -> Result<(), Refusal> {
        if region.bytes() > 0 {
            self.queue(device)?.fill(region, value)?;
        }
        Ok(())
    }

    fn memset_tensor(&mut self, request: &MemsetTensor) -> Result<(), Refusal> {
        let tensor = self.holdings.handles.locate(&request.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, request.size)?);
        self.fill(device, region, request.value)
    }

    /// Clears what a device reserves behind a tensor's last byte, as far as it lies in the buffer.
    fn init_tensor(&mut self, request: &InitTensor) -> Result<(), Refusal> {
        let tensor = self.holdings.handles.locate(&request.tensor)?;
        let device = tensor.entry.device;
        let lane = self.lanes.get(device as usize).ok_or(Refusal::Device { device, count: self.lanes.len() })?;
        let extent = tensor.desc.extent() as u64;
        let reserved = lane.device.alloc_size(&tensor.desc).min(tensor.entry.buffer.bytes() - tensor.start);
        let region = tensor.region(extent, reserved.saturating_sub(extent))?;
        self.fill(device, region, 0)
    }

    /// Streams the data behind a SET_TENSOR's head to its place.
    fn set_tensor(&mut self, len: usize) -> Result<(), Refusal> {
        let head = SetTensorHead::decode(&self.connection.array::<SET_TENSOR_HEAD>()?)?;
        let len = (len - SET_TENSOR_HEAD) as u64;
        let tensor = self.holdings.handles.locate(&head.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(head.offset, len)?);
        if len == 0 {
            return Ok(());
        }
        let cache = self.holdings.shared.cache.as_ref().filter(|_| head.cache);
        let mut keeper = cache.and_then(|cache| cache.keep(len));
        let (lanes, connection) = (&mut self.lanes, &mut self.connection);
        let count = lanes.len();
        let lane = lanes.get_mut(device as usize).ok_or(Refusal::Device { device, count })?;
        let mut broken = None;
        let whole = tensor.desc;
        self.foresight.uploaded(device, &region)?;
        let done = lane.queue(&self.holdings.account)?.upload(
            region,
            (head.offset == 0 && len == whole.extent() as u64).then_some(&whole),
            Source::Writer(&mut |piece| {
                connection.read_exact(piece).map_err(|e| {
                    let text = io::Error::other(e.to_string());
                    broken = Some(e);
                    text
                })?;
                if let Some(keeper) = &mut keeper {
                    keeper.update(piece);
                }
                Ok(())
            }),
        );
        if let Some(broken) = broken {
            return Err(broken.into());
        }
        done?;
        if let Some(keeper) = keeper {
            keeper.commit();
        }
        Ok(())
    }

    fn set_tensor_hash(&mut self, request: &SetTensorHash) -> Result<(), Refusal> {
        let tensor = self.holdings.handles.locate(&request.tensor)?;
        let extent = tensor.desc.extent() as u64;
        // The message has no length: it is the rest of the tensor.
        let len = extent.saturating_sub(request.offset);
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, len)?);
        let whole = (request.offset == 0).then_some(tensor.desc);
        let found = self.fill_cached(device, region, whole.as_ref(), request.hash)?;
        self.reply(&Response::SetTensorHash(found))
    }

    /// Fills a region with cached data. `false` may leave other bytes in it: the client writes it next.
    fn fill_cached(
        &mut self,
        device: u32,
        region: Region,
        tensor: Option<&TensorDesc>,
        hash: u64,
    ) -> Result<bool, Refusal> {
        let Some(cache) = self.holdings.shared.cache.as_ref().filter(|_| region.bytes() > 0) else { return Ok(false) };
        let Some(mut hit) = cache.find(hash, region.bytes()) else { return Ok(false) };
        let mut broken = None;
        let done = self.queue(device)?.upload(
            region,
            tensor,
            Source::Writer(&mut |piece| {
                hit.read(piece).map_err(|e| {
                    let text = io::Error::other(e.to_string());
                    broken = Some(e);
                    text
                })
            }),
        );
        if let Some(e) = broken.or_else(|| done.is_ok().then(|| hit.verify().err()).flatten()) {
            cache.drop_file(hash, &e);
            return Ok(false);
        }
        done?;
        debug!("{}: {hash:016x} comes from the cache", self.holdings.peer);
        Ok(true)
    }

    fn get_tensor(&mut self, request: &GetTensor) -> Result<(), Refusal> {
        let tensor = self.holdings.handles.locate(&request.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, request.size)?);
        if request.size == 0 {
            return self.reply(&Response::GetTensor(&[]));
        }
        let patience = self.holdings.shared.config.device_timeout;
        let (lanes, connection) = (&mut self.lanes, &mut self.connection);
        let count = lanes.len();
        let lane = lanes.get_mut(device as usize).ok_or(Refusal::Device { device, count })?;
        let queue = lane.queue(&self.holdings.account)?;
        let mut piece = |at: u64| queue.download(region.part(at, PIECE.min(request.size - at))?);
        let mut next = Some(piece(0)?);
        let mut at = 0;
        while let Some(ticket) = next.take() {
            let after = at + PIECE.min(request.size - at);
            if after < request.size {
                next = Some(piece(after)?);
            }
            let bytes = ticket.wait(Some(Instant::now() + patience))?;
            if at == 0 {
                connection.send_first(request.size, &bytes)?;
            } else {
                connection.send_bytes(&bytes)?;
            }
            at = after;
        }
        Ok(())
    }

    fn copy_tensor(&mut self, request: &CopyTensor) -> Result<(), Refusal> {
        let (src, dst) = (self.holdings.handles.locate(&request.src)?, self.holdings.handles.locate(&request.dst)?);
        let whole = |tensor: &Located<'_>| tensor.region(0, tensor.desc.extent() as u64);
        let (from, to) = (whole(&src)?, whole(&dst)?);
        let (reads, writes) = (src.entry.device, dst.entry.device);
        let copied = if from.bytes() != to.bytes() {
            false
        } else if from.bytes() == 0 {
            true
        } else if reads == writes {
            self.queue(writes)?.copy_from(from, to, None)?
        } else {
            let ready = self.queue(reads)?.mark();
            let queue = self.queue(writes)?;
            let copied = queue.copy_from(from.clone(), to.clone(), Some(&ready))?;
            if copied {
                // The source may be overwritten only after the copy has read it.
                let read = queue.mark();
                self.queue(reads)?.wait(&read)?;
            } else {
                let patience = self.holdings.shared.config.device_timeout;
                let [a, b] = self.two_queues(reads, writes)?;
                bounce::copy((&mut **a, &from), (&mut **b, &to), patience)?;
            }
            true
        };
        self.reply(&Response::CopyTensor(copied))
    }

    /// Runs the graph in the first `len` bytes of `body`. One that was seen before costs its comparison and a
    /// submission; a new one keeps the body.
    fn graph_compute(&mut self, len: usize, body: &mut Vec<u8>) -> Result<(), Refusal> {
        let message = &body[..len];
        // The size in the header has been checked: there are four bytes.
        let device = message.first_chunk().copied().map_or(0, u32::from_le_bytes);
        if let Some(found) = self.programs.find(device, message) {
            let (program, bindings) = (found.program.clone(), Arc::clone(&found.bindings));
            return self.run(device, &program, &bindings);
        }
        let lane = self.lane(device)?.device;
        let Request::GraphCompute(graph) =
            Request::decode(Command::GraphCompute, message, &self.holdings.shared.config.limits)?
        else {
            return Err(confused());
        };
        let bytes = graph_cost(message.len() as u64, &graph) as usize;
        if self.programs.make_room(bytes) {
            let until = Instant::now() + self.holdings.shared.config.device_timeout;
            for queue in self.lanes.iter_mut().filter_map(|lane| lane.queue.as_mut()) {
                queue.mark().wait(Some(until))?;
            }
            self.programs.settle();
        }
        let (program, bindings) = compile::compile(&graph, &self.holdings.handles, device, &**lane)?;
        let mut message = std::mem::take(body);
        message.truncate(len);
        self.programs.store(device, message.into(), bytes, program.clone(), Arc::clone(&bindings));
        self.run(device, &program, &bindings)
    }

    fn graph_recompute(&mut self, device: u32) -> Result<(), Refusal> {
        self.lane(device)?;
        let last = self.programs.last(device).ok_or(Refusal::NoGraph(device))?;
        let (program, bindings) = (last.program.clone(), Arc::clone(&last.bindings));
        self.run(device, &program, &bindings)
    }

    /// Runs a program on this thread while it is short and no other device waits for our next message; else it is handed
    /// over.
    fn run(&mut self, device: u32, program: &Program, bindings: &Arc<[Region]>) -> Result<(), Refusal> {
        let others = (0..).zip(&self.lanes).any(|(at, lane)| at != device && lane.queue.is_some());
        let queue = self.queue(device)?;
        let done = if others { queue.run(program, bindings) } else { queue.run_here(program, bindings, RUN_PATIENCE) };
        Ok(done?)
    }
}

fn confused() -> Refusal {
    DeviceError::Bug("the decoder took one command for another".to_owned()).into()
}

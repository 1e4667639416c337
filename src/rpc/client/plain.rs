//! What a queue says where the server speaks 7.0 alone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::connection::{To, Turn};
use super::device::{Memory, Remote, bytes, memory, whole};
use super::fate::Fate;
use super::graph::{Body, describe};
use super::proof::{Before, Lane, Needs, Progress, Track};
use super::queue::{Awaited, Command, Recall, SMALL, Speaker};
use crate::device::{DeviceError, Point, Region, SourceError, Ticket, Timeline};
use crate::rpc::wire::{
    BodySize, BufferClear, Command as Wire, CopyTensor, GetTensor, GraphRecompute, MemsetTensor, Request, Response,
    SetTensorHead, TensorRecord,
};
use crate::tensor::TensorDesc;

/// Largest message of an upload that is no whole tensor: others come in between.
const PIECE: u64 = 4 << 20;

/// Largest tensor whose bytes are gathered from a writer before they are sent, so that the server knows it as one.
pub(super) const GATHERED: u64 = 64 << 20;

/// Largest range that one tensor record describes here; dimensions are below 2^32.
pub(super) const RANGE: u64 = 1 << 30;

/// A server forgets graphs when others need the room. One whose bytes, with those of the graphs that were sent for other
/// devices since, are more than this is sent again; fanout's servers keep several times as much.
const REMEMBERED: u64 = 4 << 20;

impl Turn<'_> {
    pub(super) fn lane(&mut self, device: u32) -> Result<&mut Lane, DeviceError> {
        self.writer.lanes.get_mut(device as usize).ok_or(DeviceError::Misuse("a device of another endpoint"))
    }

    /// Numbers a message that is work for a device.
    pub(super) fn number(&self, progress: &Progress) -> u64 {
        progress.sent.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Reads bytes of a device; their reply proves all that it was sent before. A queue that has failed by then gets none.
    fn get(
        &mut self,
        (device, progress): (u32, &Progress),
        tensor: TensorRecord,
        size: u64,
        to: Option<(Awaited, Arc<Fate>)>,
    ) -> Result<u64, DeviceError> {
        let number = self.number(progress);
        progress.asked.store(number, Ordering::Release);
        let proofs = Arc::clone(&self.shared.proofs);
        let told = move |bytes: Result<Vec<u8>, DeviceError>| {
            if bytes.is_ok() {
                proofs.proved((device, number));
            }
            if let Some((to, fate)) = to {
                to.send(bytes.and_then(|bytes| fate.failure().map_or(Ok(bytes), Err)));
            }
            Ok(())
        };
        let request = Request::GetTensor(GetTensor { tensor, offset: 0, size });
        self.request(&request, size, To::Told(Box::new(told)))?;
        Ok(number)
    }

    /// Writes bytes into a tensor, from its start.
    fn set(&mut self, tensor: TensorRecord, data: &[u8]) -> Result<(), DeviceError> {
        let head = SetTensorHead { tensor, cache: false, offset: 0 };
        let (dialect, mut encoded) = (self.shared.dialect, Ok(()));
        self.put(|out| encoded = dialect.encode_head(&head, data.len() as u64, out));
        encoded.map_err(|e| DeviceError::Bug(format!("an upload that no message holds: {e}")))?;
        self.acknowledged(Wire::SetTensor)?;
        self.stream(Wire::SetTensor.name(), data)
    }

    /// Runs a graph for a queue; one that the device ran last is not sent again.
    fn compute(&mut self, device: u32, body: &Body, fate: &Arc<Fate>) -> Result<(), DeviceError> {
        let dialect = self.shared.dialect;
        let again = dialect.number(Wire::GraphRecompute).is_some();
        let bytes = body.frame().len() as u64;
        let others = |(_, since): (u64, u64)| since.saturating_sub(bytes);
        let last = self.lane(device)?.graph.filter(|last| last.0 == body.id());
        if again && last.is_some_and(|last| others(last) == 0 || last.1 <= REMEMBERED) {
            return self.tell(&Request::GraphRecompute(GraphRecompute { device }));
        }
        for (_, since) in self.writer.lanes.iter_mut().filter_map(|lane| lane.graph.as_mut()) {
            *since += bytes;
        }
        self.lane(device)?.graph = Some((body.id(), bytes));
        if let Some(BodySize::Exact(len)) = dialect.reply(Wire::GraphCompute) {
            let fate = Arc::clone(fate);
            let told = move |status: Result<Vec<u8>, DeviceError>| {
                if let Ok([status]) = status.as_deref() {
                    fate.computed(*status as i8);
                }
                Ok(())
            };
            self.expect(Wire::GraphCompute.name(), len..=len, To::Told(Box::new(told)))?;
        }
        self.stream(Wire::GraphCompute.name(), body.frame())
    }

    /// Reads a byte of each device that has to be proved.
    pub(super) fn prove(&mut self, wanted: &Needs) -> Result<(), DeviceError> {
        for (device, number) in wanted.iter() {
            let probe = self.lane(device)?.probe.clone();
            let (Some(progress), Some(probe)) = (self.shared.proofs.progress(device), probe) else { continue };
            if progress.asked.load(Ordering::Acquire) < number {
                self.get((device, &progress), probe, 1, None)?;
                self.shared.count_wait();
            }
        }
        Ok(())
    }
}

/// Speaks for one queue.
pub(super) struct Plain {
    remote: Arc<Remote>,
    progress: Arc<Progress>,
    track: Arc<Track>,
    /// What has to be done before the next mark is reached.
    needs: Needs,
}

impl Plain {
    pub(super) fn new(remote: Arc<Remote>, progress: Arc<Progress>) -> Result<(Plain, Arc<Timeline>), DeviceError> {
        let (track, timeline) = Track::new(&remote.connection)?;
        Ok((Plain { remote, progress, track, needs: Needs::default() }, timeline))
    }

    /// The track of a point of this connection.
    fn own<'a>(&self, point: &'a Point) -> Option<&'a Track> {
        point.progress::<Track>().filter(|track| track.is_of(&self.remote.connection))
    }

    /// Sends work for the device.
    fn send(&mut self, work: impl FnOnce(&mut Turn<'_>) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let number = self.remote.connection.turn(|turn| {
            let number = turn.number(&self.progress);
            work(turn).map(|()| number)
        })?;
        self.needs.add(self.remote.index, number);
        Ok(())
    }

    /// Reads a region, for whoever is taken out of `to`.
    fn read(&mut self, src: &Region, to: &mut Option<(Awaited, Arc<Fate>)>) -> Result<(), DeviceError> {
        let record = bytes(memory(src)?, src.offset(), src.bytes());
        let lane = (self.remote.index, &*self.progress);
        let number = self.remote.connection.turn(|turn| turn.get(lane, record, src.bytes(), to.take()))?;
        self.needs.add(self.remote.index, number);
        Ok(())
    }

    /// Whether the server is known to copy between two regions.
    fn copies(&self, src: &Region, dst: &Region) -> bool {
        let from = memory(src).map_or(self.remote.index, |memory| memory.device);
        !overlap(src, dst) && self.remote.connection.proofs.copies(from, self.remote.index) == Some(true)
    }

    /// Fills a region where the server has no word for it.
    fn fill_by_hand(&mut self, dst: &Region, memory: &Memory, value: u8) -> Result<(), DeviceError> {
        if dst.bytes() == dst.buffer().bytes() {
            let clear = Request::BufferClear(BufferClear { remote_ptr: memory.handle, value });
            return self.send(|turn| turn.tell(&clear));
        }
        let bytes = vec![value; PIECE.min(dst.bytes()) as usize];
        for at in (0..dst.bytes()).step_by(PIECE as usize) {
            let part = dst.part(at, PIECE.min(dst.bytes() - at))?;
            self.upload(&part, None, &bytes[..part.bytes() as usize])?;
        }
        Ok(())
    }

    /// Finds out whether the server copies between two devices, or within one: not every device does.
    fn try_copy(&mut self, request: &Request<'_>, (from, to): (u32, u32)) -> Result<bool, DeviceError> {
        let (sender, ticket) = Ticket::new();
        self.send(|turn| turn.request(request, 1, To::Ticket(sender)))?;
        let reply = ticket.wait(None)?;
        match Response::decode(Wire::CopyTensor, &reply) {
            Ok(Response::CopyTensor(does)) => {
                self.remote.connection.proofs.learn_copies(from, to, does);
                Ok(does)
            }
            other => Err(self.remote.connection.fail(format!("the server answered COPY_TENSOR with {other:?}"))),
        }
    }

    /// All of it is read before any of it is written: the two may overlap.
    fn copy_through_here(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let from = memory(src)?;
        let progress = self.remote.connection.proofs.progress(from.device);
        let progress = progress.ok_or(DeviceError::Misuse("a region of another device"))?;
        let mut tickets = Vec::new();
        for (at, size) in ranges(src.bytes()) {
            let (to, ticket) = Awaited::new(&self.remote);
            let record = bytes(from, src.offset() + at, size);
            let lane = (from.device, &*progress);
            let to = (to, Arc::clone(self.track.fate()));
            self.remote.connection.turn(|turn| turn.get(lane, record, size, Some(to)))?;
            tickets.push((at, size, ticket));
        }
        let pieces = tickets.into_iter().map(|(at, size, ticket)| Ok((dst.part(at, size)?, ticket.wait(None)?)));
        let pieces: Vec<_> = pieces.collect::<Result<_, DeviceError>>()?;
        pieces.iter().try_for_each(|(part, bytes)| self.upload(part, None, bytes))
    }
}

impl Speaker for Plain {
    fn must_wait(&self, command: &Command) -> bool {
        match command {
            Command::Wait(point) => match self.own(point) {
                Some(track) => !track.has_placed(point.seq()),
                None => point.poll() != Ok(true),
            },
            Command::Copy { src, dst } => !self.copies(src, dst),
            _ => false,
        }
    }

    fn upload(&mut self, dst: &Region, tensor: Option<&TensorDesc>, data: &[u8]) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        let known = |tensor: &TensorDesc| memory.connection.dialect.has_type(tensor.dtype());
        let whole = tensor.filter(|tensor| whole(tensor, dst) && known(tensor));
        if let Some(tensor) = whole {
            let (buffer, data_at) = (memory.handle, memory.base + dst.offset());
            let record = TensorRecord { buffer, data: data_at, ..describe(tensor) };
            return self.send(|turn| turn.set(record, data));
        }
        for (at, piece) in (0..).step_by(PIECE as usize).zip(data.chunks(PIECE as usize)) {
            let record = bytes(memory, dst.offset() + at, piece.len() as u64);
            self.send(|turn| turn.set(record, piece))?;
        }
        Ok(())
    }

    fn upload_from(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<(), DeviceError> {
        let at_once = if tensor.is_some() { GATHERED } else { SMALL };
        let piece = if dst.bytes() <= at_once { dst.bytes() } else { PIECE };
        let mut bytes = vec![0; piece as usize];
        let mut at = 0;
        while at < dst.bytes() {
            let part = dst.part(at, piece.min(dst.bytes() - at))?;
            let bytes = &mut bytes[..part.bytes() as usize];
            fill(bytes)?;
            self.upload(&part, tensor, bytes)?;
            at += part.bytes();
        }
        Ok(())
    }

    fn download(&mut self, parts: Vec<(Region, Awaited)>) -> Result<(), DeviceError> {
        let mut parts = parts.into_iter();
        let mut failed = None;
        while failed.is_none()
            && let Some((src, to)) = parts.next()
        {
            let mut to = Some((to, Arc::clone(self.track.fate())));
            failed = self.read(&src, &mut to).err().map(|error| (error, to));
        }
        let Some((error, to)) = failed else { return Ok(()) };
        // What no message was made of is waited for too.
        let left = to.into_iter().map(|(to, _)| to).chain(parts.map(|(_, to)| to));
        left.for_each(|to| to.send(Err(error.clone())));
        Err(error)
    }

    /// No server of 7.0 does.
    fn recall(&mut self, recall: Recall) -> Result<(), DeviceError> {
        recall.to.send(Ok(vec![0]));
        Ok(())
    }

    fn fill(&mut self, dst: &Region, value: u8) -> Result<(), DeviceError> {
        let memory = memory(dst)?;
        if memory.connection.dialect.number(Wire::MemsetTensor).is_none() {
            return self.fill_by_hand(dst, memory, value);
        }
        for (at, size) in ranges(dst.bytes()) {
            let tensor = bytes(memory, dst.offset() + at, size);
            let request = Request::MemsetTensor(MemsetTensor { tensor, offset: 0, size, value });
            self.send(|turn| turn.tell(&request))?;
        }
        Ok(())
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = (memory(src)?, memory(dst)?);
        let known = self.remote.connection.proofs.copies(from.device, to.device);
        let plain = self.copies(src, dst);
        for (at, size) in ranges(dst.bytes()) {
            let request = Request::CopyTensor(CopyTensor {
                src: bytes(from, src.offset() + at, size),
                dst: bytes(to, dst.offset() + at, size),
            });
            if plain {
                let fate = Arc::clone(self.track.fate());
                let told = move |reply: Result<Vec<u8>, DeviceError>| {
                    let Ok(reply) = reply else { return Ok(()) };
                    match Response::decode(Wire::CopyTensor, &reply) {
                        Ok(Response::CopyTensor(copied)) => {
                            if !copied {
                                fate.refused(Wire::CopyTensor);
                            }
                            Ok(())
                        }
                        other => Err(format!("{other:?}")),
                    }
                };
                self.send(|turn| turn.request(&request, 1, To::Told(Box::new(told))))?;
            } else if known.is_none() && !overlap(src, dst) && self.try_copy(&request, (from.device, to.device))? {
                continue;
            } else {
                return self.copy_through_here(src, dst);
            }
        }
        Ok(())
    }

    fn fetch(&mut self, _: &Region, _: &Region, _: Option<&Point>) -> Result<(), DeviceError> {
        Err(DeviceError::Bug("a copy between servers that do not know each other".to_owned()))
    }

    fn run(&mut self, bodies: &[Body]) -> Result<(), DeviceError> {
        let device = self.remote.index;
        let fate = Arc::clone(self.track.fate());
        self.send(|turn| bodies.iter().try_for_each(|body| turn.compute(device, body, &fate)))
    }

    /// What this connection has sent before is done before what it sends later; anything else is waited for.
    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(track) = self.own(point)
            && let Before::Sent(needs) = track.before(point.seq())?
        {
            track.fate().carries(self.track.fate(), point.seq());
            self.needs.merge(&needs);
            return Ok(());
        }
        point.wait(None)
    }

    fn mark(&mut self, seq: u64) -> Result<(), DeviceError> {
        self.track.place(seq, &self.needs);
        Ok(())
    }

    fn end(&mut self, made: u64) {
        self.track.end(made);
    }
}

/// Whether two regions do: not every server copies then, and none says so.
fn overlap(src: &Region, dst: &Region) -> bool {
    src.buffer().id() == dst.buffer().id()
        && src.offset() < dst.offset() + dst.bytes()
        && dst.offset() < src.offset() + src.bytes()
}

/// Offsets and sizes of the parts that a record each describes.
fn ranges(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes).step_by(RANGE as usize).map(move |at| (at, RANGE.min(bytes - at)))
}

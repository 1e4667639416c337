//! CUDA queue: submits work to one stream, in order. Each call reaches the driver at once.
//!
//! Life cycle of a submission: check for an earlier failure, retain the operands until the event behind the work is reached,
//! submit. Timeline points are CUDA events that are recorded on demand. Dropping a queue does not block (see `deferred_drop`).

use super::context::DeviceContext;
use super::copy::{self, DownloadBuffer, HostStagedCopy, SEGMENT, StagingRing, TransferStream};
use super::deferred_drop::DeferredDrop;
use super::events::{ABORT_CHECK_INTERVAL, EventTimeline, Stream, WAIT_WORDS};
use super::memory::{DeviceMemory, is_pinned};
use super::program::{CudaProgram, ProgramRun};
use super::turns::StreamWaits;
use crate::device::{
    CallbackRegistration, CopyOutcome, DEVICE_TIMEOUT, DeviceError, MemoryBudget, PendingRead, Program, Queue,
    QueueAborter, Region, Reservation, Timeline, TimelinePoint, UploadSource,
};
use crate::tensor::TensorDesc;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Limit of retained objects without an event behind their work. Beyond it an event is recorded, so that they can be dropped.
const MAX_UNRECORDED: usize = 64;

pub(super) struct CudaQueue {
    budget: Arc<MemoryBudget>,
    stream: Option<Arc<Stream>>,
    events: Arc<EventTimeline>,
    timeline: Arc<Timeline>,
    /// Sequence number of the last recorded event.
    last_recorded: u64,
    /// Whether work was submitted since the last recorded event.
    dirty: bool,
    /// Number of objects retained since the last recorded event.
    unrecorded: usize,
    /// The callbacks that release the latest waits on host points, newest first. Dropped with the queue, because their points
    /// may never be reached.
    host_wait_callbacks: VecDeque<CallbackRegistration>,
    stream_waits: StreamWaits,
    staging: Option<StagingRing>,
    /// Counts the pinned memory of the queue's pending downloads.
    downloads: Arc<MemoryBudget>,
    scratch: Option<QueueScratch>,
    /// Copy paths from other devices, by the ordinal of their GPU.
    copy_paths: HashMap<usize, CopyPath>,
    context: Arc<DeviceContext>,
}

/// Scratch memory of the queue, shared by all its programs; grows on demand.
struct QueueScratch {
    memory: DeviceMemory,
    /// Released together with the memory.
    _reservations: (Reservation, Reservation),
}

/// How bytes are copied from another device to this one.
enum CopyPath {
    Peer,
    HostStaged(HostStagedCopy),
}

fn memory(region: &Region) -> Result<&DeviceMemory, DeviceError> {
    region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
}

impl CudaQueue {
    pub(super) fn new(context: &Arc<DeviceContext>, budget: &Arc<MemoryBudget>) -> Result<CudaQueue, DeviceError> {
        context.bind()?;
        let stream = Arc::new(Stream::new(context)?);
        let events = Arc::new(EventTimeline::new(context, &stream)?);
        let progress = Arc::clone(&events);
        Ok(CudaQueue {
            context: Arc::clone(context),
            budget: Arc::clone(budget),
            stream: Some(stream),
            events,
            timeline: Timeline::with_source(progress),
            last_recorded: 0,
            dirty: false,
            unrecorded: 0,
            host_wait_callbacks: VecDeque::new(),
            stream_waits: StreamWaits::default(),
            staging: None,
            downloads: MemoryBudget::within(&context.pinned_budget, u64::MAX),
            scratch: None,
            copy_paths: HashMap::new(),
        })
    }

    /// Runs `work`, which submits to the stream. Fails if the queue has failed or was aborted. A driver error or a timeout fails
    /// the queue for good.
    fn submit<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        let events = Arc::clone(&self.events);
        let _submission = events.lock_submission();
        self.check_failure()?;
        self.dirty = true;
        let done = self.context.bind().and_then(|()| work(self)).map_err(|e| self.events.add_last_kernel(e));
        if let Err(e @ (DeviceError::Driver { .. } | DeviceError::Deadline(_))) = &done {
            self.timeline.fail(e.clone());
        }
        done
    }

    /// Fails if the queue has failed or was aborted, or one of its kernels has reported an error.
    fn check_failure(&self) -> Result<(), DeviceError> {
        if let Some(e) = self.events.data_error() {
            self.timeline.fail(e);
        }
        self.timeline.failure().map_or_else(|| self.events.check_aborted(), Err)
    }

    fn stream(&self) -> Result<&Stream, DeviceError> {
        self.stream.as_deref().ok_or(DeviceError::Ended)
    }

    fn transfer_stream(&self) -> Result<TransferStream<'_>, DeviceError> {
        Ok(TransferStream { stream: self.stream()?, events: &self.events })
    }

    /// Retains an object until the work that is submitted next is done. Must be called before that work is submitted, because
    /// the submission may fail half-way.
    fn retain(&mut self, what: impl std::any::Any + Send) -> Result<(), DeviceError> {
        if self.unrecorded >= MAX_UNRECORDED {
            self.record_event()?;
            self.dirty = true;
        }
        self.unrecorded += 1;
        self.events.retain_until(self.last_recorded + 1, Box::new(what));
        Ok(())
    }

    /// Records an event behind all work so far and returns its sequence number.
    fn record_event(&mut self) -> Result<u64, DeviceError> {
        let seq = self.last_recorded + 1;
        self.events.record(self.stream()?, seq)?;
        self.last_recorded = seq;
        self.dirty = false;
        self.unrecorded = 0;
        // Poll here, so that retained memory is freed even if the caller never waits for its points.
        self.timeline.poll();
        // Polling may have dropped memory of another device, which made that device's context current.
        self.context.bind()?;
        Ok(seq)
    }

    /// The memory behind a region; fails unless it belongs to this queue's device.
    fn own_memory<'a>(&self, region: &'a Region) -> Result<&'a DeviceMemory, DeviceError> {
        let memory = memory(region)?;
        let same = memory.context().gpu.ordinal == self.context.gpu.ordinal;
        if same { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    /// Ensures that the scratch memory has `bytes` bytes and returns its address. The old memory is retained for submitted
    /// work.
    fn ensure_scratch(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let enough = |scratch: &QueueScratch| scratch.memory.address_of(0, bytes).is_ok();
        if bytes > 0 && !self.scratch.as_ref().is_some_and(enough) {
            let size = bytes.next_power_of_two().max(1 << 20);
            let _reservations = (self.budget.reserve(size)?, self.context.budget.reserve(size)?);
            let memory = DeviceMemory::uninitialized(&self.context, size)?;
            if let Some(old) = self.scratch.replace(QueueScratch { memory, _reservations }) {
                self.events.retain_until(self.last_recorded + 1, Box::new(old));
            }
        }
        Ok(self.scratch.as_ref().map_or(0, |scratch| scratch.memory.address()))
    }

    /// Reserves pinned memory for a download. If the device's pending downloads hold too much, first waits for the earlier work of
    /// this queue, behind which reads that were dropped, or that another thread takes, release theirs. `None` if they still do.
    fn reserve_download(&mut self, bytes: usize) -> Result<Option<Reservation>, DeviceError> {
        if let Some(reservation) = self.context.reserve_pinned(&self.downloads, bytes) {
            return Ok(Some(reservation));
        }
        let earlier = self.record_event()?;
        self.wait_on_host(&TimelinePoint::new(&self.timeline, earlier))?;
        self.context.bind()?;
        Ok(self.context.reserve_pinned(&self.downloads, bytes))
    }

    /// Downloads through the staging ring, for which no memory is shared, and blocks. Earlier work of the queue must be done.
    fn download_staged(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        let (mut staging, from) = (self.take_staging()?, self.transfer_stream()?);
        let mut read = |src: &Region| staging.download(from, (memory(src)?, src.offset()), src.bytes());
        let reads = srcs.iter().map(|src| read(src).map(PendingRead::ready)).collect();
        self.staging = Some(staging);
        reads
    }

    fn take_staging(&mut self) -> Result<StagingRing, DeviceError> {
        self.staging.take().map_or_else(|| StagingRing::new(&self.context, &self.budget), Ok)
    }

    /// Makes the stream wait for a host point, that is, a point of a queue that is not a CUDA queue. The stream waits for a
    /// pinned word (cuStreamWaitValue32), which a callback of the point writes. Blocks the host instead if the device has no
    /// such waits, if the next word is still in use, or if the point is reached only when a thread polls it.
    fn wait_host_point(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        // A point that needs polling cannot write the word by itself: a thread that waits for this stream polls only this
        // stream, so the wait would never end.
        let can_wait = self.context.gpu.stream_wait_value && point.needs_no_polling();
        let Some((index, value)) = self.events.next_host_wait().filter(|_| can_wait) else {
            self.wait_on_host(point)?;
            // See `wait_point` for the reason.
            return self.context.bind();
        };
        let (events, timeline) = (Arc::clone(&self.events), Arc::clone(&self.timeline));
        self.events.submit_host_wait(self.stream()?, index, value)?;
        let callback = point.on_reached(move |outcome| {
            if let Err(e) = outcome {
                timeline.fail(e);
            }
            events.release_host_wait(index, value);
        });
        // A word is used again only after its callback was called, so the oldest registration is no longer needed.
        self.host_wait_callbacks.truncate(WAIT_WORDS as usize - 1);
        self.host_wait_callbacks.push_front(callback);
        Ok(())
    }

    /// Blocks until a point is reached, for up to the device timeout. An abort of this queue ends the wait.
    fn wait_on_host(&self, point: &TimelinePoint) -> Result<(), DeviceError> {
        let until = Instant::now() + DEVICE_TIMEOUT;
        loop {
            let now = Instant::now();
            match point.wait(Some(until.min(now + ABORT_CHECK_INTERVAL))) {
                Err(DeviceError::Deadline(_)) if now < until => self.events.check_aborted()?,
                decided => return decided,
            }
        }
    }

    /// Makes the stream wait for a point of any queue.
    fn wait_point(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        let events = point.completion_source::<EventTimeline>();
        // The stream is in order anyway.
        if events.is_some_and(|events| std::ptr::eq(events, &*self.events)) {
            return point.poll().map(drop);
        }
        let reached = point.poll()?;
        if !reached {
            self.stream_waits.push(point);
        }
        // Polling a queue of another device made that device's context current.
        self.context.bind()?;
        if reached {
            return Ok(());
        }
        match events {
            Some(events) => {
                self.events.record_wait(self.last_recorded + 1, point);
                let (context, stream) = (&self.context, self.stream()?);
                events.with_event_from(point.seq(), |event| stream.wait_event(context, event))
            }
            None => self.wait_host_point(point),
        }
    }

    /// Submits a copy between CUDA regions. Overlapping ranges go through temporary memory.
    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = ((memory(src)?, src.offset()), (self.own_memory(dst)?, dst.offset()));
        let bytes = src.bytes();
        if from.0.context().gpu.ordinal != self.context.gpu.ordinal {
            return self.copy_from_peer(from, to, bytes);
        }
        let overlap = from.0.address() == to.0.address() && from.1 < to.1 + bytes && to.1 < from.1 + bytes;
        if !overlap {
            return copy::copy_within_device(self.stream()?, from, to, bytes);
        }
        if from.1 == to.1 {
            return Ok(());
        }
        let reservations = (self.budget.reserve(bytes)?, self.context.budget.reserve(bytes)?);
        let temporary = DeviceMemory::uninitialized(&self.context, bytes)?;
        // If the second copy fails, dropping `temporary` is safe: cuMemFree waits for the first.
        copy::copy_within_device(self.stream()?, from, (&temporary, 0), bytes)?;
        copy::copy_within_device(self.stream()?, (&temporary, 0), to, bytes)?;
        self.events.retain_until(self.last_recorded + 1, Box::new((temporary, reservations)));
        Ok(())
    }

    /// Submits a copy from another device, by a peer copy or staged through host memory. The path is set up on first use.
    fn copy_from_peer(
        &mut self,
        from: (&DeviceMemory, u64),
        to: (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let source = from.0.context();
        let stream = self.stream.as_deref().ok_or(DeviceError::Ended)?;
        let path = match self.copy_paths.entry(source.gpu.ordinal) {
            Entry::Occupied(path) => path.into_mut(),
            Entry::Vacant(none) => none.insert(if copy::enable_peer_access(&self.context, source)? {
                CopyPath::Peer
            } else {
                CopyPath::HostStaged(HostStagedCopy::new(&self.context, source, &self.budget)?)
            }),
        };
        match path {
            CopyPath::Peer => copy::copy_peer(stream, from, to, bytes),
            CopyPath::HostStaged(staged) => staged.copy(stream, from, to, bytes),
        }
    }
}

impl Queue for CudaQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.own_memory(&dst)?;
        if let UploadSource::Borrowed(bytes) = &src
            && bytes.len() as u64 != dst.bytes()
        {
            return Err(DeviceError::Misuse("an upload and its region differ in size"));
        }
        self.submit(|queue| {
            queue.retain(dst.clone())?;
            // Uploads of at most one segment are staged even from pinned memory: the host copy is faster than waiting for the
            // stream.
            if let UploadSource::Borrowed(bytes) = &src
                && bytes.len() > SEGMENT
                && is_pinned(bytes)
            {
                return copy::upload_pinned(queue.transfer_stream()?, memory(&dst)?, dst.offset(), bytes);
            }
            let mut staging = queue.take_staging()?;
            let done = copy::upload_in_segments(queue.transfer_stream()?, &mut staging, memory(&dst)?, &dst, src);
            queue.staging = Some(staging);
            done
        })
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        self.download_all(&[src])?.pop().ok_or(DeviceError::Ended)
    }

    /// Downloads all regions into one pinned block, with one event behind all copies.
    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError> {
        let beyond = DeviceError::Misuse("a download beyond the address space");
        let (mut ranges, mut end) = (Vec::with_capacity(srcs.len()), 0usize);
        for src in srcs {
            self.own_memory(src)?;
            let bytes = usize::try_from(src.bytes()).ok();
            let range = end..bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(|| beyond.clone())?;
            end = range.end;
            ranges.push(range);
        }
        if end == 0 {
            return self.submit(|_| Ok(ranges.iter().map(|_| PendingRead::ready(Vec::new())).collect()));
        }
        self.submit(|queue| {
            queue.retain(srcs.to_vec())?;
            let Some(reservation) = queue.reserve_download(end)? else { return queue.download_staged(srcs) };
            let mut download = DownloadBuffer::new(&queue.context, end, reservation)?;
            let mut parts = srcs.iter().zip(&ranges).filter(|(_, range)| !range.is_empty());
            let copied = parts.try_for_each(|(src, range)| {
                download.copy_from_device(queue.stream()?, (memory(src)?, src.offset()), range.clone())
            });
            let download = Arc::new(download);
            // Retain the block even if a copy failed: earlier copies into it may be running.
            queue.events.retain_until(queue.last_recorded + 1, Box::new(Arc::clone(&download)));
            copied?;
            let seq = queue.record_event()?;
            let point = TimelinePoint::new(&queue.timeline, seq);
            let pending_read = |range: Range<usize>| {
                let (point, download) = (point.clone(), Arc::clone(&download));
                PendingRead::on_demand(move |deadline| {
                    point.wait(deadline).map_err(|e| match e {
                        DeviceError::Deadline(_) => DeviceError::Deadline("a download"),
                        e => e,
                    })?;
                    download.bytes(range)
                })
            };
            Ok(ranges.into_iter().map(pending_read).collect())
        })
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.own_memory(&dst)?;
        self.submit(|queue| {
            queue.retain(dst.clone())?;
            memory(&dst)?.fill(queue.stream()?, dst.offset(), dst.bytes(), value)
        })
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.own_memory(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if memory(&src).is_err() {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(|queue| {
            if let Some(point) = after {
                queue.wait_point(point)?;
            }
            if src.bytes() > 0 {
                queue.retain((src.clone(), dst.clone()))?;
                queue.copy(&src, &dst)?;
            }
            Ok(CopyOutcome::Submitted)
        })
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let compiled = program.compiled::<CudaProgram>().filter(|compiled| compiled.is_for_device(&self.context));
        let compiled = compiled.ok_or(DeviceError::Misuse("a program of another device"))?;
        let slots = program.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if !fits {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        self.submit(|queue| {
            let scratch = queue.ensure_scratch(compiled.scratch())?;
            queue.retain((program.clone(), Arc::clone(bindings)))?;
            let run = ProgramRun {
                context: &queue.context,
                stream: queue.stream()?,
                events: &queue.events,
                session: &queue.budget,
                stream_waits: &queue.stream_waits,
                scratch,
            };
            compiled.run(&run, bindings)
        })
    }

    fn mark(&mut self) -> TimelinePoint {
        // A failed queue records no event, and a queue without new work needs no new event.
        if self.check_failure().is_ok() && self.dirty {
            let _ = self.submit(|queue| queue.record_event());
            self.dirty = false;
        }
        let seq = if self.check_failure().is_err() { self.last_recorded + 1 } else { self.last_recorded };
        TimelinePoint::new(&self.timeline, seq)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.submit(|queue| {
            let waited = queue.wait_point(point);
            // The timeline of an aborted queue fails once its work is done.
            waited.inspect_err(|e| {
                if queue.events.check_aborted().is_ok() {
                    queue.timeline.fail(e.clone())
                }
            })
        })
    }

    /// Work that the stream has got already runs to its end; then the timeline fails. Everything else ends at once: the
    /// submission of a program at its next launch, and the waits of the stream and of the host for other work.
    fn aborter(&mut self) -> Option<QueueAborter> {
        let events = Arc::downgrade(&self.events);
        Some(QueueAborter::new(move || {
            if let Some(events) = events.upgrade() {
                events.abort();
            }
        }))
    }
}

impl Drop for CudaQueue {
    /// Does not block: the resources that the device still uses are kept until the submitted work is done.
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
        self.events.forget_waits_until(u64::MAX);
        self.events.release_host_waits();
        let (Some(stream), Ok(end)) =
            (self.stream.take(), self.context.bind().and_then(|()| self.context.acquire_event()))
        else {
            return;
        };
        if end.record(&self.context, &stream).is_err() {
            return;
        }
        let resources = (stream, self.staging.take(), self.scratch.take(), std::mem::take(&mut self.copy_paths));
        DeferredDrop::new(&self.context, &self.events, end, Box::new(resources)).drop_when_complete();
    }
}

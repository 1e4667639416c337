//! The queue of a GPU: a stream. What is submitted goes to the driver at once, and the host waits only for bytes.

use super::copy::{self, Bounce, Landing, SEGMENT, Staging};
use super::core::Core;
use super::events::{Event, Marks, Stream};
use super::memory::{Memory, is_pinned};
use super::program::{Code, Run};
use crate::device::{
    Account, Charge, CopyOutcome, DeviceError, PATIENCE, Point, Program, Queue, Region, Source, Ticket, Timeline,
};
use crate::tensor::TensorDesc;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Things kept for unmarked work before a mark is made for them.
const UNMARKED: usize = 64;

/// Words of the queue's shared memory that waits for other kinds of queues use in turn; word 0 is the verdict.
const GATES: u64 = 1000;

pub(super) struct CudaQueue {
    account: Arc<Account>,
    stream: Option<Stream>,
    marks: Arc<Marks>,
    timeline: Arc<Timeline>,
    marked: u64,
    /// Work submitted and things kept since the last mark.
    dirty: bool,
    unmarked: usize,
    staging: Option<Staging>,
    scratch: Option<Scratch>,
    /// The ways from other devices, by their number.
    ways: HashMap<usize, Way>,
    gates: u64,
    core: Arc<Core>,
}

struct Scratch {
    memory: Memory,
    /// Given back with it.
    _charges: (Charge, Charge),
}

enum Way {
    Direct,
    Staged(Bounce),
}

fn memory(region: &Region) -> Result<&Memory, DeviceError> {
    region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
}

impl CudaQueue {
    pub(super) fn new(core: &Arc<Core>, account: &Arc<Account>) -> Result<CudaQueue, DeviceError> {
        core.bind()?;
        let marks = Arc::new(Marks::new(core)?);
        let progress = Arc::clone(&marks);
        Ok(CudaQueue {
            core: Arc::clone(core),
            account: Arc::clone(account),
            stream: Some(Stream::new(core)?),
            marks,
            timeline: Timeline::looked_at(progress),
            marked: 0,
            dirty: false,
            unmarked: 0,
            staging: None,
            scratch: None,
            ways: HashMap::new(),
            gates: 0,
        })
    }

    /// Submits work: not after a failure, and one of the driver's sticks.
    fn submit<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        self.unbroken()?;
        self.dirty = true;
        let done = self.core.bind().and_then(|()| work(self)).map_err(|e| self.marks.explain(e));
        if let Err(e @ (DeviceError::Driver { .. } | DeviceError::Deadline(_))) = &done {
            self.timeline.fail(e.clone());
        }
        done
    }

    fn unbroken(&self) -> Result<(), DeviceError> {
        if let Some(e) = self.marks.data_error() {
            self.timeline.fail(e);
        }
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn stream(&self) -> Result<&Stream, DeviceError> {
        self.stream.as_ref().ok_or(DeviceError::Ended)
    }

    /// Keeps something until the work that is submitted next is done. Before that work: it may fail half-way.
    fn keep(&mut self, what: impl std::any::Any + Send) -> Result<(), DeviceError> {
        if self.unmarked >= UNMARKED {
            self.record()?;
            self.dirty = true;
        }
        self.unmarked += 1;
        self.marks.keep(self.marked + 1, Box::new(what));
        Ok(())
    }

    /// A mark behind everything so far.
    fn record(&mut self) -> Result<u64, DeviceError> {
        let seq = self.marked + 1;
        self.marks.record(self.stream()?, seq)?;
        self.marked = seq;
        self.dirty = false;
        self.unmarked = 0;
        // Whoever marks a moment and never looks at it should not keep memory from being freed.
        self.timeline.look();
        // What was let go may have been another device's memory.
        self.core.bind()?;
        Ok(seq)
    }

    /// A range of this queue's device.
    fn own<'a>(&self, region: &'a Region) -> Result<&'a Memory, DeviceError> {
        let memory = memory(region)?;
        let same = memory.core().gpu.ordinal == self.core.gpu.ordinal;
        if same { Ok(memory) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    fn ensure_scratch(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        let enough = |scratch: &Scratch| scratch.memory.at(0, bytes).is_ok();
        if bytes > 0 && !self.scratch.as_ref().is_some_and(enough) {
            let size = bytes.next_power_of_two().max(1 << 20);
            let _charges = (self.account.charge(size)?, self.core.account.charge(size)?);
            let memory = Memory::scratch(&self.core, size)?;
            if let Some(old) = self.scratch.replace(Scratch { memory, _charges }) {
                self.marks.keep(self.marked + 1, Box::new(old));
            }
        }
        Ok(self.scratch.as_ref().map_or(0, |scratch| scratch.memory.address()))
    }

    /// Makes the stream wait for a point of another kind of queue: for a word that changes when the point is reached.
    fn wait_for_host(&mut self, point: &Point) -> Result<(), DeviceError> {
        let (index, value) = ((1 + self.gates % GATES) as usize, (self.gates / GATES + 1) as u32);
        let free = self.marks.verdict.read_word(index) + 1 == value;
        // Where someone has to look, nobody might: who waits for the stream looks at the stream alone.
        if !free || !self.core.gpu.waits_for_memory || !point.tells() {
            point.wait(Some(Instant::now() + PATIENCE))?;
            // As in `wait_on`.
            return self.core.bind();
        }
        self.gates += 1;
        let (marks, timeline) = (Arc::clone(&self.marks), Arc::clone(&self.timeline));
        self.stream()?.wait_for_word(&self.core, &self.marks.verdict, index, value)?;
        point.when(move |outcome| {
            if let Err(e) = outcome {
                timeline.fail(e);
            }
            if let Some(word) = marks.verdict.word(index) {
                word.fetch_max(value, Ordering::Release);
            }
        });
        Ok(())
    }

    fn wait_on(&mut self, point: &Point) -> Result<(), DeviceError> {
        let reached = point.poll()?;
        // Looking at another device's queue made that device's context the current one.
        self.core.bind()?;
        if reached {
            return Ok(());
        }
        match point.progress::<Marks>() {
            // In order with itself.
            Some(marks) if std::ptr::eq(marks, &*self.marks) => Ok(()),
            Some(marks) => {
                self.marks.awaits(self.marked + 1, point);
                let (core, stream) = (&self.core, self.stream()?);
                marks.event_of(point.seq(), |event| stream.wait(core, event))
            }
            None => self.wait_for_host(point),
        }
    }

    fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        let (from, to) = ((memory(src)?, src.offset()), (self.own(dst)?, dst.offset()));
        let bytes = src.bytes();
        if from.0.core().gpu.ordinal != self.core.gpu.ordinal {
            return self.copy_over(from, to, bytes);
        }
        let overlap = from.0.address() == to.0.address() && from.1 < to.1 + bytes && to.1 < from.1 + bytes;
        if !overlap {
            return copy::within(self.stream()?, from, to, bytes);
        }
        if from.1 == to.1 {
            return Ok(());
        }
        let charges = (self.account.charge(bytes)?, self.core.account.charge(bytes)?);
        let between = Memory::scratch(&self.core, bytes)?;
        // Should one of them fail, the driver waits for the other before it frees what is between.
        copy::within(self.stream()?, from, (&between, 0), bytes)?;
        copy::within(self.stream()?, (&between, 0), to, bytes)?;
        self.marks.keep(self.marked + 1, Box::new((between, charges)));
        Ok(())
    }

    /// Copies from another device.
    fn copy_over(&mut self, from: (&Memory, u64), to: (&Memory, u64), bytes: u64) -> Result<(), DeviceError> {
        let source = from.0.core();
        let stream = self.stream.as_ref().ok_or(DeviceError::Ended)?;
        let way = match self.ways.entry(source.gpu.ordinal) {
            Entry::Occupied(way) => way.into_mut(),
            Entry::Vacant(none) => none.insert(if copy::connect(&self.core, source)? {
                Way::Direct
            } else {
                Way::Staged(Bounce::new(&self.core, source, &self.account)?)
            }),
        };
        match way {
            Way::Direct => copy::direct(stream, from, to, bytes),
            Way::Staged(bounce) => bounce.copy(stream, from, to, bytes),
        }
    }
}

impl Queue for CudaQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.own(&dst)?;
        if let Source::Borrowed(bytes) = &src
            && bytes.len() as u64 != dst.bytes()
        {
            return Err(DeviceError::Misuse("an upload's length is not its region's"));
        }
        self.submit(|queue| {
            queue.keep(dst.clone())?;
            // A smaller one has arrived in staging memory before the wait would be over.
            if let Source::Borrowed(bytes) = &src
                && bytes.len() > SEGMENT
                && is_pinned(bytes)
            {
                return copy::upload_pinned(queue.stream()?, memory(&dst)?, dst.offset(), bytes);
            }
            let mut staging = match queue.staging.take() {
                Some(staging) => staging,
                None => Staging::new(&queue.core, &queue.account)?,
            };
            let done = pieces(queue.stream()?, &mut staging, memory(&dst)?, &dst, src);
            queue.staging = Some(staging);
            done
        })
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.download_all(&[src])?.pop().ok_or(DeviceError::Ended)
    }

    /// All of them land in one block.
    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        let beyond = DeviceError::Misuse("a download beyond the address space");
        let (mut ranges, mut end) = (Vec::with_capacity(srcs.len()), 0usize);
        for src in srcs {
            self.own(src)?;
            let bytes = usize::try_from(src.bytes()).ok();
            let range = end..bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(|| beyond.clone())?;
            end = range.end;
            ranges.push(range);
        }
        self.submit(|queue| {
            if end == 0 {
                return Ok(ranges.iter().map(|_| Ticket::ready(Vec::new())).collect());
            }
            queue.keep(srcs.to_vec())?;
            let mut landing = Landing::new(&queue.core, end)?;
            let mut parts = srcs.iter().zip(&ranges).filter(|(_, range)| !range.is_empty());
            let brought = parts.try_for_each(|(src, range)| {
                landing.bring(queue.stream()?, (memory(src)?, src.offset()), range.clone())
            });
            let landing = Arc::new(landing);
            // When one has failed others may be on their way.
            queue.marks.keep(queue.marked + 1, Box::new(Arc::clone(&landing)));
            brought?;
            let seq = queue.record()?;
            let point = Point::new(&queue.timeline, seq);
            let ticket = |range: Range<usize>| {
                let (point, landing) = (point.clone(), Arc::clone(&landing));
                Ticket::fetched(move |deadline| {
                    point.wait(deadline).map_err(|e| match e {
                        DeviceError::Deadline(_) => DeviceError::Deadline("a download"),
                        e => e,
                    })?;
                    landing.bytes(range)
                })
            };
            Ok(ranges.into_iter().map(ticket).collect())
        })
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.own(&dst)?;
        self.submit(|queue| {
            queue.keep(dst.clone())?;
            memory(&dst)?.fill(queue.stream()?, dst.offset(), dst.bytes(), value)
        })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.own(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if memory(&src).is_err() {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(|queue| {
            if let Some(point) = after {
                queue.wait_on(point)?;
            }
            if src.bytes() > 0 {
                queue.keep((src.clone(), dst.clone()))?;
                queue.copy(&src, &dst)?;
            }
            Ok(CopyOutcome::Submitted)
        })
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let code = program.code::<Code>().filter(|code| code.fits(&self.core));
        let code = code.ok_or(DeviceError::Misuse("a program of another device"))?;
        let slots = program.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if !fits {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        self.submit(|queue| {
            let scratch = queue.ensure_scratch(code.scratch())?;
            queue.keep((program.clone(), Arc::clone(bindings)))?;
            let run = Run { core: &queue.core, stream: queue.stream()?, marks: &queue.marks, scratch };
            code.run(&run, bindings)
        })
    }

    fn mark(&mut self) -> Point {
        // A failed queue makes no new moments, and one without new work needs none.
        if self.unbroken().is_ok() && self.dirty {
            let _ = self.submit(|queue| queue.record());
            self.dirty = false;
        }
        let seq = if self.timeline.failure().is_some() { self.marked + 1 } else { self.marked };
        Point::new(&self.timeline, seq)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(|queue| queue.wait_on(point).inspect_err(|e| queue.timeline.fail(e.clone())))
    }
}

/// Uploads a region piece by piece.
fn pieces(
    stream: &Stream,
    staging: &mut Staging,
    memory: &Memory,
    dst: &Region,
    mut src: Source<'_>,
) -> Result<(), DeviceError> {
    let mut at = 0;
    while at < dst.bytes() {
        let n = (dst.bytes() - at).min(SEGMENT as u64);
        staging.upload(stream, memory, dst.offset() + at, n as usize, |piece| match &mut src {
            Source::Borrowed(bytes) => {
                let (next, rest) = bytes.split_at(piece.len());
                piece.copy_from_slice(next);
                *bytes = rest;
                Ok(())
            }
            Source::Writer(fill) => {
                fill(piece)?;
                // Whoever gave the bytes may have asked another GPU for them, which made its context the current one.
                memory.core().bind()
            }
        })?;
        at += n;
    }
    Ok(())
}

/// What the work of a dropped queue still needs.
struct Rest {
    _stream: Stream,
    _staging: Option<Staging>,
    _scratch: Option<Scratch>,
    _ways: HashMap<usize, Way>,
    marks: Arc<Marks>,
    end: Event,
    core: Arc<Core>,
}

impl Rest {
    /// Whether the device is done with it; it will not use it after a failure either.
    fn is_over(&self) -> bool {
        self.core.bind().is_err() || self.end.reached(&self.core) != Ok(false)
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        // Points that someone still holds keep the marks, but should not keep memory.
        self.marks.release(u64::MAX);
    }
}

impl Drop for CudaQueue {
    /// Whoever drops a queue does not wait: a thread keeps what the device still needs until its work is done.
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
        self.marks.forget(u64::MAX);
        // Nobody may come any more for whom it waits. No greater number: the device compares by the sign of the difference.
        let lap = (self.gates / GATES + 1) as u32;
        for word in (1..=GATES as usize).filter_map(|gate| self.marks.verdict.word(gate)) {
            word.store(lap, Ordering::Release);
        }
        let (Some(stream), Ok(end)) = (self.stream.take(), self.core.bind().and_then(|()| self.core.event())) else {
            return;
        };
        if end.record(&self.core, &stream).is_err() {
            return;
        }
        let rest = Rest {
            _stream: stream,
            _staging: self.staging.take(),
            _scratch: self.scratch.take(),
            _ways: std::mem::take(&mut self.ways),
            marks: Arc::clone(&self.marks),
            end,
            core: Arc::clone(&self.core),
        };
        if rest.is_over() {
            return;
        }
        let kept = move || {
            while !rest.is_over() {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        // Without a thread what is kept is dropped here, and the driver waits before it frees memory.
        let _ = std::thread::Builder::new().name("cuda-last-work".to_owned()).spawn(kept);
    }
}

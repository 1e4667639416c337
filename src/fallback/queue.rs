//! The queue: the primary's own until a program falls back, and again whenever none is pending.
//!
//! Whoever holds the [`Worker`], with the primary's queue in it, may submit to the primary. While nothing is pending that
//! is the submitter. A program that falls back is handed with the worker to the queue's thread, which that program starts,
//! and so is all that comes before the thread has given the worker back.

use super::Fallback;
use super::cut::Cut;
use super::worker::{Command, Shelf, Worker};
use crate::device::{
    Account, CopyOutcome, DeviceError, ForwardQueue, Line, LoadByDigest, LoadOutcome, PATIENCE, PIECE, Point, Prefault,
    Program, Queue, Region, RunInline, Source, TensorDigest, Ticket, Timeline,
};
use crate::tensor::TensorDesc;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct FallbackQueue {
    device: Arc<Fallback>,
    /// Here while nothing is pending, unless the thread has not given it back yet: see [`FallbackQueue::idle`].
    worker: Option<Box<Worker>>,
    /// Since the first program that fell back.
    thread: Option<Arc<Line<Command, Worker>>>,
    shelf: Arc<Shelf>,
    /// Of what the thread does.
    timeline: Arc<Timeline>,
    marked: u64,
    /// Whether anything was handed to the thread since the last mark.
    dirty: bool,
    /// Capabilities of the primary's queue, which may be with the thread when it is asked for them.
    has: Has,
}

/// Which capabilities a queue has.
#[derive(Clone, Copy)]
struct Has {
    prefault: bool,
    load_by_digest: bool,
    run_inline: bool,
}

impl Has {
    fn of(queue: &mut dyn Queue) -> Has {
        Has {
            prefault: queue.prefault().is_some(),
            load_by_digest: queue.load_by_digest().is_some(),
            run_inline: queue.run_inline().is_some(),
        }
    }
}

impl FallbackQueue {
    pub(super) fn new(device: Arc<Fallback>, account: &Arc<Account>) -> Result<FallbackQueue, DeviceError> {
        let mut worker = Worker::new(Arc::clone(&device), account)?;
        let has = Has::of(worker.primary()?);
        let (shelf, timeline) = (Arc::clone(&worker.shelf), Arc::clone(&worker.timeline));
        let worker = Some(Box::new(worker));
        Ok(FallbackQueue { device, worker, thread: None, shelf, timeline, marked: 0, dirty: false, has })
    }

    /// The primary's queue, if everything that was handed over is done.
    ///
    /// # Errors
    /// What failed on the thread: it sticks.
    fn idle(&mut self) -> Result<Option<&mut dyn Queue>, DeviceError> {
        if let Some(thread) = &self.thread {
            if let Some(failure) = self.timeline.failure() {
                return Err(failure);
            }
            if self.worker.is_none() {
                self.worker = thread.idle();
            }
        }
        self.worker.as_mut().map(|worker| worker.primary()).transpose()
    }

    /// The primary's queue, once everything that was handed over is done.
    fn awaited(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        if self.worker.is_none() {
            let thread = self.thread.as_ref().ok_or(DeviceError::Ended)?;
            self.worker = Some(thread.idle_by(Instant::now() + PATIENCE)?);
        }
        // A failure of what came before was not known yet.
        self.idle()?.ok_or(DeviceError::Ended)
    }

    fn hand_over(&mut self, command: Command) -> Result<(), DeviceError> {
        let thread = match &mut self.thread {
            Some(thread) => thread,
            none => none.insert(Line::start("fallback-queue", Worker::obey)?),
        };
        thread.hand_over(command, &mut self.worker)?;
        self.dirty = true;
        Ok(())
    }

    /// Commands that wait are checked when they come: what is wrong with them is their submitter's fault, not the queue's.
    fn ours(&self, region: &Region) -> Result<(), DeviceError> {
        let ours = region.buffer().device() == self.device.primary.info().id;
        if ours { Ok(()) } else { Err(DeviceError::Misuse("a region of another device")) }
    }

    fn fits(&self, program: &Program, bindings: &[Region]) -> Result<(), DeviceError> {
        let slots = program.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if !fits {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        bindings.iter().try_for_each(|region| self.ours(region))
    }

    fn submit(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.fits(program, bindings)?;
        self.hand_over(Command::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    /// Whether a program is for the thread.
    fn falls_back(&self, program: &Program) -> Result<bool, DeviceError> {
        match program.code::<Cut>() {
            Some(cut) if cut.is_of(&self.device) => Ok(true),
            Some(_) => Err(DeviceError::Misuse("a program of another device")),
            None => Ok(false),
        }
    }
}

impl ForwardQueue for FallbackQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        self.awaited()
    }

    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        if let Some(primary) = self.idle()? {
            return primary.upload(dst, tensor, src);
        }
        self.ours(&dst)?;
        if matches!(&src, Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes()) {
            return Err(DeviceError::Misuse("an upload's length is not its region's"));
        }
        if dst.bytes() > PIECE {
            return self.awaited()?.upload(dst, tensor, src);
        }
        let bytes = match src {
            Source::Borrowed(bytes) => bytes.to_vec(),
            Source::Writer(fill) => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes)?;
                bytes
            }
        };
        self.hand_over(Command::Upload { dst, bytes })
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        if let Some(primary) = self.idle()? {
            return primary.download(src);
        }
        self.ours(&src)?;
        let (to, ticket) = Ticket::new();
        self.hand_over(Command::Download { src, to })?;
        Ok(ticket)
    }

    fn download_all(&mut self, srcs: &[Region]) -> Result<Vec<Ticket>, DeviceError> {
        if let Some(primary) = self.idle()? {
            return primary.download_all(srcs);
        }
        srcs.iter().map(|src| ForwardQueue::download(self, src.clone())).collect()
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        if let Some(primary) = self.idle()? {
            return primary.fill(dst, value);
        }
        self.ours(&dst)?;
        self.hand_over(Command::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        let foreign = self.ours(&src).is_err();
        let known = self.device.copies().get(&src.buffer().device()).copied();
        if let Some(primary) = self.idle()? {
            let news = (foreign && known.is_none()).then(|| src.buffer().device());
            let outcome = primary.copy_from(src, dst, after)?;
            self.device.copies().extend(news.map(|device| (device, outcome.is_submitted())));
            return Ok(outcome);
        }
        self.ours(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        // Whether the primary can do it must be said now, and its queue is away: only what is known counts.
        if foreign && known != Some(true) {
            return Ok(CopyOutcome::Unreachable);
        }
        self.hand_over(Command::Copy { src, dst, after: after.cloned() })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let falls_back = self.falls_back(program)?;
        match self.idle()? {
            Some(primary) if !falls_back => primary.run(program, bindings),
            _ => self.submit(program, bindings),
        }
    }

    fn mark(&mut self) -> Point {
        let dirty = self.dirty;
        match self.idle() {
            Ok(Some(primary)) => return primary.mark(),
            Ok(None) if dirty => {
                self.marked += 1;
                // When the thread is gone, the timeline carries the failure that waiting for the point returns.
                let _ = self.hand_over(Command::Mark(self.marked));
                self.dirty = false;
            }
            Ok(None) => {}
            // Never reached.
            Err(_) => return Point::new(&self.timeline, self.marked + 1),
        }
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        if let Some(primary) = self.idle()? {
            return primary.wait(point);
        }
        self.hand_over(Command::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.has.prefault { Some(self) } else { None }
    }

    fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
        if self.has.load_by_digest { Some(self) } else { None }
    }

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        if self.has.run_inline { Some(self) } else { None }
    }
}

impl Prefault for FallbackQueue {
    /// While the primary's queue is with the thread the hint is dropped: it must not wait.
    fn prefault(&mut self, region: &Region) {
        if let Ok(Some(primary)) = self.idle()
            && let Some(memory) = primary.prefault()
        {
            memory.prefault(region);
        }
    }
}

impl LoadByDigest for FallbackQueue {
    fn load_by_digest(
        &mut self,
        dst: Region,
        tensor: Option<&TensorDesc>,
        wanted: TensorDigest<'_>,
    ) -> Result<Ticket<LoadOutcome>, DeviceError> {
        match self.awaited()?.load_by_digest() {
            Some(loads) => loads.load_by_digest(dst, tensor, wanted),
            None => Ok(Ticket::ready(LoadOutcome::Missing)),
        }
    }
}

impl RunInline for FallbackQueue {
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        let falls_back = self.falls_back(program)?;
        match self.idle()? {
            Some(primary) if !falls_back => primary.run_inline_or_submit(program, bindings, budget),
            _ => self.submit(program, bindings),
        }
    }
}

impl Drop for FallbackQueue {
    fn drop(&mut self) {
        let Some(thread) = &self.thread else { return };
        self.timeline.fail(DeviceError::Ended);
        thread.end();
        // The devices stop what runs, which ends the thread's wait for them.
        self.shelf.end();
    }
}

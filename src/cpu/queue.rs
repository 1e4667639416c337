//! The CPU's queue: commands run in order, on a thread of the queue's own or on the submitter's.
//!
//! Whoever holds the queue's [`Executor`] runs commands. While nothing is pending that is the submitter: what is small is
//! done at once, and so is a program that the submitter would only wait for. Anything else is handed with the executor
//! to the queue's thread, which gives it back when it has nothing left. So a decoding client's token (small uploads, a
//! short program, a small download) costs no hand-over at all.

use super::CpuDevice;
use super::layout::{Fill, Memory};
use super::memory::HostMemory;
use super::program::Code;
use crate::device::{
    Account, Charge, CopyOutcome, DeviceError, Line, PATIENCE, PIECE, Point, Prefault, Program, Queue, Region,
    RunInline, Source, Staged, Ticket, TicketSender, Timeline,
};
use crate::tensor::TensorDesc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Largest upload that is copied into its command; a larger one waits for earlier work and is written in place. Also the
/// most bytes that a command moves on the submitter's thread.
const SMALL: usize = PIECE as usize;

pub(super) struct CpuQueue {
    device: Arc<CpuDevice>,
    line: Arc<Line<Command, Executor>>,
    /// Here while nothing is pending, unless the thread has not given it back yet: see [`CpuQueue::idle`].
    executor: Option<Box<Executor>>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    /// Where the bytes of a small upload arrive, at most [`SMALL`].
    staging: Vec<u8>,
    marked: u64,
    /// Whether anything was handed to the thread since the last mark.
    dirty: bool,
}

enum Command {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: TicketSender },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region, after: Option<Point> },
    Run { program: Program, bindings: Arc<[Region]>, first: usize },
    Wait(Point),
    Mark(u64),
}

impl Staged for Command {
    fn staged(&self) -> usize {
        if let Command::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }
}

impl Command {
    /// Whether it is done in no time.
    fn small(&self) -> bool {
        let few = |region: &Region| region.bytes() <= SMALL as u64;
        match self {
            Command::Upload { .. } | Command::Mark(_) => true,
            Command::Download { src: region, .. } | Command::Fill { dst: region, .. } => few(region),
            Command::Copy { dst, after, .. } => few(dst) && after.as_ref().is_none_or(reached),
            Command::Run { .. } => false,
            Command::Wait(point) => reached(point),
        }
    }
}

fn reached(point: &Point) -> bool {
    point.poll() == Ok(true)
}

impl CpuQueue {
    pub(super) fn new(device: Arc<CpuDevice>, account: Arc<Account>) -> Result<CpuQueue, DeviceError> {
        let line = Line::start("cpu-queue", Executor::obey)?;
        let (timeline, abort) = (Timeline::new(), Arc::new(AtomicBool::new(false)));
        let executor = Executor {
            device: Arc::clone(&device),
            account,
            timeline: Arc::clone(&timeline),
            abort: Arc::clone(&abort),
            locals: Scratch::default(),
            shared: Scratch::default(),
        };
        Ok(CpuQueue {
            device,
            line,
            executor: Some(Box::new(executor)),
            timeline,
            abort,
            staging: Vec::new(),
            marked: 0,
            dirty: false,
        })
    }

    /// The executor, if everything submitted so far is done.
    fn idle(&mut self) -> Option<&mut Executor> {
        if self.executor.is_none() {
            self.executor = self.line.idle();
        }
        self.executor.as_deref_mut()
    }

    /// Runs a command: here and now if it is small and nothing is before it, else on the queue's thread.
    fn submit(&mut self, command: Command) -> Result<(), DeviceError> {
        self.unbroken()?;
        if command.small()
            && let Some(executor) = self.idle()
        {
            executor.obey(command);
            return self.unbroken();
        }
        self.hand_over(command)
    }

    fn unbroken(&self) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)
    }

    fn hand_over(&mut self, command: Command) -> Result<(), DeviceError> {
        self.line.hand_over(command, &mut self.executor)?;
        self.dirty = true;
        Ok(())
    }

    fn check(program: &Program, bindings: &[Region]) -> Result<(), DeviceError> {
        if program.code::<Code>().is_none() {
            return Err(DeviceError::Misuse("a program of another kind of device"));
        }
        let slots = program.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if fits { Ok(()) } else { Err(DeviceError::Misuse("the bindings do not fit the program's slots")) }
    }

    /// Writes a small region: at once, or in its turn.
    fn upload_small(&mut self, dst: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        if let Some(executor) = self.idle() {
            return executor.guard(|_| host(&dst)?.write(dst.offset() as usize, bytes));
        }
        self.submit(Command::Upload { dst, bytes: bytes.to_vec() })
    }

    /// Writes a region when all earlier work is done.
    fn upload_in_place(
        &mut self,
        dst: &Region,
        tensor: Option<&TensorDesc>,
        fill: &mut Fill<'_>,
    ) -> Result<(), DeviceError> {
        self.mark().wait(Some(Instant::now() + PATIENCE))?;
        let tensor = tensor.filter(|tensor| self.device.packs(tensor));
        host(dst)?.upload(dst.offset() as usize, dst.bytes() as usize, tensor, fill)
    }
}

fn host(region: &Region) -> Result<&Memory, DeviceError> {
    region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
}

impl Queue for CpuQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        host(&dst)?;
        let small = dst.bytes() <= SMALL as u64;
        if let Source::Borrowed(bytes) = &src
            && bytes.len() as u64 != dst.bytes()
        {
            return Err(DeviceError::Misuse("an upload's length is not its region's"));
        }
        self.unbroken()?;
        if small {
            return match src {
                Source::Borrowed(bytes) => self.upload_small(dst, bytes),
                Source::Writer(fill) => {
                    let mut staging = std::mem::take(&mut self.staging);
                    staging.resize(dst.bytes() as usize, 0);
                    let filled = fill(&mut staging).map_err(DeviceError::Source);
                    let done = filled.and_then(|()| self.upload_small(dst, &staging));
                    self.staging = staging;
                    done
                }
            };
        }
        match src {
            Source::Borrowed(mut bytes) => self.upload_in_place(&dst, tensor, &mut |piece| {
                let (next, rest) = bytes.split_at(piece.len());
                piece.copy_from_slice(next);
                bytes = rest;
                Ok(())
            }),
            Source::Writer(fill) => self.upload_in_place(&dst, tensor, fill),
        }
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        let memory = host(&src)?;
        self.unbroken()?;
        if src.bytes() <= SMALL as u64
            && let Some(executor) = self.idle()
        {
            let bytes = executor.guard(|_| memory.read(src.offset() as usize, src.bytes() as usize));
            return bytes.map(Ticket::ready);
        }
        let (to, ticket) = Ticket::new();
        self.submit(Command::Download { src, to })?;
        Ok(ticket)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        host(&dst)?;
        self.submit(Command::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        host(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if host(&src).is_err() {
            return Ok(CopyOutcome::Unreachable);
        }
        self.submit(Command::Copy { src, dst, after: after.cloned() })?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        CpuQueue::check(program, bindings)?;
        self.submit(Command::Run { program: program.clone(), bindings: Arc::clone(bindings), first: 0 })
    }

    fn mark(&mut self) -> Point {
        if self.dirty {
            self.marked += 1;
            // When the thread is gone, the timeline already carries the failure that waiting for the point returns.
            let _ = self.submit(Command::Mark(self.marked));
            self.dirty = false;
        }
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(Command::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        Some(self)
    }

    fn run_inline(&mut self) -> Option<&mut dyn RunInline> {
        Some(self)
    }
}

impl Prefault for CpuQueue {
    fn prefault(&mut self, region: &Region) {
        if let Ok(memory) = host(region) {
            memory.populate(region.offset() as usize, region.bytes() as usize);
        }
    }
}

impl RunInline for CpuQueue {
    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        CpuQueue::check(program, bindings)?;
        self.unbroken()?;
        let mut first = Some(0);
        if let Some(executor) = self.idle() {
            first = executor.guard(|me| me.run(program, bindings, 0, Some(Instant::now() + budget)))?;
        }
        let Some(first) = first else { return Ok(()) };
        self.submit(Command::Run { program: program.clone(), bindings: Arc::clone(bindings), first })
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        // The thread ends by itself: at the next node, or when it sees that there will be no more commands.
        self.abort.store(true, Ordering::Relaxed);
        self.line.end();
    }
}

/// Scratch memory of a queue; grows to what its programs need, and is charged to the queue's account.
#[derive(Default)]
struct Scratch(Option<(HostMemory, Charge)>);

impl Scratch {
    fn at_least(&mut self, bytes: usize, account: &Arc<Account>) -> Result<&HostMemory, DeviceError> {
        let enough = self.0.as_ref().is_some_and(|(m, _)| m.bytes() >= bytes);
        if !enough {
            // The old one goes first, so that an account need not hold both.
            self.0 = None;
            let charge = account.charge(bytes as u64)?;
            let left = account.limit() - account.used();
            let memory = HostMemory::zeroed(bytes).map_err(|_| DeviceError::OutOfMemory {
                asked: bytes as u64,
                left,
                limit: account.limit(),
            })?;
            self.0 = Some((memory, charge));
        }
        self.0.as_ref().map(|(m, _)| m).ok_or(DeviceError::Ended)
    }
}

/// What runs commands. However it ends, by a panic too, whoever waits for a point is told.
struct Executor {
    device: Arc<CpuDevice>,
    account: Arc<Account>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    locals: Scratch,
    shared: Scratch,
}

impl Executor {
    /// Runs a command. Nothing runs after a failure; whoever waits for bytes learns why.
    fn obey(&mut self, command: Command) {
        match (self.timeline.failure(), command) {
            (Some(failure), Command::Download { to, .. }) => to.send(Err(failure)),
            (Some(_), _) => {}
            (None, command) => {
                // The timeline has it.
                let _ = self.guard(|me| me.execute(command));
            }
        }
    }

    /// Makes a failure stick.
    fn guard<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, DeviceError>) -> Result<T, DeviceError> {
        work(self).inspect_err(|error| self.timeline.fail(error.clone()))
    }

    fn execute(&mut self, command: Command) -> Result<(), DeviceError> {
        match command {
            Command::Upload { dst, bytes } => host(&dst)?.write(dst.offset() as usize, &bytes),
            Command::Download { src, to } => {
                let bytes = host(&src)?.read(src.offset() as usize, src.bytes() as usize);
                to.send(bytes);
                Ok(())
            }
            Command::Fill { dst, value } => host(&dst)?.fill(dst.offset() as usize, dst.bytes() as usize, value),
            Command::Copy { src, dst, after } => {
                if let Some(point) = after {
                    point.wait(None)?;
                }
                let (to, from) = (dst.offset() as usize, src.offset() as usize);
                host(&dst)?.copy_from(to, host(&src)?, from, src.bytes() as usize)
            }
            Command::Run { program, bindings, first } => self.run(&program, &bindings, first, None).map(drop),
            Command::Wait(point) => point.wait(None),
            Command::Mark(seq) => {
                self.timeline.advance(seq);
                Ok(())
            }
        }
    }

    /// Runs a program from its node `first` on; the node to go on with where the deadline came first.
    fn run(
        &mut self,
        program: &Program,
        bindings: &[Region],
        first: usize,
        until: Option<Instant>,
    ) -> Result<Option<usize>, DeviceError> {
        let code = program.code::<Code>().ok_or(DeviceError::Misuse("a program of another kind of device"))?;
        // Scratch and run are for the same workers, whatever number is set meanwhile.
        let pool = self.device.pool();
        let (locals, shared) = code.scratch(pool.workers())?;
        let locals = self.locals.at_least(locals, &self.account)?;
        let shared = self.shared.at_least(shared, &self.account)?;
        code.run(&pool, bindings, (locals, shared), &self.abort, first, until)
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

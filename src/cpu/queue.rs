//! The CPU's queue: commands run in order on a thread of the queue's own, which is worker 0 of the pool.

use super::CpuDevice;
use super::layout::{Fill, Memory};
use super::memory::HostMemory;
use super::program::Code;
use crate::device::{
    Account, Charge, DeviceError, Point, Program, Queue, Region, Source, Ticket, TicketSender, Timeline,
};
use crate::tensor::TensorDesc;
use crossbeam::channel::{Receiver, Sender, bounded};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Commands that may wait in a queue. Together with [`STAGED_MAX`] this bounds what a session can pile up.
const DEPTH: usize = 64;

/// Largest upload that is copied into its command; a larger one waits for earlier work and is written in place.
const STAGED_MAX: usize = 256 << 10;

/// Longest wait for earlier work before an upload in place.
const PATIENCE: Duration = Duration::from_secs(600);

pub(super) struct CpuQueue {
    device: Arc<CpuDevice>,
    commands: Sender<Command>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    marked: u64,
    /// Whether anything was submitted since the last mark.
    dirty: bool,
}

enum Command {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: TicketSender },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region, after: Option<Point> },
    Run { program: Program, bindings: Arc<[Region]> },
    Wait(Point),
    Mark(u64),
}

impl CpuQueue {
    pub(super) fn new(device: Arc<CpuDevice>, account: Arc<Account>) -> Result<CpuQueue, DeviceError> {
        let (commands, inbox) = bounded(DEPTH);
        let (timeline, abort) = (Timeline::new(), Arc::new(AtomicBool::new(false)));
        let worker = Worker {
            device: Arc::clone(&device),
            account,
            timeline: Arc::clone(&timeline),
            abort: Arc::clone(&abort),
            locals: Scratch::default(),
            shared: Scratch::default(),
        };
        std::thread::Builder::new()
            .name("cpu-queue".to_owned())
            .spawn(move || worker.serve(&inbox))
            .map_err(|e| DeviceError::Bug(format!("cannot start a queue's thread: {e}")))?;
        Ok(CpuQueue { device, commands, timeline, abort, marked: 0, dirty: false })
    }

    fn submit(&mut self, command: Command) -> Result<(), DeviceError> {
        if let Some(failure) = self.timeline.failure() {
            return Err(failure);
        }
        self.dirty = true;
        self.commands.send(command).map_err(|_| DeviceError::Lost)
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
        match src {
            Source::Borrowed(bytes) if bytes.len() as u64 != dst.bytes() => {
                Err(DeviceError::Misuse("an upload's length is not its region's"))
            }
            Source::Borrowed(bytes) if bytes.len() <= STAGED_MAX => {
                self.submit(Command::Upload { bytes: bytes.to_vec(), dst })
            }
            Source::Borrowed(mut bytes) => self.upload_in_place(&dst, tensor, &mut |piece| {
                let (next, rest) = bytes.split_at(piece.len());
                piece.copy_from_slice(next);
                bytes = rest;
                Ok(())
            }),
            Source::Writer(fill) if dst.bytes() <= STAGED_MAX as u64 => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes).map_err(|e| DeviceError::Source(e.to_string()))?;
                self.submit(Command::Upload { bytes, dst })
            }
            Source::Writer(fill) => self.upload_in_place(&dst, tensor, fill),
        }
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        host(&src)?;
        let (to, ticket) = Ticket::new();
        self.submit(Command::Download { src, to })?;
        Ok(ticket)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        host(&dst)?;
        self.submit(Command::Fill { dst, value })
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError> {
        host(&dst)?;
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if host(&src).is_err() {
            return Ok(false);
        }
        self.submit(Command::Copy { src, dst, after: after.cloned() })?;
        Ok(true)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        if program.code::<Code>().is_none() {
            return Err(DeviceError::Misuse("a program of another kind of device"));
        }
        let slots = program.graph().slots();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if !fits {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        self.submit(Command::Run { program: program.clone(), bindings: Arc::clone(bindings) })
    }

    fn mark(&mut self) -> Point {
        if self.dirty {
            self.marked += 1;
            self.dirty = false;
            // When the thread is gone, the timeline already carries the failure that waiting for the point returns.
            let _ = self.commands.send(Command::Mark(self.marked));
        }
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.submit(Command::Wait(point.clone()))
    }
}

impl Drop for CpuQueue {
    fn drop(&mut self) {
        // The thread ends by itself: at the next node, or when it sees that there will be no more commands.
        self.abort.store(true, Ordering::Relaxed);
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
        self.0.as_ref().map(|(m, _)| m).ok_or(DeviceError::Lost)
    }
}

struct Worker {
    device: Arc<CpuDevice>,
    account: Arc<Account>,
    timeline: Arc<Timeline>,
    abort: Arc<AtomicBool>,
    locals: Scratch,
    shared: Scratch,
}

impl Worker {
    fn serve(mut self, inbox: &Receiver<Command>) {
        while let Ok(command) = inbox.recv() {
            if self.abort.load(Ordering::Relaxed) {
                break;
            }
            if let Err(error) = self.execute(command) {
                self.timeline.fail(error.clone());
                // Nothing after a failure runs; whoever waits for bytes learns why.
                for command in inbox {
                    if let Command::Download { to, .. } = command {
                        to.send(Err(error.clone()));
                    }
                }
            }
        }
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
            Command::Run { program, bindings } => self.run(&program, &bindings),
            Command::Wait(point) => point.wait(None),
            Command::Mark(seq) => {
                self.timeline.advance(seq);
                Ok(())
            }
        }
    }

    fn run(&mut self, program: &Program, bindings: &[Region]) -> Result<(), DeviceError> {
        let code = program.code::<Code>().ok_or(DeviceError::Misuse("a program of another kind of device"))?;
        let (locals, shared) = code.scratch();
        let locals = self.locals.at_least(locals, &self.account)?;
        let shared = self.shared.at_least(shared, &self.account)?;
        code.run(self.device.pool(), bindings, locals, shared, &self.abort)
    }
}

impl Drop for Worker {
    /// However the thread ends, by a panic too: whoever waits for a point is told.
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Lost);
    }
}

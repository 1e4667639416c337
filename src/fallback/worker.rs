//! What runs the commands of a queue that has fallen back, on a thread of its own.
//!
//! It waits for bytes, and for points: it goes on only when the primary has reached a moment that somebody marked, so that
//! nothing submitted later keeps it from being known. While it waits, the two devices' queues lie on a [`Shelf`], where
//! whoever drops the queue finds them: dropping them ends the wait.

use super::Fallback;
use super::cut::{Away, Cut, Move, Part};
use crate::device::{
    Account, Buffer, CopyOutcome, DeviceError, PATIENCE, Point, Program, Queue, Region, Source, Staged, Ticket,
    TicketSender, Timeline,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the second device may work on this thread, which then cannot be told that its queue was dropped.
const HERE: Duration = Duration::from_millis(2);

/// Pieces in which bytes move between the devices, and how many of them are on their way: so much host memory is in use.
const PIECE: u64 = 1 << 20;
const FLYING: usize = 8;

pub(super) enum Command {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: TicketSender },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region, after: Option<Point> },
    Run { program: Program, bindings: Arc<[Region]> },
    Wait(Point),
    Mark(u64),
}

impl Staged for Command {
    fn staged(&self) -> usize {
        if let Command::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }
}

/// The queues of the two devices; that of the second is made when it is needed.
pub(super) struct Queues {
    pub(super) primary: Box<dyn Queue>,
    second: Option<Box<dyn Queue>>,
}

/// Which of them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Primary,
    Second,
}

impl Of {
    fn other(self) -> Of {
        if self == Of::Primary { Of::Second } else { Of::Primary }
    }
}

/// Where the queues lie while their worker waits.
#[derive(Default)]
pub(super) struct Shelf(Mutex<Shelved>);

#[derive(Default)]
struct Shelved {
    queues: Option<Queues>,
    /// Nobody wants them any more.
    ended: bool,
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Shelved> {
        // Two plain values, whole at every moment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is there, now and later, out of the worker's hands.
    pub(super) fn end(&self) {
        let mut shelved = self.lock();
        shelved.ended = true;
        let queues = shelved.queues.take();
        drop(shelved);
        drop(queues);
    }
}

/// However it ends, by a panic too, whoever waits for a point is told.
pub(super) struct Worker {
    device: Arc<Fallback>,
    account: Arc<Account>,
    /// `None` from the moment on when the queue was dropped.
    queues: Option<Queues>,
    pub(super) shelf: Arc<Shelf>,
    pub(super) timeline: Arc<Timeline>,
    /// Memory of the second device for its operands.
    scratch: Option<Buffer>,
}

impl Worker {
    pub(super) fn new(device: Arc<Fallback>, account: &Arc<Account>) -> Result<Worker, DeviceError> {
        let queues = Queues { primary: device.primary.queue(account)?, second: None };
        let account = Arc::clone(account);
        let (shelf, timeline) = (Arc::default(), Timeline::new());
        Ok(Worker { device, account, queues: Some(queues), shelf, timeline, scratch: None })
    }

    pub(super) fn primary(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.queues.as_mut().ok_or(DeviceError::Ended)?.primary)
    }

    /// Runs a command. Nothing runs after a failure; whoever waits for bytes learns why.
    pub(super) fn obey(&mut self, command: Command) {
        let done = match (self.timeline.failure(), command) {
            (Some(failure), Command::Download { to, .. }) => {
                to.send(Err(failure));
                Ok(())
            }
            (Some(_), _) => Ok(()),
            (None, Command::Download { src, to }) => {
                let bytes = self.ask(Of::Primary, |queue| queue.download(src));
                let bytes = bytes.and_then(|ticket| self.wait(Of::Primary, |until| ticket.wait(until)));
                let done = bytes.as_ref().map(drop).map_err(Clone::clone);
                to.send(bytes);
                done
            }
            (None, command) => self.execute(command),
        };
        if let Err(error) = done {
            self.timeline.fail(error);
        }
    }

    fn execute(&mut self, command: Command) -> Result<(), DeviceError> {
        match command {
            Command::Upload { dst, bytes } => {
                self.primary_does(|queue| queue.upload(dst, None, Source::Borrowed(&bytes)))
            }
            Command::Fill { dst, value } => self.primary_does(|queue| queue.fill(dst, value)),
            Command::Copy { src, dst, after } => {
                self.primary_does(|queue| match queue.copy_from(src, dst, after.as_ref())? {
                    CopyOutcome::Submitted => Ok(()),
                    CopyOutcome::Unreachable => {
                        Err(DeviceError::Bug("it refuses a copy that it has made before".to_owned()))
                    }
                })
            }
            Command::Run { program, bindings } => match program.code::<Cut>() {
                Some(cut) => self.run(cut, &bindings),
                None => self.primary_does(|queue| queue.run(&program, &bindings)),
            },
            Command::Wait(point) => self.primary_does(|queue| queue.wait(&point)),
            Command::Mark(seq) => {
                self.settle()?;
                self.timeline.advance(seq);
                Ok(())
            }
            Command::Download { .. } => Ok(()), // see `obey`
        }
    }

    fn run(&mut self, cut: &Cut, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        for part in &cut.parts {
            match part {
                Part::Primary { program, slots: None } => self.primary_does(|queue| queue.run(program, bindings))?,
                Part::Primary { program, slots: Some(slots) } => {
                    let bound = slots.iter().filter_map(|&slot| bindings.get(slot as usize).cloned()).collect();
                    self.primary_does(|queue| queue.run(program, &bound))?;
                }
                Part::Second(away) => self.run_away(away, bindings)?,
            }
        }
        Ok(())
    }

    fn run_away(&mut self, away: &Away, bindings: &[Region]) -> Result<(), DeviceError> {
        let scratch = self.scratch(away.bytes)?;
        for padding in &away.padding {
            let region = scratch.part(padding.start, padding.end - padding.start)?;
            self.ask(Of::Second, |queue| queue.fill(region, 0))?;
        }
        self.carry(&away.reads, Of::Primary, bindings, &scratch)?;
        let bound = Arc::from([scratch.clone()]);
        self.ask(Of::Second, |queue| queue.run_inline_or_submit(&away.program, &bound, HERE))?;
        self.carry(&away.writes, Of::Second, bindings, &scratch)?;
        self.device.count(&away.ops);
        Ok(())
    }

    /// The second device's memory for operands of `bytes` bytes.
    fn scratch(&mut self, bytes: u64) -> Result<Region, DeviceError> {
        if let Some(buffer) = self.scratch.as_ref().filter(|buffer| buffer.bytes() >= bytes) {
            return buffer.region(0, bytes);
        }
        // The old one goes first, so that an account need not hold both.
        self.scratch = None;
        let second = &self.device.second;
        let buffer = second.alloc(bytes, &self.account).map_err(|e| e.on(&second.info().name))?;
        self.scratch.insert(buffer).region(0, bytes)
    }

    /// Moves bytes from one device to the other, in pieces.
    fn carry(&mut self, moves: &[Move], from: Of, bindings: &[Region], scratch: &Region) -> Result<(), DeviceError> {
        let mut flying = VecDeque::with_capacity(FLYING);
        for &Move { slot, offset, at, bytes } in moves {
            let bound = bindings.get(slot as usize).ok_or(DeviceError::Misuse("a slot without a binding"))?;
            for start in (0..bytes).step_by(PIECE as usize) {
                let length = PIECE.min(bytes - start);
                let (home, away) = (bound.part(offset + start, length)?, scratch.part(at + start, length)?);
                let (src, dst) = if from == Of::Primary { (home, away) } else { (away, home) };
                if flying.len() >= FLYING {
                    self.land(&mut flying, from.other())?;
                }
                flying.push_back((self.ask(from, |queue| queue.download(src))?, dst));
            }
        }
        while !flying.is_empty() {
            self.land(&mut flying, from.other())?;
        }
        Ok(())
    }

    /// Waits for the first of the pieces on their way, and puts it into its place.
    fn land(&mut self, flying: &mut VecDeque<(Ticket, Region)>, on: Of) -> Result<(), DeviceError> {
        let Some((ticket, dst)) = flying.pop_front() else { return Ok(()) };
        let bytes = self.wait(on.other(), |until| ticket.wait(until))?;
        self.ask(on, |queue| queue.upload(dst, None, Source::Borrowed(&bytes)))
    }

    /// Waits for all that the primary was given.
    fn settle(&mut self) -> Result<(), DeviceError> {
        let point = self.primary()?.mark();
        self.wait(Of::Primary, |until| point.wait(until))
    }

    fn primary_does(
        &mut self,
        what: impl FnOnce(&mut dyn Queue) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.ask(Of::Primary, what)
    }

    /// Submits to one of the queues; its failures carry its device's name.
    fn ask<T>(
        &mut self,
        of: Of,
        what: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Worker { device, account, queues, .. } = self;
        let Queues { primary, second } = queues.as_mut().ok_or(DeviceError::Ended)?;
        let done = match (of, second) {
            (Of::Primary, _) => what(&mut **primary),
            (Of::Second, Some(queue)) => what(&mut **queue),
            (Of::Second, none) => device.second.queue(account).and_then(|queue| what(&mut **none.insert(queue))),
        };
        done.map_err(|e| self.named(of, e))
    }

    /// Waits with the queues on the shelf.
    fn wait<T>(
        &mut self,
        of: Of,
        what: impl FnOnce(Option<Instant>) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut shelved = self.shelf.lock();
        if shelved.ended {
            return Err(DeviceError::Ended);
        }
        shelved.queues = self.queues.take();
        drop(shelved);
        let done = what(Some(Instant::now() + PATIENCE));
        self.queues = self.shelf.lock().queues.take();
        done.map_err(|e| self.named(of, e))
    }

    fn named(&self, of: Of, error: DeviceError) -> DeviceError {
        let device = if of == Of::Primary { &self.device.primary } else { &self.device.second };
        error.on(&device.info().name)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

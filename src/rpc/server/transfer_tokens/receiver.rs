//! Bytes on their way into the memory of one queue's device.
//!
//! They have a device queue of their own: the queue that waits for them could not write them, and a connection that brings them
//! cannot wait for it. A RECEIVE's bytes may be written when the work that its queue was sent before is done; and its queue
//! goes on when they are. As every RECEIVE of a queue is behind the one before, one at a time is at work: the first that is
//! not done. What comes for later ones is kept.
//!
//! Whoever finds that something can be done does it: the connection that brings bytes writes them itself where the device is
//! ready for them, which is how a decoded token's few bytes travel, and leaves all waiting to the thread here.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::error::TokenError;
use super::payload::{Data, Stash};
use super::table::{Destination, TokenTable};
use crate::device::{Account, Device, DeviceError, PIECE, Point, Queue, Region, Source, Timeline};
use crate::rpc::wire::ext::Ticket;

/// What arrives for one queue. Dropping it ends that: who still waits for bytes learns that none will come.
pub(in crate::rpc::server) struct Receiver(pub(super) Arc<Inner>);

impl Receiver {
    pub(super) fn new(
        table: &Arc<TokenTable>,
        device: &Arc<dyn Device>,
        account: &Arc<Account>,
        patience: Duration,
    ) -> Receiver {
        Receiver(Arc::new(Inner {
            table: Arc::clone(table),
            device: Arc::clone(device),
            account: Arc::clone(account),
            patience,
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }
}

/// What arrives for all queues of a session. Ending it is for whoever learns that the session's client is gone while the session's
/// own thread waits for one of these queues.
#[derive(Default)]
pub(in crate::rpc::server) struct PendingReceives(Mutex<Known>);

#[derive(Default)]
struct Known {
    inbound: Vec<Weak<Inner>>,
    ended: bool,
}

impl PendingReceives {
    pub(super) fn add(&self, inbound: &Receiver) {
        let mut known = self.lock();
        known.inbound.retain(|other| other.strong_count() > 0);
        known.inbound.push(Arc::downgrade(&inbound.0));
        let ended = known.ended;
        drop(known);
        if ended {
            inbound.0.fail(DeviceError::Ended);
        }
    }

    /// Nothing arrives any more: who still waits for bytes learns that none will come.
    pub(in crate::rpc::server) fn end(&self) {
        let mut known = self.lock();
        known.ended = true;
        let inbound: Vec<_> = known.inbound.iter().filter_map(Weak::upgrade).collect();
        drop(known);
        inbound.iter().for_each(|inbound| inbound.fail(DeviceError::Ended));
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // A list of whole things.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.fail(DeviceError::Ended);
    }
}

pub(super) struct Inner {
    table: Arc<TokenTable>,
    device: Arc<dyn Device>,
    account: Arc<Account>,
    /// How long bytes may take from their RECEIVE on, and the device for each step.
    patience: Duration,
    state: Mutex<State>,
    /// There is something for the thread.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: Option<Box<dyn Queue>>,
    receives: VecDeque<Receive>,
    /// The number of the first of them.
    first: u64,
    /// Whether there is a thread.
    served: bool,
    /// Nothing more arrives, because of this.
    over: Option<DeviceError>,
}

/// One RECEIVE.
struct Receive {
    region: Region,
    tickets: Vec<Ticket>,
    /// The bytes may be written.
    ready: Point,
    /// The queue may go on.
    arrival: Arc<Timeline>,
    /// What has come and is not written, by piece.
    kept: Vec<(usize, Stash)>,
    /// Pieces that are not written.
    left: usize,
    /// All are, when the device is there.
    written: Option<Point>,
    due: Instant,
}

impl Receive {
    fn piece(&self, at: usize) -> Result<Region, DeviceError> {
        let start = at as u64 * PIECE;
        self.region.part(start, PIECE.min(self.region.bytes().saturating_sub(start)))
    }

    fn write(&mut self, queue: &mut dyn Queue, at: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        queue.upload(self.piece(at)?, None, Source::Borrowed(bytes))?;
        self.left -= 1;
        if self.left == 0 {
            self.written = Some(queue.mark());
        }
        Ok(())
    }
}

/// Why a piece was not taken.
struct Wrong {
    /// What that is to the queue that waits for it.
    failure: DeviceError,
    /// What it is to whoever brought it, if that is to blame.
    told: Option<TokenError>,
}

impl Wrong {
    fn put(error: TokenError) -> Box<Wrong> {
        Box::new(Wrong { failure: error.failure(), told: Some(error) })
    }

    fn here(failure: DeviceError) -> Box<Wrong> {
        Box::new(Wrong { failure, told: None })
    }
}

/// What others are told when the lock is released: they may do anything then.
#[derive(Default)]
struct News {
    reached: Vec<Arc<Timeline>>,
    failed: Vec<Receive>,
    failure: Option<DeviceError>,
}

/// What is to be done.
enum Next {
    /// To wait for a device.
    Wait(Point),
    /// To wait for bytes, until then.
    Bytes(Option<Instant>),
}

impl State {
    /// Ends it, if it has not ended.
    fn fail(&mut self, failure: DeviceError, news: &mut News) {
        if self.over.is_none() {
            self.over = Some(failure.clone());
            news.failure = Some(failure);
            news.failed.extend(self.receives.drain(..));
            // What it has not begun to write is not written.
            self.queue = None;
        }
    }

    /// Takes the bytes of a piece: to the device, if that is ready for them, or into keeping. Where nothing arrives any more they
    /// are dropped.
    fn take(&mut self, inner: &Inner, number: u64, at: usize, data: Data<'_>) -> Result<(), Box<Wrong>> {
        if self.over.is_some() {
            return Ok(());
        }
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        let Some(receive) = index.and_then(|index| self.receives.get_mut(index)) else {
            return Err(Wrong::here(DeviceError::Bug("bytes for a RECEIVE that is done".to_owned())));
        };
        if Instant::now() >= receive.due {
            return Err(Box::new(Wrong { failure: late(), told: Some(TokenError::Unknown) }));
        }
        let (expected, have) = (receive.piece(at).map_err(Wrong::here)?.bytes(), data.len());
        if have as u64 != expected {
            return Err(Wrong::put(TokenError::Length { expected, have }));
        }
        let now = index == Some(0) && receive.kept.is_empty() && receive.ready.poll().map_err(Wrong::here)?;
        if now {
            let queue = open(&mut self.queue, inner).map_err(Wrong::here)?;
            return receive.write(queue, at, data.bytes()).map_err(Wrong::here);
        }
        let stash = data.keep(&inner.account).map_err(Wrong::put)?;
        receive.kept.push((at, stash));
        Ok(())
    }

    /// Does what can be done without waiting.
    fn advance(&mut self, inner: &Inner, news: &mut News) -> Result<Next, DeviceError> {
        loop {
            let Some(head) = self.receives.front_mut() else { return Ok(Next::Bytes(None)) };
            if let Some(written) = &head.written {
                if !written.poll()? {
                    return Ok(Next::Wait(written.clone()));
                }
                news.reached.extend(self.receives.pop_front().map(|done| done.arrival));
                self.first += 1;
                continue;
            }
            if head.kept.is_empty() {
                return if Instant::now() < head.due { Ok(Next::Bytes(Some(head.due))) } else { Err(late()) };
            }
            if !head.ready.poll()? {
                return Ok(Next::Wait(head.ready.clone()));
            }
            let queue = open(&mut self.queue, inner)?;
            for (at, stash) in std::mem::take(&mut head.kept) {
                head.write(queue, at, &stash.bytes)?;
            }
        }
    }
}

fn late() -> DeviceError {
    DeviceError::Deadline("bytes from another server")
}

/// The device queue; made for the first bytes.
fn open<'a>(queue: &'a mut Option<Box<dyn Queue>>, inner: &Inner) -> Result<&'a mut dyn Queue, DeviceError> {
    let queue = match queue {
        Some(queue) => queue,
        none => none.insert(inner.device.queue(&inner.account)?),
    };
    Ok(&mut **queue)
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic half-way leaves a RECEIVE that is never done, and fails when its time is over.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the bytes of `tickets`; the number of that wait.
    pub(super) fn expect(
        self: &Arc<Self>,
        ready: Point,
        arrival: Arc<Timeline>,
        region: Region,
        tickets: &[Ticket],
    ) -> Result<u64, DeviceError> {
        let mut state = self.lock();
        if let Some(over) = &state.over {
            return Err(over.clone());
        }
        if !state.served {
            let inner = Arc::clone(self);
            let started = std::thread::Builder::new().name("inbound".to_owned()).spawn(move || inner.serve());
            started.map_err(|e| DeviceError::no_thread("for arriving bytes", &e))?;
            state.served = true;
        }
        let number = state.first + state.receives.len() as u64;
        let (tickets, left, due) = (tickets.to_vec(), tickets.len(), Instant::now() + self.patience);
        let receive = Receive { region, tickets, ready, arrival, kept: Vec::new(), left, written: None, due };
        state.receives.push_back(receive);
        Ok(number)
    }

    pub(super) fn is_over(&self) -> bool {
        self.lock().over.is_some()
    }

    fn serve(&self) {
        let mut state = self.lock();
        while state.over.is_none() {
            let mut news = News::default();
            let next = state.advance(self, &mut news);
            if !news.reached.is_empty() {
                // What is next may be ready by that.
                drop(state);
                self.deliver(news);
                state = self.lock();
                continue;
            }
            let failed = match next {
                Err(e) => Some(e),
                Ok(Next::Wait(point)) => {
                    drop(state);
                    let waited = point.wait(Some(Instant::now() + self.patience));
                    state = self.lock();
                    waited.err()
                }
                // What comes meanwhile has more time than this: nobody need say that it is there.
                Ok(Next::Bytes(due)) => {
                    let due = due.map_or(self.patience, |due| due.saturating_duration_since(Instant::now()));
                    state = self.changed.wait_timeout(state, due).unwrap_or_else(PoisonError::into_inner).0;
                    None
                }
            };
            if let Some(e) = failed {
                state.fail(e, &mut news);
                drop(state);
                self.deliver(news);
                return;
            }
        }
    }

    fn deliver(&self, news: News) {
        news.reached.iter().for_each(|arrival| arrival.advance(1));
        if let Some(failure) = news.failure {
            self.changed.notify_one();
            for receive in news.failed {
                // Who still comes in time does nothing wrong.
                if Instant::now() < receive.due {
                    self.table.abandon(&receive.tickets);
                } else {
                    self.table.forget(&receive.tickets);
                }
                receive.arrival.fail(failure.clone());
            }
        }
    }
}

impl Destination for Inner {
    fn put(&self, number: u64, at: usize, data: Data<'_>) -> Result<(), TokenError> {
        let mut news = News::default();
        let mut state = self.lock();
        let taken = state.take(self, number, at, data).or_else(|wrong| {
            state.fail(wrong.failure, &mut news);
            wrong.told.map_or(Ok(()), Err)
        });
        let waits = match state.advance(self, &mut news) {
            Ok(next) => matches!(next, Next::Wait(_)),
            Err(e) => {
                state.fail(e, &mut news);
                false
            }
        };
        drop(state);
        if waits || news.failure.is_some() {
            self.changed.notify_one();
        }
        self.deliver(news);
        taken
    }

    /// Nothing more is written then, and who waits for bytes gets this.
    fn fail(&self, failure: DeviceError) {
        let mut news = News::default();
        self.lock().fail(failure, &mut news);
        self.deliver(news);
    }
}

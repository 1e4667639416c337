//! Other servers: which ones this one may dial, and how bytes of its devices get there.
//!
//! ```text
//! session's thread: Outbound::send → downloads on the queue → a thread for each queue: waits for the bytes → Link → PUT
//!                   Pool::reach    →  Link, dialled once for each session and address, if the PeerList has it
//! ```
//!
//! A queue's bytes leave in the order of its work, and no queue waits for another's: two that send to one server share its
//! link, message by message. What is on its way is charged to the session, and bounded: it lies in the host's memory.

mod dial;
mod link;
mod list;

pub(super) use list::PeerList;
pub use list::{BadPeer, Peer};

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::allowance::{Allowance, Room};
use super::limits::Config;
use crate::device::{self, Account, Charge, DeviceError, PIECE, Queue, Region};
use crate::rpc::wire::ext::Ticket;
use link::Link;

/// Servers that a session may have bytes sent to.
const MAX_LINKS: usize = 64;

/// The longest that a question whether a server can be reached keeps the session from its next message.
const REACH: Duration = Duration::from_secs(5);

/// Downloads that one SEND submits at most: fewer than a queue takes without waiting.
const DOWNLOADS: u64 = 16;

/// Bytes that a session may have read and not delivered, in the largest messages. Who sends more waits.
const MESSAGES_DUE: u64 = 16;

/// What a piece of a SEND costs beyond its bytes.
const OVERHEAD: u64 = 256;

/// Told why a queue has failed; the first time counts. It may be called when the queue is closed, by other threads.
pub(super) type Fail = Arc<dyn Fn(DeviceError) + Send + Sync>;

/// What a queue is told that could not send to `address`.
fn failure(address: &str, why: String) -> DeviceError {
    DeviceError::Remote { device: address.to_owned(), reason: format!("cannot copy to {why}") }
}

/// How long things may take.
#[derive(Clone, Copy)]
struct Times {
    handshake: Duration,
    stall: Duration,
    device: Duration,
}

/// The connections of one session to other servers. They end with it.
pub(super) struct Pool {
    list: Arc<PeerList>,
    times: Times,
    links: HashMap<String, Arc<Link>>,
    allowance: Arc<Allowance>,
}

impl Pool {
    /// None yet.
    pub(super) fn new(list: &Arc<PeerList>, config: &Config) -> Pool {
        let times =
            Times { handshake: config.handshake_timeout, stall: config.stall_timeout, device: config.device_timeout };
        let allowance = Allowance::new(config.limits.max_body.saturating_mul(MESSAGES_DUE));
        Pool { list: Arc::clone(list), times, links: HashMap::new(), allowance }
    }

    /// Whether bytes can be sent to `address`: it is dialled, unless it has been.
    ///
    /// # Errors
    /// Why not, for the client.
    pub(super) fn reach(&mut self, address: &str) -> Result<(), String> {
        let until = Instant::now() + REACH.min(self.times.handshake);
        self.link(address)?.up(until).map(drop)
    }

    fn link(&mut self, address: &str) -> Result<&Arc<Link>, String> {
        self.links.retain(|_, link| !link.is_down());
        if !self.links.contains_key(address) {
            if self.links.len() >= MAX_LINKS {
                return Err(format!("the session has connections to {MAX_LINKS} servers already"));
            }
            self.list.admits(address)?;
            self.links.insert(address.to_owned(), Link::start(address, &self.list, self.times)?);
        }
        self.links.get(address).ok_or_else(|| "the connection is lost".to_owned())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.links.values().for_each(|link| link.close());
    }
}

/// Bytes of a queue on their way to other servers. Dropped, it sends what the device has read already.
pub(super) struct Outbound {
    account: Arc<Account>,
    fail: Fail,
    /// Nothing more is sent.
    failed: Arc<AtomicBool>,
    thread: Option<Sender<Job>>,
}

/// One SEND.
struct Job {
    address: String,
    link: Arc<Link>,
    parts: Vec<(device::Ticket, Vec<Ticket>)>,
    /// Of all its bytes.
    _charge: (Charge, Room),
}

impl Outbound {
    /// For a queue whose failures `fail` tells; `account` pays for bytes on their way.
    pub(super) fn new(account: &Arc<Account>, fail: impl Fn(DeviceError) + Send + Sync + 'static) -> Outbound {
        let failed = Arc::new(AtomicBool::new(false));
        let known = Arc::clone(&failed);
        let fail = Arc::new(move |e| {
            known.store(true, Ordering::Release);
            fail(e);
        });
        Outbound { account: Arc::clone(account), fail, failed, thread: None }
    }

    /// Reads `region`, in order with the queue's other work, and puts it to the server at `address`, for tickets that are as many
    /// as its pieces. Waits for room in the queue, and until there is room for its bytes beside others that are on their way; what
    /// cannot be delivered fails the queue.
    ///
    /// # Errors
    /// The queue's failure.
    pub(super) fn send(
        &mut self,
        pool: &mut Pool,
        queue: &mut dyn Queue,
        region: &Region,
        tickets: &[Ticket],
        address: &str,
    ) -> Result<(), DeviceError> {
        if tickets.is_empty() {
            return Ok(());
        }
        let link = pool.link(address);
        let link = Arc::clone(link.map_err(|why| failure(address, format!("{}: {why}", list::shown(address))))?);
        let count = tickets.len() as u64;
        let charge = self.account.charge(region.bytes().saturating_add(count * OVERHEAD))?;
        let room = pool.allowance.take(region.bytes(), Instant::now() + pool.times.device)?;
        let each = count.div_ceil(DOWNLOADS);
        let parts = (0..count).step_by(each as usize).zip(tickets.chunks(each as usize)).map(|(first, tickets)| {
            let start = first * PIECE;
            let part = region.part(start, (each * PIECE).min(region.bytes() - start))?;
            Ok((queue.download(part)?, tickets.to_vec()))
        });
        let parts = parts.collect::<Result<_, DeviceError>>()?;
        let job = Job { address: address.to_owned(), link, parts, _charge: (charge, room) };
        if self.thread(pool.times.device)?.send(job).is_err() {
            return Err(DeviceError::Bug("the thread that sends bytes has ended".to_owned()));
        }
        Ok(())
    }

    fn thread(&mut self, patience: Duration) -> Result<&Sender<Job>, DeviceError> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => {
                // No more jobs than the account pays for.
                let (thread, jobs) = unbounded();
                let (fail, failed) = (Arc::clone(&self.fail), Arc::clone(&self.failed));
                let started = std::thread::Builder::new()
                    .name("outbound".to_owned())
                    .spawn(move || serve(&jobs, patience, &fail, &failed));
                started.map_err(|e| DeviceError::no_thread("that sends bytes", &e))?;
                thread
            }
        };
        Ok(self.thread.insert(thread))
    }
}

fn serve(jobs: &Receiver<Job>, patience: Duration, fail: &Fail, failed: &AtomicBool) {
    for job in jobs {
        if failed.load(Ordering::Acquire) {
            continue;
        }
        if let Err(e) = deliver(job, patience, fail) {
            fail(e);
        }
    }
}

/// Puts a SEND's pieces as they come from the device.
fn deliver(job: Job, patience: Duration, fail: &Fail) -> Result<(), DeviceError> {
    let mut left: usize = job.parts.iter().map(|(_, tickets)| tickets.len()).sum();
    for (part, tickets) in job.parts {
        let bytes = part.wait(Some(Instant::now() + patience))?;
        for (ticket, piece) in tickets.into_iter().zip(bytes.chunks(PIECE as usize)) {
            left -= 1;
            let put = job.link.put(ticket, piece, (left == 0).then_some(fail));
            put.map_err(|why| failure(&job.address, why))?;
        }
    }
    Ok(())
}

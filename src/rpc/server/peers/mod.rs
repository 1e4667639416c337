//! Connections to other servers: the sending side of copies between servers (SEND_TO_PEER, PROBE_PEER), and the dialer of groups.
//!
//! ```text
//! session's thread:    PeerSender::send → submits downloads to the queue;  PeerPool::probe → starts a PeerConnection
//! sender's thread:     waits for the downloads → PeerConnection::send_piece → PEER_WRITE
//! connection's thread: dials, then reads PING replies and notifications
//! ```
//!
//! - A session has one [`PeerConnection`] per address. This server dials only addresses on its [`PeerAllowlist`].
//! - A group dials a connection of its own to each server ([`PeerPool::dialer`]), beyond [`MAX_PEER_CONNECTIONS`].
//! - Each sending queue has a [`PeerSender`], which sends the queue's bytes in the order of the queue's work. Queues do not
//!   wait for each other: their messages interleave on a shared connection.
//! - A peer with a key is dialled over TLS: this server proves its own key, and demands that of the peer.
//! - Bytes in flight lie in host memory. They are charged to the session's budget and limited by a semaphore.
//!
//! The receiving side is in `transfer_tokens`. Start reading at [`PeerSender::send`].

mod dial;
mod message;
mod peer_allowlist;
mod peer_connection;
mod peer_trust;

pub(super) use dial::describe_transport_error;
pub(super) use message::{PeerMessage, read_message};
pub(super) use peer_allowlist::{COMM_PORT_OFFSET, MAX_ADDRESS_BYTES, PeerAllowlist, UNENCRYPTED};
pub use peer_allowlist::{ParsePeerError, Peer};

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, unbounded};

use super::host_memory::{BytePermit, ByteSemaphore, SessionMemory};
use super::limits::Config;
use super::log_limits::{LogKind, LogLimits};
use super::tenants::ClientBudget;
use crate::device::{self, DeviceError, MemoryBudget, Queue, Region, Reservation, TRANSFER_CHUNK_BYTES};
use crate::rpc::connection::Handshake;
use crate::rpc::transport::{Deadline, PeerAddr};
use crate::rpc::wire::ext::{PeerWrite, TransferToken};
use peer_allowlist::PeerTargets;
use peer_connection::PeerConnection;

/// Limit of connections to other servers per session.
const MAX_PEER_CONNECTIONS: usize = 64;

/// Limit of the time for which a PROBE_PEER blocks the session's thread.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest part of that time after which a PROBE_PEER checks whether its client has gone.
const PROBE_SLICE: Duration = Duration::from_millis(250);

/// Limit of downloads that one SEND_TO_PEER submits. It is lower than the number of commands that a queue accepts without
/// blocking.
const MAX_DOWNLOADS_PER_SEND: u64 = 16;

/// Limit of a session's bytes in flight to other servers, as a multiple of the message limit. A SEND_TO_PEER beyond it blocks.
const MAX_UNDELIVERED_MESSAGES: u64 = 16;

/// Host memory charged per piece of a SEND_TO_PEER in addition to its bytes.
const PIECE_OVERHEAD_BYTES: u64 = 256;

/// Callback that fails a queue; only its first call has an effect. Any thread may call it, also after the queue was closed.
pub(super) type FailQueue = Arc<dyn Fn(DeviceError) + Send + Sync>;

/// The failure of a queue whose bytes could not be delivered to `address`.
fn copy_failure(address: &str, why: String) -> DeviceError {
    DeviceError::Remote { device: address.to_owned(), reason: format!("cannot copy to {why}") }
}

/// Timeouts of a connection to another server.
#[derive(Clone, Copy)]
struct PeerTimeouts {
    /// Limit of the time to connect, including HELLO and HELLO_EXT.
    handshake: Duration,
    /// Limit of the time without progress of a write, and without a reply to a PING.
    stall: Duration,
    /// Limit of each wait for a device.
    device: Duration,
}

/// The log of a session's connections to other servers.
#[derive(Clone)]
pub(super) struct PeerLog {
    logs: Arc<LogLimits>,
    /// The client of the session.
    client: PeerAddr,
}

impl PeerLog {
    pub(super) fn new(logs: &Arc<LogLimits>, client: PeerAddr) -> PeerLog {
        PeerLog { logs: Arc::clone(logs), client }
    }

    /// The client gets a fixed text instead.
    fn untrusted(&self, address: &str, why: &str) {
        let client = self.client;
        self.logs.log(client, LogKind::UntrustedPeer, format_args!("{client}: cannot connect to {address}: {why}"));
    }
}

/// Connection pool of one session: its connections to other servers, by address. Dropping it closes them.
pub(super) struct PeerPool {
    allowlist: Arc<PeerAllowlist>,
    log: PeerLog,
    timeouts: PeerTimeouts,
    connections: HashMap<String, Arc<PeerConnection>>,
    threads: Arc<ClientBudget>,
    /// Bounds the bytes that are downloaded and not delivered.
    in_flight: ByteSemaphore,
}

impl PeerPool {
    /// An empty pool that may dial the addresses of `allowlist`. Its threads are reserved in `threads`, and the bytes in flight
    /// are charged to `memory`.
    pub(super) fn new(
        allowlist: &Arc<PeerAllowlist>,
        config: &Config,
        threads: &Arc<ClientBudget>,
        memory: &Arc<SessionMemory>,
        log: PeerLog,
    ) -> PeerPool {
        let timeouts = PeerTimeouts {
            handshake: config.handshake_timeout,
            stall: config.stall_timeout,
            device: config.reply_timeout,
        };
        let in_flight = config.limits.max_body.saturating_mul(MAX_UNDELIVERED_MESSAGES);
        let in_flight = ByteSemaphore::new(in_flight, memory, 0);
        let (allowlist, threads) = (Arc::clone(allowlist), Arc::clone(threads));
        PeerPool { allowlist, log, timeouts, connections: HashMap::new(), threads, in_flight }
    }

    /// Checks that bytes can be sent to `address`: dials it unless a connection exists, and waits until it is connected, or
    /// until `client_has_gone`.
    ///
    /// # Errors
    /// The reason, as a text for the client.
    pub(super) fn probe(&mut self, address: &str, client_has_gone: &dyn Fn() -> bool) -> Result<(), String> {
        let until = Instant::now() + PROBE_TIMEOUT.min(self.timeouts.handshake);
        let connection = self.connection(address)?;
        loop {
            let slice = until.min(Instant::now() + PROBE_SLICE);
            match connection.wait_until_connected(slice) {
                Err(_) if slice < until && !connection.is_closed() && !client_has_gone() => {}
                result => return result,
            }
        }
    }

    /// A dialer for a connection to `address`.
    ///
    /// # Errors
    /// The reason, as a text for the client.
    pub(super) fn dialer(&self, address: &str) -> Result<PeerDialer, String> {
        Ok(PeerDialer {
            address: address.to_owned(),
            targets: self.allowlist.transfer_targets(address)?,
            timeouts: self.timeouts,
            log: self.log.clone(),
            _thread: self.threads.reserve().map_err(|e| e.to_string())?,
        })
    }

    /// The connection to `address`. Starts dialling unless a connection exists.
    fn connection(&mut self, address: &str) -> Result<&Arc<PeerConnection>, String> {
        self.connections.retain(|_, connection| !connection.is_closed());
        if !self.connections.contains_key(address) {
            if self.connections.len() >= MAX_PEER_CONNECTIONS {
                return Err(format!("the session has connections to {MAX_PEER_CONNECTIONS} servers already"));
            }
            let connection = PeerConnection::start(self.dialer(address)?)?;
            self.connections.insert(address.to_owned(), connection);
        }
        self.connections.get(address).ok_or_else(|| "the connection is lost".to_owned())
    }
}

/// A server that may be dialled for a connection of its own, with the reservation of the connection's thread.
pub(super) struct PeerDialer {
    /// As the client sent it.
    address: String,
    targets: PeerTargets,
    timeouts: PeerTimeouts,
    log: PeerLog,
    _thread: Reservation,
}

impl PeerDialer {
    /// Limit of the time to connect, including HELLO and HELLO_EXT.
    pub(super) fn handshake_timeout(&self) -> Duration {
        self.timeouts.handshake
    }

    /// Limit of the time without progress of a write, and without a reply.
    pub(super) fn stall_timeout(&self) -> Duration {
        self.timeouts.stall
    }

    /// Connects, over TLS if the list demands it, and completes HELLO and HELLO_EXT.
    ///
    /// # Errors
    /// The reason, as a text for the client.
    pub(super) fn dial(&self) -> Result<Handshake, String> {
        dial::dial(&self.targets, &Deadline::after(self.timeouts.handshake)).map_err(|failure| {
            if let Some(distrust) = failure.distrust {
                self.log.untrusted(&self.address, &distrust);
            }
            failure.why
        })
    }
}

impl Drop for PeerPool {
    fn drop(&mut self) {
        self.connections.values().for_each(|connection| connection.close());
    }
}

/// Sends bytes of one queue to other servers. When dropped, it still sends the downloads that were submitted.
pub(super) struct PeerSender {
    budget: Arc<MemoryBudget>,
    fail: FailQueue,
    /// Set when the queue has failed: the remaining jobs are skipped.
    failed: Arc<AtomicBool>,
    worker: Option<Sender<SendJob>>,
}

/// One SEND_TO_PEER.
struct SendJob {
    address: String,
    connection: Arc<PeerConnection>,
    token: TransferToken,
    /// Bytes of the region.
    bytes: u64,
    /// Downloads in the order of the region, each of whole pieces.
    downloads: Vec<device::PendingRead>,
    /// Host memory for all bytes of the job.
    _reservations: (Reservation, BytePermit),
}

impl PeerSender {
    /// Creates the sender of a queue; `fail` is called if a transfer fails. Bytes in flight are charged to `budget`.
    pub(super) fn new(budget: &Arc<MemoryBudget>, fail: impl Fn(DeviceError) + Send + Sync + 'static) -> PeerSender {
        let failed = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&failed);
        let fail = Arc::new(move |e| {
            flag.store(true, Ordering::Release);
            fail(e);
        });
        PeerSender { budget: Arc::clone(budget), fail, failed, worker: None }
    }

    /// Downloads `region`, in order with the queue's other work, and sends it to the server at `address`, in PEER_WRITEs with
    /// `token`. Blocks while the queue has no room, and while too many bytes of the session are in flight. If bytes cannot be
    /// delivered later, the queue is failed.
    ///
    /// # Errors
    /// The failure of the queue.
    pub(super) fn send(
        &mut self,
        pool: &mut PeerPool,
        queue: &mut dyn Queue,
        region: &Region,
        token: TransferToken,
        address: &str,
    ) -> Result<(), DeviceError> {
        let bytes = region.bytes();
        if bytes == 0 {
            return Ok(());
        }
        let connection = pool.connection(address);
        let connection = Arc::clone(connection.map_err(|why| {
            copy_failure(address, format!("{}: {why}", peer_allowlist::displayable_address(address)))
        })?);
        let pieces = bytes.div_ceil(TRANSFER_CHUNK_BYTES);
        let reservation = self.budget.reserve(bytes.saturating_add(pieces * PIECE_OVERHEAD_BYTES))?;
        let permit = pool.in_flight.acquire(bytes, Instant::now() + pool.timeouts.device)?;
        let per_download = pieces.div_ceil(MAX_DOWNLOADS_PER_SEND) * TRANSFER_CHUNK_BYTES;
        let starts = (0..bytes).step_by(per_download as usize);
        let downloads = starts.map(|start| queue.download(region.subregion(start, per_download.min(bytes - start))?));
        let downloads = downloads.collect::<Result<_, DeviceError>>()?;
        let job = SendJob {
            address: address.to_owned(),
            connection,
            token,
            bytes,
            downloads,
            _reservations: (reservation, permit),
        };
        if self.worker(pool)?.send(job).is_err() {
            return Err(DeviceError::Bug("the thread that sends bytes to other servers has ended".to_owned()));
        }
        Ok(())
    }

    /// The channel to the sender's thread, which is started for the first job.
    fn worker(&mut self, pool: &PeerPool) -> Result<&Sender<SendJob>, DeviceError> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => {
                // Unbounded: the session's memory budget limits the number of jobs.
                let (worker, jobs) = unbounded();
                let (fail, failed) = (Arc::clone(&self.fail), Arc::clone(&self.failed));
                let (timeout, permit) = (pool.timeouts.device, pool.threads.reserve()?);
                let started = std::thread::Builder::new().name("peer-sender".to_owned()).spawn(move || {
                    let _permit = permit;
                    run_worker(&jobs, timeout, &fail, &failed);
                });
                started.map_err(|e| DeviceError::thread_spawn_failed("that sends bytes to other servers", &e))?;
                worker
            }
        };
        Ok(self.worker.insert(worker))
    }
}

fn run_worker(jobs: &Receiver<SendJob>, timeout: Duration, fail: &FailQueue, failed: &AtomicBool) {
    for job in jobs {
        if failed.load(Ordering::Acquire) {
            continue;
        }
        if let Err(e) = send_pieces(job, timeout, fail) {
            fail(e);
        }
    }
}

/// Sends the pieces of a SEND_TO_PEER as their downloads complete.
fn send_pieces(job: SendJob, timeout: Duration, fail: &FailQueue) -> Result<(), DeviceError> {
    let mut at = 0;
    for download in job.downloads {
        let bytes = download.wait(Some(Instant::now() + timeout))?;
        for data in bytes.chunks(TRANSFER_CHUNK_BYTES as usize) {
            let piece = PeerWrite { token: job.token, at, data };
            at += data.len() as u64;
            let sent = job.connection.send_piece(piece, (at == job.bytes).then_some(fail));
            sent.map_err(|why| copy_failure(&job.address, why))?;
        }
    }
    Ok(())
}

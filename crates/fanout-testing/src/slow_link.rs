//! A TCP relay that makes the link between clients and a server slow: latency, a limit of bandwidth, a cut, a freeze. It counts
//! the bytes of each connection.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Limit on the bytes in flight in one direction of a connection. At the limit the relay stops reading, which blocks the sender
/// as a full TCP window does.
const WINDOW: usize = 4 << 20;

/// Most bytes of one read.
const CHUNK: usize = 16 << 10;

/// Latency and bandwidth of a link, the same in both directions.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkSpeed {
    /// Latency: the time from a byte's arrival at the relay to its departure, where the rate allows it.
    pub delay: Duration,
    /// Bandwidth in bytes per second; unlimited without it.
    pub rate: Option<u64>,
}

/// A relay between clients and one server. Dropping it cuts its connections and ends its threads.
pub struct SlowLink {
    addr: SocketAddr,
    shared: Arc<LinkShared>,
    accepts: Option<JoinHandle<()>>,
}

struct LinkShared {
    to: SocketAddr,
    speed: LinkSpeed,
    state: Mutex<LinkState>,
    /// Notified after every change of the state.
    changed: Condvar,
}

#[derive(Default)]
struct LinkState {
    frozen: bool,
    ended: bool,
    /// Both ends of each connection.
    streams: Vec<TcpStream>,
    /// Two entries for each connection: towards the server, and towards the client.
    flows: Vec<Flow>,
}

/// One direction of a connection.
#[derive(Default)]
struct Flow {
    /// Bytes that have arrived.
    passed: u64,
    /// Pieces that have arrived, each with the moment when it may leave.
    pending: VecDeque<(Instant, Vec<u8>)>,
    /// Bytes in `pending`.
    bytes: usize,
    /// When the last byte that arrived has passed the bandwidth limit.
    rate_limited_until: Option<Instant>,
    /// The sender has closed its half.
    sender_closed: bool,
    /// The receiver has closed the connection.
    receiver_closed: bool,
}

impl SlowLink {
    /// A relay to a server, on a free port of the loopback interface.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn new(to: SocketAddr, speed: LinkSpeed) -> SlowLink {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::new(LinkShared { to, speed, state: Mutex::default(), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        let accepts = std::thread::spawn(move || accepting.accept(&listener));
        SlowLink { addr, shared, accepts: Some(accepts) }
    }

    /// The address to which clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Bytes that have arrived so far on a connection: from the client, and from the server. Connections are numbered in the
    /// order in which they were accepted, from 0.
    pub fn passed(&self, connection: usize) -> (u64, u64) {
        let state = self.shared.lock();
        let passed = |flow: usize| state.flows.get(flow).map_or(0, |flow| flow.passed);
        (passed(2 * connection), passed(2 * connection + 1))
    }

    /// Ends all connections. New ones are accepted.
    pub fn cut(&self) {
        for stream in std::mem::take(&mut self.shared.lock().streams) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Holds everything that arrives (`true`), or lets it leave again (`false`).
    pub fn freeze(&self, frozen: bool) {
        self.shared.lock().frozen = frozen;
        self.shared.changed.notify_all();
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        self.cut();
        // Wakes the accepting thread, which then sees that the relay has ended.
        let _ = TcpStream::connect(self.addr);
        if let Some(accepts) = self.accepts.take() {
            let _ = accepts.join();
        }
    }
}

impl LinkShared {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, LinkState>, until: Option<Instant>) -> MutexGuard<'a, LinkState> {
        let Some(until) = until else { return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner) };
        let left = until.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    fn accept(self: &Arc<LinkShared>, listener: &TcpListener) {
        for client in listener.incoming() {
            let Ok(client) = client else { continue };
            if self.lock().ended {
                return;
            }
            // Without a server the client sees its connection end.
            let Ok(server) = TcpStream::connect(self.to) else { continue };
            for stream in [&client, &server] {
                stream.set_nodelay(true).unwrap();
            }
            let clone = |stream: &TcpStream| stream.try_clone().unwrap();
            let mut state = self.lock();
            state.streams.extend([clone(&client), clone(&server)]);
            for (from, to) in [(clone(&client), clone(&server)), (server, client)] {
                let flow = state.flows.len();
                state.flows.push(Flow::default());
                let [reader, writer] = [(); 2].map(|()| Arc::clone(self));
                std::thread::spawn(move || reader.read_from(flow, from));
                std::thread::spawn(move || writer.write_to(flow, to));
            }
        }
    }

    /// Reads one direction of a connection into `pending`.
    fn read_from(&self, flow: usize, mut from: TcpStream) {
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = from.read(&mut buffer).unwrap_or(0);
            let mut state = self.lock();
            let at = &mut state.flows[flow];
            at.passed += read as u64;
            if read == 0 || at.receiver_closed {
                at.sender_closed = true;
                self.changed.notify_all();
                let _ = from.shutdown(Shutdown::Read);
                return;
            }
            let transmit_time =
                self.speed.rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(read as f64 / rate as f64));
            let now = Instant::now();
            let transmitted = at.rate_limited_until.map_or(now, |last| last.max(now)) + transmit_time;
            at.rate_limited_until = Some(transmitted);
            at.pending.push_back((transmitted + self.speed.delay, buffer[..read].to_vec()));
            at.bytes += read;
            self.changed.notify_all();
            while state.flows[flow].bytes > WINDOW && !state.flows[flow].receiver_closed {
                state = self.wait(state, None);
            }
        }
    }

    /// Writes one direction's pending pieces to the receiver, each at its time.
    fn write_to(&self, flow: usize, mut to: TcpStream) {
        let mut state = self.lock();
        loop {
            let (frozen, ended) = (state.frozen, state.ended);
            let at = &mut state.flows[flow];
            let due = at.pending.front().map(|&(due, _)| due);
            match due {
                _ if ended => break,
                _ if frozen => state = self.wait(state, None),
                None if at.sender_closed => break,
                None => state = self.wait(state, None),
                Some(due) if due > Instant::now() => state = self.wait(state, Some(due)),
                Some(_) => {
                    let (_, bytes) = at.pending.pop_front().unwrap();
                    at.bytes -= bytes.len();
                    self.changed.notify_all();
                    drop(state);
                    let sent = to.write_all(&bytes);
                    state = self.lock();
                    if sent.is_err() {
                        break;
                    }
                }
            }
        }
        state.flows[flow].receiver_closed = true;
        state.flows[flow].pending.clear();
        self.changed.notify_all();
        drop(state);
        let _ = to.shutdown(Shutdown::Write);
    }
}

//! A TCP relay of the tests' own: a line between a client and a server that is slow, counts, and may be cut or frozen.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes on their way in one direction of a connection: whoever sends more waits.
const WINDOW: usize = 4 << 20;

/// Bytes that are read at once.
const CHUNK: usize = 16 << 10;

/// How slow a relay is, in each direction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slow {
    /// From a byte's arrival to its departure, as far as the rate allows.
    pub delay: Duration,
    /// Bytes per second.
    pub rate: Option<u64>,
}

/// A relay, ended when dropped.
pub struct Relay {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepts: Option<JoinHandle<()>>,
}

struct Shared {
    to: SocketAddr,
    slow: Slow,
    state: Mutex<State>,
    /// Something in the state is another.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    frozen: bool,
    ended: bool,
    /// Both ends of each connection.
    streams: Vec<TcpStream>,
    /// Two of each connection: towards the server, and towards the client.
    flows: Vec<Flow>,
}

/// One direction of a connection.
#[derive(Default)]
struct Flow {
    /// Bytes that have come.
    passed: u64,
    /// Each with the moment when it may leave.
    pending: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// When the line has taken in the last byte that came.
    taken: Option<Instant>,
    /// No more comes.
    over: bool,
    /// Nobody takes any more.
    broken: bool,
}

impl Relay {
    /// A relay on a port of its own to a server.
    pub fn new(to: SocketAddr, slow: Slow) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { to, slow, state: Mutex::default(), changed: Condvar::new() });
        let accepting = Arc::clone(&shared);
        let accepts = std::thread::spawn(move || accepting.accept(&listener));
        Relay { addr, shared, accepts: Some(accepts) }
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Bytes that have come so far on a connection, numbered as they were accepted: from the client, and from the server.
    pub fn passed(&self, connection: usize) -> (u64, u64) {
        let state = self.shared.lock();
        let passed = |flow: usize| state.flows.get(flow).map_or(0, |flow| flow.passed);
        (passed(2 * connection), passed(2 * connection + 1))
    }

    /// Ends all connections. New ones may come.
    pub fn cut(&self) {
        for stream in std::mem::take(&mut self.shared.lock().streams) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// From now on nothing leaves, or what has come leaves and all goes on.
    pub fn freeze(&self, frozen: bool) {
        self.shared.lock().frozen = frozen;
        self.shared.changed.notify_all();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
        self.cut();
        // Wakes the thread, which sees that it is to end.
        let _ = TcpStream::connect(self.addr);
        if let Some(accepts) = self.accepts.take() {
            let _ = accepts.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        let Some(until) = until else { return self.changed.wait(state).unwrap_or_else(PoisonError::into_inner) };
        let left = until.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    fn accept(self: &Arc<Shared>, listener: &TcpListener) {
        for client in listener.incoming() {
            let Ok(client) = client else { continue };
            if self.lock().ended {
                return;
            }
            // Where there is no server, the client sees its connection end.
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
                let [taking, giving] = [(); 2].map(|()| Arc::clone(self));
                std::thread::spawn(move || taking.take(flow, from));
                std::thread::spawn(move || giving.give(flow, to));
            }
        }
    }

    /// Takes in what comes.
    fn take(&self, flow: usize, mut from: TcpStream) {
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = from.read(&mut buffer).unwrap_or(0);
            let mut state = self.lock();
            let at = &mut state.flows[flow];
            at.passed += read as u64;
            if read == 0 || at.broken {
                at.over = true;
                self.changed.notify_all();
                let _ = from.shutdown(Shutdown::Read);
                return;
            }
            let takes =
                self.slow.rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(read as f64 / rate as f64));
            let now = Instant::now();
            let taken = at.taken.map_or(now, |last| last.max(now)) + takes;
            at.taken = Some(taken);
            at.pending.push_back((taken + self.slow.delay, buffer[..read].to_vec()));
            at.bytes += read;
            self.changed.notify_all();
            while state.flows[flow].bytes > WINDOW && !state.flows[flow].broken {
                state = self.wait(state, None);
            }
        }
    }

    /// Lets leave what is due.
    fn give(&self, flow: usize, mut to: TcpStream) {
        let mut state = self.lock();
        loop {
            let (frozen, ended) = (state.frozen, state.ended);
            let at = &mut state.flows[flow];
            let due = at.pending.front().map(|&(due, _)| due);
            match due {
                _ if ended => break,
                _ if frozen => state = self.wait(state, None),
                None if at.over => break,
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
        state.flows[flow].broken = true;
        state.flows[flow].pending.clear();
        self.changed.notify_all();
        drop(state);
        let _ = to.shutdown(Shutdown::Write);
    }
}

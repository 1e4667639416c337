//! The exchange over TCP and over the in-memory transport: sizes around the chunk, peers that use one direction at a time,
//! truncated streams, silent peers, and a client that hangs up.

use std::cell::Cell;
use std::thread;

use super::*;
use crate::rpc::transport::memory::{LinkConditions, pair};
use crate::rpc::transport::{Connection, dial, listen};

/// Upper limit of every wait in these tests; no test comes close to it.
const WATCHDOG: Duration = Duration::from_secs(30);

/// A timeout that a test lets expire.
const SHORT: Duration = Duration::from_millis(20);

const CHUNK: usize = TRANSFER_CHUNK_BYTES as usize;

fn tcp_pair() -> (Connection, Connection) {
    let listener = listen("127.0.0.1", 0).unwrap();
    let ours = dial(&[listener.local_addr()], &Deadline::after(WATCHDOG)).unwrap().1;
    (ours, listener.accept(&Deadline::after(WATCHDOG)).unwrap().unwrap())
}

fn pairs() -> Vec<(Connection, Connection)> {
    let memory = (0..4).map(|seed| pair(LinkConditions { seed, cut_after: None }));
    [tcp_pair()].into_iter().chain(memory).collect()
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

/// Sends bytes in chunks of any length, and keeps what is received.
struct Bytes {
    outgoing: Vec<u8>,
    sent: usize,
    chunk: usize,
    received: Vec<u8>,
}

impl Bytes {
    fn new(outgoing: Vec<u8>, chunk: usize) -> Bytes {
        Bytes { outgoing, sent: 0, chunk, received: Vec::new() }
    }
}

impl Payload for Bytes {
    type Error = ExchangeError;

    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, ExchangeError> {
        let rest = &self.outgoing[self.sent..];
        let next = &rest[..self.chunk.min(rest.len())];
        self.sent += next.len();
        Ok(Some(next.to_vec()).filter(|next| !next.is_empty()))
    }

    fn receive(&mut self, bytes: &[u8]) -> Result<(), ExchangeError> {
        assert!(bytes.len() <= CHUNK);
        self.received.extend_from_slice(bytes);
        Ok(())
    }
}

fn limits(hung_up: &dyn Fn() -> bool) -> ExchangeLimits<'_> {
    ExchangeLimits { stall: WATCHDOG, deadline: Deadline::after(WATCHDOG), hung_up }
}

fn exchange_bytes(
    link: &mut Duplex,
    bytes: &mut Bytes,
    incoming: usize,
    limits: &ExchangeLimits<'_>,
) -> Result<(), ExchangeError> {
    exchange(link, &AdaptiveSpin::new(Duration::ZERO), incoming as u64, bytes, limits)
}

#[test]
fn both_ends_receive_what_the_other_sends() {
    for (seed, (len, chunk)) in
        (0..).zip([(1, 1), (24, 24), (CHUNK - 1, CHUNK), (CHUNK, CHUNK), (CHUNK + 1, 1000), (3 * CHUNK + 7, CHUNK)])
    {
        for (ours, theirs) in pairs() {
            let data = [noise(seed, len), noise(seed + 100, len)];
            thread::scope(|scope| {
                let other = scope.spawn(|| {
                    let (mut link, mut bytes) = (theirs.into_duplex(), Bytes::new(data[1].clone(), chunk));
                    exchange_bytes(&mut link, &mut bytes, len, &limits(&|| false)).unwrap();
                    (link, bytes.received)
                });
                let (mut link, mut bytes) = (ours.into_duplex(), Bytes::new(data[0].clone(), chunk));
                exchange_bytes(&mut link, &mut bytes, len, &limits(&|| false)).unwrap();
                let (_theirs, received) = other.join().unwrap();
                assert!(bytes.received == data[1] && received == data[0], "{len} bytes");
            });
        }
    }
}

/// llama.cpp's rank 0 sends all before it reads, and its rank 1 reads all before it sends. More bytes than the connection
/// buffers.
#[test]
fn a_peer_may_use_one_direction_at_a_time() {
    let len = 16 << 20;
    for sends_first in [true, false] {
        let (ours, theirs) = tcp_pair();
        let data = [noise(1, len), noise(2, len)];
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let (mut receiver, mut sender) = theirs.split();
                let mut got = vec![0; len];
                if sends_first {
                    sender.write_all(&[&data[1]], WATCHDOG).unwrap();
                }
                receiver.read_exact(&mut got, &Deadline::after(WATCHDOG)).unwrap();
                if !sends_first {
                    sender.write_all(&[&data[1]], WATCHDOG).unwrap();
                }
                assert!(got == data[0]);
                (receiver, sender)
            });
            let (mut link, mut bytes) = (ours.into_duplex(), Bytes::new(data[0].clone(), CHUNK));
            exchange_bytes(&mut link, &mut bytes, len, &limits(&|| false)).unwrap();
            assert!(bytes.received == data[1]);
            other.join().unwrap();
        });
    }
}

#[test]
fn a_truncated_stream_is_an_error() {
    let len = 2 * CHUNK;
    for sent in [0, 1, CHUNK, len - 1] {
        for (ours, theirs) in pairs() {
            thread::scope(|scope| {
                scope.spawn(move || {
                    let (mut receiver, mut sender) = theirs.split();
                    sender.write_all(&[&noise(3, sent)], WATCHDOG).unwrap();
                    sender.finish(&Deadline::after(WATCHDOG)).unwrap();
                    // Reads on, so that only the missing bytes are an error.
                    let mut rest = [0; 4096];
                    while matches!(receiver.read_into(&mut rest, &Deadline::after(WATCHDOG)), Ok(1..)) {}
                });
                let (mut link, mut bytes) = (ours.into_duplex(), Bytes::new(noise(4, len), CHUNK));
                let error = exchange_bytes(&mut link, &mut bytes, len, &limits(&|| false)).unwrap_err();
                assert!(matches!(error, ExchangeError::Transport(TransportError::Closed)), "{sent}: {error}");
            });
        }
    }
}

/// Before the peer's first byte the limit of the whole exchange counts: a peer that sends nothing, one that reads nothing, and
/// one that sends a byte now and then. After it, the stall limit: a peer that sends one byte and no more.
#[test]
fn an_exchange_ends_at_its_limits() {
    let (ours, theirs) = tcp_pair();
    let mut link = ours.into_duplex();
    let (_receiver, mut sender) = theirs.split();
    let timed_out = |link: &mut Duplex, mut bytes: Bytes, incoming, stall, whole| {
        let limits = ExchangeLimits { stall, deadline: Deadline::after(whole), hung_up: &|| false };
        let error = exchange_bytes(link, &mut bytes, incoming, &limits).unwrap_err();
        assert!(matches!(error, ExchangeError::Transport(TransportError::TimedOut { after: SHORT, .. })), "{error}");
    };
    let nothing = || Bytes::new(Vec::new(), 1);
    timed_out(&mut link, nothing(), 1, WATCHDOG, SHORT);
    sender.write_all(&[&[0]], WATCHDOG).unwrap();
    timed_out(&mut link, nothing(), 2, SHORT, WATCHDOG);
    timed_out(&mut link, Bytes::new(vec![0; 64 << 20], CHUNK), 0, WATCHDOG, SHORT);
    drop((link, sender));

    let (ours, theirs) = tcp_pair();
    let mut link = ours.into_duplex();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (_receiver, mut sender) = theirs.split();
            while sender.write_all(&[&[0]], WATCHDOG).is_ok() {
                thread::yield_now();
            }
        });
        let whole = ExchangeLimits { stall: WATCHDOG, deadline: Deadline::after(SHORT), hung_up: &|| false };
        let error = exchange_bytes(&mut link, &mut Bytes::new(Vec::new(), 1), usize::MAX, &whole).unwrap_err();
        assert!(matches!(error, ExchangeError::Transport(TransportError::TimedOut { after: SHORT, .. })), "{error}");
        drop(link);
    });
}

#[test]
fn an_exchange_ends_when_the_client_hangs_up() {
    for (ours, _theirs) in pairs() {
        let polls = Cell::new(0);
        let hung_up = || polls.replace(polls.get() + 1) == 2;
        let mut link = ours.into_duplex();
        let error = exchange_bytes(&mut link, &mut Bytes::new(vec![1; 10], 10), 10, &limits(&hung_up)).unwrap_err();
        assert!(matches!(error, ExchangeError::ClientHungUp), "{error}");
    }
}

/// The peer's first byte arrives long after the stall limit has passed.
#[test]
fn the_stall_limit_begins_with_the_first_byte_of_the_peer() {
    let (ours, theirs) = tcp_pair();
    let (_receiver, sender) = theirs.split();
    let (sender, polls) = (std::cell::RefCell::new(sender), Cell::new(0));
    let hung_up = || {
        if polls.replace(polls.get() + 1) == 3 {
            sender.borrow_mut().write_all(&[&[7]], WATCHDOG).unwrap();
        }
        false
    };
    let limits =
        ExchangeLimits { stall: Duration::from_nanos(1), deadline: Deadline::after(WATCHDOG), hung_up: &hung_up };
    let mut bytes = Bytes::new(vec![1], 1);
    exchange_bytes(&mut ours.into_duplex(), &mut bytes, 1, &limits).unwrap();
    assert_eq!(bytes.received, [7]);
}

/// Sends three bytes; the device needs longer for the third than the stall limit.
struct SlowDevice {
    sent: u8,
}

impl Payload for SlowDevice {
    type Error = ExchangeError;

    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, ExchangeError> {
        self.sent += 1;
        let busy = Deadline::after(SHORT);
        while self.sent == 3 && busy.remaining().is_some() {
            thread::yield_now();
        }
        Ok((self.sent <= 3).then(|| vec![self.sent]))
    }

    fn receive(&mut self, _: &[u8]) -> Result<(), ExchangeError> {
        Ok(())
    }
}

#[test]
fn progress_after_a_long_wait_for_the_device_renews_the_stall_limit() {
    let (ours, theirs) = tcp_pair();
    let (mut receiver, mut sender) = theirs.split();
    let mut link = ours.into_duplex();
    sender.write_all(&[&[0]], WATCHDOG).unwrap();
    assert!(link.wait(Interest::Read, &Deadline::after(WATCHDOG)).unwrap());
    let limits = ExchangeLimits { stall: SHORT / 2, deadline: Deadline::after(WATCHDOG), hung_up: &|| false };
    let spin = AdaptiveSpin::new(Duration::ZERO);
    exchange(&mut link, &spin, 1, &mut SlowDevice { sent: 0 }, &limits).unwrap();
    let mut got = [0; 3];
    receiver.read_exact(&mut got, &Deadline::after(WATCHDOG)).unwrap();
    assert_eq!(got, [1, 2, 3]);
}

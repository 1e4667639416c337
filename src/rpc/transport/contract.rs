//! The contract of a transport, for each of them.

use super::memory::{Weather, pair};
use super::*;
use std::net::Ipv4Addr;
use std::thread;

/// Longer than anything here takes.
const WATCHDOG: Duration = Duration::from_secs(30);

/// Long enough for another thread to be waiting, and short enough to pass in a test.
const SHORT: Duration = Duration::from_millis(20);

/// More than any transport keeps for a peer that reads nothing.
const MUCH: usize = 64 << 20;

fn later() -> Deadline {
    Deadline::after(WATCHDOG)
}

fn tcp_pair() -> (Connection, Connection) {
    let listener = listen("127.0.0.1", 0).unwrap();
    let ours = dial(&[listener.local_addr()], &later()).unwrap().1;
    (ours, listener.accept(&later()).unwrap().unwrap())
}

/// Runs a test over a pair of each transport.
fn each(test: impl Fn(Connection, Connection)) {
    let (ours, theirs) = tcp_pair();
    test(ours, theirs);
    for seed in 0..16 {
        let (ours, theirs) = pair(Weather { seed, cut_after: None });
        test(ours, theirs);
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

#[test]
fn bytes_come_in_order_from_parts_of_any_lengths() {
    each(|ours, theirs| {
        let data = noise(7, 300_000);
        let (_, mut sender) = ours.split();
        let (mut receiver, _keep) = theirs.split();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut rest = &data[..];
                let mut rng = fastrand::Rng::with_seed(3);
                while !rest.is_empty() {
                    let parts: Vec<&[u8]> = (0..rng.usize(1..5))
                        .map(|_| {
                            let (part, behind) = rest.split_at(rng.usize(0..40_000).min(rest.len()));
                            rest = behind;
                            part
                        })
                        .collect();
                    sender.write_all(&parts, WATCHDOG).unwrap();
                }
                sender.finish(&later()).unwrap();
            });
            let mut got = vec![0; data.len()];
            receiver.read_exact(&mut got, &later()).unwrap();
            assert!(got == data);
            assert_eq!(receiver.read_into(&mut [0], &later()).unwrap(), 0);
            // The end stays.
            assert!(matches!(receiver.read_exact(&mut [0], &later()), Err(TransportError::Closed)));
        });
    });
}

#[test]
fn both_directions_go_on_at_the_same_time() {
    each(|ours, theirs| {
        let data = noise(9, 1 << 20);
        let (mut our_receiver, mut our_sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        thread::scope(|scope| {
            // Neither end reads before it has sent more than the other one's room, but for its other thread.
            scope.spawn(|| our_sender.write_all(&[&data], WATCHDOG).unwrap());
            scope.spawn(|| their_sender.write_all(&[&data], WATCHDOG).unwrap());
            for receiver in [&mut our_receiver, &mut their_receiver] {
                let data = &data;
                scope.spawn(move || {
                    let mut got = vec![0; data.len()];
                    receiver.read_exact(&mut got, &later()).unwrap();
                    assert!(&got == data);
                });
            }
        });
    });
}

#[test]
fn half_a_close_leaves_the_other_direction() {
    each(|ours, theirs| {
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        sender.write_all(&[b"last"], WATCHDOG).unwrap();
        sender.finish(&later()).unwrap();
        assert!(sender.write_all(&[b"more"], WATCHDOG).unwrap_err().is_reset());
        let mut got = [0; 4];
        their_receiver.read_exact(&mut got, &later()).unwrap();
        assert_eq!(&got, b"last");
        assert_eq!(their_receiver.read_into(&mut got, &later()).unwrap(), 0);
        their_sender.write_all(&[b"word"], WATCHDOG).unwrap();
        receiver.read_exact(&mut got, &later()).unwrap();
        assert_eq!(&got, b"word");
    });
}

/// Some first attempts to finish find no room, as TLS's close_notify does behind a full socket. The peer sees the end all the same.
#[test]
fn an_end_that_finds_no_room_is_sent_later() {
    let mut refused = 0;
    for seed in 0..64 {
        let (ours, theirs) = pair(Weather { seed, cut_after: None });
        refused += u32::from(!ours.0.try_finish().unwrap());
        let (_keep, mut sender) = ours.split();
        sender.finish(&later()).unwrap();
        let (mut receiver, _keep_theirs) = theirs.split();
        assert_eq!(receiver.read_into(&mut [0], &later()).unwrap(), 0);
        // It stays finished.
        sender.finish(&Deadline::after(Duration::ZERO)).unwrap();
    }
    assert!(refused > 0);
}

/// A transport that never has room.
#[derive(Debug)]
struct Full;

impl Transport for Full {
    fn try_read(&self, _: &mut [u8]) -> Result<Option<usize>, TransportError> {
        Ok(None)
    }

    fn try_write(&self, _: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        Ok(None)
    }

    fn wait(&self, _: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        Ok(deadline.left().is_some())
    }

    fn readable(&self) -> bool {
        false
    }

    fn try_finish(&self) -> Result<bool, TransportError> {
        Ok(false)
    }

    fn abort(&self) {}

    fn peer(&self) -> PeerAddr {
        PeerAddr::Local(0)
    }
}

#[test]
fn an_end_without_room_fails_at_its_deadline() {
    let (_, mut sender) = Connection::new(Full).split();
    let told = sender.finish(&Deadline::after(SHORT)).unwrap_err();
    assert!(matches!(told, TransportError::TimedOut { after: SHORT, .. }), "{told:?}");
}

#[test]
fn an_abort_wakes_a_reader_and_a_writer() {
    each(|ours, theirs| {
        let (aborter, other) = (ours.aborter(), ours.aborter());
        let (mut receiver, mut sender) = ours.split();
        thread::scope(|scope| {
            let reads = scope.spawn(move || receiver.read_into(&mut [0; 16], &later()));
            // It waits, because nobody reads.
            let writes = scope.spawn(move || sender.write_all(&[&vec![7; MUCH]], WATCHDOG));
            let waited = thread::spawn(move || {
                let (mut receiver, _keep) = theirs.split();
                // What has come is left in the way: the writer is stuck, or about to be.
                receiver.read_exact(&mut [0; 1000], &later()).unwrap();
                receiver
            });
            let _theirs = waited.join().unwrap();
            aborter.abort();
            other.abort();
            assert!(matches!(reads.join().unwrap(), Ok(0) | Err(TransportError::Reset(_))));
            assert!(writes.join().unwrap().unwrap_err().is_reset());
        });
    });
}

#[test]
fn a_dropped_connection_ends_for_its_peer() {
    each(|ours, theirs| {
        let (mut receiver, mut sender) = theirs.split();
        drop(ours);
        assert!(matches!(receiver.read_into(&mut [0; 16], &later()), Ok(0) | Err(TransportError::Reset(_))));
        // A system may take some bytes before it hears of the end.
        assert!(sender.write_all(&[&vec![7; MUCH]], WATCHDOG).unwrap_err().is_reset());
    });
}

#[test]
fn waits_end_at_their_deadlines() {
    each(|ours, theirs| {
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        let since = Instant::now();
        let told = receiver.read_into(&mut [0; 16], &Deadline::after(SHORT)).unwrap_err();
        assert!(matches!(told, TransportError::TimedOut { after: SHORT, .. }), "{told:?}");
        assert!(since.elapsed() >= SHORT);
        // One that has passed reads what is there, and no more.
        their_sender.write_all(&[b"x"], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0], &later()).unwrap();
        assert!(receiver.read_into(&mut [0], &Deadline::after(Duration::ZERO)).unwrap_err().is_timeout());
        let told = sender.write_all(&[&vec![7; MUCH]], SHORT).unwrap_err();
        assert!(matches!(told, TransportError::TimedOut { after: SHORT, .. }), "{told:?}");
        // The other direction goes on, and so does what has left of this one.
        their_sender.write_all(&[b"y"], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0], &later()).unwrap();
        their_receiver.read_exact(&mut [0; 1000], &later()).unwrap();
    });
}

#[test]
fn a_drip_does_not_outlast_the_deadline() {
    each(|ours, theirs| {
        let (mut receiver, _keep) = ours.split();
        let (_, mut sender) = theirs.split();
        thread::scope(|scope| {
            // Until the reader has given up, which it does with its halves.
            scope.spawn(move || while sender.write_all(&[b"."], WATCHDOG).is_ok() {});
            let mut much = vec![0; 1 << 30];
            let told = receiver.read_exact(&mut much, &Deadline::after(SHORT)).unwrap_err();
            assert!(told.is_timeout(), "{told:?}");
            drop((receiver, _keep));
        });
    });
}

#[test]
fn readable_tells_of_bytes_and_of_the_end() {
    each(|ours, theirs| {
        let (mut receiver, _keep) = ours.split();
        let (_, mut sender) = theirs.split();
        assert!(!receiver.readable());
        sender.write_all(&[b"ab"], WATCHDOG).unwrap();
        // A look alone does not bring delayed bytes closer; a read that finds nothing does.
        let mut got = [0];
        receiver.read_exact(&mut got, &later()).unwrap();
        assert!(receiver.readable());
        receiver.read_exact(&mut got, &later()).unwrap();
        assert!(!receiver.readable());
        sender.finish(&later()).unwrap();
        assert_eq!(receiver.read_into(&mut got, &later()).unwrap(), 0);
        assert!(receiver.readable());
    });
}

#[test]
fn what_a_peer_sends_at_last_is_drained() {
    each(|ours, theirs| {
        let (receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        drop(receiver);
        thread::scope(|scope| {
            scope.spawn(move || {
                their_sender.write_all(&[&vec![7; 1 << 20]], WATCHDOG).unwrap();
                their_sender.finish(&later()).unwrap();
            });
            sender.drain(&later()).unwrap();
        });
        drop(sender);
        assert!(matches!(their_receiver.read_into(&mut [0], &later()), Ok(0)));
    });
}

#[test]
fn ends_are_named() {
    let (ours, theirs) = tcp_pair();
    let ip = |peer| match peer {
        PeerAddr::Ip(addr) => addr.ip(),
        PeerAddr::Local(number) => panic!("local {number}"),
    };
    assert_eq!([ip(ours.peer()), ip(theirs.peer())], [Ipv4Addr::LOCALHOST; 2]);
    let (ours, theirs) = pair(Weather { seed: 1, cut_after: None });
    assert_eq!(ours.peer(), theirs.peer());
    assert!(ours.peer().to_string().starts_with("local#"));
}

#[test]
fn a_listener_names_the_address_that_reaches_it() {
    let weather = Weather { seed: 1, cut_after: None };
    for listener in [listen("127.0.0.1", 0).unwrap(), Box::new(super::memory::listen(weather))] {
        let addr = listener.local_addr();
        assert_eq!(resolve(&addr.to_string()).unwrap(), std::slice::from_ref(&addr));
        let _ours = dial(&[addr], &later()).unwrap();
        assert!(listener.accept(&later()).unwrap().is_some());
    }
}

/// A cut ends both ends of a connection, wherever it comes.
#[test]
fn a_cut_ends_both_ends() {
    for after in [1, 2, 1000, 100_000] {
        let (ours, theirs) = pair(Weather { seed: after, cut_after: Some(after) });
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, _keep) = theirs.split();
        thread::scope(|scope| {
            scope.spawn(move || assert!(sender.write_all(&[&vec![7; 1 << 20]], WATCHDOG).unwrap_err().is_reset()));
            let (mut got, mut buf) = (0, vec![0; 4096]);
            loop {
                match their_receiver.read_into(&mut buf, &later()).unwrap() {
                    0 => break,
                    n => got += n as u64,
                }
            }
            assert_eq!(got, after);
            assert_eq!(receiver.read_into(&mut buf, &later()).unwrap(), 0);
        });
    }
}

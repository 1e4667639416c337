//! Contract tests of transports: every test runs over TCP and over the in-memory transport with several seeds.

use super::memory::{
    Dialler, Fault, Injection, LinkConditions, inject_next, latest_link, listen_at, pair, reserve_number,
};
use super::tls::{AllowedPeers, Credentials, Verdict};
use super::*;
use crate::rpc::keys::{Identity, PublicKey, SecretKey};
use std::net::Ipv4Addr;
use std::thread;

/// Upper limit of every wait in these tests; no test comes close to it.
const WATCHDOG: Duration = Duration::from_secs(30);

/// Long enough for another thread to start waiting, and short enough for a test.
const SHORT: Duration = Duration::from_millis(20);

/// More bytes than any transport buffers for a peer that reads nothing.
const MORE_THAN_BUFFERED: usize = 64 << 20;

fn watchdog() -> Deadline {
    Deadline::after(WATCHDOG)
}

fn tcp_pair() -> (Connection, Connection) {
    let listener = listen("127.0.0.1", 0).unwrap();
    let ours = dial(&[listener.local_addr()], &watchdog()).unwrap().1;
    (ours, listener.accept(&watchdog()).unwrap().unwrap())
}

/// A server's TLS and a client's, each with a key of its own that the other demands.
pub(crate) fn tls_ends() -> (ServerTls, ClientTls) {
    /// Allows one key.
    #[derive(Debug)]
    struct OneKey(PublicKey);

    impl AllowedPeers for OneKey {
        fn check(&self, identity: &Identity) -> Verdict {
            let known = *identity == Identity::Key(self.0);
            if known { Verdict::Allowed(KeyName::new(self.0, "client")) } else { Verdict::Unknown }
        }
    }

    let [server, client] = [(); 2].map(|()| Credentials::of_key(&SecretKey::generate().unwrap()).unwrap());
    let allowed = Arc::new(OneKey(client.public_key()));
    (ServerTls::new(&server, allowed).unwrap(), ClientTls::new(&client, &[server.public_key()]).unwrap())
}

/// Both ends have a thread during the handshake, as they have in sessions.
pub(super) fn tls_pair((server, client): (ServerTls, ClientTls)) -> (Connection, Connection) {
    let listener = listen_on(bind("127.0.0.1", 0).unwrap(), Some(server)).unwrap();
    let ours = dial_with(&[listener.local_addr()], &watchdog(), Some(&client)).unwrap().1;
    let theirs = listener.accept(&watchdog()).unwrap().unwrap();
    // One byte in each direction.
    let exchange = |connection: &Connection| {
        let (mut receiver, mut sender) = (Receiver(Arc::clone(&connection.0)), Sender(Arc::clone(&connection.0)));
        sender.write_all(&[&[7]], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0], &watchdog()).unwrap();
    };
    thread::scope(|scope| {
        scope.spawn(|| exchange(&theirs));
        exchange(&ours);
    });
    (ours, theirs)
}

/// Runs a test over a connected pair of each transport.
fn for_each_transport(test: impl Fn(Connection, Connection)) {
    let (ours, theirs) = tcp_pair();
    test(ours, theirs);
    let (ours, theirs) = tls_pair(tls_ends());
    test(ours, theirs);
    for seed in 0..16 {
        let (ours, theirs) = pair(LinkConditions { seed, cut_after: None });
        test(ours, theirs);
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

#[test]
fn bytes_arrive_in_order_from_parts_of_any_lengths() {
    for_each_transport(|ours, theirs| {
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
                sender.finish(&watchdog()).unwrap();
            });
            let mut got = vec![0; data.len()];
            receiver.read_exact(&mut got, &watchdog()).unwrap();
            assert!(got == data);
            assert_eq!(receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
            // The end of the stream is permanent.
            assert!(matches!(receiver.read_exact(&mut [0], &watchdog()), Err(TransportError::Closed)));
        });
    });
}

#[test]
fn both_directions_transfer_concurrently() {
    for_each_transport(|ours, theirs| {
        let data = noise(9, 1 << 20);
        let (mut our_receiver, mut our_sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        thread::scope(|scope| {
            // Each end sends more than its peer buffers: this completes only because a second thread reads.
            scope.spawn(|| our_sender.write_all(&[&data], WATCHDOG).unwrap());
            scope.spawn(|| their_sender.write_all(&[&data], WATCHDOG).unwrap());
            for receiver in [&mut our_receiver, &mut their_receiver] {
                let data = &data;
                scope.spawn(move || {
                    let mut got = vec![0; data.len()];
                    receiver.read_exact(&mut got, &watchdog()).unwrap();
                    assert!(&got == data);
                });
            }
        });
    });
}

#[test]
fn a_half_close_leaves_the_other_direction_open() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        sender.write_all(&[b"last"], WATCHDOG).unwrap();
        sender.finish(&watchdog()).unwrap();
        assert!(sender.write_all(&[b"more"], WATCHDOG).unwrap_err().is_reset());
        let mut got = [0; 4];
        their_receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert_eq!(&got, b"last");
        assert_eq!(their_receiver.read_into(&mut got, &watchdog()).unwrap(), 0);
        their_sender.write_all(&[b"word"], WATCHDOG).unwrap();
        receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert_eq!(&got, b"word");
    });
}

/// Some first attempts to finish find no room, as for TLS's close_notify while the socket is full. The peer still sees the end of
/// the stream.
#[test]
fn a_half_close_without_room_is_retried() {
    let mut stalls = 0;
    for seed in 0..64 {
        let (ours, theirs) = pair(LinkConditions { seed, cut_after: None });
        stalls += u32::from(!ours.0.try_finish().unwrap());
        let (_keep, mut sender) = ours.split();
        sender.finish(&watchdog()).unwrap();
        let (mut receiver, _keep_theirs) = theirs.split();
        assert_eq!(receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
        // Finishing again is allowed.
        sender.finish(&Deadline::after(Duration::ZERO)).unwrap();
    }
    assert!(stalls > 0);
}

/// A transport that never has room.
#[derive(Debug)]
struct NeverWritable;

impl Transport for NeverWritable {
    fn try_read(&self, _: &mut [u8]) -> Result<Option<usize>, TransportError> {
        Ok(None)
    }

    fn try_write(&self, _: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        Ok(None)
    }

    fn wait(&self, _: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        Ok(deadline.remaining().is_some())
    }

    fn readable(&self) -> bool {
        false
    }

    fn hung_up(&self) -> bool {
        false
    }

    fn set_loss_timeout(&self, _: Duration) {}

    fn try_finish(&self) -> Result<bool, TransportError> {
        Ok(false)
    }

    fn abort(&self) {}

    fn peer(&self) -> PeerAddr {
        PeerAddr::Local(0)
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        None
    }
}

#[test]
fn a_half_close_without_room_fails_at_its_deadline() {
    let (_, mut sender) = Connection::new(NeverWritable).split();
    let error = sender.finish(&Deadline::after(SHORT)).unwrap_err();
    assert!(matches!(error, TransportError::TimedOut { after: SHORT, .. }), "{error:?}");
}

#[test]
fn a_hang_up_is_noticed_without_reading() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, _keep) = ours.split();
        let (_their_receiver, mut their_sender) = theirs.split();
        assert!(!receiver.hung_up());
        their_sender.write_all(&[b"unread"], WATCHDOG).unwrap();
        // On other systems than Linux, TCP hides the end of the stream until the unread bytes are read.
        if cfg!(not(target_os = "linux")) {
            receiver.read_exact(&mut [0; 6], &watchdog()).unwrap();
        }
        assert!(!receiver.hung_up());
        their_sender.finish(&watchdog()).unwrap();
        let deadline = watchdog();
        while !receiver.hung_up() {
            assert!(deadline.remaining().is_some());
            thread::yield_now();
        }
    });
}

/// One thread sends more than its peer buffers, and receives as much at the same time.
#[test]
fn one_thread_transfers_in_both_directions() {
    for_each_transport(|ours, theirs| {
        let data = noise(5, 1 << 20);
        let transfer = |mut link: Duplex| {
            let (mut sent, mut flushed, mut got) = (0, false, Vec::new());
            while !flushed || got.len() < data.len() {
                let mut buffer = [0; 10_000];
                let mut progress = false;
                if sent < data.len() {
                    let n = link.try_write(&data[sent..]).unwrap();
                    sent += n.unwrap_or(0);
                    progress |= n.is_some();
                } else if !flushed {
                    flushed = link.try_flush().unwrap();
                    progress |= flushed;
                }
                if got.len() < data.len()
                    && let Some(n) = link.try_read(&mut buffer).unwrap()
                {
                    got.extend_from_slice(&buffer[..n]);
                    progress = true;
                }
                let interest = if flushed { Interest::Read } else { Interest::ReadOrWrite };
                assert!(progress || link.wait(interest, &watchdog()).unwrap());
            }
            assert!(got == data);
            link // closed only when both ends are done
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| transfer(theirs.into_duplex()));
            let _ours = transfer(ours.into_duplex());
            other.join().unwrap();
        });
    });
}

#[test]
fn an_abort_wakes_a_reader_and_a_writer() {
    for_each_transport(|ours, theirs| {
        let (aborter, other) = (ours.aborter(), ours.aborter());
        let (mut receiver, mut sender) = ours.split();
        thread::scope(|scope| {
            let reads = scope.spawn(move || receiver.read_into(&mut [0; 16], &watchdog()));
            // The write blocks, because the peer reads only its first 1000 bytes.
            let writes = scope.spawn(move || sender.write_all(&[&vec![7; MORE_THAN_BUFFERED]], WATCHDOG));
            let waited = thread::spawn(move || {
                let (mut receiver, _keep) = theirs.split();
                // The rest stays unread: the writer blocks, or is about to.
                receiver.read_exact(&mut [0; 1000], &watchdog()).unwrap();
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
fn dropping_a_connection_ends_it_for_its_peer() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, mut sender) = theirs.split();
        drop(ours);
        assert!(matches!(receiver.read_into(&mut [0; 16], &watchdog()), Ok(0) | Err(TransportError::Reset(_))));
        // The system may accept some bytes before it learns of the end.
        assert!(sender.write_all(&[&vec![7; MORE_THAN_BUFFERED]], WATCHDOG).unwrap_err().is_reset());
    });
}

#[test]
fn reads_and_writes_time_out_at_their_deadlines() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        let since = Instant::now();
        let error = receiver.read_into(&mut [0; 16], &Deadline::after(SHORT)).unwrap_err();
        assert!(matches!(error, TransportError::TimedOut { after: SHORT, .. }), "{error:?}");
        assert!(since.elapsed() >= SHORT);
        // A deadline that has passed still returns available bytes, but does not wait.
        their_sender.write_all(&[b"x"], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0], &watchdog()).unwrap();
        assert!(receiver.read_into(&mut [0], &Deadline::after(Duration::ZERO)).unwrap_err().is_timeout());
        let error = sender.write_all(&[&vec![7; MORE_THAN_BUFFERED]], SHORT).unwrap_err();
        assert!(matches!(error, TransportError::TimedOut { after: SHORT, .. }), "{error:?}");
        // The receiving direction still works, and the bytes that were sent before the timeout arrive.
        their_sender.write_all(&[b"y"], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0], &watchdog()).unwrap();
        their_receiver.read_exact(&mut [0; 1000], &watchdog()).unwrap();
    });
}

#[test]
fn a_slow_drip_of_bytes_does_not_extend_the_deadline() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, _keep) = ours.split();
        let (_, mut sender) = theirs.split();
        thread::scope(|scope| {
            // Until the reader has timed out and dropped its halves.
            scope.spawn(move || while sender.write_all(&[b"."], WATCHDOG).is_ok() {});
            let mut more_than_arrives = vec![0; 1 << 30];
            let error = receiver.read_exact(&mut more_than_arrives, &Deadline::after(SHORT)).unwrap_err();
            assert!(error.is_timeout(), "{error:?}");
            drop((receiver, _keep));
        });
    });
}

#[test]
fn readable_is_true_for_available_bytes_and_at_the_end() {
    for_each_transport(|ours, theirs| {
        let (mut receiver, _keep) = ours.split();
        let (_, mut sender) = theirs.split();
        assert!(!receiver.readable());
        sender.write_all(&[b"ab"], WATCHDOG).unwrap();
        // `readable` alone does not age delayed bytes; an unsuccessful read does.
        let mut got = [0];
        receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert!(receiver.readable());
        receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert!(!receiver.readable());
        sender.finish(&watchdog()).unwrap();
        assert_eq!(receiver.read_into(&mut got, &watchdog()).unwrap(), 0);
        assert!(receiver.readable());
    });
}

#[test]
fn the_last_data_of_a_peer_is_drained() {
    for_each_transport(|ours, theirs| {
        let (receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        drop(receiver);
        thread::scope(|scope| {
            scope.spawn(move || {
                their_sender.write_all(&[&vec![7; 1 << 20]], WATCHDOG).unwrap();
                their_sender.finish(&watchdog()).unwrap();
            });
            sender.drain(&watchdog()).unwrap();
        });
        drop(sender);
        assert!(matches!(their_receiver.read_into(&mut [0], &watchdog()), Ok(0)));
    });
}

#[test]
fn peers_are_named_by_their_address() {
    let (ours, theirs) = tcp_pair();
    let ip = |peer| match peer {
        PeerAddr::Ip(addr) => addr.ip(),
        other => panic!("{other}"),
    };
    assert_eq!([ip(ours.peer()), ip(theirs.peer())], [Ipv4Addr::LOCALHOST; 2]);
    let (ours, theirs) = pair(LinkConditions { seed: 1, cut_after: None });
    assert_eq!(ours.peer(), theirs.peer());
    assert!(ours.peer().to_string().starts_with("local#"));
}

#[test]
fn a_listener_names_the_address_that_reaches_it() {
    let conditions = LinkConditions { seed: 1, cut_after: None };
    for listener in [listen("127.0.0.1", 0).unwrap(), Box::new(super::memory::listen(conditions))] {
        let addr = listener.local_addr();
        assert_eq!(resolve(&addr.to_string()).unwrap(), std::slice::from_ref(&addr));
        let _ours = dial(&[addr], &watchdog()).unwrap();
        assert!(listener.accept(&watchdog()).unwrap().is_some());
    }
}

/// A cut ends both ends of a connection, after any number of bytes.
#[test]
fn a_cut_ends_both_ends() {
    for after in [1, 2, 1000, 100_000] {
        let (ours, theirs) = pair(LinkConditions { seed: after, cut_after: Some(after) });
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, _keep) = theirs.split();
        thread::scope(|scope| {
            scope.spawn(move || assert!(sender.write_all(&[&vec![7; 1 << 20]], WATCHDOG).unwrap_err().is_reset()));
            let (mut got, mut buf) = (0, vec![0; 4096]);
            loop {
                match their_receiver.read_into(&mut buf, &watchdog()).unwrap() {
                    0 => break,
                    n => got += n as u64,
                }
            }
            assert_eq!(got, after);
            assert_eq!(receiver.read_into(&mut buf, &watchdog()).unwrap(), 0);
        });
    }
}

/// The client's end and the server's end of a connection to a new listener, with a fault.
fn broken_pair(seed: u64, injection: Injection) -> (Connection, Connection) {
    let number = reserve_number();
    let listener = listen_at(number, LinkConditions { seed, cut_after: None }, None);
    // In turn before and after the connection is made.
    if seed.is_multiple_of(2) {
        inject_next(number, Dialler::ThisThread, injection);
    }
    let ours = dial(&[Address::Memory(number)], &watchdog()).unwrap().1;
    assert!(latest_link(number, Dialler::OtherThreads).is_none());
    if seed % 2 == 1 {
        latest_link(number, Dialler::ThisThread).unwrap().inject(injection);
    }
    (ours, listener.accept(&watchdog()).unwrap().unwrap())
}

/// An injected half-close ends one direction after its bytes, and leaves the other one open.
#[test]
fn an_injected_half_close_ends_one_direction() {
    for seed in 0..8 {
        let after = 1 + 300 * seed;
        let (ours, theirs) = broken_pair(seed, Injection { fault: Fault::HalfClose, to_server: true, after });
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, mut their_sender) = theirs.split();
        assert!(sender.write_all(&[&vec![7; 4000]], WATCHDOG).unwrap_err().is_reset());
        let mut got = vec![0; after as usize];
        their_receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert_eq!(their_receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
        their_sender.write_all(&[b"word"], WATCHDOG).unwrap();
        receiver.read_exact(&mut [0; 4], &watchdog()).unwrap();
    }
}

/// An injected stall delays bytes and the end of the stream, and loses none. One without an end lasts until an abort.
#[test]
fn an_injected_stall_delivers_nothing_while_it_lasts() {
    for (seed, time) in [(1, Some(SHORT)), (2, None)] {
        let (ours, theirs) = broken_pair(seed, Injection { fault: Fault::Stall(time), to_server: true, after: 2 });
        let aborter = ours.aborter();
        let (_keep, mut sender) = ours.split();
        let (mut receiver, _keep_theirs) = theirs.split();
        let since = Instant::now();
        sender.write_all(&[b"late"], WATCHDOG).unwrap();
        sender.finish(&watchdog()).unwrap();
        assert!(receiver.read_into(&mut [0], &Deadline::after(Duration::ZERO)).unwrap_err().is_timeout());
        if time.is_none() {
            assert!(!receiver.readable() && !receiver.hung_up());
            aborter.abort();
        }
        let mut got = [0; 4];
        receiver.read_exact(&mut got, &watchdog()).unwrap();
        assert_eq!(&got, b"late");
        assert!(time.is_none_or(|time| since.elapsed() >= time));
        assert_eq!(receiver.read_into(&mut got, &watchdog()).unwrap(), 0);
    }
}

/// A reset loses bytes that were sent and not received.
#[test]
fn an_injected_reset_loses_bytes_in_flight() {
    for seed in 0..8 {
        let (ours, theirs) = broken_pair(seed, Injection { fault: Fault::Reset, to_server: true, after: 100 });
        let (mut receiver, mut sender) = ours.split();
        let (mut their_receiver, _keep) = theirs.split();
        assert!(sender.write_all(&[&[7; 100]], WATCHDOG).unwrap_err().is_reset());
        assert_eq!(their_receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
        assert_eq!(receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
    }
}

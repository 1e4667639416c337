//! The connection of a group to one other server. Invariants: messages arrive whole and in the order of each rank; the last message
//! arrives if the connection was attached, and nothing follows it; after a close, the connection's thread ends without a deadline,
//! whatever the other server does; a server that has gone, or does not reply, ends it, too; the memory of the backlog is given back.

use super::link::{GroupLink, SendError};
use crate::device::{DeviceError, MemoryBudget};
use crate::rpc::server::peers::DialThreads;
use crate::rpc::transport::{self, Connection, NEVER, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{ATTACH_GROUP, AttachGroup, NotificationHeader, NotificationKind, PING};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::orders::{fire_earliest, spawn, yield_now};
use crate::sync::{Arc, Mutex, lock};
use shuttle::rand::{Rng, thread_rng};
use std::time::Duration;

/// Bytes that the transport holds: fewer than a message has.
const CAPACITY: usize = 5;

/// First byte of the last message. Those of others are their ranks.
const LAST: u8 = 255;

/// A link whose thread runs.
struct Running {
    link: Arc<GroupLink>,
    budget: Arc<MemoryBudget>,
    is_attached: Arc<AtomicBool>,
    ended: Arc<Mutex<Option<Result<(), DeviceError>>>>,
}

impl Running {
    /// Starts a link to the other end of `own`, for the parts of two ranks.
    fn start(own: Connection) -> Running {
        let budget = MemoryBudget::new(1000);
        let link = GroupLink::new("peer", 1..=1, 2, &budget);
        let (is_attached, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let running = {
            let (link, is_attached, ended) = (Arc::clone(&link), Arc::clone(&is_attached), Arc::clone(&ended));
            let dialer = DialThreads::new().dialer("peer", Ok(own));
            move || {
                let request = AttachGroup { secret: 7, from: 0, to: 1 };
                let result = link.run(&dialer, request, || is_attached.store(true, Ordering::Relaxed));
                *lock(&ended) = Some(result);
            }
        };
        spawn(running);
        Running { link, budget, is_attached, ended }
    }

    /// Waits until the thread has ended, and returns its result.
    fn wait_until_ended(&self) -> Result<(), DeviceError> {
        let ended = loop {
            if let Some(ended) = lock(&self.ended).take() {
                break ended;
            }
            yield_now();
        };
        assert_eq!(self.budget.used(), 0, "memory of the backlog");
        ended
    }

    /// Sends messages of `rank`, not more than two before `received` says so.
    fn send(&self, rank: u8, messages: u8, received: &Arc<[AtomicBool; 2]>) -> impl Fn() + Send + use<> {
        let (link, received) = (Arc::clone(&self.link), Arc::clone(received));
        move || {
            for number in 0..messages {
                while number >= 2 && !received[usize::from(rank)].load(Ordering::Relaxed) {
                    yield_now();
                }
                let data = [rank; 4];
                match link.send(&[rank, number, data.len() as u8], &data) {
                    Ok(()) => {}
                    Err(SendError::Peer(why)) => return assert!(!why.contains("does not receive"), "{why}"),
                    Err(SendError::Memory(e)) => panic!("{e}"),
                }
            }
        }
    }
}

/// Reads ATTACH_GROUP.
fn read_attach(receiver: &mut Receiver) -> Result<(), TransportError> {
    let mut request = [0; 4];
    receiver.read_exact(&mut request, &NEVER)?;
    assert_eq!(request, [ATTACH_GROUP, 7, 0, 1]);
    Ok(())
}

fn reply(sender: &mut Sender, body: &[u8]) -> Result<(), TransportError> {
    let header = NotificationHeader { kind: NotificationKind::Reply, size: body.len() as u64 }.encode();
    sender.write_by(&[&header, body].concat(), &NEVER)
}

/// Reads messages up to the end of the stream, of which it tells `received`. Returns how many came of each rank, and whether the
/// last one did.
fn read_messages(receiver: &mut Receiver, received: &[AtomicBool; 2]) -> ([u8; 2], bool) {
    let mut counts = [0; 2];
    let mut first = [0];
    while receiver.read_into(&mut first, &NEVER).expect("no deadline") > 0 {
        let [rank] = first;
        if rank == LAST {
            assert_eq!(receiver.read_into(&mut first, &NEVER).expect("no deadline"), 0, "bytes after the last message");
            return (counts, true);
        }
        let mut rest = [0; 6];
        if receiver.read_exact(&mut rest, &NEVER).is_err() {
            break;
        }
        let [number, len, data @ ..] = rest;
        assert_eq!((len, data), (4, [rank; 4]), "bytes of a message are mixed up");
        let count = &mut counts[usize::from(rank)];
        assert_eq!(number, *count, "messages of rank {rank}");
        *count += 1;
        received[usize::from(rank)].store(true, Ordering::Relaxed);
    }
    (counts, false)
}

/// Two ranks send, and the link is closed meanwhile or afterwards.
pub(crate) fn messages_of_two_ranks() {
    const MESSAGES: u8 = 3;
    let (own, other) = transport::pair(CAPACITY);
    let received = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
    let waits_for_all = thread_rng().gen_bool(0.5);
    let running = Running::start(own);
    let server = {
        let received = Arc::clone(&received);
        spawn(move || {
            let (mut receiver, mut sender) = other.split();
            if read_attach(&mut receiver).is_err() || reply(&mut sender, &[]).is_err() {
                return ([0; 2], false);
            }
            read_messages(&mut receiver, &received)
        })
    };
    let senders = [0, 1].map(|rank| spawn(running.send(rank, if waits_for_all { MESSAGES } else { 2 }, &received)));
    if waits_for_all {
        senders.into_iter().for_each(|thread| thread.join().unwrap());
    }
    let with_parts = thread_rng().gen_bool(0.5);
    let was_attached = running.link.close(vec![LAST], with_parts);
    let (counts, last) = server.join().unwrap();
    assert_eq!(running.wait_until_ended(), Ok(()));
    assert_eq!(last, was_attached, "the last message of a connection that was attached");
    assert_eq!(running.is_attached.load(Ordering::Relaxed), was_attached);
    assert!(running.link.send(b"more", b"").is_ok(), "dropped");
    if waits_for_all {
        assert!(counts.into_iter().all(|count| count >= 1), "{counts:?}");
        assert!(!with_parts || counts == [MESSAGES; 2], "{counts:?} messages of a rank that has left");
    }
}

/// The link is closed while the other server does not reply to ATTACH_GROUP, refuses it, or ends the connection.
pub(crate) fn closed_before_it_is_attached() {
    let (own, other) = transport::pair(CAPACITY);
    let behaviour = thread_rng().gen_range(0..3);
    let running = Running::start(own);
    let server = spawn(move || {
        let aborter = other.aborter();
        let (mut receiver, mut sender) = other.split();
        if read_attach(&mut receiver).is_ok() {
            match behaviour {
                0 => {}
                1 => _ = reply(&mut sender, b"no"),
                _ => aborter.abort(),
            }
        }
        while receiver.read_into(&mut [0; 8], &NEVER).expect("no deadline") > 0 {}
    });
    assert!(!running.link.close(vec![LAST], true), "attached");
    server.join().unwrap();
    let ended = running.wait_until_ended();
    let refusals: &[_] = match behaviour {
        0 => &[],
        1 => &["no"],
        _ => &["it closed the connection", "connection lost"],
    };
    if let Err(e) = ended {
        assert!(refusals.iter().any(|why| e.to_string().ends_with(why)), "{e}");
    }
    assert!(!running.is_attached.load(Ordering::Relaxed));
}

/// The other server aborts the connection while ranks send; the group fails, and so the link is closed.
pub(crate) fn lost() {
    let (own, other) = transport::pair(CAPACITY);
    let received = Arc::new([AtomicBool::new(true), AtomicBool::new(true)]);
    let reads = thread_rng().gen_bool(0.5);
    let running = Running::start(own);
    let server = spawn(move || {
        let aborter = other.aborter();
        let (mut receiver, mut sender) = other.split();
        read_attach(&mut receiver).expect("the link is not closed yet");
        reply(&mut sender, &[]).expect("the link is not closed yet");
        if reads {
            let _ = receiver.read_into(&mut [0; 4], &NEVER);
        }
        aborter.abort();
    });
    // Otherwise most messages would be in the backlog.
    while !running.is_attached.load(Ordering::Relaxed) && lock(&running.ended).is_none() {
        yield_now();
    }
    let senders = [0, 1].map(|rank| spawn(running.send(rank, 2, &received)));
    server.join().unwrap();
    running.link.close(vec![LAST], thread_rng().gen_bool(0.5));
    senders.into_iter().for_each(|thread| thread.join().unwrap());
    match running.wait_until_ended() {
        Ok(()) | Err(DeviceError::ConnectionLost { .. }) => {}
        Err(e) => assert!(e.to_string().contains("cannot connect"), "{e}"),
    }
}

/// A server that replies to some PINGs of the heartbeat and then to none. Time passes only while it has nothing to read, so that no
/// reply is late.
pub(crate) fn heartbeat() {
    let (own, other) = transport::pair(CAPACITY);
    let replies = thread_rng().gen_range(0..3);
    let running = Running::start(own);
    let ended = Arc::clone(&running.ended);
    let server = spawn(move || {
        let (mut receiver, mut sender) = other.split();
        read_attach(&mut receiver).expect("no deadline");
        reply(&mut sender, &[]).expect("no deadline");
        for _ in 0..replies {
            while !receiver.readable() {
                fire_earliest();
                yield_now();
            }
            let mut ping = [0];
            receiver.read_exact(&mut ping, &NEVER).expect("a PING");
            assert_eq!(ping, [PING]);
            reply(&mut sender, &[0]).expect("the link is open");
        }
        // Keeps the connection.
        while lock(&ended).is_none() {
            fire_earliest();
            yield_now();
        }
    });
    server.join().unwrap();
    let Err(e) = running.wait_until_ended() else { panic!("the link ended, though nothing has closed it") };
    assert!(e.to_string().contains("has not replied to a PING"), "{e}");
}

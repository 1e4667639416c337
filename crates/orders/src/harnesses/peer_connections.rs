//! Connections to other servers. Invariants: a queue is failed once if its last bytes are not acknowledged, and never if they are; a
//! connection that its session closes fails no queue; the connection and every wait for it end with either end.

use super::peer_connection::PeerConnection;
use super::{DialThreads, FailQueue};
use crate::device::DeviceError;
use crate::rpc::transport::{self, Connection, NEVER, Receiver, TransportError};
use crate::rpc::wire::ext::{NotificationHeader, NotificationKind, PEER_WRITE, PING, PeerWrite};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::orders::{spawn, with_clock};
use crate::sync::{self, Arc};
use shuttle::rand::{Rng, thread_rng};
use std::time::Duration;

/// Bytes that the transport holds: fewer than a message has.
const CAPACITY: usize = 6;

/// How the other server behaves after its last reply.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// It ends its sending direction, and reads on.
    Finish,
    /// It aborts the connection.
    Abort,
    /// It reports a protocol error, and refuses what it is sent from then on.
    ProtocolError,
    /// It reads on.
    Read,
    /// It neither reads nor sends.
    Freeze,
}

/// A queue: what fails it, and how often that was called.
struct SendingQueue {
    fail: FailQueue,
    failures: Arc<AtomicU32>,
    with_protocol_error: Arc<AtomicU32>,
}

impl SendingQueue {
    fn new() -> SendingQueue {
        let (failures, with_protocol_error) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (counted, errors) = (Arc::clone(&failures), Arc::clone(&with_protocol_error));
        let fail = move |e: DeviceError| {
            counted.fetch_add(1, Ordering::Relaxed);
            errors.fetch_add(e.to_string().contains("protocol error").into(), Ordering::Relaxed);
        };
        SendingQueue { fail: Arc::new(fail), failures, with_protocol_error }
    }

    /// Sends two pieces with the token, of which the last one has to be acknowledged.
    fn send(&self, connection: &PeerConnection, token: u8) -> Result<(), String> {
        let bytes = [token; 5];
        let (first, last) = bytes.split_at(3);
        connection.send_piece(PeerWrite { token, at: 0, data: first }, None)?;
        connection.send_piece(PeerWrite { token, at: 3, data: last }, Some(&self.fail))
    }

    fn failures(&self) -> u32 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Reads requests, whose bytes it checks, and returns the tokens of the PINGs with a reply. Keeps the connection until `until_ended`
/// returns.
fn serve(connection: Connection, replies: usize, end: End, until_ended: impl FnOnce()) -> Vec<u8> {
    let aborter = connection.aborter();
    let (mut receiver, mut sender) = connection.split();
    let (mut acknowledged, mut last) = (Vec::new(), None);
    let send = |sender: &mut transport::Sender, kind, body: &[u8]| {
        let header = NotificationHeader { kind, size: body.len() as u64 }.encode();
        sender.write_by(&[&header, body].concat(), &NEVER)
    };
    while acknowledged.len() < replies {
        match read_request(&mut receiver, &mut last) {
            Ok(Some(token)) => {
                acknowledged.push(token);
                if send(&mut sender, NotificationKind::Reply, &[0]).is_err() {
                    return acknowledged;
                }
            }
            Ok(None) => {}
            Err(_) => return acknowledged,
        }
    }
    match end {
        End::Finish => sender.finish(&NEVER).expect("room"),
        End::Abort => aborter.abort(),
        // The connection may have ended by itself.
        End::ProtocolError => {
            let _ = send(&mut sender, NotificationKind::ProtocolError, &[]);
            receiver.refuse();
        }
        End::Read | End::Freeze => {}
    }
    if matches!(end, End::Finish | End::Read) {
        while read_request(&mut receiver, &mut last).is_ok() {}
    }
    until_ended();
    acknowledged
}

/// Reads a request. Returns the token of a PING: that of the PEER_WRITE before it.
fn read_request(receiver: &mut Receiver, last: &mut Option<u8>) -> Result<Option<u8>, TransportError> {
    let mut first = [0];
    receiver.read_exact(&mut first, &NEVER)?;
    if first == [PING] {
        return Ok(Some(last.expect("a PING follows a PEER_WRITE")));
    }
    assert_eq!(first, [PEER_WRITE]);
    let mut head = [0; 3];
    receiver.read_exact(&mut head, &NEVER)?;
    let [token, _, len] = head;
    let mut data = vec![0; len.into()];
    receiver.read_exact(&mut data, &NEVER)?;
    assert!(data.iter().all(|&byte| byte == token), "bytes of a message are mixed up");
    *last = Some(token);
    Ok(None)
}

/// Two queues send on a connection that the other server ends after some replies.
pub(crate) fn acknowledgements() {
    let (own, other) = transport::pair(CAPACITY);
    let end = [End::Finish, End::Abort, End::ProtocolError][thread_rng().gen_range(0..3)];
    let replies = thread_rng().gen_range(0..=2);
    let threads = DialThreads::new();
    let connection = PeerConnection::start(threads.dialer("peer", Ok(own))).expect("the thread starts");
    let server = {
        let threads = threads.clone();
        spawn(move || serve(other, replies, end, || threads.wait_until_ended()))
    };
    let senders: Vec<_> = (0..2)
        .map(|token| {
            let connection = Arc::clone(&connection);
            spawn(move || {
                let queue = SendingQueue::new();
                let sent = queue.send(&connection, token);
                (queue, sent)
            })
        })
        .collect();
    let queues = senders.into_iter().map(|thread| thread.join().unwrap());
    let queues: Vec<_> = queues.collect();
    let acknowledged = server.join().unwrap();
    threads.wait_until_ended();
    for (token, (queue, sent)) in (0..).zip(queues) {
        let failures = queue.failures();
        assert!(failures <= 1, "queue {token} was failed {failures} times");
        let has_reply = acknowledged.contains(&token);
        if sent.is_ok() && !has_reply {
            assert_eq!(failures, 1, "queue {token}, whose bytes were not acknowledged");
        }
        // A reply before an abort may be lost.
        if has_reply && end != End::Abort {
            assert_eq!((&sent, failures), (&Ok(()), 0), "queue {token}, whose bytes were acknowledged");
        }
        if end == End::ProtocolError {
            assert_eq!(queue.with_protocol_error.load(Ordering::Relaxed), failures, "the reason of queue {token}");
            assert!(sent.is_ok() || sent.is_err_and(|why| why.contains("protocol error")));
        }
    }
    assert!(connection.is_closed());
}

/// The session closes the connection while it is dialled and used.
pub(crate) fn closed() {
    let (own, other) = transport::pair(CAPACITY);
    let threads = DialThreads::new();
    let connection = PeerConnection::start(threads.dialer("peer", Ok(own))).expect("the thread starts");
    // Ends only if the connection does, though this thread still has the connection.
    let server = spawn(move || serve(other, 0, End::Read, || ()));
    let queue = SendingQueue::new();
    let (fail, failures) = (Arc::clone(&queue.fail), Arc::clone(&queue.failures));
    let sending = {
        let connection = Arc::clone(&connection);
        spawn(move || {
            let sent = queue.send(&connection, 1);
            assert!(sent.is_ok() || sent.is_err_and(|why| why.contains("the session has ended")));
        })
    };
    let waiting = {
        let connection = Arc::clone(&connection);
        spawn(move || {
            let connected = connection.wait_until_connected(sync::now() + Duration::from_secs(1000));
            assert!(connected.is_ok() || connected.is_err_and(|why| why.contains("the session has ended")));
        })
    };
    connection.close();
    assert!(connection.is_closed());
    [server.join().map(drop), sending.join(), waiting.join()].into_iter().for_each(|ended| ended.unwrap());
    threads.wait_until_ended();
    assert!(connection.send_piece(PeerWrite { token: 1, at: 0, data: &[1] }, Some(&fail)).is_err());
    assert_eq!(failures.load(Ordering::Relaxed), 0, "a queue of a session that has ended was failed");
}

/// The server cannot be dialled.
pub(crate) fn failed_dial() {
    let threads = DialThreads::new();
    let dialler = threads.dialer("peer", Err("no such server".to_owned()));
    let connection = PeerConnection::start(dialler).expect("the thread starts");
    let queue = SendingQueue::new();
    let waiting = {
        let connection = Arc::clone(&connection);
        spawn(move || connection.wait_until_connected(sync::now() + Duration::from_secs(1000)))
    };
    let why = Err("peer: no such server".to_owned());
    assert_eq!(queue.send(&connection, 1), why);
    assert_eq!(waiting.join().unwrap(), why);
    threads.wait_until_ended();
    assert_eq!(queue.failures(), 0, "the sender fails its queue itself");
}

/// A server that acknowledges nothing, or reads nothing, while deadlines pass.
pub(crate) fn stalls() {
    with_clock(|| {
        let (own, other) = transport::pair(CAPACITY);
        let end = [End::Read, End::Freeze][thread_rng().gen_range(0..2)];
        let threads = DialThreads::new();
        let connection = PeerConnection::start(threads.dialer("peer", Ok(own))).expect("the thread starts");
        let server = {
            let threads = threads.clone();
            spawn(move || serve(other, 0, end, || threads.wait_until_ended()))
        };
        let queue = SendingQueue::new();
        let sent = queue.send(&connection, 1);
        if sent.is_err() {
            // There was no connection in time, but there may be one now, which loses nothing.
            connection.close();
        }
        assert_eq!(server.join().unwrap(), [0; 0]);
        threads.wait_until_ended();
        let failures = queue.failures();
        assert!(failures == 1 || (sent.is_err() && failures == 0), "{sent:?}, {failures} failures");
    });
}

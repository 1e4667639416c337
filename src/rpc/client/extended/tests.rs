//! Tests of operations on a queue that fails, or whose connection is lost, between two steps of the operation.

use std::io::Read;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::connection::Connection;
use super::super::device::{RemoteBuffer, RemoteDevice};
use super::super::queue::{DigestLoad, QueueProtocol, RemoteQueue};
use super::super::remote_read::ReadCompleter;
use super::extended_protocol::ExtendedProtocol;
use crate::device::{Buffer, DeviceError, DeviceInfo, DeviceKind, PendingRead, Queue, Timeline, TimelinePoint};
use crate::rpc::wire::VersionCodec;
use crate::rpc::wire::ext::{DeviceFault, HelloExtReply, ServerCapabilities};
use crate::tensor::ByteRuns;

const WATCHDOG: Duration = Duration::from_secs(20);

/// A queue and a buffer on a device of a server that accepts all messages and sends nothing.
fn silent_server() -> (Arc<RemoteDevice>, ExtendedProtocol, Buffer) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let handshake = crate::rpc::client::test_support::dial_handshake(listener.local_addr().unwrap());
    let (mut server, _) = listener.accept().unwrap();
    std::thread::spawn(move || while matches!(server.read(&mut [0; 4096]), Ok(1..)) {});
    let server_info = HelloExtReply {
        build: String::new(),
        max_message: 1 << 20,
        graph_budget: 1 << 20,
        max_graphs: 4,
        capabilities: ServerCapabilities::default(),
        devices: Vec::new(),
    };
    let connection =
        Connection::start("h:1", handshake, VersionCodec::NEWEST, (WATCHDOG, WATCHDOG), Some(server_info)).unwrap();
    let domain = connection.domain();
    let info = DeviceInfo { max_buffer: 1 << 20, domain, ..DeviceInfo::new("h:1/X0", DeviceKind::Cpu) };
    let remote = Arc::new(RemoteDevice::new(&connection, 0, info).unwrap());
    let memory = RemoteBuffer { connection, device: 0, handle: 7, base: 1 << 40 };
    let buffer = Buffer::new(&remote.info, 64, Box::new(memory), Box::new(()));
    (Arc::clone(&remote), ExtendedProtocol::new(remote).unwrap(), buffer)
}

fn wait_error(read: PendingRead) -> DeviceError {
    read.wait(Some(Instant::now() + WATCHDOG)).unwrap_err()
}

/// The queue fails after its state was checked and before the read is sent, as when another thread holds the writer in between.
#[test]
fn a_read_after_a_queue_failure_fails() {
    let (remote, mut queue, buffer) = silent_server();
    let session = remote.connection.session().unwrap();
    session.handle_failed(queue.marks.queue, DeviceFault::new("a fan stopped")).unwrap();
    let (to, read) = ReadCompleter::new(&remote);
    let error = queue.download(vec![(buffer.whole(), to)]).unwrap_err();
    assert!(matches!(&error, DeviceError::Remote { reason, .. } if reason == "a fan stopped"), "{error}");
    assert_eq!(wait_error(read), error);
    assert!(!session.has_outstanding_reads(queue.marks.queue));
}

#[test]
fn loads_and_reads_on_a_lost_connection_fail_with_the_reason() {
    let (remote, mut queue, buffer) = silent_server();
    let lost = remote.connection.fail("a cable broke");
    let (to, found) = ReadCompleter::new(&remote);
    let (bytes, runs, name) = (buffer.bytes(), ByteRuns::whole(buffer.bytes()), String::new());
    let load = DigestLoad { dst: buffer.whole(), tensor: None, digest: [0; 32], bytes, runs, name, to };
    assert_eq!(queue.load_by_digest(load), Err(lost.clone()));
    assert_eq!(wait_error(found), lost);
    let (to, read) = ReadCompleter::new(&remote);
    assert_eq!(queue.download(vec![(buffer.whole(), to)]), Err(lost.clone()));
    assert_eq!(wait_error(read), lost);
}

/// Queue A's thread waits for a point that is never reached, with a mark pending after it, and queue B's until that mark is
/// placed. An abort of either queue ends B's wait.
#[test]
fn an_abort_ends_a_wait_for_a_mark_to_be_placed() {
    for aborts_b in [false, true] {
        let (remote, protocol, buffer) = silent_server();
        let queue = |protocol: ExtendedProtocol| {
            let (marks, timeline) = (Arc::clone(&protocol.marks), Arc::clone(&protocol.timeline));
            (RemoteQueue::new(Arc::clone(&remote), timeline, protocol, 1 << 20).unwrap(), marks)
        };
        let ((mut a, _), (mut b, marks_of_b)) =
            (queue(protocol), queue(ExtendedProtocol::new(Arc::clone(&remote)).unwrap()));
        a.wait(&TimelinePoint::new(&Timeline::new(), 1)).unwrap();
        a.fill(buffer.whole(), 1).unwrap();
        b.wait(&a.mark()).unwrap();
        let until = Instant::now() + WATCHDOG;
        let wait_until_it_waits = |waits: bool| {
            while marks_of_b.awaits_placement() != waits {
                assert!(Instant::now() < until, "aborts B: {aborts_b}, waits: {waits}");
                std::thread::yield_now();
            }
        };
        wait_until_it_waits(true);
        if aborts_b { b.aborter() } else { a.aborter() }.unwrap().abort();
        wait_until_it_waits(false);
        assert_eq!(b.mark().wait(Some(until)), Err(DeviceError::Ended), "aborts B: {aborts_b}");
    }
}

//! Tests of operations on a queue that fails, or whose connection is lost, between two steps of the operation.

use std::io::Read;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::connection::Connection;
use super::super::device::{RemoteBuffer, RemoteDevice};
use super::super::queue::{DigestLoad, QueueProtocol, ReadCompleter};
use super::extended_protocol::ExtendedProtocol;
use crate::device::{Buffer, DeviceError, DeviceInfo, DeviceKind, PendingRead};
use crate::rpc::wire::VersionCodec;
use crate::rpc::wire::ext::{DeviceFault, HelloExtReply, ServerCapabilities};

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
        sessions: 1,
        listeners: Vec::new(),
        limits: Vec::new(),
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
    let load = DigestLoad { dst: buffer.whole(), tensor: None, digest: [0; 32], name: String::new(), to };
    assert_eq!(queue.load_by_digest(load), Err(lost.clone()));
    assert_eq!(wait_error(found), lost);
    let (to, read) = ReadCompleter::new(&remote);
    assert_eq!(queue.download(vec![(buffer.whole(), to)]), Err(lost.clone()));
    assert_eq!(wait_error(read), lost);
}

use super::super::device::{RemoteBuffer, RemoteDevice, enumerate};
use super::super::ggml_protocol::GgmlProtocol;
use super::super::queue::QueueProtocol;
use super::super::remote_read::ReadCompleter;
use super::*;
use crate::device::{Buffer, DeviceInfo, DeviceKind};
use crate::rpc::wire::ext::{Notification, ServerCapabilities, ServerState};
use crate::rpc::wire::{PROTOCOL_VERSION, REQUEST_HEADER, Response, RpcCommand};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// Upper limit of every wait in these tests; no test comes close to it.
const WATCHDOG: Duration = Duration::from_secs(30);

/// A client connection and the server's end of its socket.
fn pair(reply_timeout: Duration, server_info: Option<HelloExtReply>) -> (Arc<Connection>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let handshake = crate::rpc::client::test_support::dial_handshake(listener.local_addr().unwrap());
    let codec = VersionCodec::for_version(PROTOCOL_VERSION).unwrap();
    let connection = Connection::start("a:1", handshake, codec, (WATCHDOG, reply_timeout), server_info).unwrap();
    (connection, listener.accept().unwrap().0)
}

fn is_lost(error: &DeviceError) -> bool {
    matches!(error, DeviceError::ConnectionLost { endpoint, .. } if endpoint == "a:1")
}

#[test]
fn two_connections_to_one_server_are_two_domains() {
    let connections = [pair(WATCHDOG, None), pair(WATCHDOG, None)];
    let domains = connections.each_ref().map(|(connection, _)| connection.domain());
    assert_ne!(domains[0], domains[1]);
    assert_eq!(domains[0], connections[0].0.domain());
    assert_eq!(domains[0].name(), "a:1");
}

#[test]
fn deferred_sends_of_a_lost_connection_are_dropped() {
    let (connection, _server) = pair(WATCHDOG, None);
    let held = Arc::new(());
    let holds = Arc::clone(&held);
    connection.fail("a test's reason");
    // As when a thread defers a send while another thread writes, and the connection fails before the writer is returned.
    lock(&connection.deferred).sends.push(Box::new(move |_| {
        drop(holds);
        Ok(())
    }));
    assert!(is_lost(&connection.with_writer(|_| Ok(())).unwrap_err()));
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn downloads_on_a_lost_connection_fail_with_the_name_of_its_endpoint() {
    let (connection, _server) = pair(WATCHDOG, None);
    let domain = connection.domain();
    let info = DeviceInfo { max_buffer: 1 << 30, domain, ..DeviceInfo::new("a:1/0", DeviceKind::Gpu) };
    let remote = Arc::new(RemoteDevice::new(&connection, 0, info).unwrap());
    let (mut protocol, _timeline) =
        GgmlProtocol::new(Arc::clone(&remote), connection.completions.add_device()).unwrap();
    let memory = RemoteBuffer { connection: Arc::clone(&connection), device: 0, handle: 7, base: 1 << 20 };
    let buffer = Buffer::new(&remote.info, 128, Box::new(memory), Box::new(()));
    connection.fail("a test's reason");
    let (parts, reads): (Vec<_>, Vec<_>) = (0..2)
        .map(|at| {
            let (to, read) = ReadCompleter::new(&remote);
            ((buffer.region(64 * at, 64).unwrap(), to), read)
        })
        .unzip();
    assert!(is_lost(&protocol.download(parts).unwrap_err()));
    for read in reads {
        let error = read.wait(Some(Instant::now() + WATCHDOG)).unwrap_err();
        assert!(is_lost(&error), "{error}");
    }
}

#[test]
fn a_reply_is_overdue_although_the_server_sends_notifications() {
    let server_info = HelloExtReply {
        build: String::new(),
        max_message: 1 << 20,
        graph_budget: 1 << 20,
        max_graphs: 4,
        capabilities: ServerCapabilities::default(),
        devices: Vec::new(),
    };
    let (connection, mut server) = pair(Duration::from_millis(50), Some(server_info));
    let sender = std::thread::spawn(move || {
        let mut notification = Vec::new();
        Notification::ServerState(ServerState::Ready).encode(&mut notification);
        // Until the client closes the connection.
        while server.write_all(&notification).is_ok() {}
    });
    let error = connection.call_encoded("ALLOC_BUFFER", 16..=16, |out| out.push(0)).unwrap_err();
    assert!(is_lost(&error) && error.to_string().contains("did not reply to ALLOC_BUFFER within 50ms"), "{error}");
    sender.join().unwrap();
}

#[test]
fn listing_the_devices_has_a_deadline() {
    let (connection, mut server) = pair(Duration::from_millis(1), None);
    let replies = std::thread::spawn(move || -> io::Result<()> {
        loop {
            let mut header = [0; REQUEST_HEADER];
            server.read_exact(&mut header)?;
            server.read_exact(&mut vec![0; header[1] as usize])?;
            let mut reply = Vec::new();
            if header[0] == RpcCommand::DeviceCount as u8 {
                Response::DeviceCount(4096).encode(&mut reply);
            } else {
                Response::GetAlignment(64).encode(&mut reply);
            }
            server.write_all(&reply)?;
        }
    });
    let error = enumerate(&connection).unwrap_err();
    assert!(is_lost(&error) && error.to_string().contains("of its 4096 devices within 1ms"), "{error}");
    drop(connection);
    replies.join().unwrap().unwrap_err();
}

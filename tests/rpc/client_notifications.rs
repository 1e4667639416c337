//! The client against servers of the extended protocol that send invalid notifications, or none.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{budget, deadline, options};
use crate::support::{SHORT_TIMEOUT, WATCHDOG};
use fanout::device::{DeviceError, UploadSource};
use fanout::ops::OpCode;
use fanout::rpc::client::Endpoint;
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::*;
use std::io::{Read as _, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// The bytes that a server sends for a READ, by the id of the queue and of the READ.
type ReadResponder = fn(u32, u64) -> Vec<u8>;

/// How the server replies to PING and READ.
#[derive(Clone, Copy, PartialEq)]
enum ServerBehaviour {
    Conforming,
    /// Never replies to PING.
    IgnoresPing,
    /// Sends the data of a READ after the fourth PING.
    SlowRead,
}

/// A server with one client and one device. Its replies are valid until it receives a READ.
fn extended_server(hello_reply: HelloExtReply, read_response: ReadResponder, behaviour: ServerBehaviour) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        // An error means that the client has closed the connection.
        let _ = serve(&mut stream, &hello_reply, read_response, behaviour);
    });
    addr
}

fn serve(
    stream: &mut TcpStream,
    hello_reply: &HelloExtReply,
    read_response: ReadResponder,
    behaviour: ServerBehaviour,
) -> std::io::Result<()> {
    let limits = Limits::new(1 << 20, 1 << 20, 1 << 30);
    let (mut pings, mut last) = (0, 0);
    loop {
        let mut header = [0; REQUEST_HEADER];
        stream.read_exact(&mut header)?;
        let size = u64::from_le_bytes(header[1..].try_into().unwrap());
        let mut body = vec![0; size as usize];
        stream.read_exact(&mut body)?;
        let mut out = Vec::new();
        if ExtHeader::is_extension(&header) {
            let command = ExtHeader::decode(&header).unwrap().command;
            let body = if command == ExtCommand::Write { &body[..WRITE_HEAD] } else { &body };
            match ExtRequest::decode(command, body, &limits).expect("a request") {
                ExtRequest::HelloExt(_) => {
                    let mut reply = Vec::new();
                    ExtResponse::HelloExt(hello_reply.clone()).encode_body(&mut reply);
                    out.extend(ResponseHeader { size: reply.len() as u64 }.encode());
                    out.extend(reply);
                }
                ExtRequest::ReadSpans(read) => {
                    out = read_response(read.queue, read.id);
                    last = read.id;
                }
                ExtRequest::Ping(_) if behaviour != ServerBehaviour::IgnoresPing => {
                    pings += 1;
                    let mut reply = Vec::new();
                    ExtResponse::Ping(ServerState::Ready, 1).encode_body(&mut reply);
                    Notification::Reply(&reply).encode(&mut out);
                    if behaviour == ServerBehaviour::SlowRead && pings == 4 {
                        Notification::ReadData { id: last, bytes: &[6; 64] }.encode(&mut out);
                    }
                }
                _ => {}
            }
        } else {
            let header = RequestHeader::decode(&header).expect("a header");
            let response = match Request::decode(header.command, &body, &limits).expect("a request") {
                Request::Hello(_) => {
                    let extension_byte = ExtensionOffer { revision: REVISION, state: ServerState::Ready }.to_byte();
                    Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps: Some([0; 24]), extension_byte })
                }
                Request::AllocBuffer(r) => {
                    Response::AllocBuffer(AllocBufferReply { remote_ptr: 7, remote_size: r.size })
                }
                Request::BufferGetBase(_) => Response::BufferGetBase(1 << 40),
                _ => continue,
            };
            response.encode(&mut out);
            if header.command != RpcCommand::Hello {
                let mut notification = Vec::new();
                Notification::Reply(&out[RESPONSE_HEADER..]).encode(&mut notification);
                out = notification;
            }
        }
        stream.write_all(&out)?;
    }
}

fn device(name: &str) -> DeviceRecord {
    DeviceRecord {
        name: name.to_owned(),
        description: "a test's".to_owned(),
        kind: 1,
        caps: 9,
        alignment: 64,
        max_buffer: 1 << 30,
        features: vec![("driver".to_owned(), "1.2".to_owned())],
    }
}

fn hello_ext_reply(devices: Vec<DeviceRecord>) -> HelloExtReply {
    HelloExtReply {
        build: "server 9".to_owned(),
        max_message: 1 << 20,
        graph_budget: 1 << 20,
        max_graphs: 4,
        capabilities: ServerCapabilities::default(),
        devices,
    }
}

fn encode_notification(notification: Notification<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    notification.encode(&mut out);
    out
}

fn raw_notification(kind: u8, size: u64, body: &[u8]) -> Vec<u8> {
    [&[kind], &size.to_le_bytes()[..], body].concat()
}

/// Uploads 64 bytes, places a mark and reads the bytes. Returns the results of the read and of the mark.
fn run_session(addr: SocketAddr, silence_timeout: Duration) -> (Result<Vec<u8>, DeviceError>, Result<(), DeviceError>) {
    let options = options().with_silence_timeout(silence_timeout);
    let endpoint = Endpoint::connect(&addr.to_string(), &options).unwrap();
    let device = &endpoint.devices()[0];
    let buffer = device.alloc(64, &budget()).unwrap();
    let mut queue = device.queue(&budget()).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[1; 64])).unwrap();
    let mark = queue.mark();
    // The submission fails if the queue has failed before it.
    let read = queue.download(buffer.whole()).and_then(|read| read.wait(deadline()));
    (read, mark.wait(deadline()))
}

#[test]
fn invalid_notifications_close_the_connection_with_a_reason() {
    let faults: &[(&str, ReadResponder, &str)] = &[
        ("short READ_DATA", |_, id| encode_notification(Notification::ReadData { id, bytes: &[0; 63] }), "63 bytes"),
        ("long READ_DATA", |_, id| raw_notification(2, 1 << 60, &id.to_le_bytes()), "expected 64"),
        ("READ_DATA without a complete id", |_, _| raw_notification(2, 7, &[0; 7]), "less than its id of 8 bytes"),
        (
            "READ_DATA of an unknown READ",
            |_, id| encode_notification(Notification::ReadData { id: id + 1, bytes: &[0; 64] }),
            "which was never sent",
        ),
        (
            "MARK_REACHED of an unplaced mark",
            |queue, _| encode_notification(Notification::MarkReached { queue, number: 2 }),
            "this mark was never made",
        ),
        (
            "MARK_REACHED of an unknown queue",
            |queue, _| encode_notification(Notification::MarkReached { queue: queue + 1, number: 1 }),
            "queue 2",
        ),
        (
            "QUEUE_FAILED of an unknown queue",
            |_, _| encode_notification(Notification::QueueFailed { queue: 9, fault: DeviceFault::new("x") }),
            "queue 9",
        ),
        ("REPLY without a request", |_, _| encode_notification(Notification::Reply(&[])), "unsolicited"),
        ("an unknown kind", |_, _| raw_notification(9, 0, &[]), "0 to 5"),
        ("MARK_REACHED of 13 bytes", |_, _| raw_notification(1, 13, &[0; 13]), "13 bytes"),
        ("MARK_REACHED of 11 bytes", |_, _| raw_notification(1, 11, &[0; 11]), "notification"),
        ("PROTOCOL_ERROR of 2^64 - 1 bytes", |_, _| raw_notification(4, u64::MAX, &[]), "notification"),
        ("PROTOCOL_ERROR that is not UTF-8", |_, _| raw_notification(4, 5, &[1, 0, 0, 0, 0xff]), "UTF-8"),
        ("SERVER_STATE with an unknown state", |_, _| raw_notification(5, 1, &[3]), "0 to 2"),
        (
            "PROTOCOL_ERROR",
            |_, _| encode_notification(Notification::ProtocolError("too many marks")),
            "refused the connection: too many marks",
        ),
    ];
    for (what, read_response, message) in faults {
        let addr = extended_server(hello_ext_reply(vec![device("X0")]), *read_response, ServerBehaviour::Conforming);
        let start = Instant::now();
        let (read, mark) = run_session(addr, WATCHDOG);
        assert!(start.elapsed() < WATCHDOG / 2, "{what}");
        let error = read.unwrap_err();
        assert!(
            matches!(&error, DeviceError::ConnectionLost { endpoint, .. } if *endpoint == addr.to_string()),
            "{what}: {error}"
        );
        assert!(error.to_string().contains(message), "{what}: {error}");
        assert_eq!(mark, Err(error), "{what}");
    }
}

#[test]
fn valid_notifications_are_decoded() {
    let both: ReadResponder = |queue, id| {
        let messages = [
            encode_notification(Notification::ServerState(ServerState::Draining)),
            encode_notification(Notification::MarkReached { queue, number: 1 }),
            encode_notification(Notification::ReadData { id, bytes: &[5; 64] }),
        ];
        messages.concat()
    };
    let addr = extended_server(hello_ext_reply(vec![device("X0")]), both, ServerBehaviour::Conforming);
    assert_eq!(run_session(addr, WATCHDOG), (Ok(vec![5; 64]), Ok(())));
    type Kind = (DeviceFaultKind, fn(&DeviceError) -> bool, ReadResponder);
    let kinds: [Kind; 3] = [
        (
            DeviceFaultKind::Other,
            |e| matches!(e, DeviceError::Remote { device, .. } if device.ends_with("/X0")),
            |queue, _| {
                encode_notification(Notification::QueueFailed { queue, fault: DeviceFault::new("a fan stopped") })
            },
        ),
        (
            DeviceFaultKind::OutOfMemory { requested: 3, available: 2, limit: 9 },
            |e| *e == DeviceError::OutOfMemory { requested: 3, available: 2, limit: 9 },
            |queue, _| {
                let kind = DeviceFaultKind::OutOfMemory { requested: 3, available: 2, limit: 9 };
                encode_notification(Notification::QueueFailed {
                    queue,
                    fault: DeviceFault { kind, text: String::new() },
                })
            },
        ),
        (
            DeviceFaultKind::Data(OpCode::GetRows.to_wire()),
            |e| matches!(e, DeviceError::Data { op: OpCode::GetRows, reason } if reason == "row 9 of 3"),
            |queue, _| {
                let kind = DeviceFaultKind::Data(OpCode::GetRows.to_wire());
                encode_notification(Notification::QueueFailed {
                    queue,
                    fault: DeviceFault { kind, text: "row 9 of 3".to_owned() },
                })
            },
        ),
    ];
    for (kind, is, read_response) in kinds {
        let (read, mark) = run_session(
            extended_server(hello_ext_reply(vec![device("X0")]), read_response, ServerBehaviour::Conforming),
            WATCHDOG,
        );
        let error = read.unwrap_err();
        assert!(is(&error), "{kind:?}: {error:?}");
        assert_eq!(mark, Err(error));
    }
}

#[test]
fn a_server_that_replies_to_no_ping_is_lost() {
    let nothing: ReadResponder = |_, _| Vec::new();
    let start = Instant::now();
    let (read, mark) = run_session(
        extended_server(hello_ext_reply(vec![device("X0")]), nothing, ServerBehaviour::IgnoresPing),
        SHORT_TIMEOUT,
    );
    let error = read.unwrap_err();
    for part in ["READ", "100ms"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(mark, Err(error));
    assert!(start.elapsed() < WATCHDOG / 2);
    // While the server replies to PING, the client waits longer than the silence timeout.
    let start = Instant::now();
    let (read, mark) = run_session(
        extended_server(hello_ext_reply(vec![device("X0")]), nothing, ServerBehaviour::SlowRead),
        6 * SHORT_TIMEOUT,
    );
    assert_eq!((read, mark), (Ok(vec![6; 64]), Ok(())));
    assert!(start.elapsed() > 6 * SHORT_TIMEOUT);
}

#[test]
fn device_records_are_used_or_rejected_with_a_reason() {
    let nothing: ReadResponder = |_, _| Vec::new();
    let connect = |hello_reply: HelloExtReply| {
        let addr = extended_server(hello_reply, nothing, ServerBehaviour::Conforming);
        let endpoint = Endpoint::connect(&addr.to_string(), &options());
        endpoint.map(|endpoint| (addr, endpoint))
    };
    let (addr, endpoint) =
        connect(hello_ext_reply(vec![device("CUDA0"), device("X"), device("x"), device("a b")])).unwrap();
    let names: Vec<_> = endpoint.devices().iter().map(|device| device.info().name.clone()).collect();
    assert_eq!(names, ["CUDA0", "1", "2", "3"].map(|name| format!("{addr}/{name}")));
    let first = &endpoint.devices()[0];
    assert!(first.info().description.contains("a test's") && first.info().description.contains("server 9"));
    assert_eq!(first.features()[0].to_string(), "driver: 1.2");
    type InvalidReply = (fn(&mut HelloExtReply), &'static str);
    let wrong: [InvalidReply; 5] = [
        (|hello_reply| hello_reply.devices.clear(), "0 devices"),
        (|hello_reply| hello_reply.max_message = 100, "100 bytes"),
        (|hello_reply| hello_reply.devices[0].alignment = 48, "an alignment of 48 bytes"),
        (|hello_reply| hello_reply.devices[0].max_buffer = 0, "a maximum buffer size of 0 bytes"),
        (|hello_reply| hello_reply.build = "x".repeat(2 << 20), "HELLO_EXT with"),
    ];
    for (change, message) in wrong {
        let mut hello_reply = hello_ext_reply(vec![device("X0")]);
        change(&mut hello_reply);
        let error = connect(hello_reply).map(drop).unwrap_err().to_string();
        assert!(error.contains(message) && error.contains("127.0.0.1"), "{message}: {error}");
    }
}

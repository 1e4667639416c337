//! The client against servers that greet and then say what they must not, or nothing.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::client::{account, deadline, options};
use crate::support::{SHORT, WATCHDOG};
use fanout::device::{DeviceError, Source};
use fanout::ops::OpCode;
use fanout::rpc::client::Endpoint;
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::*;
use std::io::{Read as _, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What a server says to a READ: the queue's number and the READ's.
type ReadResponder = fn(u32, u64) -> Vec<u8>;

/// What it does besides.
#[derive(Clone, Copy, PartialEq)]
enum ServerBehaviour {
    Conforming,
    /// It answers no PING.
    IgnoresPing,
    /// It sends the bytes of its READ when it was asked four times whether it is there.
    SlowRead,
}

/// A server of one client and one device that answers as it must, until a READ comes.
fn server(greet: GreetReply, says: ReadResponder, manner: ServerBehaviour) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        // When the client is gone, this is over.
        let _ = serve(&mut stream, &greet, says, manner);
    });
    addr
}

fn serve(
    stream: &mut TcpStream,
    greet: &GreetReply,
    says: ReadResponder,
    manner: ServerBehaviour,
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
        if ExtHeader::is_one(&header) {
            let command = ExtHeader::decode(&header).unwrap().command;
            let body = if command == ExtCommand::Write { &body[..WRITE_HEAD] } else { &body };
            match ExtRequest::decode(command, body, &limits).expect("a request") {
                ExtRequest::Greet(_) => {
                    let mut reply = Vec::new();
                    Answer::Greet(greet.clone()).encode(&mut reply);
                    out.extend(ResponseHeader { size: reply.len() as u64 }.encode());
                    out.extend(reply);
                }
                ExtRequest::Read(read) => {
                    out = says(read.queue, read.id);
                    last = read.id;
                }
                ExtRequest::Ping(_) if manner != ServerBehaviour::IgnoresPing => {
                    pings += 1;
                    let mut reply = Vec::new();
                    Answer::Ping(State::Ready, 1).encode(&mut reply);
                    Notice::Reply(&reply).encode(&mut out);
                    if manner == ServerBehaviour::SlowRead && pings == 4 {
                        Notice::Data { id: last, bytes: &[6; 64] }.encode(&mut out);
                    }
                }
                _ => {}
            }
        } else {
            let header = RequestHeader::decode(&header).expect("a header");
            let response = match Request::decode(header.command, &body, &limits).expect("a request") {
                Request::Hello(_) => {
                    let greeting = Greeting { revision: REVISION, state: State::Ready }.to_byte();
                    Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps: Some([0; 24]), greeting })
                }
                Request::AllocBuffer(r) => {
                    Response::AllocBuffer(AllocBufferReply { remote_ptr: 7, remote_size: r.size })
                }
                Request::BufferGetBase(_) => Response::BufferGetBase(1 << 40),
                _ => continue,
            };
            response.encode(&mut out);
            if header.command != Command::Hello {
                let mut notice = Vec::new();
                Notice::Reply(&out[RESPONSE_HEADER..]).encode(&mut notice);
                out = notice;
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

fn greeting(devices: Vec<DeviceRecord>) -> GreetReply {
    GreetReply {
        build: "server 9".to_owned(),
        max_message: 1 << 20,
        graph_budget: 1 << 20,
        max_graphs: 4,
        abilities: Abilities::default(),
        sessions: 1,
        devices,
    }
}

fn notice(notice: Notice<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    notice.encode(&mut out);
    out
}

fn raw(kind: u8, size: u64, body: &[u8]) -> Vec<u8> {
    [&[kind], &size.to_le_bytes()[..], body].concat()
}

/// A write, a mark and a read of 64 bytes; what becomes of the read and of the mark.
fn session(addr: SocketAddr, patience: Duration) -> (Result<Vec<u8>, DeviceError>, Result<(), DeviceError>) {
    let options = options().with_silence_timeout(patience);
    let endpoint = Endpoint::connect(&addr.to_string(), &options).unwrap();
    let device = &endpoint.devices()[0];
    let buffer = device.alloc(64, &account()).unwrap();
    let mut queue = device.queue(&account()).unwrap();
    queue.upload(buffer.whole(), None, Source::Borrowed(&[1; 64])).unwrap();
    let mark = queue.mark();
    // The one that asks may hear already why there will be nothing.
    let read = queue.download(buffer.whole()).and_then(|read| read.wait(deadline()));
    (read, mark.wait(deadline()))
}

#[test]
fn what_a_server_must_not_say_ends_the_connection_with_a_reason() {
    let faults: &[(&str, ReadResponder, &str)] = &[
        ("short DATA", |_, id| notice(Notice::Data { id, bytes: &[0; 63] }), "63 bytes"),
        ("long DATA", |_, id| raw(2, 1 << 60, &id.to_le_bytes()), "expected 64"),
        ("DATA without a number", |_, _| raw(2, 7, &[0; 7]), "whose id alone has 8"),
        ("DATA of no READ", |_, id| notice(Notice::Data { id: id + 1, bytes: &[0; 64] }), "which was never sent"),
        ("a mark of no one", |queue, _| notice(Notice::Reached { queue, number: 2 }), "which was never made"),
        ("a queue of no one", |queue, _| notice(Notice::Reached { queue: queue + 1, number: 1 }), "queue 2"),
        ("a failure of no one", |_, _| notice(Notice::Failed { queue: 9, fault: Fault::new("x") }), "queue 9"),
        ("a reply to nothing", |_, _| notice(Notice::Reply(&[])), "unsolicited"),
        ("no notice", |_, _| raw(9, 0, &[]), "0 to 5"),
        ("a mark of 13 bytes", |_, _| raw(1, 13, &[0; 13]), "13 bytes"),
        ("a mark of 11 bytes", |_, _| raw(1, 11, &[0; 11]), "notification"),
        ("an endless reason", |_, _| raw(4, u64::MAX, &[]), "notification"),
        ("a reason that is no text", |_, _| raw(4, 5, &[1, 0, 0, 0, 0xff]), "UTF-8"),
        ("a state that is none", |_, _| raw(5, 1, &[3]), "0 to 2"),
        ("REFUSED", |_, _| notice(Notice::Refused("too many marks")), "refused the connection: too many marks"),
    ];
    for (what, says, told) in faults {
        let addr = server(greeting(vec![device("X0")]), *says, ServerBehaviour::Conforming);
        let start = Instant::now();
        let (read, mark) = session(addr, WATCHDOG);
        assert!(start.elapsed() < WATCHDOG / 2, "{what}");
        let error = read.unwrap_err();
        assert!(
            matches!(&error, DeviceError::Lost { endpoint, .. } if *endpoint == addr.to_string()),
            "{what}: {error}"
        );
        assert!(error.to_string().contains(told), "{what}: {error}");
        assert_eq!(mark, Err(error), "{what}");
    }
}

#[test]
fn what_it_may_say_is_understood() {
    let both: ReadResponder = |queue, id| {
        let said = [
            notice(Notice::State(State::Draining)),
            notice(Notice::Reached { queue, number: 1 }),
            notice(Notice::Data { id, bytes: &[5; 64] }),
        ];
        said.concat()
    };
    let addr = server(greeting(vec![device("X0")]), both, ServerBehaviour::Conforming);
    assert_eq!(session(addr, WATCHDOG), (Ok(vec![5; 64]), Ok(())));
    type Kind = (FaultKind, fn(&DeviceError) -> bool, ReadResponder);
    let kinds: [Kind; 3] = [
        (
            FaultKind::Other,
            |e| matches!(e, DeviceError::Remote { device, .. } if device.ends_with("/X0")),
            |queue, _| notice(Notice::Failed { queue, fault: Fault::new("a fan stopped") }),
        ),
        (
            FaultKind::OutOfMemory { asked: 3, left: 2, limit: 9 },
            |e| *e == DeviceError::OutOfMemory { asked: 3, left: 2, limit: 9 },
            |queue, _| {
                let kind = FaultKind::OutOfMemory { asked: 3, left: 2, limit: 9 };
                notice(Notice::Failed { queue, fault: Fault { kind, text: String::new() } })
            },
        ),
        (
            FaultKind::Data(OpCode::GetRows.to_wire()),
            |e| matches!(e, DeviceError::Data { op: OpCode::GetRows, reason } if reason == "row 9 of 3"),
            |queue, _| {
                let kind = FaultKind::Data(OpCode::GetRows.to_wire());
                notice(Notice::Failed { queue, fault: Fault { kind, text: "row 9 of 3".to_owned() } })
            },
        ),
    ];
    for (kind, is, says) in kinds {
        let (read, mark) = session(server(greeting(vec![device("X0")]), says, ServerBehaviour::Conforming), WATCHDOG);
        let error = read.unwrap_err();
        assert!(is(&error), "{kind:?}: {error:?}");
        assert_eq!(mark, Err(error));
    }
}

#[test]
fn silence_ends_where_pings_are_not_answered() {
    let nothing: ReadResponder = |_, _| Vec::new();
    let start = Instant::now();
    let (read, mark) = session(server(greeting(vec![device("X0")]), nothing, ServerBehaviour::IgnoresPing), SHORT);
    let error = read.unwrap_err();
    for part in ["READ", "100ms"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    assert_eq!(mark, Err(error));
    assert!(start.elapsed() < WATCHDOG / 2);
    // One that is there is waited for: longer than it may be silent.
    let start = Instant::now();
    let (read, mark) = session(server(greeting(vec![device("X0")]), nothing, ServerBehaviour::SlowRead), 6 * SHORT);
    assert_eq!((read, mark), (Ok(vec![6; 64]), Ok(())));
    assert!(start.elapsed() > 6 * SHORT);
}

#[test]
fn devices_are_as_the_server_says_or_it_is_told() {
    let nothing: ReadResponder = |_, _| Vec::new();
    let connect = |greet: GreetReply| {
        let addr = server(greet, nothing, ServerBehaviour::Conforming);
        let endpoint = Endpoint::connect(&addr.to_string(), &options());
        endpoint.map(|endpoint| (addr, endpoint))
    };
    let (addr, endpoint) = connect(greeting(vec![device("CUDA0"), device("X"), device("x"), device("a b")])).unwrap();
    let names: Vec<_> = endpoint.devices().iter().map(|device| device.info().name.clone()).collect();
    assert_eq!(names, ["CUDA0", "1", "2", "3"].map(|name| format!("{addr}/{name}")));
    let first = &endpoint.devices()[0];
    assert!(first.info().description.contains("a test's") && first.info().description.contains("server 9"));
    assert_eq!(first.features()[0].to_string(), "driver: 1.2");
    type Wrong = (fn(&mut GreetReply), &'static str);
    let wrong: [Wrong; 5] = [
        (|greet| greet.devices.clear(), "0 devices"),
        (|greet| greet.max_message = 100, "100 bytes"),
        (|greet| greet.devices[0].alignment = 48, "aligns to 48"),
        (|greet| greet.devices[0].max_buffer = 0, "has no buffers"),
        (|greet| greet.build = "x".repeat(2 << 20), "GREET with"),
    ];
    for (change, told) in wrong {
        let mut greet = greeting(vec![device("X0")]);
        change(&mut greet);
        let error = connect(greet).map(drop).unwrap_err().to_string();
        assert!(error.contains(told) && error.contains("127.0.0.1"), "{told}: {error}");
    }
}

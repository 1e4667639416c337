//! Sessions of protocol 7.0: concurrent clients, stalled and killed clients, handshake and shutdown. No client affects another.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::time::Duration;

/// Sends the header of an upload of `promised` bytes, and its first 300 bytes.
fn begin_upload(client: &mut Client, memory: &ClientBuffer, promised: u64) {
    let mut bytes = Vec::new();
    let head = SetTensorHead { tensor: memory.byte_tensor(), cache: false, offset: 0 };
    head.encode(promised, &mut bytes).expect("a size");
    bytes.extend(random_bytes(1, 300));
    client.write(&bytes);
}

#[test]
fn concurrent_clients_receive_their_own_results() {
    let server = TestServer::start(Config::default());
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let server = &server;
            scope.spawn(move || {
                let mut client = Client::connect(server);
                let memory = client.alloc(0, 1 << 20);
                let n = 1000;
                let (a, b) = (memory.float_tensor(1, n, 0), memory.float_tensor(2, n, 8192));
                let sum = node(OpCode::Add, memory.float_tensor(3, n, 16384), &[&a, &b]);
                for round in 0..20 {
                    let (x, y) = (random_floats(seed * 100 + round, n as usize), random_floats(seed, n as usize));
                    client.set_floats(&a, &x);
                    client.set_floats(&b, &y);
                    client.compute_graph(0, &[3], &[a.clone(), b.clone(), sum.clone()]);
                    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
                    assert_eq!(client.get_floats(&sum), want, "client {seed}, round {round}");
                }
            });
        }
    });
    eventually("all sessions have ended", || server.handle.connections() == 0 && server.used_bytes(0) == 0);
}

#[test]
fn a_client_killed_during_an_upload_leaves_no_memory_allocated() {
    let server = TestServer::start(Config::default());
    let mut other = Client::connect(&server);
    let kept = other.alloc(0, 256 << 10);
    for size in [256 << 10, 64 << 20] {
        let mut client = Client::connect(&server);
        let memory = client.alloc(0, size);
        begin_upload(&mut client, &memory, size);
        assert_eq!(server.used_bytes(0), size + kept.size);
        client.shutdown_write();
        client.expect_refused(&["SET_TENSOR", "in the middle of a message"]);
        eventually("the server has freed the memory of the session", || server.used_bytes(0) == kept.size);
    }
    other.assert_alive();
}

#[test]
fn closing_a_connection_between_messages_logs_nothing() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    client.alloc(0, 1000);
    client.shutdown_write();
    client.expect_closed();
    let mut silent = Client::connect_without_hello(&server);
    silent.shutdown_write();
    silent.expect_closed();
    assert_eq!((client.warnings(), silent.warnings()), (vec![], vec![]));
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 0);
}

#[test]
fn a_client_that_stalls_in_a_message_is_closed_and_idle_clients_are_not() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT_TIMEOUT));
    let mut idle = Client::connect(&server);
    type Start = fn(&mut Client);
    let started: [(&str, Start); 4] = [
        ("no more bytes", |client| client.write(&[RpcCommand::DeviceCount as u8])),
        ("GRAPH_COMPUTE", |client| client.write(&graph_compute_message(0, &[], &[zero_record()])[..40])),
        ("SET_TENSOR", |client| {
            let memory = client.alloc(0, 1000);
            begin_upload(client, &memory, 1000);
        }),
        ("SET_TENSOR", |client| {
            let memory = client.alloc(0, 1 << 20);
            begin_upload(client, &memory, 1 << 20);
        }),
    ];
    for (what, start) in started {
        let mut client = Client::connect(&server);
        start(&mut client);
        client.expect_refused(&[what, "stalled"]);
    }
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 0);
    // The idle client has been silent for several stall timeouts: the timeout applies only within a message.
    idle.assert_alive();
}

#[test]
fn a_client_that_reads_no_reply_is_closed() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT_TIMEOUT));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 128 << 20);
    client.send(&get_tensor_request(&memory.byte_tensor(), 0, memory.size));
    eventually("the server has closed the connection", || server.handle.connections() == 0);
    let lines = client.warnings();
    assert!(lines.len() == 1 && lines[0].contains("GET_TENSOR: stalled"), "{lines:?}");
    assert_eq!(server.used_bytes(0), 0);
}

#[test]
fn the_handshake_deadline_applies_to_slow_senders() {
    let deadline = 4 * SHORT_TIMEOUT;
    let server = TestServer::start(Config::default().with_handshake_timeout(deadline));
    let mut known = Client::connect(&server);
    let mut silent = Client::connect_without_hello(&server);
    let mut half = Client::connect_without_hello(&server);
    half.write(&encode_message(&hello_request())[..20]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut drip = Client::connect_without_hello(&server);
            let mut stream = drip.stream.try_clone().expect("a socket");
            for byte in encode_message(&hello_request()) {
                use std::io::{Read, Write};
                // Pauses for a quarter of the deadline before each byte, by a read that times out because the server sends
                // nothing.
                stream.set_read_timeout(Some(deadline / 4)).expect("a live socket");
                if matches!(stream.read(&mut [0]), Ok(0)) || stream.write_all(&[byte]).is_err() {
                    break;
                }
            }
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a live socket");
            drip.expect_closed();
        });
    });
    silent.expect_closed();
    half.expect_closed();
    for client in [silent, half] {
        let lines = client.warnings();
        assert!(lines.len() == 1 && lines[0].contains("no complete HELLO"), "{lines:?}");
    }
    known.assert_alive();
}

#[test]
fn hello_must_be_the_first_message_and_sent_once() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_without_hello(&server);
    client.send(&Request::DeviceCount(DeviceCount {}));
    client.expect_refused(&["DEVICE_COUNT", "expected HELLO as the first message"]);
    let mut client = Client::connect(&server);
    client.send(&hello_request());
    client.expect_refused(&["HELLO", "has had its HELLO"]);
}

#[test]
fn shutdown_closes_every_connection_and_ends() {
    let mut server = TestServer::start(Config::default());
    let (mut idle, mut raw, mut busy) =
        (Client::connect(&server), Client::connect_without_hello(&server), Client::connect(&server));
    let memory = busy.alloc(0, 64 << 20);
    begin_upload(&mut busy, &memory, memory.size);
    idle.assert_alive();
    server.stop();
    for client in [&mut idle, &mut raw, &mut busy] {
        client.expect_closed();
        assert_eq!(client.warnings(), Vec::<String>::new());
    }
    assert_eq!((server.handle.connections(), server.used_bytes(0)), (0, 0));
}

#[test]
fn a_session_with_queued_work_frees_its_memory() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 32 << 20);
    let tensor = memory.tensor(1, DType::I8, [16 << 20, 1, 1, 1], 0);
    for value in 0..40 {
        client.send(&Request::MemsetTensor(MemsetTensor {
            tensor: tensor.clone(),
            offset: 0,
            size: memory.size,
            value,
        }));
    }
    drop(client);
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 0);
}

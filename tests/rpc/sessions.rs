//! Clients that come, stall, are killed, and never disturb each other.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::time::Duration;

/// The start of an upload of `promised` bytes, with the first of them.
fn begin_upload(client: &mut Client, memory: &ClientBuffer, promised: u64) {
    let mut bytes = Vec::new();
    let head = SetTensorHead { tensor: memory.bytes(), cache: false, offset: 0 };
    head.encode(promised, &mut bytes).expect("a size");
    bytes.extend(noise(1, 300));
    client.write(&bytes);
}

#[test]
fn many_clients_at_once_get_their_own_results() {
    let server = TestServer::start(Config::default());
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let server = &server;
            scope.spawn(move || {
                let mut client = Client::open(server);
                let memory = client.alloc(0, 1 << 20);
                let n = 1000;
                let (a, b) = (memory.floats(1, n, 0), memory.floats(2, n, 8192));
                let sum = node(OpCode::Add, memory.floats(3, n, 16384), &[&a, &b]);
                for round in 0..20 {
                    let (x, y) = (floats(seed * 100 + round, n as usize), floats(seed, n as usize));
                    client.set_floats(&a, &x);
                    client.set_floats(&b, &y);
                    client.compute(0, &[3], &[a.clone(), b.clone(), sum.clone()]);
                    let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
                    assert_eq!(client.floats(&sum), want, "client {seed}, round {round}");
                }
            });
        }
    });
    eventually("all sessions end", || server.handle.connections() == 0 && server.used(0) == 0);
}

#[test]
fn a_client_killed_in_an_upload_leaves_nothing() {
    let server = TestServer::start(Config::default());
    let mut other = Client::open(&server);
    let kept = other.alloc(0, 1000);
    for size in [1000, 64 << 20] {
        let mut client = Client::open(&server);
        let memory = client.alloc(0, size);
        begin_upload(&mut client, &memory, size);
        assert_eq!(server.used(0), size + kept.size);
        client.hang_up();
        client.expect_refused(&["SET_TENSOR", "in the middle of a message"]);
        eventually("the memory is back", || server.used(0) == kept.size);
    }
    other.assert_alive();
}

#[test]
fn leaving_between_messages_is_no_fault() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    client.alloc(0, 1000);
    client.hang_up();
    client.expect_closed();
    let mut silent = Client::raw(&server);
    silent.hang_up();
    silent.expect_closed();
    assert_eq!((client.warnings(), silent.warnings()), (vec![], vec![]));
    eventually("the memory is back", || server.used(0) == 0);
}

#[test]
fn a_client_that_stalls_in_a_message_is_closed_and_others_are_not() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT));
    let mut idle = Client::open(&server);
    type Start = fn(&mut Client);
    let started: [(&str, Start); 4] = [
        ("no more bytes", |client| client.write(&[Command::DeviceCount as u8])),
        ("GRAPH_COMPUTE", |client| client.write(&graph(0, &[], &[empty()])[..40])),
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
        let mut client = Client::open(&server);
        start(&mut client);
        client.expect_refused(&[what, "stalled"]);
    }
    eventually("the memory is back", || server.used(0) == 0);
    // Silent for several deadlines by now: between messages there is none.
    idle.assert_alive();
}

#[test]
fn a_client_that_takes_no_reply_is_closed() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT));
    let mut client = Client::open(&server);
    let memory = client.alloc(0, 128 << 20);
    client.send(&get(&memory.bytes(), 0, memory.size));
    eventually("it is given up", || server.handle.connections() == 0);
    let lines = client.warnings();
    assert!(lines.len() == 1 && lines[0].contains("GET_TENSOR: stalled"), "{lines:?}");
    assert_eq!(server.used(0), 0);
}

#[test]
fn the_handshake_has_a_deadline_however_it_drips() {
    let deadline = 4 * SHORT;
    let server = TestServer::start(Config::default().with_handshake_timeout(deadline));
    let mut known = Client::open(&server);
    let mut silent = Client::raw(&server);
    let mut half = Client::raw(&server);
    half.write(&frame(&hello())[..20]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut drip = Client::raw(&server);
            let mut stream = drip.stream.try_clone().expect("a socket");
            for byte in frame(&hello()) {
                use std::io::{Read, Write};
                // Each byte after a fraction of the deadline: the wait for a reply that does not come.
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
fn hello_comes_first_and_once() {
    let server = TestServer::start(Config::default());
    let mut client = Client::raw(&server);
    client.send(&Request::DeviceCount(DeviceCount {}));
    client.expect_refused(&["DEVICE_COUNT", "expected HELLO as the first message"]);
    let mut client = Client::open(&server);
    client.send(&hello());
    client.expect_refused(&["HELLO", "has had its HELLO"]);
}

#[test]
fn shutdown_closes_every_connection_and_ends() {
    let mut server = TestServer::start(Config::default());
    let (mut idle, mut raw, mut busy) = (Client::open(&server), Client::raw(&server), Client::open(&server));
    let memory = busy.alloc(0, 64 << 20);
    begin_upload(&mut busy, &memory, memory.size);
    idle.assert_alive();
    server.stop();
    for client in [&mut idle, &mut raw, &mut busy] {
        client.expect_closed();
        assert_eq!(client.warnings(), Vec::<String>::new());
    }
    assert_eq!((server.handle.connections(), server.used(0)), (0, 0));
}

#[test]
fn a_session_is_freed_with_work_in_its_queue() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
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
    eventually("the memory is back", || server.used(0) == 0);
}

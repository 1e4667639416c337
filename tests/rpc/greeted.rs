//! What a client that greets gets: who the server is, queues, bytes, and answers as work is done.

use crate::greeted_support::*;
use crate::support::*;
use fanout::device::Device;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{Answer, CloseQueue, ExtCommand, ExtRequest, Greet, Shape, State};
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::io::Write;

#[test]
fn the_server_says_who_it_is() {
    let server = TestServer::with_devices(2, Config::default());
    let (mut client, reply) = Client::greet(&server);
    assert_eq!(reply.build, format!("rpc-server {}", fanout::VERSION));
    assert_eq!((reply.max_message, reply.graph_budget, reply.max_graphs), (16 << 20, 40 << 20, 64));
    assert_eq!((reply.sessions, reply.devices.len()), (1, 2));
    for (told, device) in reply.devices.iter().zip(&server.devices) {
        let info = device.info();
        assert_eq!((&told.name, &told.description, told.kind), (&info.name, &info.description, 0));
        assert_eq!((told.alignment, told.max_buffer), (info.alignment, info.max_buffer));
        // As every CPU device: asynchronous, over host memory, with events.
        assert_eq!((told.caps, device.pinned_memory().is_some()), (0b1101, false));
        let features: Vec<_> = device.features().into_iter().map(|f| (f.name, f.value)).collect();
        assert_eq!(told.features, features);
    }
    let (_other, second) = Client::greet(&server);
    assert_eq!(second.sessions, 2);
    client.ask(&ExtRequest::Ping(ext::Ping {}));
    let body = client.answered();
    assert_eq!(Answer::decode(ExtCommand::Ping, &body), Ok(Answer::Ping(State::Ready, 2)));
}

/// Commands of 7.0 that are still served answer as notices; the others are refused.
#[test]
fn a_greeted_session_has_its_own_memory_commands() {
    let server = TestServer::start(Config::default());
    let (mut client, _) = Client::greet(&server);
    let memory = client.buffer(0, 1 << 20);
    client.send(&Request::GetDeviceMemory(GetDeviceMemory { device: 0 }));
    let body = client.answered();
    let want = Response::GetDeviceMemory(DeviceMemoryReply { free: MEMORY - memory.size, total: MEMORY });
    assert_eq!(Response::decode(Command::GetDeviceMemory, &body), Ok(want));
    let srcs = [[0; TENSOR_RECORD]; MAX_SRC];
    client.send(&Request::GetAllocSize(GetAllocSize { device: 0, tensor: memory.floats(1, 10, 0), srcs: &srcs }));
    assert_eq!(client.answered().len(), 8);
    client.free(&memory);
    client.pings();
    assert_eq!(server.used(0), 0);
}

#[test]
fn bytes_come_back_span_after_span() {
    let server = TestServer::start(Config::default());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 1 << 20);
    // Small and large, with a shape and without.
    for (seed, n) in [(1, 0), (2, 7), (3, 4096), (4, 300 << 10), (5, 1 << 20)] {
        let bytes = noise(seed, n);
        let shape = Shape { dtype: DType::F32.to_wire(), ne: [n as u32 / 4, 1, 1, 1] };
        client.write_span(0, memory.span(0, n as u64), (n % 4 == 0 && n > 0).then_some(shape), &bytes);
        client.read_spans(0, seed, &[memory.span(0, n as u64)]);
        assert!(client.told() == data(seed, &bytes), "{n} bytes");
        let half = n as u64 / 2;
        client.read_spans(
            0,
            seed + 100,
            &[memory.span(half, n as u64 - half), memory.span(0, 0), memory.span(0, half)],
        );
        assert!(client.told() == data(seed + 100, [&bytes[half as usize..], &bytes[..half as usize]].concat()));
    }
    client.fill_span(0, memory.span(3, 5), 9);
    client.fill_span(0, memory.span(3, 0), 7);
    client.read_spans(0, 1, &[memory.span(3, 5)]);
    assert_eq!(client.told(), data(1, [9; 5]));
    client.read_spans(0, 2, &[]);
    assert_eq!(client.told(), data(2, []));
}

#[test]
fn a_graph_runs_by_its_number() {
    let server = TestServer::start(Config::default());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 4096);
    let (a, b) = (memory.floats(1, 4, 0), memory.floats(2, 4, 64));
    let sum = node(OpCode::Add, memory.floats(3, 4, 128), &[&a, &b]);
    client.keep_graph(17, 0, &[3], &[a, b, sum]);
    for round in 0..5u8 {
        let x = f32::from(round).to_le_bytes().repeat(4);
        client.write_span(0, memory.span(0, 16), None, &x);
        client.write_span(0, memory.span(64, 16), None, &x);
        client.run_graph(0, 17);
        client.mark(0, u64::from(round) + 1);
        client.ask_for(0, u64::from(round) + 1);
        client.read_spans(0, 5, &[memory.span(128, 16)]);
        assert_eq!(client.told(), Told::Reached(0, u64::from(round) + 1));
        assert_eq!(client.told(), data(5, (2.0 * f32::from(round)).to_le_bytes().repeat(4)));
    }
    // With another queue open the same runs on the queue's own thread.
    client.open_queue(1, 0);
    client.run_graph(0, 17);
    client.read_spans(0, 6, &[memory.span(128, 16)]);
    assert_eq!(client.told(), data(6, 8f32.to_le_bytes().repeat(4)));
}

#[test]
fn who_does_not_greet_is_served_as_ever() {
    let server = TestServer::start(Config::default());
    let mut old = Client::open(&server);
    old.assert_alive();
    let mut late = Client::open(&server);
    late.assert_alive();
    late.ask(&ExtRequest::Greet(Greet { revision: 1 }));
    late.expect_refused(&["GREET", "right after HELLO"]);
    for (request, reason) in [
        (ExtRequest::Greet(Greet { revision: 2 }), "revision 2 of the extensions, this server speaks 1"),
        (ExtRequest::CloseQueue(CloseQueue { queue: 0 }), "unknown command 130"),
        (ExtRequest::Ping(ext::Ping {}), "unknown command 147"),
    ] {
        let mut client = Client::open(&server);
        client.ask(&request);
        client.expect_refused(&[reason]);
    }
    let mut client = Client::raw(&server);
    client.ask(&ExtRequest::Greet(Greet { revision: 1 }));
    client.expect_refused(&["GREET"]);
    old.assert_alive();
}

#[test]
fn all_of_a_session_is_given_back() {
    let (first, second) = (Held::new("CPU0"), Held::new("CPU1"));
    let server = TestServer::with_device_list(vec![first.clone(), second], Config::default());
    let mut client = Client::with_queues(&server);
    let memory = [client.buffer(0, 4 << 20), client.buffer(1, 4 << 20)];
    for (queue, memory) in [0, 1].into_iter().zip(&memory) {
        client.fill_span(queue, memory.all(), 3);
        client.read_spans(queue, 1, &[memory.all()]);
        client.mark(queue, 1);
        client.ask_for(queue, 1);
    }
    client.wait_for(0, 1, 1);
    client.pings();
    assert!(server.used(0) > 0 && server.used(1) > 0);
    // A queue that is closed lets go of what it had not started, and says nothing of it any more.
    client.ask(&ExtRequest::CloseQueue(CloseQueue { queue: 1 }));
    client.pings();
    drop(client);
    eventually("the memory is back", || server.used(0) == 0 && server.used(1) == 0);
    eventually("the session has ended", || server.handle.connections() == 0);
    assert!(first.memory().is_ok());
}

#[test]
fn a_client_that_reads_nothing_is_cut_off() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT));
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 8 << 20);
    // More than the sockets hold between us; the server stops to read at some point too.
    for id in 0..64 {
        let mut bytes = Vec::new();
        let span = [ext::Spans::encode(&memory.all())];
        ExtRequest::Read(ext::Read { queue: 0, id, spans: ext::Spans::new(&span) }).encode(&mut bytes);
        if client.stream.write_all(&bytes).is_err() {
            break;
        }
    }
    eventually("it is given up", || server.handle.connections() == 0);
    let lines = client.warnings();
    assert!(lines.len() == 1 && lines[0].contains("READ: stalled"), "{lines:?}");
    eventually("the memory is back", || server.used(0) == 0);
}

//! Sessions of the extended protocol: the reply to HELLO_EXT, reads and writes of spans, graphs that run by id, and the release
//! of resources.

use crate::extended_support::*;
use crate::support::*;
use fanout::device::Device;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{
    CloseQueue, ExtCommand, ExtRequest, ExtResponse, HelloExt, REVISION, ServerState, TensorShape,
};
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::io::Write;

#[test]
fn the_hello_ext_reply_describes_the_server() {
    let server = TestServer::with_devices(2, Config::default());
    let (mut client, reply) = Client::connect_extended(&server);
    assert_eq!(reply.build, format!("rpc-server {}", fanout::VERSION));
    assert_eq!((reply.max_message, reply.graph_budget, reply.max_graphs), (16 << 20, 40 << 20, 64));
    assert_eq!(reply.devices.len(), 2);
    for (record, device) in reply.devices.iter().zip(&server.devices) {
        let info = device.info();
        assert_eq!((&record.name, &record.description, record.kind), (&info.name, &info.description, 0));
        assert_eq!((record.alignment, record.max_buffer), (info.alignment, info.max_buffer));
        // The capability bits of every CPU device: asynchronous, host memory, events.
        assert_eq!((record.caps, device.pinned_memory().is_some()), (0b1101, false));
        let features: Vec<_> = device.features().into_iter().map(|f| (f.name, f.value)).collect();
        assert_eq!(record.features, features);
    }
    let _other = Client::connect_extended(&server);
    client.send_ext(&ExtRequest::Ping(ext::Ping {}));
    let body = client.next_ext_reply();
    assert_eq!(ExtResponse::decode(ExtCommand::Ping, &body), Ok(ExtResponse::Ping(ServerState::Ready, 2)));
}

/// The memory commands of 7.0 are served after HELLO_EXT, with their replies as notifications; other commands of 7.0 are
/// rejected.
#[test]
fn an_extended_session_serves_the_memory_commands_of_7_0() {
    let server = TestServer::start(Config::default());
    let (mut client, _) = Client::connect_extended(&server);
    let memory = client.alloc_ext(0, 1 << 20);
    client.send(&Request::GetDeviceMemory(GetDeviceMemory { device: 0 }));
    let body = client.next_ext_reply();
    let want = Response::GetDeviceMemory(DeviceMemoryReply { free: MEMORY - memory.size, total: MEMORY });
    assert_eq!(Response::decode(RpcCommand::GetDeviceMemory, &body), Ok(want));
    let srcs = [[0; TENSOR_RECORD]; MAX_SRC];
    client.send(&Request::GetAllocSize(GetAllocSize { device: 0, tensor: memory.float_tensor(1, 10, 0), srcs: &srcs }));
    assert_eq!(client.next_ext_reply().len(), 8);
    client.free(&memory);
    client.assert_ping_replied();
    assert_eq!(server.used_bytes(0), 0);
}

#[test]
fn reads_return_their_spans_in_order() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 1 << 20);
    // Small and large spans, with and without a shape.
    for (seed, n) in [(1, 0), (2, 7), (3, 4096), (4, 300 << 10), (5, 1 << 20)] {
        let bytes = random_bytes(seed, n);
        let shape = TensorShape { dtype: DType::F32.to_wire(), ne: [n as u32 / 4, 1, 1, 1] };
        client.write_span(0, memory.span(0, n as u64), (n % 4 == 0 && n > 0).then_some(shape), &bytes);
        client.read_spans(0, seed, &[memory.span(0, n as u64)]);
        assert!(client.next_notification() == data_notification(seed, &bytes), "{n} bytes");
        let half = n as u64 / 2;
        client.read_spans(
            0,
            seed + 100,
            &[memory.span(half, n as u64 - half), memory.span(0, 0), memory.span(0, half)],
        );
        assert!(
            client.next_notification()
                == data_notification(seed + 100, [&bytes[half as usize..], &bytes[..half as usize]].concat())
        );
    }
    client.fill_span(0, memory.span(3, 5), 9);
    client.fill_span(0, memory.span(3, 0), 7);
    client.read_spans(0, 1, &[memory.span(3, 5)]);
    assert_eq!(client.next_notification(), data_notification(1, [9; 5]));
    client.read_spans(0, 2, &[]);
    assert_eq!(client.next_notification(), data_notification(2, []));
}

#[test]
fn a_prepared_graph_runs_by_its_id() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 4096);
    let (a, b) = (memory.float_tensor(1, 4, 0), memory.float_tensor(2, 4, 64));
    let sum = node(OpCode::Add, memory.float_tensor(3, 4, 128), &[&a, &b]);
    client.prepare_graph(17, 0, &[3], &[a, b, sum]);
    for round in 0..5u8 {
        let x = f32::from(round).to_le_bytes().repeat(4);
        client.write_span(0, memory.span(0, 16), None, &x);
        client.write_span(0, memory.span(64, 16), None, &x);
        client.run_graph(0, 17);
        client.mark(0, u64::from(round) + 1);
        client.notify_reached(0, u64::from(round) + 1);
        client.read_spans(0, 5, &[memory.span(128, 16)]);
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(0, u64::from(round) + 1));
        assert_eq!(client.next_notification(), data_notification(5, (2.0 * f32::from(round)).to_le_bytes().repeat(4)));
    }
    // With a second open queue the graph runs on the thread of its queue instead of inline.
    client.open_queue(1, 0);
    client.run_graph(0, 17);
    client.read_spans(0, 6, &[memory.span(128, 16)]);
    assert_eq!(client.next_notification(), data_notification(6, 8f32.to_le_bytes().repeat(4)));
}

#[test]
fn a_session_without_hello_ext_serves_only_ggmls_protocol() {
    let server = TestServer::start(Config::default());
    let mut old = Client::connect(&server);
    old.assert_alive();
    let mut late = Client::connect(&server);
    late.assert_alive();
    late.send_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() }));
    late.expect_refused(&["HELLO_EXT", "right after HELLO"]);
    for (request, reason) in [
        (
            ExtRequest::HelloExt(HelloExt { revision: 9 }),
            &*format!("revision 9 of the extensions, this server supports revision {REVISION}"),
        ),
        (ExtRequest::CloseQueue(CloseQueue { queue: 0 }), "unknown command 130"),
        (ExtRequest::Ping(ext::Ping {}), "unknown command 147"),
    ] {
        let mut client = Client::connect(&server);
        client.send_ext(&request);
        client.expect_refused(&[reason]);
    }
    let mut client = Client::connect_without_hello(&server);
    client.send_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() }));
    client.expect_refused(&["HELLO_EXT"]);
    old.assert_alive();
}

#[test]
fn closing_a_session_frees_its_memory() {
    let (first, second) = (HeldDevice::new("CPU0"), HeldDevice::new("CPU1"));
    let server = TestServer::with_device_list(vec![first.clone(), second], Config::default());
    let mut client = Client::connect_with_queues(&server);
    let memory = [client.alloc_ext(0, 4 << 20), client.alloc_ext(1, 4 << 20)];
    for (queue, memory) in [0, 1].into_iter().zip(&memory) {
        client.fill_span(queue, memory.whole_span(), 3);
        client.read_spans(queue, 1, &[memory.whole_span()]);
        client.mark(queue, 1);
        client.notify_reached(queue, 1);
    }
    client.wait_for_mark(0, 1, 1);
    client.assert_ping_replied();
    assert!(server.used_bytes(0) > 0 && server.used_bytes(1) > 0);
    // A closed queue drops the work that has not started, and sends no more notifications.
    client.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue: 1 }));
    client.assert_ping_replied();
    drop(client);
    eventually("the server has freed the memory of the session", || {
        server.used_bytes(0) == 0 && server.used_bytes(1) == 0
    });
    eventually("the session of the client has ended", || server.handle.connections() == 0);
    assert!(first.memory().is_ok());
}

#[test]
fn a_client_that_stops_reading_is_disconnected() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT_TIMEOUT));
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 8 << 20);
    // The requested data exceeds the buffers of both sockets, so the server's writes block and it stops reading.
    for id in 0..64 {
        let mut bytes = Vec::new();
        let span = [ext::BufferSpans::encode(&memory.whole_span())];
        ExtRequest::ReadSpans(ext::ReadSpans { queue: 0, id, spans: ext::BufferSpans::new(&span) }).encode(&mut bytes);
        if client.stream.write_all(&bytes).is_err() {
            break;
        }
    }
    eventually("the server has closed the connection", || server.handle.connections() == 0);
    eventually("the server has logged it", || !client.warnings().is_empty());
    let lines = client.warnings();
    assert!(lines.len() == 1 && lines[0].contains("READ: stalled"), "{lines:?}");
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 0);
}

//! The graph cache of an extended session (PREPARE_GRAPH, RUN_GRAPH): its eviction order is predictable for the client.
//! SUPPORTS_OP requests.

use crate::extended_support::*;
use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{
    DeviceFault, DeviceFaultKind, ExtCommand, ExtRequest, ExtResponse, Ping, SendToPeer, ServerState, SupportsOp,
    TRANSFER_TOKEN_BYTES,
};
use fanout::rpc::wire::*;
use fanout::tensor::DType;

/// The tensors of a graph that writes the sum of two floats of a buffer to `offset`, with `extra` unused leaves, and the
/// graph's cost in bytes.
fn sum(memory: &ClientBuffer, offset: u64, extra: usize) -> (Vec<TensorRecord>, u64) {
    let (a, b) = (memory.float_tensor(1, 1, 0), memory.float_tensor(2, 1, 64));
    let mut tensors = vec![a.clone(), b.clone(), node(OpCode::Add, memory.float_tensor(3, 1, offset), &[&a, &b])];
    tensors.extend((0..extra as u64).map(|id| memory.float_tensor(100 + id, 1, 0)));
    let encoded: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
    let nodes = [3u64.to_le_bytes()];
    let graph = GraphCompute::new(0, &nodes, &encoded).expect("counts within u32");
    let body = 12 + 8 + TENSOR_RECORD as u64 * tensors.len() as u64;
    (tensors, graph_cost(body, &graph))
}

/// A session with a buffer that holds the operands of [`sum`]: 1 and 2.
fn session(server: &TestServer) -> (Client, ClientBuffer) {
    let mut client = Client::connect_with_queues(server);
    let memory = client.alloc_ext(0, 1 << 20);
    client.write_span(0, memory.span(0, 4), None, &1f32.to_le_bytes());
    client.write_span(0, memory.span(64, 4), None, &2f32.to_le_bytes());
    (client, memory)
}

#[test]
fn the_graph_cache_holds_the_announced_number_of_graphs() {
    let server = TestServer::start(Config::default());
    for lost in [true, false] {
        let (mut client, memory) = session(&server);
        let keep = |client: &mut Client, id: u64| client.prepare_graph(id, 0, &[3], &sum(&memory, 64 * (id + 2), 0).0);
        (0..64).for_each(|id| keep(&mut client, id));
        // Running graph 0 makes graph 1 the least recently used, so the next graph evicts graph 1.
        client.run_graph(0, 0);
        keep(&mut client, 64);
        for id in [0, 2, 63, 64] {
            client.run_graph(0, id);
            client.read_spans(0, id, &[memory.span(64 * (id + 2), 4)]);
            assert_eq!(client.next_notification(), data_notification(id, 3f32.to_le_bytes()));
        }
        if lost {
            client.run_graph(0, 1);
            client.expect_protocol_error(&["RUN_GRAPH", "no graph 1 is prepared"]);
        } else {
            // Graph 3 is now the least recently used one.
            keep(&mut client, 65);
            client.run_graph(0, 4);
            client.run_graph(0, 3);
            client.expect_protocol_error(&["RUN_GRAPH", "no graph 3 is prepared"]);
        }
    }
}

#[test]
fn cached_graphs_stay_within_the_memory_budget() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let (tensors, cost) = sum(&memory, 128, 20_000);
    let fit = (40 << 20) / cost;
    assert!((3..8).contains(&fit), "{cost}");
    let keep = |client: &mut Client, id: u64| client.prepare_graph(id, 0, &[3], &tensors);
    (0..fit).for_each(|id| keep(&mut client, id));
    client.run_graph(0, 0);
    keep(&mut client, fit);
    client.run_graph(0, 0);
    (2..=fit).for_each(|id| client.run_graph(0, id));
    // Many evictions in turn: the memory of evicted graphs must be released.
    (fit + 1..fit + 20).for_each(|id| {
        keep(&mut client, id);
        client.run_graph(0, id);
    });
    client.read_spans(0, 1, &[memory.span(128, 4)]);
    assert_eq!(client.next_notification(), data_notification(1, 3f32.to_le_bytes()));
    client.run_graph(0, fit);
    client.expect_protocol_error(&["RUN_GRAPH", &format!("no graph {fit} is prepared")]);
}

/// The device may still execute work of a queue that has failed for the client. That work holds evicted graphs, so a session
/// that caches more graphs blocks until the device has released them.
#[test]
fn a_session_waits_for_evicted_graphs_that_a_failed_queue_still_uses() {
    let held = HeldDevice::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut client, _) = Client::connect_extended(&server);
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 1 << 10);
    let (tensors, cost) = sum(&memory, 128, 20_000);
    let fit = (40 << 20) / cost;
    for id in 0..fit {
        client.prepare_graph(id, 0, &[3], &tensors);
        client.run_graph(0, id);
    }
    client.send_ext(&ExtRequest::SendToPeer(SendToPeer {
        queue: 0,
        span: memory.span(0, 1),
        token: [0; TRANSFER_TOKEN_BYTES],
        address: "127.0.0.1:1",
    }));
    assert!(matches!(client.next_notification(), ReceivedNotification::QueueFailed(0, _)));
    // As many graphs again: all graphs above are evicted.
    for id in fit..=2 * fit {
        client.prepare_graph(id, 0, &[3], &tensors);
    }
    client.send_ext(&ExtRequest::Ping(Ping {}));
    assert_eq!(
        client.next_notification_or_state(),
        ReceivedNotification::ServerState(ServerState::Ready),
        "the session is blocked"
    );
    held.release();
    client.next_ext_reply();
}

#[test]
fn freeing_a_buffer_evicts_its_graphs() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let other = client.alloc_ext(0, 64);
    client.prepare_graph(1, 0, &[3], &sum(&memory, 128, 0).0);
    // A leaf that no node reads is enough to bind the graph to its buffer.
    let mut tensors = sum(&memory, 192, 0).0;
    tensors.push(other.float_tensor(9, 1, 0));
    client.prepare_graph(2, 0, &[3], &tensors);
    client.run_graph(0, 2);
    client.free(&other);
    client.run_graph(0, 1);
    client.read_spans(0, 1, &[memory.span(128, 4), memory.span(192, 4)]);
    assert_eq!(client.next_notification(), data_notification(1, 3f32.to_le_bytes().repeat(2)));
    client.run_graph(0, 2);
    client.expect_protocol_error(&["RUN_GRAPH", "no graph 2 is prepared"]);
}

/// A graph with an unsupported node can be stored. Running it fails the queue with the op as the cause.
#[test]
fn running_an_unsupported_node_fails_the_queue() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let unknown = OpCode::ALL.iter().copied().find(|op| op.stem().is_none() && op.to_wire() != 0).expect("one of them");
    let a = memory.float_tensor(1, 4, 0);
    let node = node(unknown, memory.float_tensor(2, 4, 128), &[&a]);
    client.prepare_graph(1, 0, &[2], &[a.clone(), node.clone()]);
    client.assert_ping_replied();
    client.run_graph(0, 1);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, DeviceFault { kind, .. }) => {
            assert_eq!(kind, DeviceFaultKind::Unsupported(unknown.to_wire()))
        }
        other => panic!("{other:?}"),
    }
    client.run_graph(0, 1);
    client.assert_ping_replied();
}

#[test]
fn support_requests_accept_tensors_without_buffers() {
    let server = TestServer::start(Config::default());
    let (mut client, _) = Client::connect_extended(&server);
    let mut ask = |nodes: &[u64], tensors: &[TensorRecord]| {
        let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
        let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
        let graph = GraphCompute::new(0, &nodes, &tensors).expect("counts within u32");
        client.send_ext(&ExtRequest::SupportsOp(SupportsOp { graph }));
        match ExtResponse::decode(ExtCommand::SupportsOp, &client.next_ext_reply()) {
            Ok(ExtResponse::SupportsOp(answer)) => answer,
            other => panic!("{other:?}"),
        }
    };
    let nowhere = ClientBuffer { handle: 0, base: 0, size: 0 };
    let float = |id, ne| nowhere.tensor(id, DType::F32, ne, 0);
    let (a, b) = (float(1, [64, 8, 1, 1]), float(2, [64, 1, 1, 1]));
    let add = node(OpCode::Add, float(3, [64, 8, 1, 1]), &[&a, &b]);
    assert_eq!(ask(&[3], &[a.clone(), b.clone(), add.clone()]), Ok(false));
    let weights = nowhere.tensor(1, DType::Q4_K, [256, 8, 1, 1], 0);
    let x = float(2, [256, 3, 1, 1]);
    let product = node(OpCode::MulMat, float(3, [8, 3, 1, 1]), &[&weights, &x]);
    assert_eq!(ask(&[3], &[weights, x, product]), Ok(false));
    // A source with a stride of zero repeats one row.
    let row = TensorRecord { nb: [4, 0, 0, 0], ..a.clone() };
    let add_row = node(OpCode::Add, float(3, [64, 8, 1, 1]), &[&a, &TensorRecord { id: 2, ..row.clone() }]);
    assert_eq!(ask(&[3], &[a.clone(), TensorRecord { id: 2, ..row }, add_row]), Ok(false));
    // For an invalid graph the reply has the reason, and the session continues.
    for (nodes, tensors, reason) in [
        (vec![3], vec![a.clone(), add.clone()], "not among the graph's tensors"),
        (vec![], vec![], "one compute node"),
        (vec![3], vec![a.clone(), b, TensorRecord { ne: [3, 8, 1, 1], ..add.clone() }], ""),
        (vec![1], vec![TensorRecord { dtype: 999, ..a.clone() }], "one compute node"),
        (vec![3], vec![a.clone(), TensorRecord { dtype: 999, id: 2, ..a.clone() }, add.clone()], "type number 999"),
        (vec![3], vec![a, TensorRecord { op: 9999, ..add }], "op number 9999"),
    ] {
        let why = ask(&nodes, &tensors).expect_err("an invalid graph");
        assert!(why.text.contains(reason), "{reason}: {why:?}");
    }
}

//! Kept graphs: the client can tell which are there, and what a device runs.

use crate::greeted_support::*;
use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{
    Answer, ExtCommand, ExtRequest, Fault, FaultKind, Ping, Send, State, Support, TICKET, TicketList,
};
use fanout::rpc::wire::*;
use fanout::tensor::DType;

/// A graph that sets the byte at `offset` of a buffer to the sum of two others; its cost.
fn sum(memory: &ClientBuffer, offset: u64, extra: usize) -> (Vec<TensorRecord>, u64) {
    let (a, b) = (memory.floats(1, 1, 0), memory.floats(2, 1, 64));
    let mut tensors = vec![a.clone(), b.clone(), node(OpCode::Add, memory.floats(3, 1, offset), &[&a, &b])];
    tensors.extend((0..extra as u64).map(|id| memory.floats(100 + id, 1, 0)));
    let encoded: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
    let nodes = [3u64.to_le_bytes()];
    let graph = GraphCompute::new(0, &nodes, &encoded).expect("few enough");
    let body = 12 + 8 + TENSOR_RECORD as u64 * tensors.len() as u64;
    (tensors, graph_cost(body, &graph))
}

/// A session with a buffer in which 1 and 2 wait to be added.
fn session(server: &TestServer) -> (Client, ClientBuffer) {
    let mut client = Client::with_queues(server);
    let memory = client.buffer(0, 1 << 20);
    client.write_span(0, memory.span(0, 4), None, &1f32.to_le_bytes());
    client.write_span(0, memory.span(64, 4), None, &2f32.to_le_bytes());
    (client, memory)
}

#[test]
fn as_many_are_kept_as_the_server_says() {
    let server = TestServer::start(Config::default());
    for lost in [true, false] {
        let (mut client, memory) = session(&server);
        let keep = |client: &mut Client, id: u64| client.keep_graph(id, 0, &[3], &sum(&memory, 64 * (id + 2), 0).0);
        (0..64).for_each(|id| keep(&mut client, id));
        // Used now: the next one drops 1 instead.
        client.run_graph(0, 0);
        keep(&mut client, 64);
        for id in [0, 2, 63, 64] {
            client.run_graph(0, id);
            client.read_spans(0, id, &[memory.span(64 * (id + 2), 4)]);
            assert_eq!(client.told(), data(id, 3f32.to_le_bytes()));
        }
        if lost {
            client.run_graph(0, 1);
            client.expect_told_refusal(&["RUN_GRAPH", "no graph 1 is kept"]);
        } else {
            // The longest unused by now is 3.
            keep(&mut client, 65);
            client.run_graph(0, 4);
            client.run_graph(0, 3);
            client.expect_told_refusal(&["RUN_GRAPH", "no graph 3 is kept"]);
        }
    }
}

#[test]
fn they_cost_no_more_than_the_budget() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let (tensors, cost) = sum(&memory, 128, 20_000);
    let fit = (40 << 20) / cost;
    assert!((3..8).contains(&fit), "{cost}");
    let keep = |client: &mut Client, id: u64| client.keep_graph(id, 0, &[3], &tensors);
    (0..fit).for_each(|id| keep(&mut client, id));
    client.run_graph(0, 0);
    keep(&mut client, fit);
    client.run_graph(0, 0);
    (2..=fit).for_each(|id| client.run_graph(0, id));
    // Many of them in turn: what was dropped is not held for ever.
    (fit + 1..fit + 20).for_each(|id| {
        keep(&mut client, id);
        client.run_graph(0, id);
    });
    client.read_spans(0, 1, &[memory.span(128, 4)]);
    assert_eq!(client.told(), data(1, 3f32.to_le_bytes()));
    client.run_graph(0, fit);
    client.expect_told_refusal(&["RUN_GRAPH", &format!("no graph {fit} is kept")]);
}

/// A queue that has failed for its client may have work on its device yet, which holds what was dropped.
#[test]
fn dropped_graphs_of_a_failed_queue_are_waited_for() {
    let held = Held::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut client, _) = Client::greet(&server);
    client.open_queue(0, 0);
    let memory = client.buffer(0, 1 << 10);
    let (tensors, cost) = sum(&memory, 128, 20_000);
    let fit = (40 << 20) / cost;
    for id in 0..fit {
        client.keep_graph(id, 0, &[3], &tensors);
        client.run_graph(0, id);
    }
    let tickets = TicketList(&[[0; TICKET]]);
    client.ask(&ExtRequest::Send(Send { queue: 0, span: memory.span(0, 1), tickets, address: "127.0.0.1:1" }));
    assert!(matches!(client.told(), Told::Failed(0, _)));
    // As many again.
    for id in fit..=2 * fit {
        client.keep_graph(id, 0, &[3], &tensors);
    }
    client.ask(&ExtRequest::Ping(Ping {}));
    assert_eq!(client.heard(), Told::State(State::Ready), "the session waits");
    held.open();
    client.answered();
}

#[test]
fn a_freed_buffer_takes_its_graphs_along() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let other = client.buffer(0, 64);
    client.keep_graph(1, 0, &[3], &sum(&memory, 128, 0).0);
    // A tensor there is enough, though no node needs it.
    let mut tensors = sum(&memory, 192, 0).0;
    tensors.push(other.floats(9, 1, 0));
    client.keep_graph(2, 0, &[3], &tensors);
    client.run_graph(0, 2);
    client.free(&other);
    client.run_graph(0, 1);
    client.read_spans(0, 1, &[memory.span(128, 4), memory.span(192, 4)]);
    assert_eq!(client.told(), data(1, 3f32.to_le_bytes().repeat(2)));
    client.run_graph(0, 2);
    client.expect_told_refusal(&["RUN_GRAPH", "no graph 2 is kept"]);
}

/// A node that its device does not run: the queue says so when the graph is run, and SUPPORT without a queue.
#[test]
fn a_device_says_what_it_does_not_run() {
    let server = TestServer::start(Config::default());
    let (mut client, memory) = session(&server);
    let unknown = OpCode::ALL.iter().copied().find(|op| op.stem().is_none() && op.to_wire() != 0).expect("one of them");
    let a = memory.floats(1, 4, 0);
    let node = node(unknown, memory.floats(2, 4, 128), &[&a]);
    client.keep_graph(1, 0, &[2], &[a.clone(), node.clone()]);
    client.pings();
    client.run_graph(0, 1);
    match client.told() {
        Told::Failed(0, Fault { kind, .. }) => assert_eq!(kind, FaultKind::Unsupported(unknown.to_wire())),
        other => panic!("{other:?}"),
    }
    client.run_graph(0, 1);
    client.pings();
}

#[test]
fn support_is_told_of_tensors_that_lie_nowhere() {
    let server = TestServer::start(Config::default());
    let (mut client, _) = Client::greet(&server);
    let mut ask = |nodes: &[u64], tensors: &[TensorRecord]| {
        let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
        let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
        let graph = GraphCompute::new(0, &nodes, &tensors).expect("few enough");
        client.ask(&ExtRequest::Support(Support { graph }));
        match Answer::decode(ExtCommand::Support, &client.answered()) {
            Ok(Answer::Support(answer)) => answer,
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
    // A source that repeats a row, and rows set where they are.
    let row = TensorRecord { nb: [4, 0, 0, 0], ..a.clone() };
    let add_row = node(OpCode::Add, float(3, [64, 8, 1, 1]), &[&a, &TensorRecord { id: 2, ..row.clone() }]);
    assert_eq!(ask(&[3], &[a.clone(), TensorRecord { id: 2, ..row }, add_row]), Ok(false));
    // Why not, of a graph that is none, too; the session goes on.
    for (nodes, tensors, reason) in [
        (vec![3], vec![a.clone(), add.clone()], "not among the graph's tensors"),
        (vec![], vec![], "one node"),
        (vec![3], vec![a.clone(), b, TensorRecord { ne: [3, 8, 1, 1], ..add.clone() }], ""),
        (vec![1], vec![TensorRecord { dtype: 999, ..a.clone() }], "one node"),
        (vec![3], vec![a.clone(), TensorRecord { dtype: 999, id: 2, ..a.clone() }, add.clone()], "type number 999"),
        (vec![3], vec![a, TensorRecord { op: 9999, ..add }], "op number 9999"),
    ] {
        let why = ask(&nodes, &tensors).expect_err("an invalid graph");
        assert!(why.text.contains(reason), "{reason}: {why:?}");
    }
}

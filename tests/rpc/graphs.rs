//! GRAPH_COMPUTE and GRAPH_RECOMPUTE: execution, the cache of programs, and graphs that cannot run.

use crate::extended_support::*;
use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::time::{Duration, Instant};

const N: u32 = 100;

/// `c = a op b`, each of `N` floats, in one buffer.
struct BinaryGraph {
    a: TensorRecord,
    b: TensorRecord,
    c: TensorRecord,
}

impl BinaryGraph {
    fn new(memory: &ClientBuffer, op: OpCode) -> BinaryGraph {
        let (a, b) = (memory.float_tensor(0xa, N, 0), memory.float_tensor(0xb, N, 512));
        let c = node(op, memory.float_tensor(0xc, N, 1024), &[&a, &b]);
        BinaryGraph { a, b, c }
    }

    fn tensors(&self) -> Vec<TensorRecord> {
        vec![self.a.clone(), self.b.clone(), self.c.clone()]
    }

    fn check(&self, client: &mut Client, seed: u64, run: impl Fn(&mut Client), want: fn(f32, f32) -> f32) {
        let (a, b) = (random_floats(seed, N as usize), random_floats(seed + 1000, N as usize));
        client.set_floats(&self.a, &a);
        client.set_floats(&self.b, &b);
        run(client);
        let want: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| want(a, b)).collect();
        assert_eq!(client.get_floats(&self.c), want, "seed {seed}");
    }
}

fn recompute(device: u32) -> Request<'static> {
    Request::GraphRecompute(GraphRecompute { device, uid: None })
}

#[test]
fn graph_recompute_runs_the_last_graph_again() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    for device in 0..2 {
        let memory = client.alloc(device, 2048);
        let (add, mul) = (BinaryGraph::new(&memory, OpCode::Add), BinaryGraph::new(&memory, OpCode::Mul));
        for round in 0..4 {
            add.check(&mut client, round, |c| c.compute_graph(device, &[0xc], &add.tensors()), |a, b| a + b);
            add.check(&mut client, round + 10, |c| c.send(&recompute(device)), |a, b| a + b);
            mul.check(&mut client, round + 20, |c| c.compute_graph(device, &[0xc], &mul.tensors()), |a, b| a * b);
            mul.check(&mut client, round + 30, |c| c.send(&recompute(device)), |a, b| a * b);
        }
    }
}

#[test]
fn more_graphs_than_the_cache_holds_still_run() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 2048);
    for round in 0..100 {
        let mut case = BinaryGraph::new(&memory, OpCode::Sub);
        // A tensor name has no effect on the result, but makes the message differ, so the program is not reused.
        case.c.name[0] = round;
        case.check(&mut client, round.into(), |c| c.compute_graph(0, &[0xc], &case.tensors()), |a, b| a - b);
    }
}

#[test]
fn nodes_run_in_order_and_leaves_are_not_computed() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 4096);
    let (a, b) = (memory.float_tensor(1, N, 0), memory.float_tensor(2, N, 512));
    let sum = node(OpCode::Add, memory.float_tensor(3, N, 1024), &[&a, &b]);
    // A leaf may carry an op of another split and sources that are not in the graph. A listed node without the compute flag is
    // skipped.
    let mut leaf = node(OpCode::MulMat, memory.float_tensor(4, N, 1536), &[]);
    leaf.src[0] = 0x9999;
    let mut asleep = node(OpCode::Add, memory.float_tensor(5, N, 2048), &[&a, &b]);
    asleep.flags = 0;
    let product = node(OpCode::Mul, memory.float_tensor(6, N, 2560), &[&sum, &leaf]);
    let mut nowhere = zero_record();
    nowhere.id = 7;
    let view = node(OpCode::View, nowhere, &[&a]);
    for (tensor, value) in [(&a, 2.0), (&b, 3.0), (&leaf, 10.0), (&asleep, -1.0)] {
        client.set_floats(tensor, &[value; N as usize]);
    }
    let listed = [sum.id, asleep.id, view.id, product.id];
    client.compute_graph(0, &listed, &[a, b, sum, leaf, asleep.clone(), view, product.clone()]);
    assert_eq!(client.get_floats(&product), [50.0; N as usize]);
    assert_eq!(client.get_floats(&asleep), [-1.0; N as usize]);
}

#[test]
fn an_unused_leaf_may_have_any_address() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    let (memory, other, freed) = (client.alloc(0, 2048), client.alloc(1, 2048), client.alloc(0, 64));
    client.free(&freed);
    let case = BinaryGraph::new(&memory, OpCode::Add);
    let mut tensors = case.tensors();
    // A client of several servers may send a leaf whose buffer another server has.
    let mut elsewhere = memory.float_tensor(4, N, 0);
    (elsewhere.buffer, elsewhere.data) = (0x7f12_3456_7890, 0x7f65_4321_0000);
    tensors.extend([
        other.float_tensor(1, N, 0),
        freed.float_tensor(2, 4, 0),
        memory.float_tensor(3, N, 1 << 40),
        elsewhere,
    ]);
    case.check(&mut client, 1, |c| c.compute_graph(0, &[0xc], &tensors), |a, b| a + b);
}

/// A server's share of a tensor may be empty, and llama.cpp places such a record behind the last byte of a buffer or beyond.
#[test]
fn a_source_without_elements_may_have_any_address() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    let (memory, other, freed) = (client.alloc(0, 2048), client.alloc(1, 2048), client.alloc(0, 64));
    client.free(&freed);
    let mut nowhere = memory.float_tensor(2, 0, 0);
    (nowhere.buffer, nowhere.data) = (0, 0x1234);
    let rows = memory.float_tensor(1, N, 0);
    let ids = memory.tensor(3, DType::I64, [0, 1, 1, 1], 1 << 30);
    for (case, empty) in [
        ("behind the last byte", memory.float_tensor(2, 0, 2048)),
        ("beyond the end", memory.float_tensor(2, 0, 1 << 40)),
        ("another device", other.float_tensor(2, 0, 0)),
        ("a freed buffer", freed.float_tensor(2, 0, 0)),
        ("no buffer", nowhere),
    ] {
        let values = random_floats(7, N as usize);
        client.set_floats(&rows, &values);
        let concat = node(OpCode::Concat, memory.float_tensor(4, N, 1024), &[&rows, &empty]);
        client.compute_graph(0, &[4], &[rows.clone(), empty.clone(), concat.clone()]);
        assert_eq!(client.get_floats(&concat), values, "CONCAT, {case}");
        // No row is written, so the destination keeps its contents.
        let mut none = empty.clone();
        (none.ne, none.nb) = ([N, 0, 1, 1], [4, 4 * N, 0, 0]);
        let set_rows = node(OpCode::SetRows, memory.float_tensor(4, N, 0), &[&none, &ids, &rows]);
        client.compute_graph(0, &[4], &[rows.clone(), none, ids.clone(), set_rows.clone()]);
        assert_eq!(client.get_floats(&set_rows), values, "SET_ROWS, {case}");
    }
}

#[test]
fn an_empty_graph_can_be_computed() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    client.compute_graph(0, &[], &[]);
    client.send(&recompute(0));
    client.assert_alive();
}

#[test]
fn freeing_a_buffer_evicts_only_its_programs() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let (kept, freed) = (client.alloc(0, 1 << 18), client.alloc(0, 1 << 20));
    let (case, doomed) = (BinaryGraph::new(&kept, OpCode::Add), BinaryGraph::new(&freed, OpCode::Add));
    client.compute_graph(0, &[0xc], &doomed.tensors());
    client.compute_graph(0, &[0xc], &case.tensors());
    client.free(&freed);
    client.assert_alive();
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 1 << 18);
    case.check(&mut client, 1, |c| c.send(&recompute(0)), |a, b| a + b);
    client.compute_graph(0, &[0xc], &doomed.tensors());
    client.expect_refused(&["GRAPH_COMPUTE", "no buffer has the handle"]);
}

#[test]
fn graph_recompute_without_a_last_graph_is_rejected() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    client.compute_graph(0, &[], &[]);
    client.send(&recompute(1));
    client.expect_refused(&["GRAPH_RECOMPUTE", "device 1 has no last graph"]);

    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 2048);
    client.compute_graph(0, &[0xc], &BinaryGraph::new(&memory, OpCode::Add).tensors());
    client.free(&memory);
    client.send(&recompute(0));
    client.expect_refused(&["GRAPH_RECOMPUTE", "device 0 has no last graph"]);
}

#[test]
fn invalid_op_data_ends_only_its_session() {
    let server = TestServer::start(Config::default());
    let (mut client, mut other) = (Client::connect(&server), Client::connect(&server));
    let memory = client.alloc(0, 4096);
    let (a, b) = (memory.float_tensor(1, 4, 0), memory.float_tensor(2, 4, 64));
    let ids = memory.tensor(3, fanout::tensor::DType::I32, [1, 1, 1, 1], 128);
    let sum = node(OpCode::AddId, memory.float_tensor(4, 4, 192), &[&a, &b, &ids]);
    client.set_tensor(&ids, 0, &77_i32.to_le_bytes());
    client.compute_graph(0, &[4], &[a, b, ids, sum.clone()]);
    client.send(&get_tensor_request(&sum, 0, 16));
    client.expect_refused(&["device: ADD_ID"]);
    other.assert_alive();
}

/// Products of 33 million multiplications each, in sequence.
fn products(memory: &ClientBuffer, count: u64) -> (Vec<u64>, Vec<TensorRecord>) {
    let (k, n) = (8192, 64);
    let [a, b] = [0, 1].map(|id| memory.tensor(id + 1, DType::F32, [k, n, 1, 1], id * u64::from(4 * k * n)));
    let product = |number| {
        let offset = u64::from(8 * k * n) + number * u64::from(4 * n * n);
        node(OpCode::MulMat, memory.tensor(number + 3, DType::F32, [n, n, 1, 1], offset), &[&a, &b])
    };
    let products: Vec<_> = (0..count).map(product).collect();
    let ids = products.iter().map(|product| product.id).collect();
    (ids, [a, b].into_iter().chain(products).collect())
}

/// The limit is for each run of a graph: those below it pass, however long they take together.
#[test]
fn a_graph_ends_at_the_limit_of_its_time() {
    const LIMIT: Duration = Duration::from_secs(1);
    const LONG: u64 = 4000;
    let server = TestServer::start(Config::default().with_max_run(Some(LIMIT)));
    let memory_bytes = (8 * 8192 * 64) + LONG * (4 * 64 * 64);
    let message = "a graph used the device for longer than the limit of 1s (of a server: max-run in --limits)";

    let mut client = Client::connect(&server);
    let memory = client.alloc(0, memory_bytes);
    let (nodes, tensors) = products(&memory, LONG);
    client.compute_graph(0, &nodes, &tensors);
    client.send(&get_tensor_request(&tensors[2], 0, 4));
    client.expect_refused(&[message]);

    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, memory_bytes);
    let (nodes, tensors) = products(&memory, LONG);
    client.prepare_graph(0, 0, &nodes, &tensors);
    client.run_graph(0, 0);
    client.read_spans(0, 0, &[memory.span(0, 4)]);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, fault) => assert_eq!(fault.text, message),
        other => panic!("{other:?}"),
    }
    drop(client);

    let mut client = Client::connect(&server);
    let memory = client.alloc(0, memory_bytes);
    let (nodes, tensors) = products(&memory, 2);
    let began = Instant::now();
    while began.elapsed() < 2 * LIMIT {
        client.compute_graph(0, &nodes, &tensors);
        client.assert_alive();
    }
}

//! GRAPH_COMPUTE and GRAPH_RECOMPUTE: graphs that run, and run again.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;

const N: u32 = 100;

/// `c = a op b`, each of `N` floats, in one buffer.
struct Case {
    a: TensorRecord,
    b: TensorRecord,
    c: TensorRecord,
}

impl Case {
    fn new(memory: &ClientBuffer, op: OpCode) -> Case {
        let (a, b) = (memory.floats(0xa, N, 0), memory.floats(0xb, N, 512));
        let c = node(op, memory.floats(0xc, N, 1024), &[&a, &b]);
        Case { a, b, c }
    }

    fn tensors(&self) -> Vec<TensorRecord> {
        vec![self.a.clone(), self.b.clone(), self.c.clone()]
    }

    fn check(&self, client: &mut Client, seed: u64, run: impl Fn(&mut Client), want: fn(f32, f32) -> f32) {
        let (a, b) = (floats(seed, N as usize), floats(seed + 1000, N as usize));
        client.set_floats(&self.a, &a);
        client.set_floats(&self.b, &b);
        run(client);
        let want: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| want(a, b)).collect();
        assert_eq!(client.floats(&self.c), want, "seed {seed}");
    }
}

fn recompute(device: u32) -> Request<'static> {
    Request::GraphRecompute(GraphRecompute { device })
}

#[test]
fn a_graph_computes_and_computes_again() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::open(&server);
    for device in 0..2 {
        let memory = client.alloc(device, 2048);
        let (add, mul) = (Case::new(&memory, OpCode::Add), Case::new(&memory, OpCode::Mul));
        for round in 0..4 {
            add.check(&mut client, round, |c| c.compute(device, &[0xc], &add.tensors()), |a, b| a + b);
            add.check(&mut client, round + 10, |c| c.send(&recompute(device)), |a, b| a + b);
            mul.check(&mut client, round + 20, |c| c.compute(device, &[0xc], &mul.tensors()), |a, b| a * b);
            mul.check(&mut client, round + 30, |c| c.send(&recompute(device)), |a, b| a * b);
        }
    }
}

#[test]
fn more_graphs_than_are_kept() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    let memory = client.alloc(0, 2048);
    for round in 0..100 {
        let mut case = Case::new(&memory, OpCode::Sub);
        // Names are of no meaning, but the body is another.
        case.c.name[0] = round;
        case.check(&mut client, round.into(), |c| c.compute(0, &[0xc], &case.tensors()), |a, b| a - b);
    }
}

#[test]
fn nodes_run_in_order_and_leaves_are_left_alone() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    let memory = client.alloc(0, 4096);
    let (a, b) = (memory.floats(1, N, 0), memory.floats(2, N, 512));
    let sum = node(OpCode::Add, memory.floats(3, N, 1024), &[&a, &b]);
    // Carries an op of another split, sources that are not here, and no compute flag where it is listed.
    let mut leaf = node(OpCode::MulMat, memory.floats(4, N, 1536), &[]);
    leaf.src[0] = 0x9999;
    let mut asleep = node(OpCode::Add, memory.floats(5, N, 2048), &[&a, &b]);
    asleep.flags = 0;
    let product = node(OpCode::Mul, memory.floats(6, N, 2560), &[&sum, &leaf]);
    let mut nowhere = empty();
    nowhere.id = 7;
    let view = node(OpCode::View, nowhere, &[&a]);
    for (tensor, value) in [(&a, 2.0), (&b, 3.0), (&leaf, 10.0), (&asleep, -1.0)] {
        client.set_floats(tensor, &[value; N as usize]);
    }
    let listed = [sum.id, asleep.id, view.id, product.id];
    client.compute(0, &listed, &[a, b, sum, leaf, asleep.clone(), view, product.clone()]);
    assert_eq!(client.floats(&product), [50.0; N as usize]);
    assert_eq!(client.floats(&asleep), [-1.0; N as usize]);
}

#[test]
fn an_unused_leaf_may_lie_anywhere() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::open(&server);
    let (memory, other, freed) = (client.alloc(0, 2048), client.alloc(1, 2048), client.alloc(0, 64));
    client.free(&freed);
    let case = Case::new(&memory, OpCode::Add);
    let mut tensors = case.tensors();
    tensors.extend([other.floats(1, N, 0), freed.floats(2, 4, 0), memory.floats(3, N, 1 << 40)]);
    case.check(&mut client, 1, |c| c.compute(0, &[0xc], &tensors), |a, b| a + b);
}

#[test]
fn an_empty_graph_is_a_graph() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    client.compute(0, &[], &[]);
    client.send(&recompute(0));
    client.assert_alive();
}

#[test]
fn freeing_a_buffer_ends_its_programs_and_no_others() {
    let server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    let (kept, freed) = (client.alloc(0, 2048), client.alloc(0, 1 << 20));
    let (case, doomed) = (Case::new(&kept, OpCode::Add), Case::new(&freed, OpCode::Add));
    client.compute(0, &[0xc], &doomed.tensors());
    client.compute(0, &[0xc], &case.tensors());
    client.free(&freed);
    client.assert_alive();
    eventually("the memory is back", || server.used(0) == 2048);
    case.check(&mut client, 1, |c| c.send(&recompute(0)), |a, b| a + b);
    client.compute(0, &[0xc], &doomed.tensors());
    client.expect_refused(&["GRAPH_COMPUTE", "no buffer has the handle"]);
}

#[test]
fn a_graph_that_is_gone_is_not_recomputed() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::open(&server);
    client.compute(0, &[], &[]);
    client.send(&recompute(1));
    client.expect_refused(&["GRAPH_RECOMPUTE", "device 1 has no last graph"]);

    let mut client = Client::open(&server);
    let memory = client.alloc(0, 2048);
    client.compute(0, &[0xc], &Case::new(&memory, OpCode::Add).tensors());
    client.free(&memory);
    client.send(&recompute(0));
    client.expect_refused(&["GRAPH_RECOMPUTE", "device 0 has no last graph"]);
}

#[test]
fn data_that_an_op_does_not_allow_ends_only_its_session() {
    let server = TestServer::start(Config::default());
    let (mut client, mut other) = (Client::open(&server), Client::open(&server));
    let memory = client.alloc(0, 4096);
    let (a, b) = (memory.floats(1, 4, 0), memory.floats(2, 4, 64));
    let ids = memory.tensor(3, fanout::tensor::DType::I32, [1, 1, 1, 1], 128);
    let sum = node(OpCode::AddId, memory.floats(4, 4, 192), &[&a, &b, &ids]);
    client.set(&ids, 0, &77_i32.to_le_bytes());
    client.compute(0, &[4], &[a, b, ids, sum.clone()]);
    client.send(&get(&sum, 0, 16));
    client.expect_refused(&["device: ADD_ID"]);
    other.assert_alive();
}

//! The messages of protocol 8.0 on a server that answers it: numbered graphs, transfers of rows, refused collectives.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{QueueFixture, deadline, options};
use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::{Config, ServedVersion};
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use fanout_testing::protocol_relay::ProtocolRelay;

const V8: Version = PROTOCOL_VERSION;

const N: u32 = 16;

fn server(max_graph_memory: u64) -> TestServer {
    let config = Config::default().with_protocol(vec![ServedVersion::V8_0]);
    TestServer::with_listeners(&["127.0.0.1:0=8"], config.with_max_graph_memory(max_graph_memory))
}

/// A graph of one node, `c = op(a, b)`, in the memory of a client.
struct NodeGraph {
    a: TensorRecord,
    b: TensorRecord,
    c: TensorRecord,
}

impl NodeGraph {
    fn new(memory: &ClientBuffer, op: OpCode) -> NodeGraph {
        let (a, b) = (memory.float_tensor(0xa, N, 0), memory.float_tensor(0xb, N, 512));
        let c = node(op, memory.float_tensor(0xc, N, 1024), &[&a, &b]);
        NodeGraph { a, b, c }
    }

    fn compute(&self, client: &mut Client, uid: u64) {
        let nodes = [0xc_u64.to_le_bytes()];
        let tensors = [self.a.encode(), self.b.encode(), self.c.encode()];
        client.send(&Request::GraphCompute(GraphCompute::new(0, &nodes, &tensors).unwrap().with_uid(uid)));
    }

    /// Writes the operands, lets `run` run the graph, and compares the result with `want` of each pair.
    fn check(&self, client: &mut Client, seed: u64, run: impl Fn(&mut Client), want: fn(f32, f32) -> f32) {
        let (a, b) = (random_floats(seed, N as usize), random_floats(seed + 1000, N as usize));
        client.set_floats(&self.a, &a);
        client.set_floats(&self.b, &b);
        run(client);
        let want: Vec<f32> = a.iter().zip(&b).map(|(&a, &b)| want(a, b)).collect();
        assert_eq!(client.get_floats(&self.c), want, "seed {seed}");
    }
}

fn recompute(client: &mut Client, uid: u64) {
    client.send(&Request::GraphRecompute(GraphRecompute { device: 0, uid: Some(uid) }));
}

#[test]
fn numbered_graphs_run_again_by_their_number() {
    let server = server(1 << 20);
    let mut client = Client::connect_as(&server, V8);
    let memory = client.alloc(0, 2048);
    let (add, mul) = (NodeGraph::new(&memory, OpCode::Add), NodeGraph::new(&memory, OpCode::Mul));
    for round in 0..3 {
        add.check(&mut client, round, |c| add.compute(c, 7), |a, b| a + b);
        mul.check(&mut client, round + 10, |c| mul.compute(c, 9), |a, b| a * b);
        // uid 0 is not stored, and leaves the others.
        mul.check(&mut client, round + 20, |c| mul.compute(c, 0), |a, b| a * b);
        for again in 0..3 {
            add.check(&mut client, round + 30 + again, |c| recompute(c, 7), |a, b| a + b);
            mul.check(&mut client, round + 40 + again, |c| recompute(c, 9), |a, b| a * b);
        }
    }
    // The same number for another graph replaces it.
    mul.check(&mut client, 90, |c| mul.compute(c, 7), |a, b| a * b);
    mul.check(&mut client, 91, |c| recompute(c, 7), |a, b| a * b);
}

/// More numbered graphs than the program cache holds: evicted programs are compiled again from the stored bodies.
#[test]
fn graphs_behind_the_program_cache_run_again() {
    const GRAPHS: u64 = 200;
    let server = server(8 << 20);
    let mut client = Client::connect_as(&server, V8);
    let memory = client.alloc(0, 2048);
    let (add, mul) = (NodeGraph::new(&memory, OpCode::Add), NodeGraph::new(&memory, OpCode::Mul));
    for uid in 1..=GRAPHS {
        if uid % 2 == 0 { add.compute(&mut client, uid) } else { mul.compute(&mut client, uid) }
    }
    for uid in [1, 2, 64, GRAPHS - 1, 3, 2] {
        if uid % 2 == 0 {
            add.check(&mut client, uid, |c| recompute(c, uid), |a, b| a + b);
        } else {
            mul.check(&mut client, uid, |c| recompute(c, uid), |a, b| a * b);
        }
    }
}

#[test]
fn a_recompute_of_a_graph_that_is_not_stored_closes_the_connection_with_the_reason() {
    type Prepare = fn(&mut Client, &ClientBuffer, &NodeGraph);
    let cases: [(&str, Prepare, u64); 4] = [
        ("device 0 has no graph 5: ", |_, _, _| {}, 5),
        ("device 0 has no graph 0: ", |c, _, add| add.compute(c, 0), 0),
        (
            "device 0 has no graph 5: ",
            |c, memory, add| {
                add.compute(c, 5);
                c.free(memory);
            },
            5,
        ),
        // The limit of 1024 clears all earlier graphs of the device.
        ("device 0 has no graph 5: ", |c, _, add| (5..=5 + 1024).for_each(|uid| add.compute(c, uid)), 5),
    ];
    let server = server(1 << 20);
    for (reason, prepare, uid) in cases {
        let mut client = Client::connect_as(&server, V8);
        let memory = client.alloc(0, 2048);
        prepare(&mut client, &memory, &NodeGraph::new(&memory, OpCode::Add));
        recompute(&mut client, uid);
        client.expect_refused(&["GRAPH_RECOMPUTE", reason]);
    }
    // The form of 7.0 has no number.
    let mut client = Client::connect_as(&server, V8);
    client.send(&Request::GraphRecompute(GraphRecompute { device: 0, uid: None }));
    client.expect_refused(&["GRAPH_RECOMPUTE", "expected a body of 12 bytes"]);
}

#[test]
fn rows_are_written_and_read_at_a_stride() {
    let server = server(1 << 20);
    let mut client = Client::connect_as(&server, V8);
    let memory = client.alloc(0, 1 << 20);
    let tensor = memory.tensor(1, DType::I8, [1 << 18, 1, 1, 1], 64);
    // Offset, bytes of a row, rows, stride: the last case has overlapping rows, of which the last one wins.
    for (seed, &(offset, size, n_copies, stride)) in
        [(0, 10, 1, 0), (3, 7, 5, 100), (0, 64, 4096, 64), (5, 1, 3000, 2), (1, 100_000, 2, 150_000), (8, 6, 3, 2)]
            .iter()
            .enumerate()
    {
        let data = random_bytes(seed as u64, (size * n_copies) as usize);
        let head = SetTensor2dHead { tensor: tensor.clone(), offset, size, n_copies, stride };
        client.send(&Request::SetTensor2d(SetTensor2d { head, data: &data }));
        let mut want = vec![0; (offset + (n_copies - 1) * stride + size) as usize];
        for (row, bytes) in (0..).zip(data.chunks(size as usize)) {
            let at = (offset + row * stride) as usize;
            want[at..at + size as usize].copy_from_slice(bytes);
        }
        let got = client.get_tensor(&tensor, 0, want.len() as u64);
        for row in 0..n_copies {
            let at = (offset + row * stride) as usize;
            assert_eq!(got[at..at + size as usize], want[at..at + size as usize], "case {seed}, row {row}");
        }
        let packed: Vec<u8> =
            (0..n_copies).flat_map(|row| want[(offset + row * stride) as usize..][..size as usize].to_vec()).collect();
        if n_copies > 1 && stride < size {
            continue; // overlapping rows can be written, but not read
        }
        client.send(&Request::GetTensor2d(GetTensor2d { tensor: tensor.clone(), offset, size, n_copies, stride }));
        assert_eq!(client.read_reply(RpcCommand::GetTensor2d), packed, "case {seed}");
    }
}

#[test]
fn rows_outside_of_their_tensor_close_the_connection() {
    let server = server(1 << 20);
    for (offset, size, n_copies, stride, reason) in [
        (0, 0, 1, 0, "at least one row"),
        (0, 1, 0, 0, "at least one row"),
        (0, 8, 9, 8, "reach past their tensor"),
        (1, 8, 8, 8, "reach past their tensor"),
        (u64::MAX, 8, 2, 8, "reach past their tensor"),
        (0, 8, 2, u64::MAX, "reach past their tensor"),
        (0, 1 << 40, 1 << 40, 0, "reach past their tensor"),
        (0, 8, 2, 4, "overlap"),
        (0, 1, 1 << 62, 0, "overlap"),
    ] {
        let mut client = Client::connect_as(&server, V8);
        let memory = client.alloc(0, 1 << 16);
        let tensor = memory.tensor(1, DType::I8, [64, 1, 1, 1], 0);
        client.send(&Request::GetTensor2d(GetTensor2d { tensor, offset, size, n_copies, stride }));
        client.expect_refused(&["GET_TENSOR_2D", reason]);
    }
    let mut client = Client::connect_as(&server, V8);
    let memory = client.alloc(0, 1 << 16);
    let tensor = memory.tensor(1, DType::I8, [64, 1, 1, 1], 0);
    let head = SetTensor2dHead { tensor, offset: 0, size: 8, n_copies: 2, stride: 16 };
    client.send(&Request::SetTensor2d(SetTensor2d { head, data: &[1; 15] }));
    client.expect_refused(&["SET_TENSOR_2D", "expected 16 bytes of rows, got 15"]);
}

#[test]
fn collectives_are_refused_without_ending_the_session() {
    let server = server(1 << 20);
    let mut client = Client::connect_as(&server, V8);
    for rank in [0, 1, 2] {
        let request = CommInit { device: 0, rank, world: 2, port: 51052, host: [0; COMM_HOST] };
        client.send(&Request::CommInit(request));
        assert_eq!(client.read_reply(RpcCommand::CommInit), [0], "rank {rank}");
    }
    client.send(&Request::CommFree(CommFree { device: 0 }));
    client.assert_alive();
    let mut client = Client::connect_as(&server, V8);
    let memory = client.alloc(0, 64);
    client.send(&Request::CommAllreduce(CommAllreduce { device: 0, tensor: memory.float_tensor(1, 4, 0) }));
    client.expect_refused(&["COMM_ALLREDUCE", "no connection for collectives"]);
    let mut client = Client::connect_as(&server, V8);
    client.send(&Request::CommFree(CommFree { device: 3 }));
    client.expect_refused(&["COMM_FREE", "no device 3"]);
}

#[test]
fn a_session_of_7_0_has_no_commands_of_8_0() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    client.send(&Request::CommFree(CommFree { device: 0 }));
    client.expect_refused(&["COMM_FREE", "is no command of protocol 7.0"]);
}

/// The commands by which a client has read, in `sent`.
fn read_commands(mut sent: &[u8]) -> Vec<RpcCommand> {
    let mut commands = Vec::new();
    let is_read = |command: &RpcCommand| matches!(command, RpcCommand::GetTensor | RpcCommand::GetTensor2d);
    while let Some((header, rest)) = sent.split_first_chunk::<REQUEST_HEADER>() {
        let header = RequestHeader::decode(header).unwrap();
        commands.push(header.command);
        // The relay may hold a part of a message.
        sent = rest.get(header.body_len(&Config::default().limits).unwrap()..).unwrap_or_default();
    }
    commands.retain(is_read);
    commands
}

/// fanout's client reads regions of equal size at an equal stride by one GET_TENSOR_2D, and all others by one GET_TENSOR each.
#[test]
fn the_client_reads_evenly_spaced_regions_by_one_request() {
    use RpcCommand::{GetTensor, GetTensor2d};
    /// Offset and bytes of each region, and the requests that read them on servers of 8.0.
    type Case = (&'static [(u64, u64)], &'static [RpcCommand]);
    let cases: [Case; 8] = [
        (&[(0, 10)], &[GetTensor]),
        (&[(0, 10), (20, 10)], &[GetTensor2d]),
        (&[(5, 10), (15, 10), (25, 10)], &[GetTensor2d]),
        (&[(0, 10), (20, 10), (41, 10)], &[GetTensor2d, GetTensor]),
        (&[(0, 10), (20, 10), (40, 11), (60, 11)], &[GetTensor2d, GetTensor2d]),
        (&[(20, 10), (0, 10)], &[GetTensor, GetTensor]),
        // Overlapping regions, and the same region twice.
        (&[(0, 10), (9, 10), (0, 10), (0, 10)], &[GetTensor; 4]),
        (&[(0, 1), (0, 0), (7, 1), (14, 1), (15, 1), (22, 1)], &[GetTensor2d, GetTensor2d]),
    ];
    for (version, has_rows) in [(ServedVersion::V8_0, true), (ServedVersion::V7_0, false)] {
        let server = TestServer::start(Config::default().with_protocol(vec![version]));
        let relay = ProtocolRelay::start(server.addr, true);
        let endpoint = Endpoint::connect(&relay.addr.to_string(), &options()).unwrap();
        let mut fixture = QueueFixture::new(&endpoint.devices()[0], 100);
        let data = random_bytes(3, 100);
        fixture.upload(&data);
        for (parts, requests) in cases {
            let before = read_commands(&relay.sent()).len();
            let regions: Vec<_> = parts.iter().map(|&(at, len)| fixture.buffer.region(at, len).unwrap()).collect();
            let reads = fixture.queue.download_all(&regions).unwrap();
            for (read, &(at, len)) in reads.into_iter().zip(parts) {
                assert_eq!(read.wait(deadline()).unwrap(), data[at as usize..(at + len) as usize], "{parts:?} at {at}");
            }
            let sent = read_commands(&relay.sent()).split_off(before);
            if has_rows {
                assert_eq!(sent, requests, "{parts:?}");
            } else {
                assert_eq!(sent, vec![GetTensor; parts.iter().filter(|(_, len)| *len > 0).count()], "{parts:?}");
            }
        }
    }
}

//! Host memory: what clients cause outside of devices is charged to one budget of the server, and released when they leave.

use crate::extended_support::*;
use crate::support::*;
use fanout::ops::OpCode;
use fanout::registry::Bytes;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{ExtRequest, IssueTokens};
use fanout::rpc::wire::*;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Host memory of the server that many sessions share.
const LIMIT: u64 = 96 << 20;

/// Sessions that push as much as they can.
const SESSIONS: usize = 200;

/// Length of a GRAPH_COMPUTE of 14,000 tensors, of which one byte is missing.
const LARGE_MESSAGE: usize = 12 + TENSOR_RECORD * 14_000;

/// Bytes of a buffer whose content is read.
const READ: u64 = 1 << 20;

/// Writes as far as the server reads: it may close the connection meanwhile, or read too slowly.
fn push(client: &mut Client, bytes: &[u8]) {
    let _ = client.stream.write_all(bytes);
}

fn push_ext(client: &mut Client, request: &ExtRequest<'_>) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    push(client, &bytes);
}

/// Nodes and tensors of a graph of `n` nodes.
fn graph(memory: &ClientBuffer, n: u64) -> (Vec<u64>, Vec<TensorRecord>) {
    let [a, b] = [1, 2].map(|id| memory.float_tensor(id, 4, 16 * id));
    let nodes: Vec<u64> = (10..10 + n).collect();
    let sum = |&id: &u64| node(OpCode::Add, memory.float_tensor(id, 4, 0), &[&a, &b]);
    let tensors = nodes.iter().map(sum).chain([a.clone(), b.clone()]).collect();
    (nodes, tensors)
}

/// What a session makes the server hold.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    PreparedGraphs,
    Replies,
    MessageOneByteShort,
    Queues,
    Buffers,
    Tokens,
}

/// A session that has pushed.
fn session_with(server: &TestServer, kind: Kind) -> Client {
    let mut client = match kind {
        Kind::MessageOneByteShort | Kind::Buffers => Client::connect(server),
        _ => Client::connect_extended(server).0,
    };
    match kind {
        Kind::PreparedGraphs => {
            let memory = client.alloc_ext(0, 64);
            let (nodes, tensors) = graph(&memory, 1000);
            let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
            let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
            let graph = GraphCompute::new(0, &nodes, &tensors).expect("counts within u32");
            for id in 1..=2 {
                push_ext(&mut client, &ExtRequest::PrepareGraph(ext::PrepareGraph { id, graph }));
            }
        }
        Kind::Replies => {
            let memory = client.alloc_ext(0, READ);
            client.open_queue(0, 0);
            // More than the sockets hold: without a size, the system may enlarge this one up to the last number of tcp_rmem, often 32 MB.
            socket2::SockRef::from(&client.stream).set_recv_buffer_size(64 << 10).expect("a smaller buffer");
            (0..24).for_each(|id| client.read_spans(0, id, &[memory.whole_span()]));
        }
        Kind::MessageOneByteShort => {
            let mut message = vec![RpcCommand::GraphCompute as u8];
            message.extend_from_slice(&(LARGE_MESSAGE as u64).to_le_bytes());
            message.resize(message.len() + LARGE_MESSAGE - 1, 0);
            push(&mut client, &message);
        }
        Kind::Queues => (0..10).for_each(|queue| client.open_queue(queue, 0)),
        Kind::Buffers => (0..1000).for_each(|_| _ = client.alloc(0, 1)),
        Kind::Tokens => {
            (0..3).for_each(|_| client.send_ext(&ExtRequest::IssueTokens(IssueTokens { count: 256 })));
        }
    }
    client
}

#[test]
fn what_a_session_holds_is_charged_and_is_released_when_it_leaves() {
    let server = TestServer::start(Config::default());
    let used = || server.handle.host_memory().used;
    let idle = Client::connect(&server);
    let base = used();
    assert!(base > 0, "the base of a session");
    drop(idle);
    for (kind, least) in [
        (Kind::PreparedGraphs, 2 << 20),
        (Kind::Replies, READ),
        (Kind::MessageOneByteShort, LARGE_MESSAGE as u64 - (192 << 10)),
        (Kind::Queues, 200 << 10),
        (Kind::Buffers, 400 << 10),
        (Kind::Tokens, 100 << 10),
    ] {
        eventually("the session before has left", || used() == 0);
        let client = session_with(&server, kind);
        eventually(&format!("{kind:?} are charged"), || used() >= base + least);
        drop(client);
    }
    eventually("all sessions have left", || used() == 0);
}

/// Sessions that push together never exceed the limit, and a client beside them is served.
#[test]
fn many_sessions_cannot_exceed_the_host_memory_nor_lock_others_out() {
    let config = Config::default()
        .with_max_host_memory(LIMIT)
        .with_max_handshakes(2 * SESSIONS)
        .with_stall_timeout(10 * SHORT_TIMEOUT);
    for kind in [Kind::PreparedGraphs, Kind::Replies, Kind::MessageOneByteShort] {
        let server = TestServer::start(config.clone());
        let pushing = AtomicUsize::new(SESSIONS);
        let clients: Vec<_> = std::thread::scope(|scope| {
            let session = || {
                let client = session_with(&server, kind);
                pushing.fetch_sub(1, Ordering::Relaxed);
                client
            };
            let sessions: Vec<_> = (0..SESSIONS).map(|_| scope.spawn(session)).collect();
            loop {
                let last = pushing.load(Ordering::Relaxed) == 0;
                let mut bystander = Client::connect(&server);
                let memory = bystander.alloc(0, 64);
                let (nodes, tensors) = graph(&memory, 2);
                bystander.set_floats(&tensors[2], &[1.0, 2.0, 3.0, 4.0]);
                bystander.set_floats(&tensors[3], &[0.5; 4]);
                bystander.compute_graph(0, &nodes, &tensors);
                assert_eq!(bystander.get_floats(&tensors[1]), [1.5, 2.5, 3.5, 4.5]);
                if last {
                    break;
                }
            }
            sessions.into_iter().map(|session| session.join().expect("a session")).collect()
        });
        let memory = server.handle.host_memory();
        // Sessions that wait end unfinished messages, so that less is held.
        let least = if kind == Kind::MessageOneByteShort { LIMIT / 2 } else { LIMIT / 8 * 7 };
        assert!(memory.peak <= LIMIT && memory.peak > least, "{kind:?}: {memory:?}");
        drop(clients);
        eventually("all memory is released", || server.handle.host_memory().used == 0);
    }
}

/// Unfinished messages of one address leave others their part, however many sessions have them.
#[test]
fn unfinished_messages_of_an_address_leave_memory_to_others() {
    const SESSIONS: u64 = 80;
    let base = {
        let server = TestServer::start(Config::default());
        let _idle = Client::connect(&server);
        server.handle.host_memory().used
    };
    // Beside the bases of the sessions, 12 MiB: half of it for the address, whose messages would take 30 MiB.
    let config = Config::default().with_loopback_tenants(true).with_max_host_memory((SESSIONS + 1) * base + (12 << 20));
    let server = TestServer::start(config);
    let unfinished = || {
        let mut client = Client::connect_from([127, 0, 0, 2], server.addr).exchange_hello(CLIENT_VERSION);
        client.write(&RequestHeader { command: RpcCommand::GraphCompute, size: LARGE_MESSAGE as u64 }.encode());
        client.write(&vec![0; 300 << 10]);
        client
    };
    let clients: Vec<_> = (0..SESSIONS).map(|_| unfinished()).collect();
    eventually("the address has its part", || {
        // Sessions that wait for long end each other's messages, so that there may be fewer.
        let bases = server.handle.connections() as u64 * base;
        server.handle.host_memory().used >= bases + (4 << 20)
    });
    let mut other = Client::connect_from([127, 0, 0, 3], server.addr).exchange_hello(CLIENT_VERSION);
    let memory = other.alloc(0, 64);
    let (nodes, tensors) = graph(&memory, 2000);
    other.set_floats(&tensors[2000], &[1.0, 2.0, 3.0, 4.0]);
    other.set_floats(&tensors[2001], &[0.5; 4]);
    other.compute_graph(0, &nodes, &tensors);
    assert_eq!(other.get_floats(&tensors[1]), [1.5, 2.5, 3.5, 4.5]);
    drop(clients);
}

#[test]
fn a_connection_whose_base_does_not_fit_is_told_that_the_server_is_full() {
    let server = TestServer::start(Config::default());
    let first = Client::connect(&server);
    let base = server.handle.host_memory().used;
    drop(first);
    let server =
        TestServer::start(Config::default().with_max_host_memory(2 * base).with_stall_timeout(10 * SHORT_TIMEOUT));
    let mut clients: Vec<_> = (0..2).map(|_| Client::connect(&server)).collect();
    let mut refused = Client::connect_without_hello(&server);
    refused.send(&hello_request());
    refused.read_reply(RpcCommand::Hello);
    refused.expect_refused(&["rejected", "max-host-memory"]);
    clients.iter_mut().for_each(Client::assert_alive);
    // A message that can never fit is refused at once, with the numbers.
    let mut client = clients.remove(0);
    let mut message = vec![RpcCommand::GraphCompute as u8];
    message.extend_from_slice(&(LARGE_MESSAGE as u64).to_le_bytes());
    message.resize(message.len() + LARGE_MESSAGE, 0);
    push(&mut client, &message);
    client.expect_refused(&["GRAPH_COMPUTE", "max-host-memory", &format!("of the server's {}", Bytes(2 * base))]);
    // The client of the extension learns of it from the queue that runs the graph.
    eventually("there is room again", || server.handle.connections() == 1);
    let (mut client, _) = Client::connect_extended(&server);
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 64);
    let (nodes, tensors) = graph(&memory, 100);
    client.prepare_graph(1, 0, &nodes, &tensors);
    client.run_graph(0, 1);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, fault) => {
            assert!(format!("{fault:?}").contains("max-host-memory"), "{fault:?}");
        }
        other => panic!("{other:?}"),
    }
}

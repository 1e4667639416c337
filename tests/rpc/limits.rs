//! Each limit of the server: a request at the limit is served, and a request beyond it fails.

use crate::support::*;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;

#[test]
fn connections_beyond_the_limit_are_rejected() {
    let server = TestServer::start(Config::default().with_max_connections(3));
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(&server)).collect();
    Client::connect_without_hello(&server).expect_refused(&["already 3 connections"]);
    clients.iter_mut().for_each(Client::assert_alive);
    drop(clients.pop());
    eventually("the server accepts a connection again", || server.handle.connections() == 2);
    Client::connect(&server).assert_alive();
}

/// Loopback has no limit per address: two clients have both handshakes, and the next one is closed.
#[test]
fn handshakes_beyond_the_limit_are_closed_without_a_reply() {
    let config = Config::default().with_max_handshakes(2).with_max_connections_per_address(2);
    let server = TestServer::start(config);
    let mut silent: Vec<_> = (0..2).map(|_| Client::connect_without_hello(&server)).collect();
    Client::connect_without_hello(&server).expect_refused(&["already 2 handshakes in flight", "--max-handshakes"]);
    // A handshake ends with its HELLO, or with its connection.
    silent[0].send(&hello_request());
    silent[0].read_reply(RpcCommand::Hello);
    Client::connect(&server).assert_alive();
    drop(silent.pop());
    eventually("the server has ended the second handshake", || server.handle.connections() == 1);
    silent.push(Client::connect_without_hello(&server));
    Client::connect(&server).assert_alive();
}

/// The reason is in the log, and a client of the extension receives it.
#[test]
fn idle_clients_are_closed_if_there_is_a_limit() {
    let server = TestServer::start(Config::default().with_idle_timeout(Some(5 * SHORT_TIMEOUT)));
    let silent = Client::connect(&server);
    let extended = Client::connect_extended(&server).0;
    silent.expect_refused(&["no request within", "--idle-timeout"]);
    extended.expect_protocol_error(&["no request within", "--idle-timeout"]);
}

#[test]
fn allocations_beyond_the_session_limit_fail() {
    let server = TestServer::start(Config::default().with_max_memory(Some(1 << 20)));
    let (mut client, mut other) = (Client::connect(&server), Client::connect(&server));
    let first = client.alloc(0, 1 << 19);
    assert_eq!(client.try_alloc(0, (1 << 19) + 1), AllocBufferReply { remote_ptr: 0, remote_size: 0 });
    client.send(&Request::GetDeviceMemory(GetDeviceMemory { device: 0 }));
    let body = client.read_reply(RpcCommand::GetDeviceMemory);
    let want = Response::GetDeviceMemory(DeviceMemoryReply { free: 1 << 19, total: MEMORY });
    assert_eq!(Response::decode(RpcCommand::GetDeviceMemory, &body), Ok(want));
    let second = client.alloc(0, 1 << 19);
    assert_eq!(client.try_alloc(0, 1).remote_ptr, 0);
    other.alloc(0, 1 << 20);
    client.free(&first);
    client.alloc(0, 1 << 19);
    client.free(&second);
    client.assert_alive();
}

#[test]
fn allocations_beyond_the_device_memory_fail() {
    let server = TestServer::start(Config::default());
    let (mut client, mut other) = (Client::connect(&server), Client::connect(&server));
    for size in [MEMORY + 1, u64::MAX, 1 << 63] {
        assert_eq!(client.try_alloc(0, size).remote_ptr, 0, "{size}");
    }
    let all = client.alloc(0, MEMORY);
    assert_eq!(other.try_alloc(0, 1).remote_ptr, 0);
    client.free(&all);
    client.assert_alive();
    other.alloc(0, 1);
}

#[test]
fn buffers_beyond_the_session_limit_fail() {
    let server = TestServer::start(Config::default().with_max_buffers(5));
    let mut client = Client::connect(&server);
    let buffers: Vec<_> = (0..5).map(|size| client.alloc(0, size)).collect();
    assert_eq!(client.try_alloc(0, 0).remote_ptr, 0);
    client.free(&buffers[2]);
    client.alloc(0, 0);
}

#[test]
fn graphs_beyond_the_size_limits_are_rejected() {
    let limits = Limits::new(3, 5, 4096);
    let server = TestServer::start(Config::default().with_limits(limits));
    let tensors = |n: u64| -> Vec<TensorRecord> {
        (1..=n)
            .map(|id| {
                let mut tensor = zero_record();
                tensor.id = id;
                tensor
            })
            .collect()
    };
    let mut client = Client::connect(&server);
    client.compute_graph(0, &[1, 2, 3], &tensors(5));
    client.assert_alive();
    for (nodes, count, reason) in
        [(4, 4, "n_nodes: 4 is over the limit of 3"), (0, 6, "over the limit of 1524"), (100, 0, "over the limit of")]
    {
        let mut client = Client::connect(&server);
        client.compute_graph(0, &(1..=nodes).collect::<Vec<_>>(), &tensors(count));
        client.expect_refused(&["GRAPH_COMPUTE", reason]);
    }
    let limits = Limits::new(1000, 1000, 4096);
    let server = TestServer::start(Config::default().with_limits(limits));
    let mut client = Client::connect(&server);
    client.compute_graph(0, &[1], &tensors(13));
    client.assert_alive();
    client.compute_graph(0, &[], &tensors(14));
    client.expect_refused(&["GRAPH_COMPUTE", "over the limit of 4096"]);
}

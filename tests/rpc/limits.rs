//! Each limit of the server: a request at the limit is served, and a request beyond it fails.

use crate::support::*;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{ExtensionOffer, ServerState};
use fanout::rpc::wire::*;
use std::time::Duration;

#[test]
fn connections_beyond_the_limit_are_rejected() {
    let server = TestServer::start(Config::default().with_max_connections(3));
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(&server)).collect();
    refused_when_full(&server).expect_refused(&["already 3 connections"]);
    clients.iter_mut().for_each(Client::assert_alive);
    drop(clients.pop());
    eventually("the server accepts a connection again", || server.handle.connections() == 2);
    Client::connect(&server).assert_alive();
}

/// A client that was told by the reply to its HELLO that the server is full.
fn refused_when_full(server: &TestServer) -> Client {
    let mut client = Client::connect_without_hello(server);
    client.send(&hello_request());
    let reply = client.read_reply(RpcCommand::Hello);
    assert!(matches!(
        Response::decode(RpcCommand::Hello, &reply),
        Ok(Response::Hello(HelloReply { extension_byte, .. }))
            if ExtensionOffer::from_byte(extension_byte).is_some_and(|offer| offer.state == ServerState::Full)
    ));
    client
}

/// A server whose handshakes do not time out within a test.
fn server_with_handshakes(config: Config, max: usize) -> TestServer {
    TestServer::start(config.with_max_handshakes(max).with_handshake_timeout(Duration::from_secs(3600)))
}

/// Silent connections from an address of loopback.
fn silent_from(server: &TestServer, client: [u8; 4], count: usize) -> Vec<Client> {
    (0..count).map(|_| Client::connect_from(client, server.addr)).collect()
}

/// The positions of the connections that are open, in the order in which they were made. All others have ended: `open` is
/// their number.
fn open_positions(silent: &[Client], open: usize) -> Vec<usize> {
    let is_open = |client: &&Client| {
        client.stream.set_nonblocking(true).expect("a live socket");
        let read = client.stream.peek(&mut [0]);
        client.stream.set_nonblocking(false).expect("a live socket");
        matches!(read, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
    };
    eventually("the other connections have ended", || silent.iter().filter(is_open).count() <= open);
    (0..silent.len()).filter(|&at| is_open(&&silent[at])).collect()
}

/// A handshake ends with its HELLO, with its connection, or for a new connection.
#[test]
fn handshakes_beyond_the_limit_close_the_oldest() {
    let server = server_with_handshakes(Config::default().with_max_connections_per_address(2), 2);
    let mut silent: Vec<_> = (0..3).map(|_| Client::connect_without_hello(&server)).collect();
    silent.remove(0).expect_refused(&["already 2 handshakes in flight", "max-handshakes"]);
    silent.remove(0).exchange_hello(CLIENT_VERSION).assert_alive();
    Client::connect(&server).assert_alive();
    assert_eq!(open_positions(&silent, 1), [0]);
}

/// Silent connections take neither the handshake nor the place of a client: the oldest of them are closed.
#[test]
fn a_client_is_served_beside_500_silent_connections() {
    for max_connections in [2, 1024] {
        let server = server_with_handshakes(Config::default().with_max_connections(max_connections), 128);
        let mut first = Client::connect(&server);
        let silent = silent_from(&server, [127, 0, 0, 1], 500);
        let mut second = Client::connect(&server);
        // The handshake of `second` has closed one more.
        assert_eq!(open_positions(&silent, 127), (500 - 127..500).collect::<Vec<_>>());
        first.assert_alive();
        second.assert_alive();
        eventually("the threads of the others have ended", || server.handle.connections() == 2 + 127);
        assert_eq!(silent.iter().flat_map(Client::warnings).count(), 500 - 127, "each has its line in the log");
    }
}

/// A client that has sent a part of its HELLO keeps its handshake, and so does a silent one of another address. The others are
/// closed oldest first.
#[test]
fn silent_connections_close_neither_a_handshake_that_has_begun_nor_those_of_other_addresses() {
    for loopback_tenants in [false, true] {
        // With tenants, an address has a quarter: 8.
        let server = server_with_handshakes(Config::default().with_loopback_tenants(loopback_tenants), 32);
        let hello = encode_message(&hello_request());
        let (first, rest) = hello.split_at(20);
        let mut begun = Client::connect_from([127, 0, 0, 2], server.addr);
        begun.write(first);
        let mut other = Client::connect_from([127, 0, 0, 3], server.addr);
        let flood = silent_from(&server, [127, 0, 0, 2], 100);
        let left = if loopback_tenants { 7 } else { 30 };
        assert_eq!(open_positions(&flood, left), (100 - left..100).collect::<Vec<_>>());
        begun.write(rest);
        begun.read_reply(RpcCommand::Hello);
        begun.assert_alive();
        other.send(&hello_request());
        other.read_reply(RpcCommand::Hello);
        other.assert_alive();
    }
}

/// A flood of connections that send a part of HELLO does not close a new client before its first byte arrives.
#[test]
fn connections_that_have_begun_close_each_other_before_a_new_client() {
    let server = server_with_handshakes(Config::default(), 16);
    let begun = |count| {
        let mut flood = silent_from(&server, [127, 0, 0, 1], count);
        flood.iter_mut().for_each(|client| client.write(&[RpcCommand::Hello as u8]));
        flood
    };
    let before = begun(16);
    let mut client = Client::connect_without_hello(&server);
    let after = begun(3);
    // The server has accepted all of them once four have made room.
    assert_eq!(open_positions(&before, 12).len(), 12);
    client.send(&hello_request());
    client.read_reply(RpcCommand::Hello);
    client.assert_alive();
    assert_eq!(open_positions(&after, 3), [0, 1, 2]);
}

/// The reason is in the log, and a client of the extension receives it.
#[test]
fn idle_clients_are_closed_if_there_is_a_limit() {
    let server = TestServer::start(Config::default().with_idle_timeout(Some(5 * SHORT_TIMEOUT)));
    let silent = Client::connect(&server);
    let extended = Client::connect_extended(&server).0;
    silent.expect_refused(&["no request within", "idle-timeout"]);
    extended.expect_protocol_error(&["no request within", "idle-timeout"]);
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

//! RPC devices of servers in this process, with the extended protocol and with ggml's protocol 7.0: remote devices compute the
//! same results as local devices.

use super::domains::{LayeredNetwork, MEMORY, cpus, expected_results};
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::server::{Config, Ended, Server, ServerHandle};
use fanout_testing::protocol_relay::ProtocolRelay;
use std::net::SocketAddr;
use std::thread::JoinHandle;

/// A server that shuts down when it is dropped.
pub(super) struct TestServer {
    pub(super) addr: SocketAddr,
    pub(super) handle: ServerHandle,
    /// Number of devices, and whether the server may copy to peers.
    config: (usize, bool),
    thread: Option<JoinHandle<Ended>>,
}

impl TestServer {
    /// Starts a server with this many CPU devices of one thread each. With `peer_copies`, the server may connect to other
    /// servers and copy to them directly.
    pub(super) fn new(devices: usize, peer_copies: bool) -> TestServer {
        TestServer::on(0, devices, peer_copies)
    }

    fn on(port: u16, count: usize, peer_copies: bool) -> TestServer {
        let peers = if peer_copies { vec!["127.0.0.1:*".parse().unwrap()] } else { Vec::new() };
        let server = Server::bind("127.0.0.1", port, cpus(count), Config::default().with_peers(peers)).unwrap();
        let (addr, handle) = (server.local_addr(), server.handle());
        let thread = std::thread::spawn(move || server.run());
        TestServer { addr, handle, config: (count, peer_copies), thread: Some(thread) }
    }

    /// Shuts the server down and starts a new one, without any state, on the same port.
    pub(super) fn restart(&mut self) {
        self.end();
        let (count, peer_copies) = self.config;
        *self = TestServer::on(self.addr.port(), count, peer_copies);
    }

    fn end(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    pub(super) fn connect(addr: SocketAddr) -> Endpoint {
        Endpoint::connect(&addr.to_string(), &Options::default()).unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
fn results_over_rpc_equal_local_results() {
    let wanted = expected_results(20);
    let servers = [3, 1, 1, 3].map(|devices| TestServer::new(devices, true));
    let mut addrs = servers.each_ref().map(|server| server.addr);
    addrs[3] = ProtocolRelay::start(addrs[3], true).addr;
    let endpoints = addrs.map(TestServer::connect);
    let [a, b, c, ggml_only] = endpoints.each_ref().map(Endpoint::devices);
    let lists = [
        ("one device", vec![b[0].clone()], [0; 3], 1),
        ("one server", a.to_vec(), [0, 1, 2], 3),
        ("two servers", vec![b[0].clone(), c[0].clone()], [0, 1, 0], 3),
        ("one server in 7.0", ggml_only.to_vec(), [0, 1, 2], 3),
        ("a server in 7.0 and one with the extended protocol", [b, ggml_only].concat(), [0, 2, 1], 3),
        ("a server and this process", [&cpus(2)[..], b].concat(), [0, 2, 1], 3),
        ("this process and two servers", [&cpus(1)[..], a, b].concat(), [1, 4, 2], 3),
    ];
    for depth in [1, 4] {
        for (name, devices, homes, splits) in &lists {
            let mut network = LayeredNetwork::new(devices.clone(), *homes, depth);
            let mut prepared = network.build();
            assert_eq!(prepared.plan().splits(), *splits, "{name}");
            assert_eq!(network.results(&mut prepared, 0..20), wanted, "{name}, depth {depth}");
        }
    }
    drop(lists);
    assert!(a[0].memory().unwrap().total == MEMORY);
}

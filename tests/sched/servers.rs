//! Devices behind servers of this process, which greet or are spoken to in 7.0: the same results as on devices of its own.

#[path = "../common/relay.rs"]
#[allow(dead_code)] // shared with other tests
mod relay;

use super::islands::{MEMORY, Network, cpus, wanted};
use fanout::device::Device;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::server::{Config, Handle, Server};
use relay::Relay;
use std::sync::Arc;
use std::thread::JoinHandle;

/// A server that ends with the test, and the devices that a client sees.
struct Served {
    devices: Vec<Arc<dyn Device>>,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    /// Spoken to in 7.0 if `plain`; otherwise it sends to others.
    fn new(devices: usize, plain: bool) -> Served {
        let config = Config { peers: vec!["127.0.0.1".parse().unwrap()], ..Config::default() };
        let server = Server::bind("127.0.0.1", 0, cpus(devices), config).unwrap();
        let (mut addr, handle) = (server.local_addr(), server.handle());
        let thread = std::thread::spawn(move || server.run());
        if plain {
            addr = Relay::start(addr, true).addr;
        }
        let endpoint = Endpoint::connect(&addr.to_string(), &Options::default()).unwrap();
        Served { devices: endpoint.devices().to_vec(), handle, thread: Some(thread) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn results_do_not_depend_on_servers() {
    let wanted = wanted(20);
    let servers = [Served::new(3, false), Served::new(1, false), Served::new(1, false), Served::new(3, true)];
    let [a, b, c, plain] = servers.each_ref().map(|server| &server.devices[..]);
    let lists = [
        ("one device", vec![b[0].clone()], [0; 3], 1),
        ("one server", a.to_vec(), [0, 1, 2], 3),
        ("two servers", vec![b[0].clone(), c[0].clone()], [0, 1, 0], 3),
        ("one server in 7.0", plain.to_vec(), [0, 1, 2], 3),
        ("a server in 7.0 and one that greets", [b, plain].concat(), [0, 2, 1], 3),
        ("a server and this process", [&cpus(2)[..], b].concat(), [0, 2, 1], 3),
        ("all of it", [&cpus(1)[..], a, b].concat(), [1, 4, 2], 3),
    ];
    for depth in [1, 4] {
        for (name, devices, homes, splits) in &lists {
            let mut network = Network::new(devices.clone(), *homes, depth);
            let mut prepared = network.build();
            assert_eq!(prepared.plan().splits(), *splits, "{name}");
            assert_eq!(network.results(&mut prepared, 0..20), wanted, "{name}, depth {depth}");
        }
    }
    drop(lists);
    assert!(a[0].memory().unwrap().total == MEMORY);
}

//! Every limit: what is allowed is served, one more is not.

use crate::support::*;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;

#[test]
fn connections() {
    let server = TestServer::start(Config::default().with_max_connections(3));
    let mut clients: Vec<_> = (0..3).map(|_| Client::open(&server)).collect();
    Client::raw(&server).expect_refused(&["already 3 connections"]);
    clients.iter_mut().for_each(Client::assert_alive);
    drop(clients.pop());
    eventually("there is room again", || server.handle.connections() == 2);
    Client::open(&server).assert_alive();
}

#[test]
fn memory_of_a_session() {
    let server = TestServer::start(Config::default().with_max_memory(Some(1 << 20)));
    let (mut client, mut other) = (Client::open(&server), Client::open(&server));
    let first = client.alloc(0, 1 << 19);
    assert_eq!(client.try_alloc(0, (1 << 19) + 1), AllocBufferReply { remote_ptr: 0, remote_size: 0 });
    client.send(&Request::GetDeviceMemory(GetDeviceMemory { device: 0 }));
    let body = client.reply(Command::GetDeviceMemory);
    let want = Response::GetDeviceMemory(DeviceMemoryReply { free: 1 << 19, total: MEMORY });
    assert_eq!(Response::decode(Command::GetDeviceMemory, &body), Ok(want));
    let second = client.alloc(0, 1 << 19);
    assert_eq!(client.try_alloc(0, 1).remote_ptr, 0);
    other.alloc(0, 1 << 20);
    client.free(&first);
    client.alloc(0, 1 << 19);
    client.free(&second);
    client.assert_alive();
}

#[test]
fn memory_of_the_device() {
    let server = TestServer::start(Config::default());
    let (mut client, mut other) = (Client::open(&server), Client::open(&server));
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
fn buffers_of_a_session() {
    let server = TestServer::start(Config::default().with_max_buffers(5));
    let mut client = Client::open(&server);
    let buffers: Vec<_> = (0..5).map(|size| client.alloc(0, size)).collect();
    assert_eq!(client.try_alloc(0, 0).remote_ptr, 0);
    client.free(&buffers[2]);
    client.alloc(0, 0);
}

#[test]
fn nodes_tensors_and_messages() {
    let limits = Limits::new(3, 5, 4096);
    let server = TestServer::start(Config::default().with_limits(limits));
    let tensors = |n: u64| -> Vec<TensorRecord> {
        (1..=n)
            .map(|id| {
                let mut tensor = empty();
                tensor.id = id;
                tensor
            })
            .collect()
    };
    let mut client = Client::open(&server);
    client.compute(0, &[1, 2, 3], &tensors(5));
    client.assert_alive();
    for (nodes, count, reason) in
        [(4, 4, "n_nodes: 4 is over the limit of 3"), (0, 6, "over the limit of 1516"), (100, 0, "over the limit of")]
    {
        let mut client = Client::open(&server);
        client.compute(0, &(1..=nodes).collect::<Vec<_>>(), &tensors(count));
        client.expect_refused(&["GRAPH_COMPUTE", reason]);
    }
    let limits = Limits::new(1000, 1000, 4096);
    let server = TestServer::start(Config::default().with_limits(limits));
    let mut client = Client::open(&server);
    client.compute(0, &[1], &tensors(13));
    client.assert_alive();
    client.compute(0, &[], &tensors(14));
    client.expect_refused(&["GRAPH_COMPUTE", "over the limit of 4096"]);
}

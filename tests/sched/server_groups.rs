//! Groups of devices of several servers, which exchange the parts of collectives directly.

use crate::rpc_servers::TestServer;
use fanout::device::{Device, Membership, MemoryBudget};
use fanout::rpc::client::Endpoint;
use fanout::sched::tensor_group::TensorSplit;
use fanout::tensor::DType;
use fanout_testing::transformer::{LoadedModel, SMALL, Shape, devices, group, model};
use std::sync::Arc;

/// The devices of servers with these numbers of devices.
fn connect(servers: &[TestServer]) -> (Vec<Endpoint>, Vec<Arc<dyn Device>>) {
    let endpoints: Vec<_> = servers.iter().map(|server| TestServer::connect(server.addr)).collect();
    let devices = endpoints.iter().flat_map(|endpoint| endpoint.devices().to_vec()).collect();
    (endpoints, devices)
}

#[test]
fn a_group_of_servers_gives_the_same_bits_as_local_devices() {
    let q4 = Shape { weight: DType::Q4_0, cache: DType::Q8_0, ..SMALL };
    for (shape, counts, shares) in [
        (SMALL, vec![1, 1], vec![1.0, 1.0]),
        (SMALL, vec![1, 1], vec![3.0, 1.0]),
        (q4, vec![1, 1, 1], vec![1.0; 3]),
        (SMALL, vec![2, 1], vec![1.0; 3]),
        (SMALL, vec![2], vec![1.0; 2]),
        (SMALL, vec![1, 2, 2], vec![1.0; 5]),
        (Shape { tokens: 7, ..SMALL }, vec![1, 2, 2], vec![1.0; 5]),
    ] {
        let ranks = shares.len();
        let model = model(shape, &[0, 0]);
        let groups = || vec![group(0..ranks, &shares)];
        let want = LoadedModel::new(&model, devices(ranks), groups(), 0, false).run().unwrap();
        let servers: Vec<_> = counts.iter().map(|&count| TestServer::new(count, true)).collect();
        let (_endpoints, remote) = connect(&servers);
        for scatter_bytes in [0, usize::MAX] {
            let options = |split: TensorSplit| split.with_scattered_sums(scatter_bytes);
            let mut loaded = LoadedModel::with_split(&model, remote.clone(), groups(), 0, options);
            assert!(loaded.has_collectives(), "{counts:?}");
            for run in 0..20 {
                assert!(loaded.run().unwrap() == want, "{counts:?}, shares {shares:?}, run {run}");
            }
        }
    }
}

/// Servers that may not connect to each other, and groups with a device of this process.
#[test]
fn other_groups_copy_and_add() {
    let model = model(SMALL, &[0, 0]);
    let groups = || vec![group(0..2, &[1.0, 1.0])];
    let want = LoadedModel::new(&model, devices(2), groups(), 0, false).run().unwrap();
    let servers = [TestServer::new(1, true), TestServer::new(1, false)];
    let (_endpoints, remote) = connect(&servers);
    let mixed = vec![devices(1)[0].clone(), remote[0].clone()];
    for devices in [remote, mixed] {
        let mut loaded = LoadedModel::new(&model, devices, groups(), 0, false);
        assert!(!loaded.has_collectives());
        assert!(loaded.run().unwrap() == want);
    }
}

/// Per run, the client sends each of two ranks less than 800 bytes: the inputs and one RUN_GRAPH. With copied collectives it sends
/// at least 200 bytes more, since every copy and every program between two copies is a request.
#[test]
fn a_run_is_one_message_per_rank() {
    let model = model(SMALL, &[0, 0]);
    let servers = [TestServer::new(1, true), TestServer::new(1, true)];
    let (_endpoints, remote) = connect(&servers);
    let sent_per_run = |copied| {
        let mut loaded = LoadedModel::new(&model, remote.clone(), vec![group(0..2, &[1.0, 1.0])], 0, copied);
        let sent = || remote.iter().map(|device| device.link_stats().unwrap().sent).sum::<u64>();
        (0..3).for_each(|_| drop(loaded.run().unwrap()));
        let before = sent();
        (0..5).for_each(|_| drop(loaded.run().unwrap()));
        (sent() - before) / 5
    };
    let [joined, copied] = [false, true].map(sent_per_run);
    assert!(joined < 1600 && copied > joined + 400, "{joined} and {copied} bytes");
}

/// The run fails with an error that names the lost server, and the servers that are left serve a new group. The errors of single
/// queues are tested in `tests/rpc/server_groups.rs`.
#[test]
fn a_lost_server_fails_the_group() {
    let model = model(SMALL, &[0, 0]);
    let groups = |ranks| vec![group(0..ranks, &vec![1.0; ranks])];
    for lost in 0..3 {
        let mut servers: Vec<_> = (0..3).map(|_| TestServer::new(1, true)).collect();
        let (mut endpoints, remote) = connect(&servers);
        let mut loaded = LoadedModel::new(&model, remote, groups(3), 0, false);
        loaded.run().unwrap();
        let name = servers[lost].addr.to_string();
        drop(servers.remove(lost));
        let error = loaded.run().unwrap_err().to_string();
        assert!(error.contains(&name), "{error}");
        drop(loaded);
        endpoints.remove(lost);
        let left = endpoints.iter().map(|endpoint| endpoint.devices()[0].clone()).collect();
        LoadedModel::new(&model, left, groups(2), 0, false).run().unwrap();
    }
}

/// Two connections to one server form a group. Further ones cannot, since the servers know each other by address.
#[test]
fn connections_to_one_server_form_a_group() {
    let model = model(SMALL, &[0, 0]);
    let server = TestServer::new(1, true);
    let endpoints: Vec<_> = (0..3).map(|_| TestServer::connect(server.addr)).collect();
    let remote: Vec<_> = endpoints.iter().map(|endpoint| endpoint.devices()[0].clone()).collect();
    let groups = |ranks| vec![group(0..ranks, &vec![1.0; ranks])];
    let want = LoadedModel::new(&model, devices(2), groups(2), 0, false).run().unwrap();
    let mut loaded = LoadedModel::new(&model, remote[..2].to_vec(), groups(2), 0, false);
    assert!(loaded.has_collectives() && loaded.run().unwrap() == want);
    let (budget, devices) = (MemoryBudget::new(1 << 20), remote.iter().map(|device| &**device).collect::<Vec<_>>());
    let member = Membership::group(&devices, 64, &budget).unwrap().remove(0);
    let error = remote[0].queue(&budget).unwrap().collectives().unwrap().join(0, member).unwrap_err();
    assert!(error.to_string().contains("two connections to one server"), "{error}");
}

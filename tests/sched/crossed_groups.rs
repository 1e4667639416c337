//! Two clients whose groups have the same devices in another order: neither waits for the other one, whatever the order of the
//! programs.

use crate::rpc_servers::TestServer;
use fanout::device::Device;
use fanout::sched::tensor_group::TensorGroup;
use fanout_testing::gated_device::Gate;
use fanout_testing::transformer::{LoadedModel, SMALL, Shape, devices, model};
use std::sync::Arc;

const TINY: Shape = Shape { width: 32, heads: 4, kv_heads: 2, head: 8, ff: 32, vocab: 40, tokens: 2, ..SMALL };

const ORDERS: [[usize; 2]; 2] = [[0, 1], [1, 0]];

fn groups(order: [usize; 2]) -> Vec<TensorGroup> {
    vec![TensorGroup::new(order.to_vec(), vec![1.0, 1.0]).unwrap()]
}

/// The gate starts the programs of both clients in random orders. The devices have one thread each, so a program that kept its
/// device while it waits would wait for ever. A seed makes the choices of the gate, not the times at which programs end.
#[test]
fn crossed_groups_finish_in_any_order() {
    let model = model(TINY, &[0, 0]);
    let want = LoadedModel::new(&model, devices(2), groups(ORDERS[0]), 0, false).run().unwrap();
    for first_seed in (0..1000).step_by(50) {
        let gate = Gate::new(first_seed);
        let devices: Vec<_> = (0..2).map(|i| gate.device(&format!("G{i}")).shared()).collect();
        let mut clients = ORDERS.map(|order| LoadedModel::new(&model, devices.clone(), groups(order), 0, false));
        assert!(clients.iter().all(LoadedModel::has_collectives));
        for seed in first_seed..first_seed + 50 {
            gate.reseed(seed);
            clients.iter_mut().for_each(|client| client.submit().unwrap());
            for client in &mut clients {
                assert!(client.logits().unwrap() == want, "seed {seed}");
            }
        }
        assert_eq!(gate.races(), [""; 0]);
    }
}

/// Clients of two servers, each with a thread and connections of its own.
#[test]
fn crossed_groups_of_two_clients_on_servers_finish() {
    let model = model(TINY, &[0, 0]);
    let want = LoadedModel::new(&model, devices(2), groups(ORDERS[0]), 0, false).run().unwrap();
    let servers = [TestServer::new(1, true), TestServer::new(1, true)];
    std::thread::scope(|scope| {
        for order in ORDERS {
            let (model, want, servers) = (&model, &want, &servers);
            scope.spawn(move || {
                let endpoints = servers.each_ref().map(|server| TestServer::connect(server.addr));
                let remote: Vec<Arc<dyn Device>> = endpoints.iter().map(|end| end.devices()[0].clone()).collect();
                let mut client = LoadedModel::new(model, remote, groups(order), 0, false);
                for run in 0..100 {
                    assert!(client.run().unwrap() == *want, "run {run} of {order:?}");
                }
            });
        }
    });
}

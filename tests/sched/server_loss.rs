//! Loss of servers during runs: waiting calls fail soon with the address of a lost server, and after a restart of the servers
//! runs succeed again.

use crate::domains::cpus;
use crate::rpc_servers::TestServer;
use crate::slow_links::DeviceChain;
use fanout::device::{Device, DeviceError, PendingRead};
use fanout::rpc::client::{Endpoint, Options};
use fanout::sched::SchedError;
use fanout_testing::slow_link::{LinkSpeed, SlowLink};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const SERVERS: usize = 12;
const LOST_SERVERS: usize = 3;
const RUNS: u64 = 24;
const SHAPE: [usize; 2] = [32, 2];

/// Upper bound on the time until a failure is reported.
const MAX_DETECTION_TIME: Duration = Duration::from_secs(20);

/// The address of the lost server that an error names. Either this client has lost its connection, or another server has noticed
/// first that it cannot copy to the lost one.
fn named_server(error: &DeviceError) -> Option<&str> {
    match error {
        DeviceError::ConnectionLost { endpoint, .. } => Some(endpoint),
        DeviceError::Remote { reason, .. } => Some(reason.strip_prefix("cannot copy to ")?.split_once(": ")?.0),
        _ => None,
    }
}

/// Submits runs until a submission fails. Before run `2 * i`, triggers shutdown `i`. Returns the failure, and the pending reads
/// of the runs before it.
fn submit_until_failure(
    chain: &mut DeviceChain,
    shutdowns: &[std::sync::mpsc::Sender<()>],
) -> (DeviceError, Vec<PendingRead>) {
    let (since, mut pending_reads) = (Instant::now(), Vec::new());
    for run in 0.. {
        for (at, victim) in shutdowns.iter().enumerate() {
            if run == 2 * at as u64 {
                let _ = victim.send(());
            }
        }
        match chain.submit(run % RUNS) {
            Ok(pending_read) => pending_reads.push(pending_read),
            Err(SchedError::Device { error, .. }) => return (error, pending_reads),
            Err(other) => panic!("{other}"),
        }
        assert!(since.elapsed() < MAX_DETECTION_TIME, "servers are lost, but no submission has failed");
    }
    unreachable!()
}

#[test]
fn lost_servers_are_reported_by_address_and_can_be_replaced() {
    let wanted = DeviceChain::new(cpus(1), SHAPE, SERVERS, 1).unwrap().results(0..RUNS);
    let mut servers: Vec<TestServer> = (0..SERVERS).map(|_| TestServer::new(1, true)).collect();
    for (seed, depth) in [(1, 1), (2, 4), (3, 4)] {
        let mut rng = fastrand::Rng::with_seed(seed);
        let endpoints: Vec<Endpoint> = servers.iter().map(|server| TestServer::connect(server.addr)).collect();
        let devices: Vec<Arc<dyn Device>> = endpoints.iter().map(|endpoint| endpoint.devices()[0].clone()).collect();
        let mut chain = DeviceChain::new(devices, SHAPE, 1, depth).unwrap();
        assert!(chain.results(0..3) == wanted[..3], "seed {seed}");

        let victims = rng.choose_multiple(0..SERVERS, LOST_SERVERS);
        let names: Vec<String> = victims.iter().map(|&at| servers[at].addr.to_string()).collect();
        let (error, pending_reads) = std::thread::scope(|scope| {
            let mut shutdowns = Vec::new();
            for &at in &victims {
                let (send, trigger): (_, Receiver<()>) = channel();
                shutdowns.push(send);
                let (server, spins) = (servers[at].handle.clone(), rng.u32(0..20_000));
                scope.spawn(move || {
                    // If a submission fails before this server's trigger, the sender is dropped, and the server shuts down too.
                    let _ = trigger.recv();
                    (0..spins).for_each(|_| std::hint::spin_loop());
                    server.shutdown();
                });
            }
            submit_until_failure(&mut chain, &shutdowns)
        });
        let is_lost =
            |error: &DeviceError| named_server(error).is_some_and(|name| names.iter().any(|lost| lost == name));
        assert!(is_lost(&error), "seed {seed}: {error}, lost: {names:?}");
        let until = Instant::now() + MAX_DETECTION_TIME;
        for (run, pending_read) in pending_reads.into_iter().enumerate() {
            match pending_read.wait(Some(until)) {
                Ok(bytes) => assert!(bytes == wanted[run % RUNS as usize], "seed {seed}, run {run}"),
                Err(error) => assert!(is_lost(&error), "seed {seed}, run {run}: {error}, lost: {names:?}"),
            }
        }
        // The failure is sticky on the device, not on the scheduler: after a reset, a run fails with the same cause.
        chain.scheduler.reset();
        match chain.submit(0) {
            Err(SchedError::Device { error, .. }) => assert!(is_lost(&error), "seed {seed}: {error}"),
            other => panic!("seed {seed}: {:?}", other.err()),
        }
        drop((chain, endpoints));
        for &at in &victims {
            servers[at].restart();
        }
    }
    let endpoints: Vec<Endpoint> = servers.iter().map(|server| TestServer::connect(server.addr)).collect();
    let devices = endpoints.iter().map(|endpoint| endpoint.devices()[0].clone()).collect();
    let mut chain = DeviceChain::new(devices, SHAPE, 1, 4).unwrap();
    assert!(chain.results(0..RUNS) == wanted, "after all restarts");
}

#[test]
fn cut_and_frozen_connections_are_reported_by_address() {
    let faults: [(_, fn(&SlowLink)); 2] = [("cut", SlowLink::cut), ("frozen", |relay| relay.freeze(true))];
    // The client always waits for a result of the last server. With a single run in flight it waits for nothing from the first
    // server, which sends its result to the last server. Only the heartbeat then detects a frozen link to the first server.
    let cases = [(0, true), (0, false), (1, true), (1, false)];
    for ((what, fault), (victim, many)) in faults.into_iter().flat_map(|fault| cases.map(|case| (fault, case))) {
        let what = format!("{what}, server {victim}, many runs: {many}");
        let servers = [(); 2].map(|()| TestServer::new(1, true));
        let relays = servers.each_ref().map(|server| SlowLink::new(server.addr, LinkSpeed::default()));
        let options = Options::default().with_silence_timeout(Duration::from_secs(1));
        let connect = |relay: &SlowLink| Endpoint::connect(&relay.addr().to_string(), &options).unwrap();
        let endpoints = relays.each_ref().map(connect);
        let devices = endpoints.each_ref().map(|endpoint| endpoint.devices()[0].clone());
        let mut chain = DeviceChain::new(devices.to_vec(), SHAPE, 1, 4).unwrap();
        chain.results(0..3);
        fault(&relays[victim]);
        let (error, pending_reads) = if many {
            submit_until_failure(&mut chain, &[])
        } else {
            let error = match chain.submit(0) {
                Ok(pending_read) => pending_read.wait(Some(Instant::now() + MAX_DETECTION_TIME)).unwrap_err(),
                Err(SchedError::Device { error, .. }) => error,
                Err(other) => panic!("{what}: {other}"),
            };
            (error, Vec::new())
        };
        assert_eq!(named_server(&error), Some(endpoints[victim].name()), "{what}: {error}");
        for pending_read in pending_reads {
            let result = pending_read.wait(Some(Instant::now() + MAX_DETECTION_TIME));
            let named = result.as_ref().is_ok() || result.as_ref().is_err_and(|e| named_server(e).is_some());
            assert!(named, "{what}: {result:?}");
        }
    }
}

#[test]
fn calls_after_a_loss_name_it() {
    let server = TestServer::new(1, true);
    let relay = SlowLink::new(server.addr, LinkSpeed::default());
    let name = relay.addr().to_string();
    let endpoint = Endpoint::connect(&name, &Options::default()).unwrap();
    let remote = endpoint.devices()[0].clone();
    let own = cpus(1).remove(0);
    assert_eq!((own.endpoint(), own.is_connected(), own.lost()), (None, true, None));
    assert_eq!((remote.endpoint(), remote.is_connected(), remote.lost()), (Some(&*name), true, None));
    let mut chain = DeviceChain::new(vec![own, remote.clone()], SHAPE, 1, 1).unwrap();
    chain.results(0..3);
    relay.cut();
    let (error, _) = submit_until_failure(&mut chain, &[]);
    assert_eq!(named_server(&error), Some(&*name), "{error}");
    for reset in [false, false, true] {
        if reset {
            chain.scheduler.reset();
        }
        let error = chain.submit(0).unwrap_err();
        assert_eq!(error.lost_endpoint(), Some(&*name), "after a reset: {reset}: {error}");
    }
    assert_eq!(remote.lost(), Some(error));
    assert!(!remote.is_connected());
}

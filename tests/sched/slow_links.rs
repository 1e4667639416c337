//! Servers behind slow links: several runs in flight hide the latency of transfers, and a run moves only inputs and outputs.

use crate::domains::cpus;
use crate::rpc_servers::TestServer;
use fanout::device::{Device, MemoryBudget, PendingRead, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::rpc::client::Endpoint;
use fanout::sched::{Options, PreparedPlan, SchedError, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::slow_link::{LinkSpeed, SlowLink};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory budget of each scheduler in bytes.
const MEMORY: u64 = 1 << 26;

/// A chain of devices with `layers` layers each. A layer computes `x = x + w * x` with its own weights.
pub(super) struct DeviceChain {
    pub(super) scheduler: Scheduler,
    pub(super) prepared: PreparedPlan,
    x: TensorId,
    y: TensorId,
    /// Columns and rows of the input.
    shape: [usize; 2],
}

impl DeviceChain {
    pub(super) fn new(
        devices: Vec<Arc<dyn Device>>,
        shape @ [width, rows]: [usize; 2],
        layers: usize,
        depth: usize,
    ) -> Result<DeviceChain, SchedError> {
        let budget = MemoryBudget::new(MEMORY);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [width, rows, 1, 1]).unwrap();
        let (mut h, mut rng) = (x, fastrand::Rng::with_seed(7));
        for (home, device) in devices.iter().enumerate() {
            let of = |error| SchedError::Device { device: device.info().name.clone(), error };
            let desc = TensorDesc::contiguous(DType::F32, [width, width, 1, 1]).unwrap();
            for layer in 0..layers {
                let values: Vec<f32> = (0..width * width).map(|_| (rng.f32() - 0.5) / width as f32).collect();
                let region = device.alloc(desc.extent() as u64, &budget).map_err(of)?.whole();
                let mut queue = device.queue(&budget).map_err(of)?;
                let bytes = UploadSource::Borrowed(bytemuck::cast_slice(&values));
                queue.upload(region.clone(), Some(&desc), bytes).map_err(of)?;
                queue.mark().wait(None).map_err(of)?;
                let w = b.stored(format!("w{home}.{layer}"), desc, home, Some(region)).unwrap();
                let product = b.node(MulMat::PLAIN, &[Some(w), Some(h)]).unwrap();
                h = b.node(Binary::Add, &[Some(product), Some(h)]).unwrap();
            }
        }
        b.output(h).unwrap();
        let options = Options::default().with_depth(depth);
        let mut scheduler = Scheduler::new(devices, options, &budget)?;
        let prepared = scheduler.build(&Arc::new(b.build().unwrap()))?;
        Ok(DeviceChain { scheduler, prepared, x, y: h, shape })
    }

    /// Submits a run with the random input of seed `run`, and reads its result.
    pub(super) fn submit(&mut self, run: u64) -> Result<PendingRead, SchedError> {
        let mut rng = fastrand::Rng::with_seed(run);
        let x: Vec<f32> = (0..self.shape[0] * self.shape[1]).map(|_| rng.f32() - 0.5).collect();
        self.scheduler.submit(&mut self.prepared, &[(self.x, bytemuck::cast_slice(&x))])?;
        self.scheduler.read(&self.prepared, self.y)
    }

    pub(super) fn results(&mut self, runs: std::ops::Range<u64>) -> Vec<Vec<u8>> {
        let pending_reads: Vec<_> = runs.map(|run| self.submit(run).unwrap()).collect();
        pending_reads.into_iter().map(|pending_read| pending_read.wait(None).unwrap()).collect()
    }
}

/// Speed of the links in each direction.
const SLOW: LinkSpeed = LinkSpeed { delay: Duration::from_millis(10), rate: Some(20_000_000) };

const RUNS: u64 = 32;
const SHAPE: [usize; 2] = [256, 16];
const LAYERS: usize = 4;

/// Upper bound on a run's message overhead in bytes, for each server and direction: less than a tenth of the input.
const MAX_HEADER_BYTES: u64 = 1000;

/// Two servers behind slow links, and a chain over them. With `peer_copies`, the servers copy to each other
/// directly.
struct SlowServers {
    chain: DeviceChain,
    relays: [SlowLink; 2],
    endpoints: [Endpoint; 2],
    _servers: [TestServer; 2],
}

impl SlowServers {
    fn new(peer_copies: bool, depth: usize) -> SlowServers {
        let servers = [(); 2].map(|()| TestServer::new(1, peer_copies));
        let relays = servers.each_ref().map(|server| SlowLink::new(server.addr, SLOW));
        let endpoints = relays.each_ref().map(|relay| TestServer::connect(relay.addr()));
        let devices = endpoints.each_ref().map(|endpoint| endpoint.devices()[0].clone());
        assert_eq!(devices[1].copies_from(devices[0].info()), peer_copies);
        let mut chain = DeviceChain::new(devices.to_vec(), SHAPE, LAYERS, depth).unwrap();
        // Warm-up: the first runs send graphs, allocate memory and connect the servers.
        chain.results(0..depth as u64 + 1);
        SlowServers { chain, relays, endpoints, _servers: servers }
    }
}

#[test]
fn four_runs_in_flight_are_at_least_1_7_times_as_fast_as_one() {
    let wanted = DeviceChain::new(cpus(2), SHAPE, LAYERS, 1).unwrap().results(0..RUNS);
    for peer_copies in [false, true] {
        let [serial, deep] = [1, 4].map(|depth| {
            let mut setup = SlowServers::new(peer_copies, depth);
            let start = Instant::now();
            assert!(setup.chain.results(0..RUNS) == wanted, "depth {depth}, peer copies: {peer_copies}");
            start.elapsed()
        });
        let gain = serial.as_secs_f64() / deep.as_secs_f64();
        eprintln!("peer copies {peer_copies}: {serial:?} {deep:?} {gain:.2}");
        assert!(gain >= 1.7, "{gain:.2}, peer copies {peer_copies}: {serial:?} one at a time, {deep:?} four at once");
    }
}

/// If servers copy to each other directly, only inputs and outputs pass through the client.
#[test]
fn a_run_moves_inputs_and_outputs_only() {
    for depth in [1, 4] {
        let mut setup = SlowServers::new(true, depth);
        let count = |setup: &SlowServers| {
            let links = setup.endpoints.each_ref().map(|endpoint| endpoint.devices()[0].link_stats().unwrap());
            // A server may still send notifications: `settled` waits until relays and links have counted the same bytes.
            links.each_ref().map(|link| (link.sent, link.received))
        };
        let settled = |setup: &SlowServers| {
            let until = Instant::now() + Duration::from_secs(20);
            loop {
                let (relays, links) = (setup.relays.each_ref().map(|relay| relay.passed(0)), count(setup));
                if relays == links {
                    return links;
                }
                assert!(Instant::now() < until, "bytes counted by relays: {relays:?}, by links: {links:?}");
                std::thread::yield_now();
            }
        };
        let before = settled(&setup);
        setup.chain.results(0..RUNS);
        let after = settled(&setup);
        let tensor = (4 * SHAPE[0] * SHAPE[1]) as u64;
        let [[a_sent, a_received], [b_sent, b_received]] =
            [0, 1].map(|at| [(after[at].0 - before[at].0) / RUNS, (after[at].1 - before[at].1) / RUNS]);
        eprintln!("depth {depth}: {a_sent} {a_received} {b_sent} {b_received}");
        assert!((tensor..tensor + MAX_HEADER_BYTES).contains(&a_sent), "{a_sent}");
        assert!((tensor..tensor + MAX_HEADER_BYTES).contains(&b_received), "{b_received}");
        assert!(a_received < MAX_HEADER_BYTES && b_sent < MAX_HEADER_BYTES, "{a_received} {b_sent}");
    }
}

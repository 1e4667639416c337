//! Servers behind slow lines: runs that are under way at once hide the time that bytes are on their way.

use crate::islands::cpus;
use crate::slow::{Relay, Slow};
use crate::servers::Served;
use fanout::device::{Account, Device, Source, Ticket};
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::sched::{Options, Prepared, SchedError, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of each scheduler.
const MEMORY: u64 = 1 << 26;

/// A row of devices, each with weights of its own: `x = x + w * x`, some times on each.
pub(super) struct Chain {
    pub(super) scheduler: Scheduler,
    pub(super) prepared: Prepared,
    x: TensorId,
    y: TensorId,
    /// Columns and rows of the input.
    shape: [usize; 2],
}

impl Chain {
    pub(super) fn new(
        devices: Vec<Arc<dyn Device>>,
        shape @ [width, rows]: [usize; 2],
        layers: usize,
        depth: usize,
    ) -> Result<Chain, SchedError> {
        let account = Account::new(MEMORY);
        let mut b = TaskBuilder::new();
        let x = b.input("x", DType::F32, [width, rows, 1, 1]).unwrap();
        let (mut h, mut rng) = (x, fastrand::Rng::with_seed(7));
        for (home, device) in devices.iter().enumerate() {
            let of = |source| SchedError::Device { device: device.info().name.clone(), source };
            let desc = TensorDesc::contiguous(DType::F32, [width, width, 1, 1]).unwrap();
            for layer in 0..layers {
                let values: Vec<f32> = (0..width * width).map(|_| (rng.f32() - 0.5) / width as f32).collect();
                let region = device.alloc(desc.extent() as u64, &account).map_err(of)?.whole();
                let mut queue = device.queue(&account).map_err(of)?;
                let bytes = Source::Borrowed(bytemuck::cast_slice(&values));
                queue.upload(region.clone(), Some(&desc), bytes).map_err(of)?;
                queue.mark().wait(None).map_err(of)?;
                let w = b.stored(format!("w{home}.{layer}"), desc, home, Some(region)).unwrap();
                let product = b.node(MulMat::PLAIN, &[Some(w), Some(h)]).unwrap();
                h = b.node(Binary::Add, &[Some(product), Some(h)]).unwrap();
            }
        }
        b.output(h).unwrap();
        let options = Options { depth, ..Options::default() };
        let mut scheduler = Scheduler::new(devices, options, &account)?;
        let prepared = scheduler.build(&Arc::new(b.build().unwrap()))?;
        Ok(Chain { scheduler, prepared, x, y: h, shape })
    }

    /// Submits a run; its number decides what it is given.
    pub(super) fn submit(&mut self, run: u64) -> Result<Ticket, SchedError> {
        let mut rng = fastrand::Rng::with_seed(run);
        let x: Vec<f32> = (0..self.shape[0] * self.shape[1]).map(|_| rng.f32() - 0.5).collect();
        self.scheduler.submit(&mut self.prepared, &[(self.x, bytemuck::cast_slice(&x))])?;
        self.scheduler.read(&self.prepared, self.y)
    }

    pub(super) fn results(&mut self, runs: std::ops::Range<u64>) -> Vec<Vec<u8>> {
        let tickets: Vec<_> = runs.map(|run| self.submit(run).unwrap()).collect();
        tickets.into_iter().map(|ticket| ticket.wait(None).unwrap()).collect()
    }
}

/// Each way.
const SLOW: Slow = Slow { delay: Duration::from_millis(10), rate: Some(20_000_000) };

const RUNS: u64 = 32;
const SHAPE: [usize; 2] = [256, 16];
const LAYERS: usize = 4;

#[test]
fn runs_under_way_at_once_gain_over_one_at_a_time() {
    let wanted = Chain::new(cpus(2), SHAPE, LAYERS, 1).unwrap().results(0..RUNS);
    let time = |depth: usize| {
        let servers = [Served::new(1), Served::new(1)];
        let relays = servers.each_ref().map(|server| Relay::new(server.addr, SLOW));
        let endpoints = relays.each_ref().map(|relay| Served::connect(relay.addr()));
        let devices = endpoints.each_ref().map(|endpoint| endpoint.devices()[0].clone());
        let mut chain = Chain::new(devices.to_vec(), SHAPE, LAYERS, depth).unwrap();
        // What is done once only: graphs are sent, memory is made.
        chain.results(0..2);
        let start = Instant::now();
        assert!(chain.results(0..RUNS) == wanted, "depth {depth}");
        start.elapsed()
    };
    let [serial, deep] = [1, 4].map(time);
    eprintln!("{serial:?} {deep:?}");
    let gain = serial.as_secs_f64() / deep.as_secs_f64();
    assert!(gain >= 1.7, "{gain:.2}: {serial:?} one at a time, {deep:?} four at once");
}

//! Emulated GPUs as devices, small graphs, and what the emulator counted.

use cudaemu::test::Session;
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Account, Buffer, Device, DeviceError, Program, Queue, Region, Source};
use fanout::graph::{Builder, Graph};
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::tensor::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MEMORY: u64 = 1 << 30;

/// Emulated GPUs, this test's alone.
pub struct Rig {
    pub devices: Vec<Arc<CudaDevice>>,
    pub account: Arc<Account>,
    // Last: the devices must be gone before the session is.
    pub emulator: Session,
}

impl Rig {
    pub fn new(settings: &str) -> Rig {
        let emulator = cudaemu::test::start(settings).unwrap();
        let gpus = cuda::detect().unwrap();
        let device = |(i, gpu): (usize, &cuda::Gpu)| CudaDevice::new(&format!("CUDA{i}"), gpu, MEMORY).unwrap();
        Rig { devices: gpus.iter().enumerate().map(device).collect(), account: Account::new(4 * MEMORY), emulator }
    }

    pub fn queue(&self, device: usize) -> Box<dyn Queue> {
        self.devices[device].queue(&self.account).unwrap()
    }

    pub fn buffer(&self, device: usize, bytes: u64) -> Buffer {
        self.devices[device].alloc(bytes, &self.account).unwrap()
    }

    pub fn program(&self, device: usize, graph: &Arc<Graph>) -> Program {
        self.devices[device].prepare(Arc::clone(graph)).unwrap()
    }

    /// How often a function of the driver was called.
    pub fn calls(&self, name: &str) -> u64 {
        self.emulator.calls(name)
    }

    /// When all work so far ends in simulated time, in microseconds.
    pub fn simulated(&self) -> f64 {
        let counts = self.emulator.counts_json();
        let (_, rest) = counts.split_once("\"simulated_us\": ").unwrap();
        rest.trim_end_matches('}').parse().unwrap()
    }

    /// Lets the devices go. The last work of a dropped queue ends on a thread of its own, and with it the context; whether
    /// all of them did.
    pub fn end(&mut self) -> bool {
        self.devices.clear();
        self.emulator.wait_contexts_released(Duration::from_secs(5))
    }
}

impl Drop for Rig {
    /// Before the session ends.
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// `x = f(x)`, once for each op, on `n` floats at the start of slot 0.
pub fn chain(n: usize, ops: &[Unary]) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let desc = b.tensor(x).unwrap().desc;
    let mut last = x;
    for &op in ops {
        let onto = b.view(x, desc, 0).unwrap();
        last = b.node_into(op, &[Some(last)], onto).unwrap();
    }
    Arc::new(b.build().unwrap())
}

pub const DOUBLE: Unary = Unary::Scale { scale: 2.0, bias: 0.0 };
pub const INCREMENT: Unary = Unary::Scale { scale: 1.0, bias: 1.0 };
pub const COSTLY: Unary = Unary::Kind(UnaryKind::GeluErf);

pub fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(60))
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn upload(queue: &mut dyn Queue, to: &Region, values: &[f32]) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(to.part(0, bytes.len() as u64).unwrap(), None, Source::Borrowed(&bytes))
}

/// The first `n` floats of a region.
pub fn read(queue: &mut dyn Queue, from: &Region, n: usize) -> Result<Vec<f32>, DeviceError> {
    Ok(floats(&queue.download(from.part(0, 4 * n as u64)?)?.wait(soon())?))
}

/// A region's bytes from the start.
pub fn whole(buffer: &Buffer) -> Arc<[Region]> {
    Arc::from([buffer.whole()])
}

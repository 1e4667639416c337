//! Fixture of the CUDA tests: an emulator session with its devices, small graphs, and access to the emulator's counters.

use cudaemu::test::Session;
use fanout::cuda::{self, CudaDevice, CudaOptions};
use fanout::device::{Buffer, Device, DeviceError, MemoryBudget, Program, Queue, Region, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::tensor::DType;
use fanout_testing::real_gpu;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MEMORY: u64 = 1 << 30;

/// An emulator session and CUDA devices on its emulated GPUs. Each test has its own.
pub struct CudaFixture {
    pub devices: Vec<Arc<CudaDevice>>,
    pub budget: Arc<MemoryBudget>,
    // Last field: the devices must be dropped before the session.
    pub emulator: Session,
}

impl CudaFixture {
    /// # Panics
    /// When the tests run on a real GPU, which has no settings and no counters: only the sweep runs there.
    pub fn new(settings: &str) -> CudaFixture {
        CudaFixture::with_options(settings, CudaOptions::default())
    }

    /// As [`CudaFixture::new`], with options of the devices.
    pub fn with_options(settings: &str, options: CudaOptions) -> CudaFixture {
        assert!(!real_gpu::requested(), "this test needs the emulator; on a real GPU, run only `--test cuda sweep`");
        let emulator = cudaemu::test::start(settings).unwrap();
        let gpus = cuda::detect().unwrap();
        let device = |(i, gpu): (usize, &cuda::Gpu)| {
            CudaDevice::with_options(&format!("CUDA{i}"), gpu, |_| MEMORY, options).unwrap()
        };
        CudaFixture {
            devices: gpus.iter().enumerate().map(device).collect(),
            budget: MemoryBudget::new(4 * MEMORY),
            emulator,
        }
    }

    pub fn queue(&self, device: usize) -> Box<dyn Queue> {
        self.devices[device].queue(&self.budget).unwrap()
    }

    pub fn buffer(&self, device: usize, bytes: u64) -> Buffer {
        self.devices[device].alloc(bytes, &self.budget).unwrap()
    }

    pub fn program(&self, device: usize, graph: &Arc<Graph>) -> Program {
        self.devices[device].prepare(Arc::clone(graph)).unwrap()
    }

    /// Number of calls of a driver function.
    pub fn driver_calls(&self, name: &str) -> u64 {
        self.emulator.calls(name)
    }

    /// Simulated time at which all work so far ends, in microseconds.
    pub fn simulated_us(&self) -> f64 {
        let counts = self.emulator.counts_json();
        let (_, rest) = counts.split_once("\"simulated_us\": ").unwrap();
        rest.trim_end_matches('}').parse().unwrap()
    }

    /// Drops the devices and waits up to 5 s until all contexts are released. (A dropped queue releases its resources on a
    /// separate thread.) Returns whether all contexts were released.
    pub fn drop_devices(&mut self) -> bool {
        self.devices.clear();
        self.emulator.wait_contexts_released(Duration::from_secs(5))
    }
}

impl Drop for CudaFixture {
    /// Releases the devices before the session ends.
    fn drop(&mut self) {
        let _ = self.drop_devices();
    }
}

/// A graph that applies each op in place to `n` floats at the start of slot 0.
pub fn chain(n: usize, ops: &[Unary]) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let desc = b.tensor(x).unwrap().desc;
    let mut last = x;
    for &op in ops {
        let onto = b.view(x, desc, 0).unwrap();
        last = b.node_into(op, &[Some(last)], onto).unwrap();
    }
    Arc::new(b.build())
}

/// A softmax of one row, which one block computes, between two short nodes: three segments on a GPU with 1024
/// multiprocessors, because one block has little of the bandwidth.
pub fn long_node() -> Arc<Graph> {
    long_node_before(1)
}

/// As [`long_node`], with so many short nodes at the end, in the third segment.
pub fn long_node_before(short: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [1 << 19, 1, 1, 1]).unwrap();
    let doubled = b.node(DOUBLE, &[Some(x)]).unwrap();
    let long = b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[Some(doubled)]).unwrap();
    let mut last = long;
    for _ in 0..short {
        last = b.node(DOUBLE, &[Some(last)]).unwrap();
    }
    Arc::new(b.build())
}

pub const DOUBLE: Unary = Unary::Scale { scale: 2.0, bias: 0.0 };
pub const INCREMENT: Unary = Unary::Scale { scale: 1.0, bias: 1.0 };
pub const COSTLY: Unary = Unary::Kind(UnaryKind::GeluErf);

/// A deadline that no passing test reaches.
pub fn test_deadline() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(300))
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

pub fn upload(queue: &mut dyn Queue, to: &Region, values: &[f32]) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(to.subregion(0, bytes.len() as u64).unwrap(), None, UploadSource::Borrowed(&bytes))
}

/// The first `n` floats of a region.
pub fn read(queue: &mut dyn Queue, from: &Region, n: usize) -> Result<Vec<f32>, DeviceError> {
    Ok(floats(&queue.download(from.subregion(0, 4 * n as u64)?)?.wait(test_deadline())?))
}

/// The bindings of a program with one slot: the whole buffer.
pub fn whole_buffer(buffer: &Buffer) -> Arc<[Region]> {
    Arc::from([buffer.whole()])
}

//! What the op tests share: seeded inputs, a run on each device with every byte accounted for, error measures.

#[allow(dead_code)] // each test uses a part of it
mod relay;

use fanout::cpu::{CpuDevice, Path};
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Account, Device, DeviceError, Source};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph, Place, TensorId};
use fanout::ops::{FAMILIES, MAX_SRC, NodeView, OpCode};
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::server::{Config, Server};
use fanout::tensor::quant::{dequantiser, quantiser};
use fanout::tensor::{Capability, DType, TensorDesc};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A device of the matrix and how closely it follows the oracles.
pub struct Subject {
    pub name: &'static str,
    pub device: Arc<dyn Device>,
    /// Whether products may quantise activations (NMSE bounds per type) or must be exact up to f32 rounding.
    pub fast: bool,
    /// Runs what `device` refuses because its tensors are not aligned, or because the tables of types and op families have no
    /// CUDA kernels for it; it must take everything else.
    pub misaligned: Option<Arc<dyn Device>>,
    /// The server that `device` is behind.
    endpoint: Option<Served>,
}

impl Subject {
    pub fn new(name: &'static str, device: Arc<dyn Device>, fast: bool) -> Subject {
        Subject { name, device, fast, misaligned: None, endpoint: None }
    }

    fn device_for(&self, graph: &Graph) -> Arc<dyn Device> {
        if let Some(served) = &self.endpoint {
            return served.device();
        }
        let whole = graph.nodes().iter().all(|node| graph.view(node).is_none_or(|node| node.aligned && on_cuda(&node)));
        Arc::clone(self.misaligned.as_ref().filter(|_| !whole).unwrap_or(&self.device))
    }

    /// Whether a run ended as it must when `op` finds data that it does not allow. In 7.0 a server can only hang up.
    pub fn found_bad(&self, error: &Option<DeviceError>, op: OpCode) -> bool {
        let plain = self.endpoint.as_ref().is_some_and(|served| served.plain);
        match error {
            Some(DeviceError::Lost { .. }) => plain,
            Some(DeviceError::Data { op: of, .. }) => *of == op && !plain,
            _ => false,
        }
    }
}

/// Whether the tables of op families and types have CUDA kernels for a node.
fn on_cuda(node: &NodeView<'_>) -> bool {
    let family = FAMILIES.iter().find(|row| row.codes.contains(&node.op.code()));
    let mut tensors = (0..MAX_SRC).filter_map(|i| node.srcs.get(i)).chain([node.dst]);
    let lacks = |t: DType| t.can(Capability::Convert) && !t.can(Capability::Cuda);
    family.is_some_and(|row| row.cuda) && !tensors.any(|t| lacks(t.dtype()))
}

/// Every device that the suite runs on.
pub fn devices() -> &'static [Subject] {
    static ALL: OnceLock<Vec<Subject>> = OnceLock::new();
    ALL.get_or_init(|| {
        let cpu =
            |threads, path| CpuDevice::new("CPU", threads, path, 4 << 30).expect("a CPU device") as Arc<dyn Device>;
        vec![
            Subject::new("exact, 1 thread", cpu(1, Path::Exact), false),
            Subject::new("exact, 3 threads", cpu(3, Path::Exact), false),
            Subject::new("fast, 2 threads", cpu(2, Path::Fast), true),
            cuda_with(cpu(1, Path::Exact)),
            served("RPC", cpu(1, Path::Exact), false),
            served("RPC 7.0", cpu(1, Path::Exact), true),
        ]
    })
}

/// A server of this process, which serves as long as that.
struct Served {
    addr: SocketAddr,
    /// Whether it is spoken to in 7.0. Then it ends a connection over a graph that fails, so that each run has its own.
    plain: bool,
}

impl Served {
    /// Its device, over a connection of its own.
    fn device(&self) -> Arc<dyn Device> {
        let addr = if self.plain { relay::Relay::start(self.addr, true).addr } else { self.addr };
        let endpoint = Endpoint::connect(&addr.to_string(), &Options::default()).expect("a server");
        Arc::clone(&endpoint.devices()[0])
    }
}

fn served(name: &'static str, device: Arc<dyn Device>, plain: bool) -> Subject {
    let server = Server::bind("127.0.0.1", 0, vec![device], Config::default()).expect("a free port");
    let served = Served { addr: server.local_addr(), plain };
    std::thread::spawn(move || server.run());
    let device = served.device();
    Subject { endpoint: Some(served), ..Subject::new(name, device, false) }
}

/// The first GPU: an emulated one, or with FANOUT_TEST_GPU=1 that of this machine.
fn cuda_with(cpu: Arc<dyn Device>) -> Subject {
    if std::env::var("FANOUT_TEST_GPU").as_deref() != Ok("1") {
        cudaemu::test::load().expect("the emulator is built with the tests");
    }
    let gpus = cuda::detect().expect("a GPU");
    let device = CudaDevice::new("CUDA0", &gpus[0], 4 << 30).expect("a GPU that can be used");
    let both: Arc<dyn Device> = Fallback::new(device.clone(), cpu);
    Subject { misaligned: Some(both), ..Subject::new("CUDA", device, true) }
}

/// A graph in the making with the values of its leaves.
#[derive(Default)]
pub struct Case {
    pub b: Builder,
    inputs: Vec<(TensorId, Vec<u8>)>,
}

/// What a run left in memory.
pub struct Outcome {
    graph: Arc<Graph>,
    memory: Vec<u8>,
}

impl Case {
    pub fn new() -> Case {
        Case::default()
    }

    /// A packed leaf with these values (converted to `dtype`, rounded or quantised).
    pub fn leaf(&mut self, dtype: DType, ne: [usize; 4], values: &[f32]) -> TensorId {
        let desc = TensorDesc::contiguous(dtype, ne).expect("a tensor");
        self.leaf_of(desc, values)
    }

    /// A leaf with strides of its own; `values` in logical order.
    pub fn leaf_of(&mut self, desc: TensorDesc, values: &[f32]) -> TensorId {
        let id = self.b.leaf_of(desc).expect("a leaf");
        self.inputs.push((id, encode(&desc, values)));
        id
    }

    /// A packed leaf given as raw bytes.
    pub fn raw(&mut self, dtype: DType, ne: [usize; 4], bytes: Vec<u8>) -> TensorId {
        let id = self.b.leaf(dtype, ne).expect("a leaf");
        self.inputs.push((id, bytes));
        id
    }

    /// A packed leaf of I32 (or I64) indices.
    pub fn indices(&mut self, dtype: DType, ne: [usize; 4], values: &[i64]) -> TensorId {
        let bytes = values.iter().flat_map(|&v| match dtype {
            DType::I64 => v.to_le_bytes().to_vec(),
            _ => (v as i32).to_le_bytes().to_vec(),
        });
        self.raw(dtype, ne, bytes.collect())
    }

    /// Builds the graph, which must pass validation.
    pub fn build(self) -> Built {
        Built { graph: Arc::new(self.b.build().expect("a valid graph")), inputs: self.inputs }
    }
}

/// A finished case; runs on any device.
pub struct Built {
    pub graph: Arc<Graph>,
    inputs: Vec<(TensorId, Vec<u8>)>,
}

impl Built {
    /// Runs the graph on a device. Every byte that is not an element of a node's destination must come back unchanged:
    /// inputs, gaps between tensors, gaps inside strided ones.
    pub fn run(&self, on: &Subject) -> Outcome {
        let outcome = self.try_run(on).unwrap_or_else(|e| panic!("{}: {e}", on.name));
        let before = self.initial();
        let mut written = vec![false; before.len()];
        for node in self.graph.nodes() {
            let t = self.graph.tensor(node.dst).expect("a destination");
            for_each_block(&t.desc, t.place.expect("placed"), |at| {
                written[at..at + t.desc.dtype().block_bytes()].fill(true)
            });
        }
        for (i, (&was, &is)) in before.iter().zip(&outcome.memory).enumerate() {
            assert!(written[i] || was == is, "{}: byte {i} outside every destination changed", on.name);
        }
        outcome
    }

    /// As [`Built::run`] without the check, for graphs that must fail.
    pub fn try_run(&self, on: &Subject) -> Result<Outcome, fanout::device::DeviceError> {
        let deadline = Some(Instant::now() + Duration::from_secs(60));
        let account = Account::new(4 << 30);
        let device = on.device_for(&self.graph);
        let program = device.prepare(Arc::clone(&self.graph))?;
        let memory = self.initial();
        let buffer = device.alloc(memory.len() as u64, &account)?;
        let mut queue = device.queue(&account)?;
        queue.upload(buffer.whole(), None, Source::Borrowed(&memory))?;
        queue.run(&program, &Arc::from([buffer.whole()]))?;
        let memory = queue.download(buffer.whole())?.wait(deadline)?;
        Ok(Outcome { graph: Arc::clone(&self.graph), memory })
    }

    fn initial(&self) -> Vec<u8> {
        let mut memory = vec![0xa5; self.graph.slots()[0]];
        for (id, bytes) in &self.inputs {
            let at = self.graph.tensor(*id).and_then(|t| t.place).expect("a placed leaf").offset;
            memory[at..at + bytes.len()].copy_from_slice(bytes);
        }
        memory
    }

    /// A leaf's blocks as they are, in logical order.
    pub fn bytes(&self, id: TensorId) -> Vec<u8> {
        bytes(&self.graph, &self.initial(), id)
    }

    /// The values that a leaf really holds after rounding to its type, in logical order.
    pub fn values(&self, id: TensorId) -> Vec<f64> {
        decode(&self.graph, &self.initial(), id)
    }
}

impl Outcome {
    /// A tensor's blocks as they are, in logical order.
    pub fn bytes(&self, id: TensorId) -> Vec<u8> {
        bytes(&self.graph, &self.memory, id)
    }

    /// A tensor's values in logical order (i0 fastest); I32 and I64 as numbers.
    pub fn values(&self, id: TensorId) -> Vec<f64> {
        decode(&self.graph, &self.memory, id)
    }
}

fn for_each_block(desc: &TensorDesc, place: Place, mut each: impl FnMut(usize)) {
    let (ne, nb) = (desc.ne(), desc.nb());
    for i3 in 0..ne[3] {
        for i2 in 0..ne[2] {
            for i1 in 0..ne[1] {
                for block in 0..ne[0] / desc.dtype().block_len() {
                    each(place.offset + block * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]);
                }
            }
        }
    }
}

fn bytes(graph: &Graph, memory: &[u8], id: TensorId) -> Vec<u8> {
    let t = graph.tensor(id).expect("a tensor");
    let mut out = Vec::with_capacity(t.desc.dense_bytes());
    for_each_block(&t.desc, t.place.expect("placed"), |at| {
        out.extend_from_slice(&memory[at..at + t.desc.dtype().block_bytes()]);
    });
    out
}

fn decode(graph: &Graph, memory: &[u8], id: TensorId) -> Vec<f64> {
    let t = graph.tensor(id).expect("a tensor");
    let (dtype, mut out) = (t.desc.dtype(), Vec::with_capacity(t.desc.elements()));
    let mut block = vec![0.0; dtype.block_len()];
    for_each_block(&t.desc, t.place.expect("placed"), |at| {
        let bytes = &memory[at..at + dtype.block_bytes()];
        match dtype {
            DType::I32 => out.push(f64::from(i32::from_le_bytes(bytes.try_into().expect("4 bytes")))),
            DType::I64 => out.push(i64::from_le_bytes(bytes.try_into().expect("8 bytes")) as f64),
            _ => {
                dequantiser(dtype).expect("a type with a dequantiser")(bytes, &mut block);
                out.extend(block.iter().map(|&v| f64::from(v)));
            }
        }
    });
    out
}

fn encode(desc: &TensorDesc, values: &[f32]) -> Vec<u8> {
    assert_eq!(values.len(), desc.elements(), "values for {desc:?}");
    let (dtype, mut bytes) = (desc.dtype(), vec![0x5a; desc.extent()]);
    let mut blocks = values.chunks_exact(dtype.block_len());
    for_each_block(desc, Place { slot: 0, offset: 0 }, |at| {
        let values = blocks.next().expect("as many values as elements");
        let bytes = &mut bytes[at..at + dtype.block_bytes()];
        if dtype == DType::I32 {
            bytes.copy_from_slice(&(values[0] as i32).to_le_bytes());
        } else {
            quantiser(dtype).expect("a type with a quantiser")(values, bytes);
        }
    });
    bytes
}

/// `n` values, roughly normal with deviation 1, from a seed.
pub fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| (0..12).map(|_| rng.f32()).sum::<f32>() - 6.0).collect()
}

/// `n` values, uniform in `lo..hi`, from a seed.
pub fn uniform(seed: u64, n: usize, lo: f32, hi: f32) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| lo + (hi - lo) * rng.f32()).collect()
}

/// Squared error relative to the squared wanted values.
pub fn nmse(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len(), "as many values as wanted");
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
    let power: f64 = want.iter().map(|w| w * w).sum();
    if error == 0.0 { 0.0 } else { error / power.max(1e-30) }
}

/// That all values agree within `relative` of the larger magnitude plus `absolute`; equal infinities and NaNs agree.
#[track_caller]
pub fn assert_close(got: &[f64], want: &[f64], relative: f64, absolute: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan());
        assert!(
            same || (g - w).abs() <= relative * g.abs().max(w.abs()) + absolute,
            "{what}: value {i} is {g}, wanted {w}"
        );
    }
}

/// Index of element `[i0, i1, i2, i3]` in logical order.
pub fn at(ne: [usize; 4], i: [usize; 4]) -> usize {
    ((i[3] * ne[2] + i[2]) * ne[1] + i[1]) * ne[0] + i[0]
}

/// The index of element `k` in logical order.
pub fn index(ne: [usize; 4], k: usize) -> [usize; 4] {
    [k % ne[0], k / ne[0] % ne[1], k / ne[0] / ne[1] % ne[2], k / ne[0] / ne[1] / ne[2]]
}

/// The relative rounding of a float type: tolerance of an op computed in f32 and stored in it.
pub fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 2e-6,
    }
}

//! Op tests: a graph with the values of its leaves, run on any device. Checks every byte of the memory after the run.
//!
//! ```
//! use fanout::cpu::{CpuDevice, MathMode};
//! use fanout::ops::binary::Binary;
//! use fanout::tensor::DType;
//! use fanout_testing::op_case::{Case, Subject};
//!
//! let subject = Subject::new("exact", CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20)?, false);
//! let mut case = Case::new();
//! let x = case.leaf(DType::F32, [4, 1, 1, 1], &[1.0, 2.0, 3.0, 4.0]);
//! let y = case.b.node(Binary::Add, &[Some(x), Some(x)])?;
//! let outcome = case.build().run(&subject);
//! assert_eq!(outcome.values(y), [2.0, 4.0, 6.0, 8.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use fanout::device::{Device, DeviceError, MemoryBudget, UploadSource};
use fanout::graph::{Builder, Graph, Tensor, TensorId};
use fanout::ops::OpCode;
use fanout::self_test::values::{decode, encode, for_each_block};
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for a result.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Opens a connection to a device behind a server.
type Connect = dyn Fn() -> Arc<dyn Device> + Send + Sync;

/// A device under test, and how closely it must follow the oracles.
pub struct Subject {
    /// Name of the device in messages.
    pub name: &'static str,
    /// The device.
    pub device: Arc<dyn Device>,
    /// Whether matrix products may quantise activations. Tests then bound the NMSE for each type of weights; otherwise, results
    /// must be exact up to f32 rounding.
    pub fast: bool,
    /// Runs graphs that `device` refuses because tensors are not aligned, or because the tables of types and op families have
    /// no CUDA kernels for them; behind a server, because the version of the protocol cannot express them.
    substitute: Option<Arc<dyn Device>>,
    connect: Option<Box<Connect>>,
    drops_connections: bool,
    replays: bool,
}

impl Subject {
    /// A device of this process.
    pub fn new(name: &'static str, device: Arc<dyn Device>, fast: bool) -> Subject {
        Subject { name, device, fast, substitute: None, connect: None, drops_connections: false, replays: false }
    }

    /// A device of a server. Each run opens a new connection, since a failed run may close its connection.
    pub fn remote(
        name: &'static str,
        connect: impl Fn() -> Arc<dyn Device> + Send + Sync + 'static,
        fast: bool,
    ) -> Subject {
        let device = connect();
        Subject { connect: Some(Box::new(connect)), ..Subject::new(name, device, fast) }
    }

    /// Runs graphs with unaligned tensors, and those with nodes that CUDA has no kernels for, on `device` instead. For a device
    /// of a server: graphs with nodes that it does not support, as an older protocol does not have newer ops and types.
    pub fn with_substitute(self, device: Arc<dyn Device>) -> Subject {
        Subject { substitute: Some(device), ..self }
    }

    /// Expects a lost connection when an op finds invalid data: in protocol 7.0 a server cannot report a failure in another
    /// way.
    pub fn that_drops_connections(self) -> Subject {
        Subject { drops_connections: true, ..self }
    }

    /// Runs each graph twice on the same memory with the same content, of which a GPU's second run replays a CUDA graph. The bytes must be
    /// equal.
    pub fn that_replays(self) -> Subject {
        Subject { replays: true, ..self }
    }

    fn device_for(&self, graph: &Graph) -> Arc<dyn Device> {
        if let Some(connect) = &self.connect {
            let device = connect();
            let mut nodes = graph.nodes().iter().filter_map(|node| graph.node_view(node));
            let other = self.substitute.as_ref().filter(|_| !nodes.all(|node| device.support(node).runs()));
            return other.map_or(device, Arc::clone);
        }
        let is_supported = graph
            .nodes()
            .iter()
            .all(|node| graph.node_view(node).is_none_or(|node| node.aligned && self.device.support(node).runs()));
        Arc::clone(self.substitute.as_ref().filter(|_| !is_supported).unwrap_or(&self.device))
    }

    /// Whether a run ended with the expected error for invalid data of `op`: [`DeviceError::Data`] of that op, or a lost
    /// connection ([`Subject::that_drops_connections`]).
    pub fn reported_bad_data(&self, error: &Option<DeviceError>, op: OpCode) -> bool {
        // A fallback names the device on which the node ran.
        match error.as_ref().map(DeviceError::root) {
            Some(DeviceError::ConnectionLost { .. }) => self.drops_connections,
            Some(DeviceError::Data { op: of, .. }) => *of == op && !self.drops_connections,
            _ => false,
        }
    }
}

/// A graph under construction with the values of its leaves.
///
/// Its methods panic if the number of values differs from the tensor's, or if a tensor is invalid in the graph.
#[derive(Default)]
pub struct Case {
    /// Adds views and nodes.
    pub b: Builder,
    inputs: Vec<(TensorId, Vec<u8>)>,
}

/// The memory after a run.
pub struct Outcome {
    graph: Arc<Graph>,
    memory: Vec<u8>,
}

impl Case {
    /// A graph without tensors.
    pub fn new() -> Case {
        Case::default()
    }

    /// Adds a contiguous leaf with these values, rounded or quantised to `dtype`. `ne` has the fastest dimension first, as the
    /// values have.
    pub fn leaf(&mut self, dtype: DType, ne: [usize; 4], values: &[f32]) -> TensorId {
        let desc = TensorDesc::contiguous(dtype, ne).expect("a valid shape");
        self.leaf_with_desc(desc, values)
    }

    /// Adds a leaf with strides of its own; `values` in logical order, dimension 0 fastest.
    pub fn leaf_with_desc(&mut self, desc: TensorDesc, values: &[f32]) -> TensorId {
        let id = self.b.leaf_with_desc(desc).expect("a valid leaf");
        assert_eq!(values.len(), desc.elements(), "values for {desc:?}");
        self.inputs.push((id, encode(&desc, values).expect("a type with a conversion")));
        id
    }

    /// Adds a contiguous leaf, given as raw bytes.
    pub fn raw(&mut self, dtype: DType, ne: [usize; 4], bytes: Vec<u8>) -> TensorId {
        let id = self.b.leaf(dtype, ne).expect("a valid leaf");
        self.inputs.push((id, bytes));
        id
    }

    /// Adds a contiguous leaf of indices, I32 or I64.
    pub fn indices(&mut self, dtype: DType, ne: [usize; 4], values: &[i64]) -> TensorId {
        let bytes = values.iter().flat_map(|&v| match dtype {
            DType::I64 => v.to_le_bytes().to_vec(),
            _ => (v as i32).to_le_bytes().to_vec(),
        });
        self.raw(dtype, ne, bytes.collect())
    }

    /// Builds the graph, which must pass validation.
    pub fn build(self) -> BuiltCase {
        BuiltCase { graph: Arc::new(self.b.build()), inputs: self.inputs }
    }
}

/// A finished case, which runs on any device.
pub struct BuiltCase {
    /// The graph.
    pub graph: Arc<Graph>,
    inputs: Vec<(TensorId, Vec<u8>)>,
}

impl BuiltCase {
    /// Runs the graph on a device.
    ///
    /// # Panics
    /// When the run fails, or changes a byte that is no element of a node's destination: inputs, gaps between tensors, gaps
    /// within strided ones.
    pub fn run(&self, on: &Subject) -> Outcome {
        let outcome = self.try_run(on).unwrap_or_else(|e| panic!("{}: {e}", on.name));
        let before = self.initial_memory();
        let mut written = vec![false; before.len()];
        for node in self.graph.nodes() {
            let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i)).filter_map(|(_, id)| *id);
            for id in updated.chain([node.dst]) {
                let (tensor, offset) = placed(&self.graph, id);
                for_each_block(&tensor.desc, |at| {
                    written[offset + at..offset + at + tensor.desc.dtype().block_bytes()].fill(true)
                });
            }
        }
        for (i, (&was, &is)) in before.iter().zip(&outcome.memory).enumerate() {
            assert!(written[i] || was == is, "{}: byte {i} outside every destination changed", on.name);
        }
        outcome
    }

    /// As [`BuiltCase::run`], without the check of what the run changed: for graphs that must fail.
    ///
    /// # Errors
    /// The device's error.
    pub fn try_run(&self, on: &Subject) -> Result<Outcome, DeviceError> {
        let deadline = Some(Instant::now() + TIMEOUT);
        let budget = MemoryBudget::new(4 << 30);
        let device = on.device_for(&self.graph);
        let program = device.prepare(Arc::clone(&self.graph))?;
        let memory = self.initial_memory();
        let buffer = device.alloc(memory.len() as u64, &budget)?;
        let mut queue = device.queue(&budget)?;
        let mut run = || {
            queue.upload(buffer.whole(), None, UploadSource::Borrowed(&memory))?;
            queue.run(&program, &Arc::from([buffer.whole()]))?;
            queue.download(buffer.whole())?.wait(deadline)
        };
        let first = run()?;
        if on.replays {
            assert!(run()? == first, "{}: the second run gives other bytes", on.name);
        }
        let memory = first;
        Ok(Outcome { graph: Arc::clone(&self.graph), memory })
    }

    /// The memory before the run: the inputs, and 0xa5 elsewhere, so that stray writes are found.
    fn initial_memory(&self) -> Vec<u8> {
        let mut memory = vec![0xa5; self.graph.slot_sizes()[0]];
        for (id, bytes) in &self.inputs {
            let (_, offset) = placed(&self.graph, *id);
            memory[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        memory
    }

    /// The bytes of a leaf's blocks, in logical order.
    pub fn bytes(&self, id: TensorId) -> Vec<u8> {
        bytes(&self.graph, &self.initial_memory(), id)
    }

    /// The values of a leaf after rounding to its type, in logical order.
    pub fn values(&self, id: TensorId) -> Vec<f64> {
        values(&self.graph, &self.initial_memory(), id)
    }
}

impl Outcome {
    /// The bytes of a tensor's blocks, in logical order.
    pub fn bytes(&self, id: TensorId) -> Vec<u8> {
        bytes(&self.graph, &self.memory, id)
    }

    /// A tensor's values in logical order (i0 fastest); I32 and I64 as numbers.
    pub fn values(&self, id: TensorId) -> Vec<f64> {
        values(&self.graph, &self.memory, id)
    }
}

/// A tensor of a graph, and its offset in the memory.
fn placed(graph: &Graph, id: TensorId) -> (&Tensor, usize) {
    let tensor = graph.tensor(id).expect("a tensor of the graph");
    (tensor, tensor.place.expect("a tensor with memory").offset)
}

fn bytes(graph: &Graph, memory: &[u8], id: TensorId) -> Vec<u8> {
    let (tensor, offset) = placed(graph, id);
    let mut out = Vec::with_capacity(tensor.desc.dense_bytes());
    for_each_block(&tensor.desc, |at| {
        out.extend_from_slice(&memory[offset + at..offset + at + tensor.desc.dtype().block_bytes()]);
    });
    out
}

fn values(graph: &Graph, memory: &[u8], id: TensorId) -> Vec<f64> {
    let (tensor, offset) = placed(graph, id);
    decode(&tensor.desc, &memory[offset..]).expect("a type with a conversion")
}

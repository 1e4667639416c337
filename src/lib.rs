//! fanout: a tensor backend that pools devices, local and remote, behind one interface.
//!
//! It is two things: this crate, which a Rust LLM runtime links, and the binary `rpc-server`, which offers a host's devices to
//! fanout's clients and to llama.cpp's clients of protocols 7.0 and 8.0. The repository's README.md is about the server; this page leads
//! the author of a runtime from the list of devices to a graph on two of them.
//!
//! # Vocabulary
//! The terms are ggml's. Where ggml has no term, they are Vulkan's or CUDA's.
//!
//! | word | ggml, CUDA | here | meaning |
//! |---|---|---|---|
//! | tensor descriptor | `ggml_tensor`'s `type`, `ne`, `nb` | [`tensor::TensorDesc`] | element type, shape and byte strides. Shapes are in the order of `ne`: the fastest dimension first |
//! | op | `ggml_op` and `op_params` | [`ops::Op`] | an op code with typed, validated parameters |
//! | graph | `ggml_cgraph` | [`graph::Graph`], [`graph::TensorId`] | an arena of tensors and nodes. A tensor has no memory: it has a slot and an offset |
//! | device | `ggml_backend_dev_t` | [`device::Device`] | a CPU, a GPU, or a device of a server |
//! | buffer, region | `ggml_backend_buffer_t` | [`device::Buffer`], [`device::Region`] | memory that a device owns: handles, never pointers |
//! | memory budget | | [`device::MemoryBudget`] | a limit that allocations count against |
//! | queue, stream | `ggml_backend_t`, `cudaStream_t` | [`device::Queue`] | in-order asynchronous work on one device |
//! | timeline point | `ggml_backend_event_t`, timeline semaphore | [`device::TimelinePoint`] | a position in a queue's work; other queues and the host can wait for it |
//! | pending read | | [`device::PendingRead`] | a future: the bytes of a download |
//! | program | `ggml_backend_graph_plan_t` | [`device::Program`] | a graph prepared for a device once, and run many times |
//! | registry | `ggml_backend_reg_t` | [`registry::Registry`] | enumerates, names and opens devices |
//! | scheduler | `ggml_backend_sched_t` | [`sched::Scheduler`] | runs one graph over several devices: assign → split → place memory → plan → execute |
//!
//! docs/ggml-map.md maps every function of `ggml-backend.h`, and docs/ops.md describes every op.
//!
//! # From zero to a graph on two devices
//! Three steps. Here both devices are CPUs; `"0,1"` opens two GPUs, and `"host-a:50052,host-b:50052"` all devices of two
//! servers, with no other change.
//!
//! ```
//! use fanout::device::{MemoryBudget, UploadSource};
//! use fanout::ops::mul_mat::MulMat;
//! use fanout::registry::{self, Registry};
//! use fanout::sched::{Options, Scheduler, TaskBuilder};
//! use fanout::tensor::{DType, TensorDesc, bytes_of};
//! use std::sync::Arc;
//!
//! // 1. Open devices.
//! let options = registry::Options::default().with_threads(Some(1)).with_memory(vec![16 << 20]);
//! let devices = Registry::detect().open("CPU,CPU", &options)?;
//! let budget = MemoryBudget::new(16 << 20);
//!
//! // 2. Bring a weight to each device, and describe the graph y = W1 (W0 x). Weights decide where nodes run.
//! let mut task = TaskBuilder::new();
//! let x = task.input("x", DType::F32, [2])?;
//! let mut y = x;
//! let weights = [("W0", vec![1f32, 2.0, 3.0, 4.0]), ("W1", vec![1.0, 10.0])]; // rows of two elements
//! for (number, (name, rows)) in weights.iter().enumerate() {
//!     let desc = TensorDesc::contiguous(DType::F32, [2, rows.len() / 2])?;
//!     let device = &devices[number];
//!     let region = device.alloc(device.alloc_size(&desc), &budget)?.region(0, desc.extent() as u64)?;
//!     let mut queue = device.queue(&budget)?;
//!     queue.upload(region.clone(), Some(&desc), UploadSource::from(&rows[..]))?;
//!     queue.mark().wait(None)?;
//!     let weight = task.stored(*name, desc, number, Some(region))?;
//!     y = task.node(MulMat::PLAIN, &[weight, y])?;
//! }
//! task.output(y)?;
//!
//! // 3. Plan once, run many times. The scheduler copies W0 x to the second device by itself.
//! let mut scheduler = Scheduler::new(devices, Options::default(), &budget)?;
//! let mut plan = scheduler.build(&Arc::new(task.build()?))?;
//! for (input, result) in [([1f32, 1.0], 73f32), ([1.0, 0.0], 31.0)] {
//!     scheduler.run(&mut plan, &[(x, bytes_of(&input))])?;
//!     let mut read = [0f32];
//!     scheduler.read(&plan, y)?.read_into(&mut read, None)?;
//!     assert_eq!(read, [result]);
//! }
//! assert_eq!((plan.plan().splits(), plan.plan().copies()), (2, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to go from here:
//! - From a model file to text, on any devices, in some 230 lines: docs/runtime.md and `examples/runtime`.
//! - Several runs in flight (pipeline parallelism), observers, an abort flag, comparing two devices: [`sched`].
//! - Results without a thread that waits: [`device::PendingRead`] and [`sched::Scheduler::mark`] are futures for any executor.
//!   `examples/async` runs 64 sequences on one thread of tokio.
//! - Model files, split ones too, and loading or mapping their weights on many devices at once: [`weights`]. Below it: [`gguf`] parses
//!   files, [`device::TensorMemory`] puts many tensors into few buffers, [`device::MappedFile`] maps files for [`device::ImportHost`].
//! - Servers and timeouts: `rpc::client`. Surviving the loss of a server: `recovery`; a runtime that does: `examples/generate`.
//! - A device of your own: [`device`] is the contract. [`device::noop`] is the smallest example. [`self_test`] compares each op of a
//!   device with an exact CPU.
//!
//! # One device by itself
//! ```
//! use fanout::cpu::{CpuDevice, MathMode};
//! use fanout::device::{Device, MemoryBudget, UploadSource};
//! use fanout::graph::Builder;
//! use fanout::ops::binary::Binary;
//! use fanout::tensor::DType;
//! use std::sync::Arc;
//!
//! // z = x * y, element by element.
//! let mut b = Builder::new();
//! let (x, y) = (b.leaf(DType::F32, [4])?, b.leaf(DType::F32, [4])?);
//! let z = b.node(Binary::Mul, &[x, y])?;
//! let graph = Arc::new(b.build());
//!
//! let cpu = CpuDevice::new("CPU", 2, MathMode::Fast, 1 << 20)?;
//! let budget = MemoryBudget::new(1 << 20);
//! let program = cpu.prepare(Arc::clone(&graph))?;
//! let memory = cpu.alloc(graph.slot_sizes()[0] as u64, &budget)?;
//! let region = |id| {
//!     let tensor = graph.tensor(id).expect("a tensor of this graph");
//!     let place = tensor.place.expect("the builder places every tensor");
//!     memory.region(place.offset as u64, tensor.desc.extent() as u64)
//! };
//!
//! let mut queue = cpu.queue(&budget)?;
//! let bytes = |v: [f32; 4]| v.map(f32::to_le_bytes).concat();
//! queue.upload(region(x)?, None, UploadSource::Borrowed(&bytes([1.0, 2.0, 3.0, 4.0])))?;
//! queue.upload(region(y)?, None, UploadSource::Borrowed(&bytes([10.0; 4])))?;
//! queue.run(&program, &Arc::from([memory.whole()]))?;
//! let result = queue.download(region(z)?)?.wait(None)?;
//! assert_eq!(result, bytes([10.0, 20.0, 30.0, 40.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//! All are on by default. Tensors, graphs, ops, the CPU device, the scheduler and the registry need none.
//!
//! | feature | adds |
//! |---|---|
//! | `cuda` | `cuda`: NVIDIA's GPUs, with their kernels as PTX in the library. The CUDA driver is loaded when the program runs |
//! | `server` | `rpc::server`: offers devices of this machine to clients over the network |
//! | `client` | `rpc::client`: devices of servers; `host:port` in the lists of [`registry`]; `recovery` from lost servers |
//! | `safetensors` | safetensors files, beside GGUF, in [`weights`] |
//! | `cli` | the dependencies of the program `rpc-server`: command line, log, signals. It is built with `server`, `client` and `cli` |
//!
//! Structs of options are `#[non_exhaustive]`: start from `Default`, and change fields by the setters `with_FIELD`.
//!
//! # Layers
//! A line uses lines below it, never above. `tests/layout/layer_table.rs` lists what each module may use, and the test `layout`
//! enforces it.
//! ```text
//! bin/rpc-server      examples/generate
//!                     recovery
//! rpc::relay          registry
//! rpc::server         rpc::client         sched
//! rpc::connection                         cpu, cuda, fallback, self_test, weights
//! rpc::wire           rpc::transport      device
//!                                         graph
//! gguf                                    ops
//!                                         tensor
//! ```
//! `rpc::server` and `sched` use devices as `dyn Device` and name no kind of device. `rpc::wire` encodes messages and has no
//! I/O, `rpc::transport` moves bytes and interprets none, and `rpc::connection` joins the two for either end. The CPU and the
//! CUDA device are independent: [`fallback`] runs on a secondary device the nodes that the primary device does not support.
//! docs/ARCHITECTURE.md explains the paths through the code, threads, memory, limits, failures and decisions.
//!
//! # Safety
//! Bytes from outside become typed values in one place each: frames and messages in `rpc::wire`, graphs in [`graph::validate`],
//! model files in [`gguf`]. After it, kernels rely on types, shapes, strides, extents and overlaps; data, such as row indices,
//! they check when they read it. `unsafe` is denied crate-wide and allowed only in the modules that `tests/layout/main.rs`
//! lists, where each block states its invariant. CUDA kernels are tested on an emulated GPU that checks every access.
//!
//! # Adding a type, an op, a backend, a transport or a message
//! CONTRIBUTING.md lists the files. A type is a row of `tensor/table.rs`, a family of ops a row of `ops/mod.rs`, and
//! `tests/layout` checks that rows and files agree.

// docs.rs marks each item with the features that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Items that one feature alone uses are dead code in builds without that feature. CI lints builds with all features, which
// report real dead code.
#![cfg_attr(
    not(all(feature = "cuda", feature = "server", feature = "client")),
    allow(dead_code, unused_imports, unreachable_pub)
)]

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("fanout needs a 64-bit little-endian target: the wire and the quantised formats are defined as such");

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod fallback;
pub mod gguf;
pub mod graph;
#[doc(hidden)] // of rpc-server
pub mod io_hint;
#[doc(hidden)] // of rpc-server
pub mod log_level;
pub mod ops;
mod poison;
#[doc(hidden)] // of rpc-server
pub mod printable;
#[cfg(feature = "client")]
pub mod recovery;
pub mod registry;
#[cfg(any(feature = "server", feature = "client"))]
pub mod rpc;
pub mod sched;
pub mod self_test;
mod setters;
mod size;
mod sync;
pub mod tensor;
pub mod weights;

/// This build: the crate's version and, in a checkout, the revision.
pub const VERSION: &str = env!("FANOUT_VERSION");

/// The README's program is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

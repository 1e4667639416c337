//! fanout: a tensor backend that pools devices, local and remote, behind one interface.
//!
//! It is two things: this crate, which a Rust LLM runtime links (tensors, compute graphs, devices), and the binary
//! `rpc-server`, which exposes a host's devices on one endpoint to every llama.cpp client, over ggml's RPC protocol.
//!
//! # Vocabulary
//! | ggml | here | meaning |
//! |---|---|---|
//! | device | [`device::Device`] | one CPU, one GPU, or one device behind an endpoint |
//! | buffer | [`device::Buffer`], [`device::Region`] | memory that a device owns; handles, never pointers |
//! | backend, stream | [`device::Queue`] | in-order asynchronous work on one device |
//! | event | [`device::Point`] | a moment on a queue; other queues and the host can wait for it |
//! | cgraph, tensor, op_params | [`graph::Graph`], [`graph::TensorId`], [`ops::Op`] | an arena; ops are an enum with typed, validated parameters |
//! | reg | [`registry`] | enumerates and names devices |
//! | graph plan | [`device::Program`] | a graph prepared once on a device and run many times |
//! | sched | [`sched`] | one graph over many devices: assign → split → place memory → plan → execute |
//!
//! # Features
//! All are on by default. Tensors, graphs, ops, the CPU device, the scheduler and the registry need none.
//!
//! | feature | what it adds |
//! |---|---|
//! | `cuda` | `cuda`: NVIDIA's GPUs, with their kernels as PTX in the library; the CUDA driver is looked for when the program runs |
//! | `server` | `rpc::server`: devices of this machine for clients over the network |
//! | `client` | `rpc::client`: devices of servers; `host:port` in the lists of [`registry`] |
//! | `cli` | what the program needs besides: command line, log, signals. `rpc-server` is built with `server`, `client` and `cli` |
//!
//! Structs of options are `#[non_exhaustive]`: start from `Default`, and change fields by the setters `with_FIELD`.
//!
//! # Layers
//! A line uses lines below it, never above; `tests/layout/rooms.rs` lists what each module may use, and `tests/layout` holds it.
//! ```text
//! bin/rpc-server      examples/generate
//!                     registry
//! rpc::server         rpc::client         sched
//! rpc::connection                         cpu, cuda, fallback
//! rpc::wire           rpc::transport      device
//!                                         graph
//! gguf                                    ops
//!                                         tensor
//! ```
//! `rpc::server` and `sched` hold devices as `dyn Device` and name none. `rpc::wire` builds messages of `tensor` and `ops` alone,
//! `rpc::transport` moves bytes and knows no message, and `rpc::connection` puts both together for either end.
//!
//! The scheduler knows devices only by their contract: see [`sched`] for running one graph over several of them, and the
//! example below for one device by itself.
//!
//! [`gguf`] reads model files for whoever has weights to bring: a server from its own disk, the example from the user's.
//!
//! The CPU and the CUDA device do not know each other: [`fallback`] runs on a second device what the first one cannot.
//!
//! # Safety
//! Outside bytes become typed values at one door each: frames and messages in `rpc::wire`, graphs in
//! [`graph::validate`], model files in [`gguf`]. After it, kernels trust types, shapes, strides, extents and overlaps; what is data (row
//! indices) they check as they read it. `unsafe` is denied crate-wide and allowed in `device/{mapped,host}`, in
//! `cpu/{memory,pool,simd}` and in `cuda/{driver,memory,events,copy,capture,kernel}` only, where each block argues why it holds.
//! CUDA kernels are tested on an emulated GPU that checks every access they make.
//!
//! # How to add a type or an op
//! CONTRIBUTING.md lists the files; a type is a row of `tensor/table.rs`, a family of ops a row in `ops/mod.rs`, and
//! `tests/layout` checks that rows and files agree.
//!
//! # Example
//! ```
//! use fanout::cpu::{CpuDevice, Path};
//! use fanout::device::{Account, Device, Source};
//! use fanout::graph::Builder;
//! use fanout::ops::binary::Binary;
//! use fanout::tensor::DType;
//! use std::sync::Arc;
//!
//! // z = x * y, element by element.
//! let mut b = Builder::new();
//! let (x, y) = (b.leaf(DType::F32, [4, 1, 1, 1])?, b.leaf(DType::F32, [4, 1, 1, 1])?);
//! let z = b.node(Binary::Mul, &[Some(x), Some(y)])?;
//! let graph = Arc::new(b.build()?);
//!
//! let cpu = CpuDevice::new("CPU", 2, Path::Fast, 1 << 20)?;
//! let account = Account::new(1 << 20);
//! let program = cpu.prepare(Arc::clone(&graph))?;
//! let memory = cpu.alloc(graph.slot_sizes()[0] as u64, &account)?;
//! let region = |id| {
//!     let tensor = graph.tensor(id).expect("a tensor of this graph");
//!     let place = tensor.place.expect("the builder places every tensor");
//!     memory.region(place.offset as u64, tensor.desc.extent() as u64)
//! };
//!
//! let mut queue = cpu.queue(&account)?;
//! let bytes = |v: [f32; 4]| v.map(f32::to_le_bytes).concat();
//! queue.upload(region(x)?, None, Source::Borrowed(&bytes([1.0, 2.0, 3.0, 4.0])))?;
//! queue.upload(region(y)?, None, Source::Borrowed(&bytes([10.0; 4])))?;
//! queue.run(&program, &Arc::from([memory.whole()]))?;
//! let result = queue.download(region(z)?)?.wait(None)?;
//! assert_eq!(result, bytes([10.0, 20.0, 30.0, 40.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// What only one feature uses is without a user in a build without it. Builds with all features, which CI lints, report the rest.
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
pub mod ops;
pub mod registry;
#[cfg(any(feature = "server", feature = "client"))]
pub mod rpc;
pub mod sched;
mod setters;
pub mod tensor;

/// This build: the crate's version and, in a checkout, the revision.
pub const VERSION: &str = env!("FANOUT_VERSION");

/// The README's program is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

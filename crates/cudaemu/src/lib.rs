//! An emulated GPU: the CUDA driver API on the CPU.
//!
//! Built as a shared library it answers as `libcuda.so`; programs that use the driver (through cudarc, for one) run
//! unmodified on as many emulated devices as asked for, and every kernel they launch is executed from its PTX, a warp
//! at a time, with every access checked.
//!
//! # Layers, from the text to the machine
//!
//! | module | what it holds | may use |
//! |---|---|---|
//! | [`ptx`] | text → syntax tree, with line numbers | nothing |
//! | [`numeric`] | the arithmetic of PTX on scalars | nothing |
//! | [`mem`] | allocations, device addresses, which bytes were ever written | `fault` |
//! | [`exec`] | registers, warps, blocks, grids; the checked access to each memory | `code`, `mem`, `fault` |
//! | [`isa`] | one file per instruction family: rows of the instruction table and what they do | `exec`, `numeric` |
//! | [`code`] | syntax tree + instruction table → bytecode | `ptx`, `isa` |
//! | [`engine`] | streams, events, graphs: the order in which work runs, and its simulated time | `exec`, `mem`, handles and errors of `driver` |
//! | [`driver`] | the C functions of the driver API | all |
//!
//! `unsafe` stands in `mem::backing`, `mem::host`, `driver::abi` and the vector variants of `isa`, each block with its
//! argument.

pub mod code;
pub mod driver;
pub mod engine;
pub mod exec;
pub mod fault;
pub mod isa;
pub mod mem;
pub mod numeric;
pub mod ptx;

pub use driver::abi::load as test;

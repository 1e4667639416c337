//! Emulated GPU: the CUDA driver API on the CPU, for tests without a GPU.
//!
//! Built as a shared library it takes the place of `libcuda.so`. Programs that use only what the manual (README.md) lists, for
//! example through cudarc, run unmodified on any number of emulated devices. The emulator interprets the PTX of every kernel
//! they launch, a warp at a time, and checks every memory access.
//!
//! # Layers
//!
//! From bottom to top. A module uses only the modules in the last column of its row, all of which are above it in the table, so
//! there are no cycles; `tests/layout` reads this table and checks the sources against it. A module's unit tests may use every
//! layer below it.
//!
//! | module | content | may use |
//! |---|---|---|
//! | [`ptx`] | parser: text → syntax tree, with line numbers | |
//! | [`numeric`] | the arithmetic of PTX on scalars | |
//! | [`fault`] | faults that the checker reports, and their locations | |
//! | [`error`] | the driver's error codes | |
//! | [`handle`] | the driver's handles, and tables from handles to objects | `error` |
//! | [`config`] | the settings, and the limits of each compute capability | `error` |
//! | [`mem`] | allocations, device addresses, written bits of each byte | `fault` |
//! | [`operands`] | register slots, and an instruction's operands bound to them | |
//! | [`exec_context`] | execution context of an instruction: registers, checked access to each memory, traffic counts | `fault`, `mem`, `operands` |
//! | [`bytecode`] | a decoded module: functions and instructions | `fault`, `operands`, `exec_context` |
//! | [`isa`] | instruction table, one file per instruction family: opcodes, operand kinds and handlers | `numeric`, `fault`, `operands`, `exec_context`, `bytecode` |
//! | [`decode`] | syntax tree + instruction table → bytecode | `ptx`, `operands`, `bytecode`, `isa` |
//! | [`exec`] | the executor: warps, blocks, grids | `fault`, `mem`, `operands`, `exec_context`, `bytecode` |
//! | [`console`] | log messages of the emulator | |
//! | [`counts`] | counts of calls and kernels, as table and JSON; calls that are to fail | `config`, `exec_context`, `isa`, `exec` |
//! | [`engine`] | streams, events, graphs: the order in which work runs, and its simulated time | `fault`, `error`, `handle`, `config`, `mem`, `exec`, `console`, `counts` |
//! | [`driver`] | semantics of the driver API: contexts, modules, memory, launches | `ptx`, `error`, `handle`, `config`, `mem`, `bytecode`, `decode`, `exec`, `console`, `counts`, `engine` |
//! | [`abi`] | the exported C functions of the driver API | `error`, `handle`, `config`, `mem`, `bytecode`, `console`, `counts`, `engine`, `driver` |
//! | [`test`](mod@test) | for tests of other programs: loads the shared library, gives one test at a time a fresh driver | |
//!
//! To follow a kernel launch, start with `abi/launch.rs`, then `driver/launch.rs`, `engine/stream.rs` and `exec/launch.rs`.
//!
//! `unsafe` is allowed in `mem::backing`, `mem::host_pointer`, `abi`, `test` and `isa::vector`, each block with its safety
//! argument.

pub mod abi;
pub mod bytecode;
pub mod config;
pub mod console;
pub mod counts;
pub mod decode;
pub mod driver;
pub mod engine;
pub mod error;
pub mod exec;
pub mod exec_context;
pub mod fault;
pub mod handle;
pub mod isa;
pub mod mem;
pub mod numeric;
pub mod operands;
pub mod ptx;
pub mod test;

//! An emulated GPU: the CUDA driver API on the CPU.
//!
//! Built as a shared library it answers as `libcuda.so`; programs that use the driver (through cudarc, for one) run
//! unmodified on as many emulated devices as asked for, and every kernel they launch is executed from its PTX, a warp
//! at a time, with every access checked.
//!
//! # Layers
//!
//! From the bottom to the top. A module uses only the modules that its row names, all of which stand above it in the table, so
//! there are no cycles; `tests/layout` reads this table and checks the sources against it. A module's unit tests may use
//! every layer below it.
//!
//! | module | what it holds | may use |
//! |---|---|---|
//! | [`ptx`] | text → syntax tree, with line numbers | |
//! | [`numeric`] | the arithmetic of PTX on scalars | |
//! | [`fault`] | what the checker finds, and where | |
//! | [`error`] | the driver's error codes | |
//! | [`handle`] | the driver's handles, and tables of what they stand for | `error` |
//! | [`config`] | the settings, and the limits of each compute capability | `error` |
//! | [`mem`] | allocations, device addresses, which bytes were ever written | `fault` |
//! | [`operands`] | register slots, and an instruction's operands bound to them | |
//! | [`exec_context`] | what an instruction sees: registers, the checked access to each memory, traffic counts | `fault`, `mem`, `operands` |
//! | [`bytecode`] | a decoded module: functions and instructions | `fault`, `operands`, `exec_context` |
//! | [`isa`] | one file per instruction family: rows of the instruction table and what they do | `numeric`, `fault`, `operands`, `exec_context`, `bytecode` |
//! | [`decode`] | syntax tree + instruction table → bytecode | `ptx`, `operands`, `bytecode`, `isa` |
//! | [`exec`] | the executor: warps, blocks, grids | `fault`, `mem`, `operands`, `exec_context`, `bytecode` |
//! | [`console`] | what the emulator and its kernels print | `exec` |
//! | [`counts`] | counts of calls and kernels, as table and JSON | `exec_context`, `isa`, `exec` |
//! | [`engine`] | streams, events, graphs: the order in which work runs, and its simulated time | `fault`, `error`, `handle`, `config`, `mem`, `exec`, `console`, `counts` |
//! | [`driver`] | contexts, modules, memory, launches: what the functions of the driver API mean | `ptx`, `fault`, `error`, `handle`, `config`, `mem`, `bytecode`, `decode`, `exec`, `console`, `counts`, `engine` |
//! | [`abi`] | the C functions of the driver API | `error`, `handle`, `config`, `mem`, `bytecode`, `console`, `counts`, `engine`, `driver` |
//! | [`test`](mod@test) | for tests of other programs: loads the shared library, gives one test at a time a fresh driver | |
//!
//! `unsafe` stands in `mem::backing`, `mem::host`, `mem::program`, `abi`, `test` and `isa::vector`, each block with its argument.

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

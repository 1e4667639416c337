//! Shared code of fanout's benchmarks: the timed cases and their inputs. `ops/` benchmarks the CPU device, `kernel-bench.rs`
//! checks and benchmarks the CUDA device.

pub mod cases;

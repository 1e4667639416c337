//! Shared code of fanout's benchmarks: the timed cases with their inputs, and measured times. `ops/` benchmarks the CPU device,
//! `kernel-bench.rs` checks and benchmarks the kernels of the CUDA device, `gpu-probes.rs` measures what else only a GPU can
//! tell, `roofline-counts.rs` counts the work of the kernels on the emulated GPU.

pub mod cases;
pub mod timing;

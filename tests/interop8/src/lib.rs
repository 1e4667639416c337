//! Safe wrappers over the parts of llama.cpp 8.0.1 that the programs of this crate need: devices, models, contexts.

mod args;
mod context;
mod devices;
mod error;
mod fit;
mod log;
mod model;

pub use args::Args;
pub use context::{Context, ContextOptions};
pub use devices::{Device, cpu_device, rpc_devices, run_rpc_server};
pub use error::Error;
pub use log::init_log;
pub use model::{Model, Placement, SplitMode, quantise};

//! Planner: predicts how fast a language model runs on a set of devices, and chooses the devices, the layers of each, and the
//! tensor groups. It is pure arithmetic: the caller measures speeds and links ([`Machine`]), reads the sizes of the model
//! ([`ModelSizes`]), and says what it will run ([`Workload`]).
//!
//! | file | content |
//! |---|---|
//! | `machine` | devices, links between hosts, the time of a copy and of an all-reduce |
//! | `workload` | sizes of the model, sequences and tokens |
//! | `cost` | [`predict`]: rates, load time and memory of one placement |
//! | `candidates` | [`choose`]: the placements that are compared; [`choose_admitted`]: also asks the caller whether a placement fits |
//!
//! # The model of costs
//! *Device.* A product of one column reads its weights, so it takes `bytes / read_rate`; one of 8 or more computes, so it takes
//! `multiply-adds / rate`, with rates of 8 and of 64 columns, and at least the time of reading. Between 1 and 8 columns, each adds as
//! much as the next. Attention reads the KV cache at a rate of its own. Each node adds a fixed time (launch or barrier), each run of a
//! program another one (submission).
//!
//! *Pipeline.* A stage is a device or a tensor group with consecutive blocks. One step takes a group of sequences through all
//! stages and back to the client. One group alone keeps one stage busy at a time. `g` groups take turns, so a round of all groups
//! takes the longest of: the latency of one step; `g` times the slowest stage; `g` times the slowest copy between stages.
//!
//! *Shared cores.* Devices of the same cores that work at the same time, as ranks of a group or as stages with several batches in flight,
//! keep only a measured part of their rates.
//!
//! *Tensor group.* Every rank reads its share of the weights at the same time, and takes part in two all-reduces per block.
//!
//! # Example
//! ```
//! use fanout::sched::planner::{BlockSizes, DeviceSpeed, Host, Link, Machine, ModelSizes, Workload, choose};
//!
//! let device = |host, read_rate| DeviceSpeed {
//!     name: format!("{host:?}"),
//!     host,
//!     read_rate,
//!     few_columns_rate: 5e11,
//!     many_columns_rate: 1e12,
//!     kv_read_rate: read_rate,
//!     node_time: 5e-6,
//!     run_time: 20e-6,
//!     cores: None,
//!     together: 1.0,
//!     free: 16 << 30,
//!     collectives: true,
//! };
//! let devices = vec![device(Host::Client, 20e9), device(Host::Server(0), 100e9)];
//! let lan = Link { round_trip: 1e-3, bandwidth: 118e6 };
//! let machine = Machine::new(devices, vec![lan], vec![vec![None]], Link { round_trip: 10e-6, bandwidth: 10e9 })?;
//! let block = BlockSizes { weight_bytes: 120 << 20, multiply_adds: 2e8, kv_bytes: 4096, nodes: 20, ..BlockSizes::default() };
//! let model = ModelSizes {
//!     blocks: vec![block; 32],
//!     embedding_bytes: 300 << 20,
//!     output_bytes: 300 << 20,
//!     width: 4096,
//!     heads: 32,
//!     kv_heads: 8,
//!     vocabulary: 128_000,
//!     ..ModelSizes::default()
//! };
//! let choice = choose(&machine, &model, &Workload::default())?;
//! assert_eq!(choice.best.stages[0].devices, [1], "one sequence runs fastest on the fast device alone");
//! # Ok::<(), fanout::sched::planner::PlannerError>(())
//! ```

mod candidates;
#[cfg(test)]
mod choice_tests;
mod cost;
#[cfg(test)]
mod fan_out_table;
mod machine;
#[cfg(test)]
mod simulator;
#[cfg(test)]
mod tests;
mod workload;

pub use candidates::{Admission, Candidate, Choice, MAX_CHECKS, MIN_GAIN, Reason, choose, choose_admitted};
pub use cost::{Prediction, predict};
pub use machine::{DeviceSpeed, FEW_COLUMNS, Host, Link, MANY_COLUMNS, Machine, PeerLink};
pub use workload::{BlockSizes, Goal, ModelSizes, Workload};

use crate::size::Bytes;
use std::ops::Range;
use thiserror::Error;

/// The most devices among which [`choose`] chooses: the number of placements that it compares grows with the fourth power.
pub const MAX_DEVICES: usize = 16;

/// A stage of the pipeline: a device, or a tensor group, with consecutive blocks of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Indices of the devices: one, or the ranks of a tensor group in order.
    pub devices: Vec<usize>,
    /// By rank: its share of each block. The shares of a stage have the sum 1.
    pub shares: Vec<f64>,
    /// The blocks. The first stage also has the embedding, the last one the output.
    pub blocks: Range<usize>,
}

/// A plan is impossible, or its input is no machine.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum PlannerError {
    /// No devices, or more than [`MAX_DEVICES`].
    #[error(
        "a plan needs 1 to {MAX_DEVICES} devices, got {0}: give at least one, and leave out the slowest of too many"
    )]
    Devices(usize),
    /// A rate that is not positive, a part outside of 0 to 1, a time that is negative, or a number that is not finite.
    #[error(
        "{what} of {of} is {value}, but a rate must be above 0, a part from 0 to 1, a time at least 0, and all finite: measure again, \
         or leave it out"
    )]
    Value {
        /// The device or link.
        of: String,
        /// The field.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A device of a server for which there is no link.
    #[error(
        "{device} belongs to server {server} (counted from 0), but links to {servers} servers are given: add the link to its server"
    )]
    UnknownServer {
        /// The device.
        device: String,
        /// Index of its server.
        server: usize,
        /// Number of servers.
        servers: usize,
    },
    /// The table of links between servers is not square.
    #[error(
        "the table of the links between {servers} servers has another size: give a row and a column for each server, with None where \
         bytes go through the client"
    )]
    Peers {
        /// Number of servers.
        servers: usize,
    },
    /// A model without blocks or heads.
    #[error(
        "the model has no blocks, no heads or no width: set these fields of ModelSizes, as the model's file has them"
    )]
    Model,
    /// No tokens, no sequences, or no micro-batches.
    #[error(
        "the workload is empty: set its sequences, groups, tokens of a prompt, tokens of a micro-batch and micro-batches in flight to \
         at least 1"
    )]
    Workload,
    /// No placement fits into the memory.
    #[error(
        "the model does not fit: on one device it needs {} for weights, KV cache and results of a micro-batch, and the devices have {} \
         free in all: add devices or free memory on them, or use a shorter context, fewer sequences or a smaller micro-batch",
        Bytes(*needed),
        Bytes(*free)
    )]
    NothingFits {
        /// Bytes of weights, KV cache and results on a device that has all of them.
        needed: u64,
        /// Sum of the devices' free memory in bytes.
        free: u64,
    },
    /// The check of [`choose_admitted`] refused every placement that was tried.
    #[error(
        "no placement can run: {checked} were predicted to fit, and all were refused by a closer check: add devices or free memory on \
         them, or use a shorter context, fewer sequences or a smaller micro-batch"
    )]
    NothingAdmitted {
        /// Number of placements that were checked.
        checked: usize,
    },
}

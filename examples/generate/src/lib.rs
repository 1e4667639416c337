//! A small runtime for language models in GGUF files, on fanout's public interface alone: how linking it looks.
//!
//! [`fanout::gguf`] reads a file, [`hyper`] its hyperparameters, [`tokenizer`] makes its tokenizer; [`sample`] chooses tokens;
//! [`args`], [`progress`], [`report`] and [`summary`] face the user.
//!
//! [`model`] builds graphs, [`placement`] spreads blocks over devices, [`load`] brings the weights there or has them found there ([`recall`]), [`engine`] runs batches
//! through fanout's scheduler, [`session`] is all of that over servers that may be lost, with [`recover`], and [`run`] goes from the
//! command line to text. [`meter`], [`links`] and [`compare`] look on.

pub mod args;
pub mod compare;
pub mod engine;
pub mod hparams;
pub mod link_traffic;
pub mod load;
pub mod load_by_digest;
pub mod model;
pub mod placement;
pub mod progress;
pub mod recover;
pub mod report;
pub mod run;
pub mod sample;
pub mod session;
pub mod summary;
pub mod timed_device;
pub mod tokenizer;

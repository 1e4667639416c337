//! A small GGUF language model runtime that uses only fanout's public API: an example of how to link the library.
//!
//! Open [`run`] first: it encodes the prompt, generates tokens and writes the report. The remaining modules:
//!
//! - Input: [`args`] is the command line, [`hub`] downloads a model, [`text_file`] reads the text files that it names, [`hparams`] reads hyperparameters from the
//!   metadata that [`fanout::gguf`] parses, and [`tokenizer`] builds the file's tokenizer. [`chat`] renders a conversation by the file's template.
//! - Weights: [`fused`] cuts matrices that a file has fused, [`tensor_names`] lists the tensors of each architecture. [`placement`] assigns transformer blocks to devices, [`placed_model`] by the options of a run. [`load`] allocates
//!   tensors, and loads weights by [`fanout::weights`].
//! - Inference: [`model`] builds graphs, [`engine`] submits batches to fanout's scheduler, [`sample`] picks the next token.
//!   [`parallel`] replies to many prompts at once.
//! - Planning: [`plan`] measures devices and links, and lets fanout's planner choose the placement (`--plan`, `--auto`).
//! - Servers: [`servers`] finds their addresses by names and in folders.
//! - Fault tolerance: [`session`] owns the devices and repeats lost work, [`token_history`] has the tokens to repeat; [`recover`]
//!   classifies errors and limits retries.
//! - Measurement: [`timed_device`], [`link_traffic`], [`perplexity`], and [`compare`] (node by node against a reference device).
//! - Output: [`models`] lists architectures and models that were tried; [`console`] keeps text and messages apart; [`stop_texts`] and [`interrupt`] end a reply; [`progress`], [`report`] and [`summary`].

pub mod args;
pub mod chat;
pub mod compare;
pub mod console;
pub mod engine;
pub mod fused;
pub mod hparams;
pub mod hub;
pub mod interrupt;
pub mod link_traffic;
pub mod load;
pub mod model;
pub mod models;
pub mod parallel;
pub mod perplexity;
pub mod placed_model;
pub mod placement;
pub mod plan;
pub mod progress;
pub mod recover;
pub mod report;
pub mod run;
pub mod sample;
pub mod servers;
pub mod session;
pub mod stop_texts;
pub mod summary;
pub mod tensor_names;
pub mod text_file;
pub mod timed_device;
pub mod token_history;
pub mod tokenizer;

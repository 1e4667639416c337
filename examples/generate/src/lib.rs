//! A small runtime for language models in GGUF files, on fanout's public interface alone: how linking it looks.
//!
//! [`gguf`] reads a file, [`hyper`] its hyperparameters, [`tokenizer`] makes its tokenizer; [`sample`] chooses tokens;
//! [`args`], [`progress`], [`report`] and [`summary`] face the user.

pub mod args;
pub mod gguf;
pub mod hyper;
pub mod progress;
pub mod report;
pub mod sample;
pub mod summary;
pub mod tokenizer;

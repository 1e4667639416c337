//! A small language model runtime on fanout.

mod gguf;
mod hyper;

fn main() {}

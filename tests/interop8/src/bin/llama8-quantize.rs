//! Quantises an f16 model with llama.cpp's quantiser.

use std::path::Path;
use std::process::ExitCode;

use interop8::{Args, Error, init_log, quantise};

const USAGE: &str = "\
Usage: llama8-quantize --type q4_k_m --from F16.gguf --to OUT.gguf

Quantises a model with llama.cpp's quantiser, in the types that the Python package gguf cannot write.
";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("llama8-quantize: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let args = Args::from_env(USAGE, &["--type", "--from", "--to"], &[]);
    init_log(false);
    quantise(Path::new(args.required("--from")?), Path::new(args.required("--to")?), args.required("--type")?)
}

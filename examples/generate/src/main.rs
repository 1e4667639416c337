//! Generates text with a GGUF language model over any set of devices.

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use fanout::device::MappedFile;
use generate::args::Args;
use generate::gguf::Gguf;
use generate::hyper::Hyper;
use generate::summary::Summary;
use generate::tokenizer::Tokenizer;
use log::LevelFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    start_log(&args);
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // The whole chain of causes in one line.
            eprintln!("generate: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn start_log(args: &Args) {
    let level = if args.verbose { Some(LevelFilter::Debug) } else { args.log_level };
    let mut log = match level {
        // What is asked for by name beats what the environment happens to hold.
        Some(level) => {
            let mut log = env_logger::Builder::new();
            log.filter_level(level);
            log
        }
        None => env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")),
    };
    log.format_target(false).init();
}

fn run(args: &Args) -> anyhow::Result<()> {
    let path = args.model.display().to_string();
    let file = MappedFile::open(&args.model).with_context(|| path.clone())?;
    let gguf = Gguf::parse(file.bytes()).with_context(|| path.clone())?;
    let hyper = Hyper::read(&gguf.metadata).with_context(|| path.clone())?;
    print!("{}", Summary { gguf: &gguf, hyper: &hyper });
    if !args.info {
        let prompt = prompt(args, &gguf, &hyper).with_context(|| path.clone())?;
        println!("prompt: {prompt:?}");
    }
    Ok(())
}

/// The tokens to continue.
fn prompt(args: &Args, gguf: &Gguf<'_>, hyper: &Hyper) -> anyhow::Result<Vec<u32>> {
    let tokens = match (&args.tokens, &args.prompt) {
        (Some(tokens), _) => tokens.clone(),
        (None, prompt) => Tokenizer::read(&gguf.metadata)?.encode(prompt.as_deref().unwrap_or_default())?,
    };
    Ok(args.checked(tokens, hyper.vocab)?)
}

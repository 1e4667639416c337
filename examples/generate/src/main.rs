//! Generates text with a GGUF language model over any set of devices.

use std::io;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use fanout::device::MappedFile;
use fanout::gguf::Gguf;
use generate::args::Args;
use generate::hparams::HParams;
use generate::summary::Summary;
use log::LevelFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    start_log(&args);
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("generate: {}", in_one_line(&e));
            ExitCode::FAILURE
        }
    }
}

/// Joins an error and its causes with `: `. A cause is skipped if the text so far already contains it.
fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match &*text {
        "" => cause,
        before if before.contains(&cause) => text,
        before => format!("{before}: {cause}"),
    })
}

fn start_log(args: &Args) {
    let level = if args.verbose { Some(LevelFilter::Debug) } else { args.log_level };
    let mut log = match level {
        // An explicit --log-level or --verbose overrides RUST_LOG.
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
    let hparams = HParams::read(&gguf.metadata).with_context(|| path.clone())?;
    if args.info {
        print!("{}", Summary { gguf: &gguf, hparams: &hparams });
        return Ok(());
    }
    generate::run::run_program(args, &file, &gguf, &hparams, &mut io::stdout())
}

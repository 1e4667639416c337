//! Generates text with a GGUF language model over any set of devices.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use env_logger::{Target, WriteStyle};
use fanout::device::MappedFile;
use fanout::gguf::Gguf;
use generate::args::Args;
use generate::console::{self, MessageWriter, TextWriter};
use generate::hparams::HParams;
use generate::summary::Summary;
use log::LevelFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    start_log(&args);
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            console::message(in_one_line(&e));
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
    // A pipe, because messages share a terminal with text and with progress bars. It has no colours of its own.
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    log.format_target(false)
        .write_style(if colour { WriteStyle::Always } else { WriteStyle::Never })
        .target(Target::Pipe(Box::new(MessageWriter)))
        .init();
}

fn run(args: &Args) -> anyhow::Result<()> {
    let path = args.model.display().to_string();
    let file = MappedFile::open(&args.model).with_context(|| path.clone())?;
    let gguf = Gguf::parse(file.bytes()).with_context(|| path.clone())?;
    let hparams = HParams::read(&gguf.metadata).with_context(|| path.clone())?;
    if args.info {
        return Ok(write!(TextWriter, "{}", Summary { gguf: &gguf, hparams: &hparams })?);
    }
    generate::run::run_program(args, &file, &gguf, &hparams, &mut io::stdin().lock(), &mut TextWriter)
}

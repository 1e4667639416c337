//! Generates text with a GGUF language model over any set of devices.

mod manual;

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use env_logger::{Target, WriteStyle};
use fanout::printable::printable_line;
use fanout::registry::RegistryError;
use fanout::weights::ModelFile;
use generate::args::{Args, ArgsError};
use generate::console::{self, MessageWriter, TextWriter};
use generate::fused::split_fused;
use generate::hparams::HParams;
use generate::interrupt::Interrupt;
use generate::models::ModelTable;
use generate::summary::Summary;
use generate::tensor_names;
use log::LevelFilter;

fn main() -> ExitCode {
    let matches = manual::command().get_matches_from(known_spelling(env::args_os()));
    let done = match matches.get_one::<PathBuf>(manual::OPTION) {
        Some(folder) => manual::write(folder),
        None if matches.subcommand_name() == Some(manual::MODELS) => {
            write!(TextWriter, "{ModelTable}").map_err(anyhow::Error::from)
        }
        None => {
            let args = Args::from_arg_matches(&matches).unwrap_or_else(|e| e.format(&mut manual::command()).exit());
            start_log(&args);
            run(&args)
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // As the parser reports it, with exit status 2.
        Err(e) if is_wrong_argument(&e) => {
            Args::command().error(ErrorKind::InvalidValue, printable_line(&in_one_line(&e))).exit()
        }
        Err(e) => {
            console::message(in_one_line(&e));
            ExitCode::FAILURE
        }
    }
}

/// llama.cpp's spelling of an option with one hyphen and several letters, which this program's parser does not have.
fn known_spelling(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    args.map(|arg| match arg.to_str() {
        Some("-ngl") => "--gpu-layers".into(),
        Some("-hf") => "--hf-repo".into(),
        _ => arg,
    })
}

/// Whether an argument is wrong, which only the model or the list of devices has shown.
fn is_wrong_argument(error: &anyhow::Error) -> bool {
    let is_wrong_list = |e: &RegistryError| {
        matches!(
            e,
            RegistryError::UnknownDevice { .. }
                | RegistryError::MemorySizeCount { .. }
                | RegistryError::MemoryOfServers
                | RegistryError::BeyondMachine { .. }
        )
    };
    error.is::<ArgsError>() || error.downcast_ref().is_some_and(is_wrong_list)
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
    // The format of env_logger without the target. A record is one line without control characters, so that no text of a file or a
    // server forges another one.
    log.format(|out, record| {
        let (time, level, text) = (out.timestamp_seconds(), record.level(), printable_line(&record.args().to_string()));
        let style = out.default_level_style(level);
        writeln!(out, "[{time} {style}{level:<5}{style:#}] {text}")
    });
    log.write_style(if colour { WriteStyle::Always } else { WriteStyle::Never })
        .target(Target::Pipe(Box::new(MessageWriter)))
        .init();
}

fn run(args: &Args) -> anyhow::Result<()> {
    let mut args = args.clone();
    if let Some(model) = &args.hf_repo {
        args.model_argument = Some(model.fetch()?);
    }
    let path = args.model().display().to_string();
    let file = ModelFile::open(args.model())?;
    let mut gguf = file.parse_gguf()?;
    let hparams = HParams::read(&gguf.metadata).with_context(|| path.clone())?;
    if args.info {
        return Ok(write!(TextWriter, "{}", Summary { gguf: &gguf, hparams: &hparams })?);
    }
    split_fused(&mut gguf, &hparams);
    tensor_names::check(&gguf, &hparams).with_context(|| path.clone())?;
    let args = &args.clone().with_sampling(&gguf.metadata);
    let interrupt = Interrupt::on_signal().context("the handler of Ctrl-C")?;
    generate::run::run_program(args, &file, &gguf, &hparams, (&mut io::stdin().lock(), &interrupt), &mut TextWriter)
}

//! The log of this process: its level, format and colors. `log_writer` writes its lines.

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use env_logger::fmt::Formatter;
use env_logger::{Target, WriteStyle};
use log::{LevelFilter, Record};

use super::log_writer;

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For users.
    Text,
    /// An object for each line: `time`, `level` and `message`.
    Json,
}

/// Starts the log. Without a level, the level of `RUST_LOG` holds.
pub(crate) fn start(level: Option<LevelFilter>, format: LogFormat) {
    let mut log = match level {
        // The option overrides RUST_LOG.
        Some(level) => {
            let mut log = env_logger::Builder::new();
            log.filter_level(level);
            log
        }
        None => env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")),
    };
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    log.target(Target::Pipe(Box::new(log_writer::writer())));
    // env_logger has no colors for a `Pipe` by default, as it cannot tell that this one ends at a terminal.
    let has_colors = std::env::var_os("TERM").is_some_and(|term| term != "dumb") && !is_set("NO_COLOR");
    if io::stderr().is_terminal() && has_colors && !is_set("RUST_LOG_STYLE") {
        log.write_style(WriteStyle::Always);
    }
    if format == LogFormat::Json {
        log.format(write_json);
    }
    log.format_target(false).init();
}

fn write_json(out: &mut Formatter, record: &Record<'_>) -> io::Result<()> {
    let line = serde_json::json!({
        "time": out.timestamp_millis().to_string(),
        "level": record.level().as_str().to_ascii_lowercase(),
        "message": record.args().to_string(),
    });
    writeln!(out, "{line}")
}

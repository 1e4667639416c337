//! `generate --manual`: writes the page of man and the completions of shells, generated from the options, as `rpc-server manual` does.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Arg, Command, CommandFactory, value_parser};
use clap_complete::aot::{Shell, generate_to};
use clap_mangen::roff::{Roff, roman};
use fanout::io_hint::io_hint;
use generate::args::{Args, EXAMPLES};

/// Name of the option with the folder.
pub(crate) const OPTION: &str = "manual";

/// Name of the command that lists models.
pub(crate) const MODELS: &str = "models";

/// The command line: [`Args`], and `--manual` and `models`, which need neither a model nor a prompt.
pub(crate) fn command() -> Command {
    let manual = Arg::new(OPTION).long(OPTION).value_name("DIR").value_parser(value_parser!(PathBuf)).exclusive(true);
    let help = "Write the page of man and the completions of bash, zsh and fish into this folder, and exit";
    let models = Command::new(MODELS).about("List the architectures, and models that were tried");
    let command = Args::command().arg(manual.help(help)).subcommand(models).disable_help_subcommand(true);
    command.subcommand_negates_reqs(true).args_conflicts_with_subcommands(true)
}

/// Writes the files into `folder`, which is created if need be.
pub(crate) fn write(folder: &Path) -> anyhow::Result<()> {
    write_files(folder).map_err(|e| anyhow!("cannot write to {}: {e}{}", folder.display(), io_hint(&e)))
}

fn write_files(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command().after_help(None::<&str>), folder)?;
    // As they stand: the page's text is filled, which would join the columns of the examples.
    let mut examples = Roff::new();
    examples.control("SH", ["EXAMPLES"]).control("nf", []).text([roman(EXAMPLES)]).control("fi", []);
    examples.to_writer(&mut File::options().append(true).open(folder.join("generate.1"))?)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command(), "generate", folder)?;
    }
    Ok(())
}

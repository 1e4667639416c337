//! `rpc-server manual`: writes the pages of man and the completions of shells, generated from the options. Every build of the
//! program can write the pages of its own version, so nothing generated is committed, and `cargo install` needs no other files.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::ExitCode;

use clap_complete::aot::{Shell, generate_to};
use clap_mangen::roff::{Roff, roman};
use fanout::io_hint::io_hint;

use super::help::AFTER_HELP;
use super::{command, fail, print_or_fail};

/// Shells with completions.
const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes the files into `folder`, which is created if need be, and prints how to use them.
pub(crate) fn run(folder: &Path) -> ExitCode {
    match write(folder) {
        Ok(()) => print_or_fail(&usage_of_files(folder), ExitCode::SUCCESS),
        Err(e) => fail(&format!("cannot write to {}: {e}{}", folder.display(), io_hint(&e))),
    }
}

fn usage_of_files(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "{folder}/rpc-server.1, also of the subcommands: read it with man {folder}/rpc-server.1, or copy it to /usr/local/share/man/man1\n\
         {folder}/rpc-server.bash: source it, or copy it to ~/.local/share/bash-completion/completions/rpc-server\n\
         {folder}/_rpc-server: for zsh, in a folder of $fpath\n\
         {folder}/rpc-server.fish: for fish, in ~/.config/fish/completions\n"
    )
}

/// Pages of man for the program and each subcommand, and a file for each shell.
fn write(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command().after_long_help(None::<&str>), folder)?;
    // Preformatted: the text of a page is filled, which would join the columns of the examples.
    let mut after_help = Roff::new();
    after_help
        .control("SH", ["EXIT STATUS AND EXAMPLES"])
        .control("nf", [])
        .text([roman(AFTER_HELP)])
        .control("fi", []);
    let mut page = File::options().append(true).open(folder.join("rpc-server.1"))?;
    after_help.to_writer(&mut page)?;
    for shell in SHELLS {
        generate_to(shell, &mut command(), "rpc-server", folder)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every option that `--help` shows is in the page of its command and in the completions of each shell; the internal ones
    /// are in no page.
    #[test]
    fn pages_and_completions_have_every_option() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path()).expect("files");
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect("a file of the table");
        let completions = ["rpc-server.bash", "_rpc-server", "rpc-server.fish"].map(read);
        let root = command();
        let commands = [("rpc-server.1", &root)].into_iter().map(|(page, command)| (page.to_owned(), command));
        let subcommands =
            root.get_subcommands().map(|command| (format!("rpc-server-{}.1", command.get_name()), command));
        let mut options = 0;
        for (page, command) in commands.chain(subcommands) {
            // Hyphens are escaped, so that man prints them as they are typed.
            let text = read(&page).replace(r"\-", "-");
            for argument in command.get_arguments() {
                let Some(name) = argument.get_long() else { continue };
                let shown = !argument.is_hide_set();
                assert_eq!(text.contains(&format!("--{name}")), shown, "--{name} in {page}");
                for completion in completions.iter().filter(|_| shown) {
                    // fish names an option without its hyphens.
                    let found = completion.contains(&format!("--{name}")) || completion.contains(&format!("-l {name}"));
                    assert!(found, "--{name} in\n{completion}");
                }
                options += 1;
            }
        }
        assert!(options > 30, "{options} options");
    }
}

//! docs/flags.md, made from the command line. `FANOUT_UPDATE_DOCS=1 cargo test --workspace --bin rpc-server flags_doc` writes it.

use std::fs;
use std::path::Path;

use super::{HEADINGS, command, limits};

const INTRODUCTION: &str = "# Flags of `rpc-server`

Made from the program's own help by `bin/flags_doc.rs`. `rpc-server --help` has the same flags, with exit statuses and examples;
`rpc-server manual DIR` writes pages of man. Subcommands have a `--help` of their own: `keygen` and `connect`
([SECURITY.md](../SECURITY.md)), `doctor` ([monitoring.md](monitoring.md#what-is-wrong-rpc-server-doctor)), `limits`, `manual`.
`FANOUT_UPDATE_DOCS=1 cargo test --bin rpc-server flags_doc` writes this page.

Sizes: bytes, or a number with K, M, G or T (powers of 1024). Seconds: a day at most.
";

/// A table cell.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// The default that the end of a help text or of its first paragraph names, and the text without it.
fn split_default(text: &str) -> (String, String) {
    let found = text.split_once(" [default: ").and_then(|(before, rest)| Some((before, rest.split_once(']')?)));
    match found {
        Some((before, (default, after))) => (default.to_owned(), format!("{before}{after}")),
        None => (String::new(), text.to_owned()),
    }
}

fn document() -> String {
    let command = command();
    let mut text = INTRODUCTION.to_owned();
    for (heading, ids) in HEADINGS {
        text += &format!("\n## {heading}\n\n| flag | default | meaning |\n|---|---|---|\n");
        for id in ids {
            let arg =
                command.get_arguments().find(|arg| arg.get_id() == id).unwrap_or_else(|| panic!("no option {id}"));
            let long = arg.get_long().expect("a long name");
            let value = arg.get_value_names().filter(|_| arg.get_action().takes_values());
            let value = value.map_or("", |names| names[0].as_str());
            let short = arg.get_short().map_or(String::new(), |short| format!("`-{short}`, "));
            let help = arg.get_long_help().or(arg.get_help()).expect("a help text").to_string();
            let (named, meaning) = split_default(&help);
            let defaults = arg.get_default_values().iter().filter(|_| arg.get_action().takes_values());
            let default: Vec<_> = defaults.map(|value| value.to_string_lossy()).collect();
            let default = if default.is_empty() { named } else { format!("`{}`", default.join(",")) };
            let flag = cell(&format!("--{long} {value}"));
            text += &format!("| {short}`{flag}` | {} | {} |\n", cell(&default), cell(&meaning));
        }
        if ids == ["limits_file"] {
            text += "\nA file has a line for each limit that is not the default, such as `max-connections = 64` or `max-memory = \"16G\"`:\n\n\
                     | limit | default | what it bounds | at the limit |\n|---|---|---|---|\n";
            for limit in limits::limits() {
                let (named, bounds) = split_default(&limit.bounds);
                let none = if named.is_empty() { "none".to_owned() } else { named };
                let default = limit.default.map_or(none, |default| format!("`{default}`"));
                let [default, bounds, at] = [&default, &bounds, &limit.at_the_limit].map(|text| cell(text));
                text += &format!("| `{}` | {default} | {bounds} | {at} |\n", limit.name);
            }
        }
    }
    text.replace("|  |", "| |")
}

#[test]
fn the_document_is_that_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/flags.md");
    let expected = document();
    if std::env::var_os("FANOUT_UPDATE_DOCS").is_some() {
        fs::write(&path, &expected).expect("a file");
    }
    let found = fs::read_to_string(&path).expect("a file");
    assert!(found == expected, "docs/flags.md differs from the help: FANOUT_UPDATE_DOCS=1 writes it");
}

/// Every option has a heading, and there are few enough to read.
#[test]
fn the_help_is_short() {
    let mut command = command();
    command.build();
    let shown = || command.get_arguments().filter(|arg| !arg.is_hide_set());
    for arg in shown() {
        let id = arg.get_id().as_str();
        assert!(arg.get_help_heading().is_some() || ["help", "version"].contains(&id), "{id} has no heading");
    }
    assert!(shown().count() <= 35, "{} options", shown().count());
    let short = command.render_help().to_string();
    assert!(short.lines().count() <= 40, "{short}");
}

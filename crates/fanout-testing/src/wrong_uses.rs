//! Wrong uses of a program, and what it prints. The tables of `docs/troubleshooting.md` have the twenty that people meet most,
//! `wrong_uses.txt` the others; tests run all rows.
//!
//! A row has a command, how the program is started if that matters, and its message:
//!
//! ```text
//! | `program --option value`, a situation | ``program: what is wrong; what to do`` | an explanation for users |
//! ```
//!
//! In the message, `…` stands for any text. A message that begins with `error: ` belongs to exit status 2, any other one to 1. It
//! must be all that the program prints, except for lines of the log and the usage that follows wrong arguments.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

/// Programs that run at a time.
const PARALLEL: usize = 4;

/// How a program is started, and the shell's command for it. `$@` is the program with its arguments, after a limit of its time:
/// a program that is not refused would run for ever.
const SITUATIONS: &[(&str, &str)] = &[
    ("", "exec \"$@\""),
    ("no driver", "exec \"$@\""),
    ("driver of CUDA 11.4", "exec \"$@\""),
    ("no visible GPU", "exec \"$@\""),
    // The limit of a file's size, since a test cannot fill a disk. Without the trap, the signal would end the program.
    ("`ulimit -f 0`", "trap '' XFSZ; ulimit -f 0; exec \"$@\""),
    ("`ulimit -n 8`", "ulimit -n 8; exec \"$@\""),
    ("`LISTEN_PID=x`", "LISTEN_PID=x LISTEN_FDS=1 exec \"$@\""),
    ("standard output on a full disk", "exec \"$@\" > /dev/full"),
    // Without capabilities, the modes of files hold for root, too.
    (
        "as another user",
        "if [ \"$(id -u)\" = 0 ]; then exec setpriv --bounding-set -all --inh-caps -all \"$@\"; else exec \"$@\"; fi",
    ),
];

/// A row of a table.
#[derive(Debug)]
pub struct WrongUse {
    /// The arguments of the program.
    pub args: Vec<String>,
    /// How the program is started.
    pub situation: String,
    /// Its message.
    message: String,
}

/// The rows of a document with commands of `program`.
///
/// # Panics
/// A row is malformed, or names a situation that this module does not know.
pub fn rows(document: &str, program: &str) -> Vec<WrongUse> {
    let mut rows = Vec::new();
    for line in document.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [command, message, _] = cells[..] else { panic!("a row has three cells: {line}") };
        let (command, rest) = command[1..].split_once('`').unwrap_or_else(|| panic!("a command in code: {line}"));
        let mut args: Vec<_> = command.split_whitespace().map(str::to_owned).collect();
        if args.remove(0) != program {
            continue;
        }
        let situation = rest.trim_start_matches([',', ' ']).to_owned();
        assert!(SITUATIONS.iter().any(|(name, _)| *name == situation), "unknown situation: {line}");
        // Two ticks around a message that has some itself.
        let message = match message.strip_prefix("``").and_then(|message| message.strip_suffix("``")) {
            Some(message) => message.trim(),
            None => message.trim_matches('`'),
        };
        rows.push(WrongUse { args, situation, message: message.replace("\\|", "|") });
    }
    rows
}

/// The files that the commands name, in a new folder at `folder`: `folder`, `text`, `locked` (that nobody can read), `readable`
/// (that all users can read).
///
/// # Panics
/// A file cannot be created.
pub fn create_files(folder: &Path) {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder.join("folder")).unwrap();
    for (name, mode) in [("text", 0o600), ("locked", 0o000), ("readable", 0o644)] {
        fs::write(folder.join(name), "a text\n").unwrap();
        fs::set_permissions(folder.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
}

/// Words of the commands, and the ports for them: servers that are no RPC servers, until the process ends.
///
/// # Panics
/// There is no free port.
pub fn other_servers() -> Vec<(&'static str, String)> {
    let http = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    let servers = [("HTTP_PORT", http), ("SSH_PORT", "SSH-2.0-OpenSSH_9.2\r\n"), ("CLOSING_PORT", "")];
    servers.map(|(word, reply)| (word, reply_to_all(reply).to_string())).into()
}

/// Replies the same to each connection, and closes it.
fn reply_to_all(reply: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // Read first: closing a socket with unread bytes resets the connection, which discards the reply.
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(reply.as_bytes());
        }
    });
    port
}

/// Runs every row in `folder`, and compares what it prints. `words` are replaced in commands and messages. `start` returns the
/// program without arguments for a situation.
///
/// # Panics
/// A program prints something else; the message has all differences.
pub fn check(rows: &[WrongUse], folder: &Path, words: &[(&str, String)], start: impl Fn(&str) -> Command + Sync) {
    let (next, differences) = (Mutex::new(rows.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while let Some(row) = { next.lock().unwrap().next() } {
                    if let Err(difference) = run(row, folder, words, start(&row.situation)) {
                        differences.lock().unwrap().push(difference);
                    }
                }
            });
        }
    });
    let differences = differences.into_inner().unwrap();
    assert!(differences.is_empty(), "{} of {} rows:\n{}", differences.len(), rows.len(), differences.join("\n"));
}

fn run(row: &WrongUse, folder: &Path, words: &[(&str, String)], program: Command) -> Result<(), String> {
    let replace = |text: &str| words.iter().fold(text.to_owned(), |text, (word, value)| text.replace(word, value));
    let (_, script) = SITUATIONS.iter().find(|(name, _)| *name == row.situation).unwrap();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, "sh", "timeout", "60"])
        .arg(program.get_program())
        .args(row.args.iter().map(|arg| replace(arg)));
    shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    for (name, _) in program.get_envs().filter(|(_, value)| value.is_none()) {
        shell.env_remove(name);
    }
    let Output { status, stdout, stderr } =
        shell.current_dir(folder).stdin(std::process::Stdio::null()).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    let message = replace(&row.message);
    let expected = if message.starts_with("error: ") { 2 } else { 1 };
    if status.code() == Some(expected) && stdout.is_empty() && matches(&message, &printed(&stderr)) {
        return Ok(());
    }
    let WrongUse { args, situation, .. } = row;
    Err(format!(
        "{args:?} {situation}: {status}, expected {expected}: {message}\n  stderr: {stderr}\n  stdout: {stdout}"
    ))
}

/// The message in what a program prints on standard error, on one line.
fn printed(stderr: &str) -> String {
    let lines: Vec<_> = stderr.lines().filter(|line| !line.starts_with('[')).map(str::trim).collect();
    // After wrong arguments, the usage follows an empty line.
    let end = if lines.first().is_some_and(|line| line.starts_with("error: ")) {
        lines.iter().position(|line| line.is_empty())
    } else {
        None
    };
    lines[..end.unwrap_or(lines.len())].join(" ")
}

/// Whether a text has the pieces of `pattern` between its `…`, in their order, and nothing else.
fn matches(pattern: &str, text: &str) -> bool {
    let mut pieces = pattern.split('…');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut pieces: Vec<_> = pieces.collect();
    let Some(last) = pieces.pop() else { return rest.is_empty() };
    for piece in pieces {
        match rest.split_once(piece) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// The tables: of the document for users, and of the rarer wrong uses.
///
/// # Panics
/// The document is missing.
pub fn document() -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting.md");
    let document = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    document + include_str!("wrong_uses.txt")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_match_as_a_whole() {
        for (pattern, text, expected) in [
            ("a b", "a b", true),
            ("a b", "a b c", false),
            ("a b", "x a b", false),
            ("a … c", "a b c", true),
            ("a … c", "a b c d", false),
            ("a…b…c", "a-c-b-c", true),
            ("a…b…c", "a-c-b", false),
            ("…", "anything", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern}: {text}");
        }
        assert_eq!(printed("[time WARN ] x\nprogram: a\nb\n"), "program: a b");
        assert_eq!(printed("error: needed:\n  --key <FILE>\n\nUsage: program\n"), "error: needed: --key <FILE>");
    }

    #[test]
    fn rows_are_those_of_the_program() {
        let document = "| you type | it prints |\n\
            | `one --a b`, no driver | ``one: `x` is …`` | text |\n\
            | `two` | `error: y` | text |\n";
        let found = rows(document, "one");
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0].args[..], &*found[0].situation), (&["--a".to_owned(), "b".to_owned()][..], "no driver"));
        assert_eq!(found[0].message, "one: `x` is …");
    }
}

//! The command line of a run with the chosen placement, quoted for a shell.

use crate::args::{Args, GroupShares, Split, WeightStorage};
use clap::{CommandFactory, ValueEnum};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// Options that a plan replaces: the long name, the short one, and whether a value follows.
const REPLACED: [(&str, Option<u8>, bool); 9] = [
    ("plan", None, false),
    ("auto", None, false),
    ("split", None, true),
    ("groups", None, true),
    ("weights", None, true),
    ("rpc", None, true),
    ("device", Some(b'd'), true),
    ("mem", None, true),
    ("threads", Some(b't'), true),
];

/// How many of [`REPLACED`] are replaced if the plan uses all devices as they are given.
const ALWAYS_REPLACED: usize = 5;

/// The words of this program's command line with the options of `args`; `kept`: whether all devices are used as given.
pub(super) fn command_line(words: impl Iterator<Item = OsString>, args: &Args, kept: bool) -> String {
    let words = with_value_of_retry(words, args.retry);
    let (mut left, positional) = without_replaced(words, if kept { &REPLACED[..ALWAYS_REPLACED] } else { &REPLACED });
    let mut add = |name: &str, value: Option<String>| {
        left.extend(value.into_iter().flat_map(|value| [name.into(), value.into()]));
    };
    if !kept {
        let sizes = args.mem.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        add("--device", args.device.clone());
        add("--mem", Some(sizes).filter(|sizes| !sizes.is_empty()));
        add("--threads", args.threads.map(|threads| threads.to_string()));
    }
    add("--split", args.split.as_ref().map(split_text));
    add("--groups", args.sequence_groups.map(|groups| groups.to_string()));
    add("--weights", args.weights.map(storage_text));
    left.iter().chain(&positional).map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// The words with the value of `--retry` in its own word: the value is optional, so that without the option after it, a bare `--retry`
/// would take the next word.
fn with_value_of_retry(words: impl Iterator<Item = OsString>, retry: Option<u32>) -> impl Iterator<Item = OsString> {
    let (mut words, mut is_option) = (words.peekable(), true);
    std::iter::from_fn(move || {
        let word = words.next()?;
        is_option &= word != "--";
        let Some(seconds) = retry.filter(|_| is_option && word == "--retry") else { return Some(word) };
        words.next_if(|next| !next.as_bytes().starts_with(b"-"));
        Some(format!("--retry={seconds}").into())
    })
}

/// The words without the options `replaced` and their values: those before `--`, and `--` with the words after it, which are no
/// options.
fn without_replaced(
    mut words: impl Iterator<Item = OsString>,
    replaced: &[(&str, Option<u8>, bool)],
) -> (Vec<OsString>, Vec<OsString>) {
    let flags = short_flags();
    // The name of the program.
    let mut left: Vec<OsString> = words.next().into_iter().collect();
    while let Some(word) = words.next() {
        if word == "--" {
            return (left, [word].into_iter().chain(words).collect());
        }
        let bytes = word.as_bytes();
        let value_follows = if let Some(long) = bytes.strip_prefix(b"--") {
            let mut parts = long.splitn(2, |&byte| byte == b'=');
            let name = parts.next().unwrap_or_default();
            let found = replaced.iter().find(|(long, ..)| long.as_bytes() == name);
            found.map(|(_, _, takes_value)| *takes_value && parts.next().is_none())
        } else {
            replaced_short(bytes, &flags, replaced).map(|at| {
                // `-vd CPU` is `-v -d CPU`: the flags stay.
                if at > 1 {
                    left.push(OsStr::from_bytes(&bytes[..at]).to_owned());
                }
                at + 1 == bytes.len()
            })
        };
        match value_follows {
            Some(true) => drop(words.next()),
            Some(false) => {}
            None => left.push(word),
        }
    }
    (left, Vec::new())
}

/// Where in a word of short options a replaced one is. An option that takes a value ends the word with it: `-vdCPU`.
fn replaced_short(word: &[u8], flags: &[u8], replaced: &[(&str, Option<u8>, bool)]) -> Option<usize> {
    let options = word.strip_prefix(b"-")?;
    let at = options.iter().position(|option| !flags.contains(option))?;
    replaced.iter().any(|(_, short, _)| *short == Some(options[at])).then_some(at + 1)
}

/// The short options without a value.
fn short_flags() -> Vec<u8> {
    let command = Args::command();
    let flags = command.get_arguments().filter(|option| !option.get_action().takes_values());
    flags.filter_map(|option| u8::try_from(option.get_short()?).ok()).collect()
}

/// The value of `--weights`.
fn storage_text(storage: WeightStorage) -> String {
    storage.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The value of `--split`.
pub(super) fn split_text(split: &Split) -> String {
    let list = |shares: &[f32]| shares.iter().map(f32::to_string).collect::<Vec<_>>().join(",");
    match split {
        Split::Layers(shares) => list(shares),
        Split::Tensor(groups) => {
            let group = |GroupShares { layers, devices }: &GroupShares| match layers {
                Some(layers) => format!("{layers}:{}", list(devices)),
                None => list(devices),
            };
            format!("tensor={}", groups.iter().map(group).collect::<Vec<_>>().join("/"))
        }
    }
}

/// A word as a shell reads it. Single quotes, unless all of its characters stand for themselves; a word with control characters or
/// bytes that are not UTF-8 is escaped within `$'…'`, which bash, zsh and ksh read.
fn quoted(word: &OsStr) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:,=@%+".contains(&byte);
    match word.to_str() {
        // zsh replaces `=name` by the path of a program.
        Some(text) if !text.is_empty() && !text.starts_with('=') && text.bytes().all(is_plain) => text.to_owned(),
        Some(text) if !text.contains(char::is_control) => format!("'{}'", text.replace('\'', r"'\''")),
        _ => {
            let escaped = word.as_bytes().iter().map(|&byte| match byte {
                b'\'' | b'\\' => format!("\\{}", char::from(byte)),
                b' '..=b'~' => char::from(byte).to_string(),
                _ => format!("\\x{byte:02x}"),
            });
            format!("$'{}'", escaped.collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::process::Command;

    #[test]
    fn options_of_the_placement_are_replaced() {
        let command = |words: &[&str], change: &dyn Fn(&mut Args), kept| {
            let mut args = Args::try_parse_from(["generate", "m.gguf", "-p", "x"]).unwrap();
            change(&mut args);
            command_line(words.iter().map(OsString::from), &args, kept)
        };
        let layers = |args: &mut Args| args.split = Some(Split::Layers(vec![3.0, 1.0]));
        let retrying = |args: &mut Args| args.retry = Some(60);
        for given in [
            &["generate", "-p", "x", "--retry", "--plan", "m.gguf"][..],
            &["generate", "-p", "x", "--retry", "60", "m.gguf", "--plan"],
            &["generate", "-p", "x", "--retry=60", "--plan", "m.gguf"],
        ] {
            assert_eq!(command(given, &retrying, true), "generate -p x --retry=60 m.gguf");
        }
        assert_eq!(
            command(&["generate", "m.gguf", "--plan", "-p", "it's", "-d", "CPU,CPU"], &layers, true),
            r"generate m.gguf -p 'it'\''s' -d CPU,CPU --split 3,1"
        );
        assert_eq!(
            command(&["generate", "--plan", "-p", "x", "--", "m.gguf"], &layers, true),
            "generate -p x --split 3,1 -- m.gguf"
        );
        let other = |args: &mut Args| {
            args.device = Some("a:1/0".to_owned());
            args.mem = vec![7];
            args.threads = Some(2);
        };
        for given in [
            &["generate", "m.gguf", "--rpc", "a:1,b:2", "-d", "CPU", "-n", "5", "--auto"][..],
            &["generate", "m.gguf", "--rpc=a:1", "-dCPU", "--mem=7", "-t4", "-n", "5", "--plan"],
            &["generate", "m.gguf", "-n", "5", "--threads", "1", "--split", "tensor"],
        ] {
            assert_eq!(command(given, &other, false), "generate m.gguf -n 5 --device a:1/0 --mem 7 --threads 2");
        }
        let mapped = |args: &mut Args| args.weights = Some(WeightStorage::Mapped);
        assert_eq!(command(&["generate", "m.gguf", "--auto"], &mapped, true), "generate m.gguf --weights mapped");
    }

    /// Short options in one word, with the value in it or after it, and words that only look like options.
    #[test]
    fn grouped_short_options_keep_their_flags() {
        let args = Args::try_parse_from(["generate", "m.gguf", "-p", "x"]).unwrap();
        for (given, left) in [
            ("-vd CPU m.gguf", "-v m.gguf"),
            ("-vdCPU m.gguf", "-v m.gguf"),
            ("-vd=CPU m.gguf", "-v m.gguf"),
            ("-vt4 -n5 m.gguf", "-v -n5 m.gguf"),
            ("-pd m.gguf", "-pd m.gguf"),
            ("-vp dt m.gguf", "-vp dt m.gguf"),
            ("--device=CPU --devices m.gguf", "--devices m.gguf"),
            ("--temp -1 - m.gguf", "--temp -1 - m.gguf"),
            ("-v -- -d --auto", "-v -- -d --auto"),
        ] {
            let words = ["generate"].into_iter().chain(given.split(' ')).map(OsString::from);
            assert_eq!(command_line(words, &args, false), format!("generate {left}"), "{given}");
        }
    }

    /// A shell reads each word as it was: file names of any bytes, and prompts of several lines.
    #[test]
    fn a_shell_reads_quoted_words_as_they_were() {
        for (word, text) in [
            (&b"m.gguf"[..], "m.gguf"),
            (b"", "''"),
            (b"=m", "'=m'"),
            (b"a $HOME `b` \"c\"", "'a $HOME `b` \"c\"'"),
            (b"it's", r"'it'\''s'"),
            ("Grüße".as_bytes(), "'Grüße'"),
            (b"a\nb'\\c\n", r"$'a\x0ab\'\\c\x0a'"),
            (b"m\xff1.gguf", r"$'m\xff1.gguf'"),
        ] {
            let got = quoted(OsStr::from_bytes(word));
            assert_eq!(got, text);
            let output = Command::new("bash").args(["-c", &format!("printf %s {got}")]).output().unwrap();
            assert_eq!(output.stdout, word, "{got}");
        }
    }
}

//! The command line of a run with the chosen placement, quoted for a shell.

use crate::args::{Args, GroupShares, Split};

/// Options that a plan replaces: the long name, the short one, and whether a value follows.
const REPLACED: [(&str, Option<char>, bool); 8] = [
    ("plan", None, false),
    ("auto", None, false),
    ("split", None, true),
    ("groups", None, true),
    ("rpc", None, true),
    ("device", Some('d'), true),
    ("mem", None, true),
    ("threads", Some('t'), true),
];

/// How many of [`REPLACED`] are replaced if the plan uses all devices as they are given.
const ALWAYS_REPLACED: usize = 4;

/// The words of this program's command line with the options of `args`; `kept`: whether all devices are used as given.
pub(super) fn command_line(words: impl Iterator<Item = String>, args: &Args, kept: bool) -> String {
    let replaced = if kept { &REPLACED[..ALWAYS_REPLACED] } else { &REPLACED[..] };
    let mut left = Vec::new();
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        match replaced.iter().find(|option| names(&word, option)) {
            Some((_, _, true)) if !has_value(&word) => {
                words.next();
            }
            Some(_) => {}
            None => left.push(word),
        }
    }
    let kept_words = left.len();
    if !kept {
        let sizes = args.mem.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let threads = args.threads.map(|threads| threads.to_string());
        let given = [("--device", args.device.clone()), ("--mem", Some(sizes).filter(|sizes| !sizes.is_empty()))];
        for (name, value) in given.into_iter().chain([("--threads", threads)]) {
            left.extend(value.into_iter().flat_map(|value| [name.to_owned(), value]));
        }
    }
    left.extend(args.split.iter().flat_map(|split| ["--split".to_owned(), split_text(split)]));
    left.extend(args.sequence_groups.iter().flat_map(|groups| ["--groups".to_owned(), groups.to_string()]));
    // Behind `--`, words are no options.
    let given = left.split_off(kept_words);
    let at = left.iter().position(|word| word == "--").unwrap_or(left.len());
    left.splice(at..at, given);
    left.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

fn names(word: &str, (long, short, takes_value): &(&str, Option<char>, bool)) -> bool {
    match word.strip_prefix("--") {
        Some(rest) => {
            rest.strip_prefix(long).is_some_and(|rest| rest.is_empty() || *takes_value && rest.starts_with('='))
        }
        None => short.is_some_and(|short| word.strip_prefix('-').is_some_and(|rest| rest.starts_with(short))),
    }
}

/// Whether the value of an option is in the same word: `--device=CPU`, `-dCPU`.
fn has_value(word: &str) -> bool {
    if word.starts_with("--") { word.contains('=') } else { word.chars().count() > 2 }
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

/// A word as a shell reads it: in single quotes, unless all of its characters stand for themselves.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,=@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn options_of_the_placement_are_replaced() {
        let command = |words: &[&str], change: &dyn Fn(&mut Args), kept| {
            let mut args = Args::try_parse_from(["generate", "m.gguf", "-p", "x"]).unwrap();
            change(&mut args);
            command_line(words.iter().map(|&word| word.to_owned()), &args, kept)
        };
        let layers = |args: &mut Args| args.split = Some(Split::Layers(vec![3.0, 1.0]));
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
    }
}

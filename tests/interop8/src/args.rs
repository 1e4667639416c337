//! Command lines: options with a value, and flags.

use std::collections::HashMap;
use std::process;
use std::str::FromStr;

use crate::Error;

/// The options of a command line. Each option is given at most once.
#[derive(Debug)]
pub struct Args {
    values: HashMap<String, String>,
}

impl Args {
    /// Reads the process's command line. `--help` prints `usage` and ends the process; an unknown option, or one without its
    /// value, prints `usage` to stderr and ends it with status 2.
    pub fn from_env(usage: &str, with_value: &[&str], flags: &[&str]) -> Self {
        Self::parse(std::env::args().skip(1), with_value, flags).unwrap_or_else(|problem| match problem {
            Problem::Help => {
                print!("{usage}");
                process::exit(0);
            }
            Problem::Wrong(message) => {
                eprint!("{message}\n{usage}");
                process::exit(2);
            }
        })
    }

    fn parse(words: impl Iterator<Item = String>, with_value: &[&str], flags: &[&str]) -> Result<Self, Problem> {
        let mut words = words;
        let mut values = HashMap::new();
        while let Some(word) = words.next() {
            if word == "--help" || word == "-h" {
                return Err(Problem::Help);
            }
            let value = if flags.contains(&word.as_str()) {
                String::new()
            } else if with_value.contains(&word.as_str()) {
                words.next().ok_or_else(|| Problem::Wrong(format!("{word} needs a value")))?
            } else {
                return Err(Problem::Wrong(format!("unknown argument {word}")));
            };
            if values.insert(word.clone(), value).is_some() {
                return Err(Problem::Wrong(format!("{word} is given twice")));
            }
        }
        Ok(Self { values })
    }

    /// Whether the flag is given.
    pub fn has(&self, flag: &str) -> bool {
        self.values.contains_key(flag)
    }

    /// The value of an option as text, if the option is given.
    pub fn text(&self, option: &str) -> Option<&str> {
        self.values.get(option).map(String::as_str)
    }

    /// The value of an option that must be given.
    pub fn required(&self, option: &str) -> Result<&str, Error> {
        self.text(option).ok_or_else(|| Error::new(format!("{option} is required")))
    }

    /// The value of an option, or `default`.
    pub fn number<T: FromStr>(&self, option: &str, default: T) -> Result<T, Error> {
        self.text(option).map_or(Ok(default), |text| parse_number(option, text))
    }

    /// The comma-separated numbers of an option; none if the option is not given or empty.
    pub fn numbers<T: FromStr>(&self, option: &str) -> Result<Vec<T>, Error> {
        let text = self.text(option).unwrap_or("");
        text.split(',').filter(|part| !part.is_empty()).map(|part| parse_number(option, part)).collect()
    }
}

#[derive(Debug)]
enum Problem {
    Help,
    Wrong(String),
}

fn parse_number<T: FromStr>(option: &str, text: &str) -> Result<T, Error> {
    text.trim().parse().map_err(|_| Error::new(format!("{option}: {text} is not a number of the expected kind")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, Problem> {
        Args::parse(line.split_whitespace().map(str::to_owned), &["--model", "--tokens"], &["--verbose"])
    }

    #[test]
    fn wrong_command_lines_are_refused() {
        for line in ["--other", "--model", "--verbose --verbose", "--model a --model b", "a"] {
            assert!(matches!(parse(line), Err(Problem::Wrong(_))), "{line}");
        }
        assert!(matches!(parse("--model --help --help"), Err(Problem::Help)));
    }

    #[test]
    #[allow(clippy::unwrap_used)]
    fn values_and_lists_are_read() {
        let args = parse("--tokens 1,2,3 --verbose").unwrap();
        assert!(args.has("--verbose"));
        assert_eq!(args.numbers::<i32>("--tokens").unwrap(), [1, 2, 3]);
        assert_eq!(args.numbers::<i32>("--model").unwrap(), [0; 0]);
        assert!(args.required("--model").is_err());
        assert!(args.number("--tokens", 1u32).is_err());
    }
}

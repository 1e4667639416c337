//! Names of log levels, as the programs take them on their command lines.

use log::LevelFilter;
use thiserror::Error;

/// A text that names no log level.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected off, error, warn, info, debug or trace, got {0:?}")]
pub struct ParseLogLevelError(String);

/// Parses the name of a log level, in upper or lower case.
///
/// # Errors
/// [`ParseLogLevelError`] for any other text. Its message lists the names.
pub fn parse_log_level(text: &str) -> Result<LevelFilter, ParseLogLevelError> {
    text.parse().map_err(|_| ParseLogLevelError(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_parsed_by_the_names_that_the_error_lists() {
        let message = parse_log_level("loud").unwrap_err().to_string();
        for level in LevelFilter::iter() {
            let name = level.as_str();
            assert!(message.contains(&name.to_lowercase()), "{message}");
            assert_eq!(parse_log_level(name), Ok(level));
            assert_eq!(parse_log_level(&name.to_lowercase()), Ok(level));
        }
        assert!(parse_log_level("").is_err() && parse_log_level(" info").is_err());
    }
}

//! Values of options that the command line's parser does not know, or reports in words of its own: ports, sizes of messages, times.

use std::time::Duration;

use fanout::registry::{Bytes, parse_bytes};
use fanout::rpc::server::MIN_MESSAGE;

pub(crate) fn message_size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|e| e.to_string())?;
    if bytes < MIN_MESSAGE { Err(format!("must be at least {}", Bytes(MIN_MESSAGE))) } else { Ok(bytes) }
}

pub(crate) fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "expected a port from 1 to 65535, or 0 for any free one".to_owned())
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let value = seconds_or_none(text)?;
    if value.is_zero() { Err("must be more than 0 seconds, up to a day (86400)".to_owned()) } else { Ok(value) }
}

pub(crate) fn at_least_a_second(text: &str) -> Result<Duration, String> {
    let value = seconds_or_none(text)?;
    if value < Duration::from_secs(1) {
        Err("must be at least 1 second, up to a day (86400)".to_owned())
    } else {
        Ok(value)
    }
}

pub(crate) fn seconds_or_none(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "expected seconds, for example 10 or 0.5".to_owned())?;
    let day = 24.0 * 3600.0;
    if (0.0..=day).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err("must be 0 or more seconds, up to a day (86400)".to_owned())
    }
}

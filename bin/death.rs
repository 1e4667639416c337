//! How a worker has ended, for the supervisor and its log.

use std::fmt::{self, Display};
use std::time::Duration;

use rustix::process::WaitStatus;
use signal_hook::low_level::signal_name;

use super::lost_device;

/// How a worker has ended.
pub(crate) struct Death {
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<i32>,
}

impl Death {
    pub(crate) fn of(status: WaitStatus) -> Death {
        Death { exit_code: status.exit_status(), signal: status.terminating_signal() }
    }

    /// As a shell reports it: the exit code, or 128 + signal. Never 0, with which no worker ends before it has served.
    pub(crate) fn failure_status(&self) -> u8 {
        let code = self.exit_code.or_else(|| Some(128 + self.signal?));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1).max(1)
    }
}

impl Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.exit_code, self.signal) {
            (Some(code), _) if code == i32::from(lost_device::EXIT_CODE) => {
                write!(f, "ended with exit code {code}, because a device is lost (its own lines name it)")
            }
            (Some(code), _) => write!(f, "ended with exit code {code}"),
            (None, Some(signal)) => {
                write!(f, "was killed by {} (signal {signal})", signal_name(signal).unwrap_or("an unnamed signal"))
            }
            (None, None) => write!(f, "ended"),
        }
    }
}

/// A time in seconds, for the log.
pub(crate) struct Seconds(pub(crate) Duration);

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s", self.0.as_secs_f64())
    }
}

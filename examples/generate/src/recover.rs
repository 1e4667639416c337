//! Servers that are lost: whose loss is behind an error, and how long one is waited for.

use fanout::device::{Device, DeviceError};
use fanout::registry::RegistryError;
use fanout::rpc::client::ConnectError;
use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The pause after a server that was back has been lost again, without progress; each later one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest of these pauses.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A server that was lost.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{endpoint}: connection lost: {reason}")]
pub struct Lost {
    /// `host:port`.
    pub endpoint: String,
    /// What was seen.
    pub reason: String,
}

/// The server of a device, `host:port`, if it is one's.
pub fn endpoint(device: &dyn Device) -> Option<&str> {
    device.info().name.split_once('/').map(|(endpoint, _)| endpoint).filter(|endpoint| endpoint.contains(':'))
}

/// The lost server that an error comes from. Where the error does not say, the devices are asked: one server's failure may
/// only tell that another one did not send.
pub fn culprit(error: &anyhow::Error, devices: &[Arc<dyn Device>]) -> Option<Lost> {
    error.chain().find_map(stated).or_else(|| {
        let remote = devices.iter().filter(|device| endpoint(&***device).is_some());
        remote.filter_map(|device| device.memory().err()).find_map(|error| within(&error))
    })
}

fn stated(error: &(dyn Error + 'static)) -> Option<Lost> {
    let of_registry = || match error.downcast_ref()? {
        RegistryError::Device(error) | RegistryError::Endpoint(ConnectError::Device(error)) => Some(error),
        _ => None,
    };
    error.downcast_ref::<DeviceError>().or_else(of_registry).and_then(within)
}

fn within(error: &DeviceError) -> Option<Lost> {
    match error {
        DeviceError::Lost { endpoint, reason } => Some(Lost { endpoint: endpoint.clone(), reason: reason.clone() }),
        DeviceError::On { source, .. } => within(source),
        _ => None,
    }
}

/// A server that did not come back.
#[derive(Debug, Error)]
pub enum Unreached {
    /// All of its time is used up: it came back, and was lost again each time.
    #[error(
        "{lost}; it has been waited for {limit:?} since the last token, and was back each time only to be lost again"
    )]
    Again {
        /// The last loss.
        lost: Lost,
        /// How long it may be waited for.
        limit: Duration,
    },
    /// It cannot be reached.
    #[error("lost, and not back within {limit:?}: {source}")]
    Away {
        /// How long it may be waited for.
        limit: Duration,
        /// What was seen last.
        source: Box<RegistryError>,
    },
}

/// How long each server has been waited for since there was progress. A server that comes back and is lost again before
/// there is any has what is left of its time.
#[derive(Debug)]
pub struct Waits {
    limit: Duration,
    waited: HashMap<String, Waited>,
}

#[derive(Debug, Default)]
struct Waited {
    spent: Duration,
    pause: Duration,
}

impl Waits {
    /// At most so long for each server.
    pub fn new(limit: Duration) -> Waits {
        Waits { limit, waited: HashMap::new() }
    }

    /// How long that is.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Every server has all of its time again.
    pub fn progress(&mut self) {
        self.waited.clear();
    }

    /// Opens a server's devices again. `open` is told for how long to try.
    ///
    /// # Errors
    /// [`Unreached`].
    pub fn reach<T>(
        &mut self,
        lost: &Lost,
        open: impl FnOnce(Duration) -> Result<T, RegistryError>,
    ) -> Result<T, Unreached> {
        let (limit, start) = (self.limit, Instant::now());
        let waited = self.waited.entry(lost.endpoint.clone()).or_default();
        let left = limit.saturating_sub(waited.spent + waited.pause);
        if left.is_zero() {
            return Err(Unreached::Again { lost: lost.clone(), limit });
        }
        std::thread::sleep(waited.pause);
        waited.pause = (2 * waited.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        // In whole ms, which errors may show.
        let opened = open(Duration::from_millis(left.as_millis() as u64));
        waited.spent += start.elapsed();
        opened.map_err(|source| Unreached::Away { limit, source: Box::new(source) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test says what it needs by failing
mod tests {
    use super::*;
    use crate::engine::EngineError;
    use crate::load::LoadError;
    use fanout::sched::SchedError;
    use std::io::{self, ErrorKind};

    const SERVER: &str = "10.0.0.5:50052";

    fn lost() -> Lost {
        Lost { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
    }

    #[test]
    fn a_lost_server_is_found_wherever_the_error_says_it() {
        let Lost { endpoint, reason } = lost();
        let gone = || DeviceError::Lost { endpoint: endpoint.clone(), reason: reason.clone() };
        let on = || DeviceError::On { device: "both".to_owned(), source: Box::new(gone()) };
        let sched = |source| EngineError::Sched(SchedError::Device { device: format!("{SERVER}/0"), source });
        let found = [
            anyhow::Error::new(gone()),
            anyhow::Error::new(on()).context("while it ran"),
            sched(gone()).into(),
            sched(on()).into(),
            EngineError::Read(gone()).into(),
            LoadError::Device { device: format!("{SERVER}/0"), source: gone() }.into(),
            RegistryError::Device(gone()).into(),
            RegistryError::Endpoint(ConnectError::Device(gone())).into(),
        ];
        for error in found {
            assert_eq!(culprit(&error, &[]), Some(lost()), "{error:#}");
        }
        for error in [sched(DeviceError::Ended).into(), EngineError::NoTokens.into(), anyhow::anyhow!("no")] {
            assert_eq!(culprit(&error, &[]), None, "{error:#}");
        }
    }

    #[test]
    fn time_without_progress_adds_up() {
        let limit = Duration::from_millis(200);
        let mut waits = Waits::new(limit);
        // It is back each time, and lost again at once.
        let (start, mut before) = (Instant::now(), limit);
        let end = loop {
            let reached = waits.reach(&lost(), |left| {
                assert!(left <= before);
                before = left;
                Ok(())
            });
            match reached {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "it is waited for without an end"),
                Err(end) => break end.to_string(),
            }
        };
        assert!(end.starts_with(&lost().to_string()) && end.contains("200ms"), "{end}");
        waits.progress();
        assert!(waits.reach(&lost(), |_| Ok(())).is_ok());
        // Another server's time is its own.
        let other = Lost { endpoint: "10.0.0.6:50052".to_owned(), ..lost() };
        let whole = waits.reach(&other, |left| {
            assert_eq!(left, limit);
            Ok(())
        });
        assert!(whole.is_ok());
    }

    #[test]
    fn a_server_that_stays_away_is_named() {
        let source = io::Error::from(ErrorKind::ConnectionRefused);
        let refused = ConnectError::Connect { endpoint: SERVER.to_owned(), source };
        let open = |_| Err::<(), _>(RegistryError::Endpoint(refused));
        let end = Waits::new(Duration::from_secs(2)).reach(&lost(), open).unwrap_err().to_string();
        assert!(end.starts_with("lost, and not back within 2s: ") && end.contains(SERVER), "{end}");
    }
}

//! Servers that are lost: whose loss is behind an error, and how long one is waited for.

use fanout::device::{Device, DeviceError};
use fanout::registry::RegistryError;
use fanout::rpc::client::ConnectError;
use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The pause before the second attempt to reach a server; each later one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause between two attempts.
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

/// Whether another attempt may end otherwise.
fn passing(error: &RegistryError) -> bool {
    match error {
        RegistryError::Endpoint(ConnectError::Name(_) | ConnectError::Version { .. }) => false,
        RegistryError::Endpoint(_) => true,
        error => stated(error).is_some(),
    }
}

/// A server that did not come back.
#[derive(Debug, Error)]
pub enum Unreached {
    /// Not within the time.
    #[error("{endpoint}: lost, and not back within {limit:?}: {last}")]
    Time {
        /// The server.
        endpoint: String,
        /// How long it was waited for.
        limit: Duration,
        /// What was seen last.
        last: String,
    },
    /// It is another one.
    #[error("{endpoint}: lost, and not the same when it was back")]
    Other {
        /// The server.
        endpoint: String,
        /// What is other.
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

    /// Opens a server's devices again, in as many attempts as there is time for: `open` is told how much is left.
    ///
    /// # Errors
    /// [`Unreached`].
    pub fn reach<T>(
        &mut self,
        lost: &Lost,
        mut open: impl FnMut(Duration) -> Result<T, RegistryError>,
    ) -> Result<T, Unreached> {
        let waited = self.waited.entry(lost.endpoint.clone()).or_default();
        let mut last = lost.reason.clone();
        while waited.spent < self.limit {
            let start = Instant::now();
            std::thread::sleep(waited.pause.min(self.limit - waited.spent));
            waited.pause = (2 * waited.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            let left = self.limit.saturating_sub(waited.spent + start.elapsed()).max(FIRST_PAUSE);
            // In whole ms, which errors may show.
            let opened = open(Duration::from_millis(left.as_millis() as u64));
            waited.spent += start.elapsed();
            match opened {
                Ok(opened) => return Ok(opened),
                Err(error) if passing(&error) => last = error.to_string(),
                Err(error) => {
                    return Err(Unreached::Other { endpoint: lost.endpoint.clone(), source: Box::new(error) });
                }
            }
        }
        Err(Unreached::Time { endpoint: lost.endpoint.clone(), limit: self.limit, last })
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

    fn refused() -> RegistryError {
        let source = io::Error::from(ErrorKind::ConnectionRefused);
        RegistryError::Endpoint(ConnectError::Connect { endpoint: SERVER.to_owned(), source })
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
    fn a_server_is_reached_again_once_it_answers() {
        let mut waits = Waits::new(Duration::from_secs(60));
        let mut attempts = 0;
        let reached = waits.reach(&lost(), |left| {
            assert!(left <= Duration::from_secs(60));
            attempts += 1;
            if attempts < 3 { Err(refused()) } else { Ok("back") }
        });
        assert_eq!((reached.unwrap(), attempts), ("back", 3));
    }

    #[test]
    fn time_without_progress_adds_up() {
        let limit = Duration::from_millis(200);
        let mut waits = Waits::new(limit);
        // It is back each time, and lost again at once.
        let start = Instant::now();
        let end = loop {
            match waits.reach(&lost(), |_| Ok(())) {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "it is waited for without an end"),
                Err(end) => break end,
            }
        };
        assert_eq!(end.to_string(), format!("{SERVER}: lost, and not back within 200ms: it is gone"));
        assert!(start.elapsed() >= limit);
        waits.progress();
        assert!(waits.reach(&lost(), |_| Ok(())).is_ok());
        // Another server's time is its own.
        let other = Lost { endpoint: "10.0.0.6:50052".to_owned(), ..lost() };
        let end = waits.reach(&other, |_| Err::<(), _>(refused())).unwrap_err().to_string();
        assert!(end.starts_with("10.0.0.6:50052") && end.contains("cannot connect"), "{end}");
    }

    #[test]
    fn another_server_in_its_place_is_not_waited_for() {
        let gone = RegistryError::Unknown { name: format!("{SERVER}/1"), known: format!("{SERVER}/0") };
        let mut gone = Some(gone);
        let mut waits = Waits::new(Duration::from_secs(60));
        let end = waits.reach(&lost(), |_| Err::<(), _>(gone.take().unwrap())).unwrap_err();
        assert!(matches!(end, Unreached::Other { .. }), "{end}");
    }
}

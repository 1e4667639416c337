//! Servers that are lost: whose loss is behind an error, and how long one is waited for.

use crate::engine::EngineError;
use crate::load::LoadError;
use fanout::device::{Device, DeviceError};
use fanout::registry::RegistryError;
use fanout::rpc::client::ConnectError;
use fanout::sched::SchedError;
use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The pause after a server that was back has been lost again, without progress; each later one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest of these pauses.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// What a run may go on after.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Loss {
    /// A server.
    #[error("{endpoint}: connection lost: {reason}")]
    Server {
        /// `host:port`.
        endpoint: String,
        /// What was seen.
        reason: String,
    },
    /// A server's memory, while it does not know that an earlier connection of ours is lost.
    #[error("{endpoint}: {reason}; it may still hold the memory of the lost connection")]
    MemoryHeld {
        /// `host:port`.
        endpoint: String,
        /// What it said.
        reason: String,
    },
    /// Bytes on their way from a server to another one; both are there.
    #[error("{reason}")]
    PeerTransfer {
        /// The server that sent them, `host:port`.
        endpoint: String,
        /// What it said.
        reason: String,
    },
}

impl Loss {
    /// The server whose time it takes, `host:port`.
    pub fn endpoint(&self) -> &str {
        match self {
            Loss::Server { endpoint, .. } | Loss::MemoryHeld { endpoint, .. } | Loss::PeerTransfer { endpoint, .. } => {
                endpoint
            }
        }
    }
}

/// The server of a device, `host:port`, if it is one's.
pub fn endpoint(device: &dyn Device) -> Option<&str> {
    server(&device.info().name)
}

/// The server in a device's name.
fn server(name: &str) -> Option<&str> {
    name.split_once('/').map(|(endpoint, _)| endpoint).filter(|endpoint| endpoint.contains(':'))
}

/// What was lost that an error comes from. Where the error does not say, the devices are asked: one server's failure may
/// only tell that another one did not send. `waits` knows of which servers an earlier connection may still be there.
pub fn find_loss(error: &anyhow::Error, devices: &[Arc<dyn Device>], waits: Option<&RetryBudgets>) -> Option<Loss> {
    let asked = || {
        let remote = devices.iter().filter(|device| endpoint(&***device).is_some());
        remote.filter_map(|device| device.memory().err()).find_map(|error| lost(&error))
    };
    let short = || error.chain().find_map(|cause| memory_held(cause, waits?));
    let cut = || error.chain().filter_map(of_device).find_map(|error| failed_peer_transfer(error, devices));
    error.chain().filter_map(of_device).find_map(lost).or_else(asked).or_else(short).or_else(cut)
}

fn of_device<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a DeviceError> {
    let of_registry = || match error.downcast_ref()? {
        RegistryError::Device(error) | RegistryError::Endpoint(ConnectError::Device(error)) => Some(error),
        _ => None,
    };
    Some(innermost(error.downcast_ref().or_else(of_registry)?))
}

fn innermost(error: &DeviceError) -> &DeviceError {
    if let DeviceError::On { source, .. } = error { innermost(source) } else { error }
}

/// A server whose connection is lost.
fn lost(error: &DeviceError) -> Option<Loss> {
    match innermost(error) {
        DeviceError::Lost { endpoint, reason } => {
            Some(Loss::Server { endpoint: endpoint.clone(), reason: reason.clone() })
        }
        _ => None,
    }
}

/// A server without room, that was lost since there was progress.
fn memory_held(error: &(dyn Error + 'static), waits: &RetryBudgets) -> Option<Loss> {
    let loading = || match error.downcast_ref()? {
        LoadError::Device { device, source } => Some((device, source)),
        _ => None,
    };
    let running = || match error.downcast_ref()? {
        EngineError::Sched(SchedError::Device { device, source }) => Some((device, source)),
        _ => None,
    };
    let (device, source) = loading().or_else(running)?;
    let endpoint = server(device).filter(|endpoint| waits.spent_by_server.contains_key(*endpoint))?;
    let reason = match innermost(source) {
        full @ DeviceError::OutOfMemory { .. } => full.to_string(),
        _ => return None,
    };
    Some(Loss::MemoryHeld { endpoint: endpoint.to_owned(), reason })
}

/// A server that could not send to another one. That is told under a name of its own, and what goes wrong with the work of
/// a device under the device's: only the first has to do with a connection that is neither's to us.
fn failed_peer_transfer(error: &DeviceError, devices: &[Arc<dyn Device>]) -> Option<Loss> {
    let DeviceError::Remote { device: sender, .. } = error else { return None };
    let mut servers = devices.iter().filter_map(|device| endpoint(&**device));
    let first = servers.next()?;
    servers.clone().find(|other| *other != first)?;
    let sends = |server: &&str| sender.strip_prefix(*server).is_some_and(|rest| rest.starts_with(' '));
    let endpoint = [first].into_iter().chain(servers).find(sends)?.to_owned();
    Some(Loss::PeerTransfer { endpoint, reason: error.to_string() })
}

/// A server that did not come back, or not as it was.
#[derive(Debug, Error)]
pub enum ReconnectError {
    /// All of its time is used up: it came back, and was lost again each time.
    #[error("{lost}; {}", used_up_text(lost, *limit))]
    RetriesUsedUp {
        /// The last loss.
        lost: Loss,
        /// How long it may be waited for.
        limit: Duration,
    },
    /// It cannot be reached.
    #[error("lost, and not back within {limit:?}: {source}")]
    Unreachable {
        /// How long it may be waited for.
        limit: Duration,
        /// What was seen last.
        source: Box<RegistryError>,
    },
    /// It answers, but is not what it was.
    #[error("it is back, but cannot be used: {0}; start it with the devices it had")]
    Changed(#[source] Box<RegistryError>),
}

/// What all of a server's time was spent on.
fn used_up_text(lost: &Loss, limit: Duration) -> String {
    match lost {
        Loss::Server { .. } => format!(
            "it has been waited for {limit:?} since the last token, and was back each time only to be lost again"
        ),
        Loss::MemoryHeld { .. } | Loss::PeerTransfer { .. } => {
            format!("that has been so for {limit:?} since the last token")
        }
    }
}

impl ReconnectError {
    fn new(limit: Duration, source: RegistryError) -> ReconnectError {
        let source = Box::new(source);
        match *source {
            RegistryError::Endpoint(ConnectError::GivenUp { .. } | ConnectError::Host { .. }) => {
                ReconnectError::Unreachable { limit, source }
            }
            _ => ReconnectError::Changed(source),
        }
    }
}

/// Whether a server that could not be opened may be opened later, and whoever has tried does not try again by himself: a name
/// may be gone as long as its host is, and a GPU's driver may come up after the server.
fn is_transient(error: &RegistryError) -> bool {
    matches!(error, RegistryError::Unknown { .. } | RegistryError::Endpoint(ConnectError::Host { .. }))
}

/// How long each server has been waited for since there was progress. A server that comes back and is lost again before
/// there is any has what is left of its time.
#[derive(Debug)]
pub struct RetryBudgets {
    limit: Duration,
    spent_by_server: HashMap<String, RetryBudget>,
}

#[derive(Debug, Default)]
struct RetryBudget {
    spent: Duration,
    pause: Duration,
}

impl RetryBudgets {
    /// At most so long for each server.
    pub fn new(limit: Duration) -> RetryBudgets {
        RetryBudgets { limit, spent_by_server: HashMap::new() }
    }

    /// How long that is.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Every server has all of its time again.
    pub fn reset(&mut self) {
        self.spent_by_server.clear();
    }

    /// Waits until what was lost may be there again: `open`, which is told for how long to try, opens a server's devices.
    ///
    /// # Errors
    /// [`Unreached`].
    pub fn retry<T>(
        &mut self,
        lost: &Loss,
        mut open: impl FnMut(Duration) -> Result<T, RegistryError>,
    ) -> Result<T, ReconnectError> {
        let limit = self.limit;
        let waited = self.spent_by_server.entry(lost.endpoint().to_owned()).or_default();
        let mut last = None;
        loop {
            // In whole ms, which errors may show.
            let left = limit.saturating_sub(waited.spent + waited.pause).as_millis() as u64;
            if left == 0 {
                let again = || ReconnectError::RetriesUsedUp { lost: lost.clone(), limit };
                return Err(last.map_or_else(again, |source| ReconnectError::new(limit, source)));
            }
            let start = Instant::now();
            std::thread::sleep(waited.pause);
            waited.pause = (2 * waited.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            let opened = open(Duration::from_millis(left));
            waited.spent += start.elapsed();
            match opened {
                Ok(opened) => return Ok(opened),
                Err(source) if is_transient(&source) => last = Some(source),
                Err(source) => return Err(ReconnectError::new(limit, source)),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test says what it needs by failing
mod tests {
    use super::*;
    use fanout::cpu::{CpuDevice, Path};
    use std::io::{self, ErrorKind};

    const SERVER: &str = "10.0.0.5:50052";
    const OTHER: &str = "10.0.0.6:50052";

    fn lost() -> Loss {
        Loss::Server { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
    }

    fn gone() -> DeviceError {
        DeviceError::Lost { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
    }

    fn on(source: DeviceError) -> DeviceError {
        DeviceError::On { device: "both".to_owned(), source: Box::new(source) }
    }

    fn sched(source: DeviceError) -> EngineError {
        EngineError::Sched(SchedError::Device { device: format!("{SERVER}/0"), source })
    }

    fn load(source: DeviceError) -> anyhow::Error {
        LoadError::Device { device: format!("{SERVER}/0"), source }.into()
    }

    #[test]
    fn a_lost_server_is_found_wherever_the_error_says_it() {
        let found = [
            anyhow::Error::new(gone()),
            anyhow::Error::new(on(gone())).context("while it ran"),
            sched(gone()).into(),
            sched(on(gone())).into(),
            EngineError::Read(gone()).into(),
            load(gone()),
            RegistryError::Device(gone()).into(),
            RegistryError::Endpoint(ConnectError::Device(gone())).into(),
        ];
        for error in found {
            assert_eq!(find_loss(&error, &[], None), Some(lost()), "{error:#}");
        }
        for error in [sched(DeviceError::Ended).into(), EngineError::NoTokens.into(), anyhow::anyhow!("no")] {
            assert_eq!(find_loss(&error, &[], None), None, "{error:#}");
        }
    }

    #[test]
    fn a_server_that_was_lost_may_be_short_of_memory_for_a_while() {
        let short = || DeviceError::OutOfMemory { asked: 9, left: 5, limit: 12 };
        let mut waits = RetryBudgets::new(Duration::from_secs(60));
        let errors = || [load(short()), load(on(short())), sched(short()).into(), sched(on(short())).into()];
        for error in errors() {
            assert_eq!(find_loss(&error, &[], Some(&waits)), None, "it was never lost");
        }
        waits.retry(&lost(), |_| Ok(())).unwrap();
        for error in errors() {
            let lost = find_loss(&error, &[], Some(&waits)).unwrap();
            assert!(matches!(&lost, Loss::MemoryHeld { endpoint, .. } if endpoint == SERVER), "{lost:?}");
            let want = "10.0.0.5:50052: out of memory: 9 bytes asked, 5 left of 12; it may still hold the memory of the \
                lost connection";
            assert_eq!(lost.to_string(), want);
        }
        let elsewhere = LoadError::Device { device: format!("{OTHER}/0"), source: short() };
        for error in [elsewhere.into(), load(DeviceError::Ended)] {
            assert_eq!(find_loss(&error, &[], Some(&waits)), None, "{error:#}");
        }
        waits.reset();
        for error in errors() {
            assert_eq!(find_loss(&error, &[], Some(&waits)), None, "there has been a token since");
        }
    }

    #[test]
    fn bytes_between_servers_are_told_from_the_work_of_a_device() {
        let device = |name: &str| CpuDevice::new(name, 1, Path::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let [one, other] = [SERVER, OTHER].map(|server| device(&format!("{server}/CPU")));
        let both = [device("CPU"), one, other];
        let remote = |device: &str| DeviceError::Remote { device: device.to_owned(), reason: "cannot".to_owned() };
        for server in [SERVER, OTHER] {
            let name = format!("{server} (device 0, sending)");
            let want = Some(Loss::PeerTransfer { endpoint: server.to_owned(), reason: format!("{name}: cannot") });
            for error in [remote(&name), on(remote(&name))] {
                let errors: [anyhow::Error; 2] = [EngineError::Read(error.clone()).into(), sched(error).into()];
                for error in errors {
                    assert_eq!(find_loss(&error, &both, None), want, "{error:#}");
                    // There is nobody to send to.
                    assert_eq!(find_loss(&error, &both[..2], None), None, "{error:#}");
                }
            }
        }
        for name in [format!("{SERVER}/CPU"), SERVER.to_owned(), "10.0.0.7:1 (device 0, sending)".to_owned()] {
            assert_eq!(find_loss(&sched(remote(&name)).into(), &both, None), None, "{name}");
        }
    }

    #[test]
    fn time_without_progress_adds_up() {
        let limit = Duration::from_millis(200);
        let reason = "10.0.0.5:50052 (device 0, sending): cannot".to_owned();
        for lost in [lost(), Loss::PeerTransfer { endpoint: SERVER.to_owned(), reason }] {
            let mut waits = RetryBudgets::new(limit);
            // It is back each time, and lost again at once.
            let (start, mut before) = (Instant::now(), limit);
            let end = loop {
                let reached = waits.retry(&lost, |left| {
                    assert!(left <= before);
                    before = left;
                    Ok(())
                });
                match reached {
                    Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "it is waited for without an end"),
                    Err(end) => break end.to_string(),
                }
            };
            assert!(end.starts_with(&lost.to_string()) && end.contains("200ms"), "{end}");
            waits.reset();
            assert!(waits.retry(&lost, |_| Ok(())).is_ok());
            // Another server's time is its own.
            let other = Loss::Server { endpoint: OTHER.to_owned(), reason: String::new() };
            let whole = waits.retry(&other, |left| {
                assert_eq!(left, limit);
                Ok(())
            });
            assert!(whole.is_ok());
        }
    }

    fn refused() -> ConnectError {
        ConnectError::Connect {
            endpoint: SERVER.to_owned(),
            source: io::Error::from(ErrorKind::ConnectionRefused).into(),
        }
    }

    fn unknown() -> RegistryError {
        RegistryError::Unknown { name: format!("{SERVER}/CUDA0"), known: format!("{SERVER}/CPU") }
    }

    fn nameless() -> RegistryError {
        let source = io::Error::other("the resolver is away");
        RegistryError::Endpoint(ConnectError::Host { endpoint: SERVER.to_owned(), source })
    }

    #[test]
    fn a_server_that_cannot_be_used_is_told_from_one_that_stays_away() {
        let limit = Duration::from_millis(200);
        let given_up = || {
            let elapsed = Duration::from_secs(2);
            RegistryError::Endpoint(ConnectError::GivenUp { attempts: 3, elapsed, last: Box::new(refused()) })
        };
        let closed = || {
            let reason = "it says nonsense".to_owned();
            RegistryError::Endpoint(ConnectError::Handshake { endpoint: SERVER.to_owned(), reason })
        };
        type Open<'a> = &'a dyn Fn() -> RegistryError;
        // Why it cannot be opened; whether that is tried once only; what is said.
        let cases: [(Open<'_>, bool, &str, &str); 4] = [
            (&given_up, true, "lost, and not back within 200ms: ", "is a server running there"),
            (&nameless, false, "lost, and not back within 200ms: ", "no such host"),
            (&closed, true, "it is back, but cannot be used: ", "it says nonsense; start it with the devices it had"),
            (&unknown, false, "it is back, but cannot be used: no device ", "CPU; start it with the devices it had"),
        ];
        for (open, once, start, words) in cases {
            let mut tries = 0;
            let end = RetryBudgets::new(limit).retry(&lost(), |_| {
                tries += 1;
                Err::<(), _>(open())
            });
            let end = end.unwrap_err().to_string();
            assert!(end.starts_with(start) && end.contains(words), "{end}");
            assert_eq!(tries == 1, once, "{tries} tries: {end}");
        }
    }

    #[test]
    fn a_server_whose_devices_or_name_come_up_late_is_waited_for() {
        for late in [&unknown as &dyn Fn() -> RegistryError, &nameless] {
            let mut tries = 0;
            let opened = RetryBudgets::new(Duration::from_secs(60)).retry(&lost(), |_| {
                tries += 1;
                if tries < 3 { Err(late()) } else { Ok(tries) }
            });
            assert_eq!(opened.unwrap(), 3);
        }
    }
}

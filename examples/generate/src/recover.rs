//! Recovery from lost servers: finds the loss that caused an error, and limits the retry time of each server.
//!
//! The pauses between retries grow exponentially. A server's retry budget is shared by all of its losses and is reset only when
//! the run makes progress, so a server that crashes over and over cannot stall the run for ever.

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

/// Exponential backoff: the first attempt starts at once, the second after this pause, and each later pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Upper limit of the backoff pauses.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A failure that the run can recover from.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Loss {
    /// The connection to a server is lost, and with it everything that was loaded there.
    #[error("{endpoint}: connection lost: {reason}")]
    Server {
        /// `host:port`.
        endpoint: String,
        /// The error on the connection.
        reason: String,
    },
    /// A server is out of memory, probably because it has not yet noticed that our earlier connection is lost and still holds
    /// that connection's memory.
    #[error("{endpoint}: {reason}; it may still hold the memory of the lost connection")]
    MemoryHeld {
        /// `host:port`.
        endpoint: String,
        /// The server's error message.
        reason: String,
    },
    /// A direct transfer between two servers failed, while both are still connected to us.
    #[error("{reason}")]
    PeerTransfer {
        /// The sending server, `host:port`.
        endpoint: String,
        /// The server's error message.
        reason: String,
    },
}

impl Loss {
    /// The server to which the retry time is charged, `host:port`.
    pub fn endpoint(&self) -> &str {
        match self {
            Loss::Server { endpoint, .. } | Loss::MemoryHeld { endpoint, .. } | Loss::PeerTransfer { endpoint, .. } => {
                endpoint
            }
        }
    }
}

/// The server that a device belongs to, `host:port`; `None` for a device of this machine.
pub fn endpoint(device: &dyn Device) -> Option<&str> {
    server(&device.info().name)
}

/// The `host:port` before the slash of a remote device's name.
fn server(name: &str) -> Option<&str> {
    name.split_once('/').map(|(endpoint, _)| endpoint).filter(|endpoint| endpoint.contains(':'))
}

/// The loss that caused `error`, or `None` if no loss did.
///
/// If the error names no lost connection, every remote device is probed: the error of one server may only report that another
/// server did not send. `retry_budgets` lists the servers that were lost since the last progress: a lost connection may
/// still hold memory there.
pub fn find_loss(
    error: &anyhow::Error,
    devices: &[Arc<dyn Device>],
    retry_budgets: Option<&RetryBudgets>,
) -> Option<Loss> {
    let probed = || {
        let remote = devices.iter().filter(|device| endpoint(&***device).is_some());
        remote.filter_map(|device| device.memory().err()).find_map(|error| lost(&error))
    };
    let held = || error.chain().find_map(|cause| memory_held(cause, retry_budgets?));
    let transfer = || error.chain().filter_map(device_error).find_map(|error| failed_peer_transfer(error, devices));
    error.chain().filter_map(device_error).find_map(lost).or_else(probed).or_else(held).or_else(transfer)
}

fn device_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a DeviceError> {
    let of_registry = || match error.downcast_ref()? {
        RegistryError::Device(error) | RegistryError::Endpoint(ConnectError::Device(error)) => Some(error),
        _ => None,
    };
    let running = || match error.downcast_ref()? {
        EngineError::Read(error) | EngineError::Sched(SchedError::Device { error, .. }) => Some(error),
        _ => None,
    };
    let loading = || match error.downcast_ref()? {
        LoadError::Device { error, .. } => Some(error),
        _ => None,
    };
    let found = error.downcast_ref().or_else(of_registry).or_else(running).or_else(loading)?;
    Some(DeviceError::root(found))
}

/// The lost connection that the error reports, if it reports one.
fn lost(error: &DeviceError) -> Option<Loss> {
    match error.root() {
        DeviceError::ConnectionLost { endpoint, reason } => {
            Some(Loss::Server { endpoint: endpoint.clone(), reason: reason.clone() })
        }
        _ => None,
    }
}

/// An out-of-memory error of a server that was lost since the last progress.
fn memory_held(error: &(dyn Error + 'static), retry_budgets: &RetryBudgets) -> Option<Loss> {
    let loading = || match error.downcast_ref()? {
        LoadError::Device { device, error } => Some((device, error)),
        _ => None,
    };
    let running = || match error.downcast_ref()? {
        EngineError::Sched(SchedError::Device { device, error }) => Some((device, error)),
        _ => None,
    };
    let (device, error) = loading().or_else(running)?;
    let endpoint = server(device).filter(|endpoint| retry_budgets.spent_by_server.contains_key(*endpoint))?;
    let reason = match error.root() {
        full @ DeviceError::OutOfMemory { .. } => full.to_string(),
        _ => return None,
    };
    Some(Loss::MemoryHeld { endpoint: endpoint.to_owned(), reason })
}

/// A failed transfer from one server to another. A server reports such an error under the sender name `host:port (...)`, and an
/// error of its own compute work under the device name `host:port/device`. Only the former may be a broken connection between
/// the servers, which a retry can get past.
fn failed_peer_transfer(error: &DeviceError, devices: &[Arc<dyn Device>]) -> Option<Loss> {
    let DeviceError::Remote { device: sender, .. } = error else { return None };
    let mut servers = devices.iter().filter_map(|device| endpoint(&**device));
    let first = servers.next()?;
    servers.clone().find(|other| *other != first)?;
    let sends = |server: &&str| sender.strip_prefix(*server).is_some_and(|rest| rest.starts_with(' '));
    let endpoint = [first].into_iter().chain(servers).find(sends)?.to_owned();
    Some(Loss::PeerTransfer { endpoint, reason: error.to_string() })
}

/// A loss that ends the run, because `--retry` is not given.
#[derive(Debug, Error)]
#[error("{lost}; with --retry, the run reconnects, loads the lost weights again and continues")]
pub struct LostServer {
    lost: Loss,
    /// The error in which the loss was found, if its text does not name the loss.
    source: Option<anyhow::Error>,
}

impl LostServer {
    /// For the loss that was found in `error`.
    pub fn new(lost: Loss, error: anyhow::Error) -> LostServer {
        let named = error.chain().any(|cause| cause.to_string().contains(&lost.to_string()));
        LostServer { lost, source: (!named).then_some(error) }
    }
}

/// A lost server did not come back, or came back with other devices.
#[derive(Debug, Error)]
pub enum ReconnectError {
    /// The retry budget is used up: each retry succeeded, and then the same loss occurred again.
    #[error("{lost}; {}", used_up_text(lost, *limit))]
    RetriesUsedUp {
        /// The last loss.
        lost: Loss,
        /// The retry budget.
        limit: Duration,
    },
    /// The server could not be reached within the retry budget.
    #[error("lost, and not back within {limit:?}: {error}")]
    Unreachable {
        /// The retry budget.
        limit: Duration,
        /// The error of the last attempt.
        error: Box<RegistryError>,
    },
    /// The server accepts connections, but its devices or its protocol changed.
    #[error("it is back, but cannot be used: {0}; start it with the devices it had")]
    Changed(Box<RegistryError>),
}

/// The end of [`ReconnectError::RetriesUsedUp`]'s message: what repeated until the budget was used up.
fn used_up_text(lost: &Loss, limit: Duration) -> String {
    match lost {
        Loss::Server { .. } => {
            format!("the server came back and was lost again, for {limit:?} of retries since the last token")
        }
        Loss::MemoryHeld { .. } | Loss::PeerTransfer { .. } => {
            format!("the error persisted for {limit:?} of retries since the last token")
        }
    }
}

impl ReconnectError {
    fn new(limit: Duration, error: RegistryError) -> ReconnectError {
        let error = Box::new(error);
        match *error {
            RegistryError::Endpoint(ConnectError::GivenUp { .. } | ConnectError::Host { .. }) => {
                ReconnectError::Unreachable { limit, error }
            }
            _ => ReconnectError::Changed(error),
        }
    }
}

/// Whether reopening may succeed later although the client library gave up at once: a host name may not resolve while its host
/// is down, and a server may list its GPU only after the driver is up. All other errors the client library retries itself, or
/// they are final.
fn is_transient(error: &RegistryError) -> bool {
    matches!(error, RegistryError::UnknownDevice { .. } | RegistryError::Endpoint(ConnectError::Host { .. }))
}

/// Retry budgets: the time spent on recovering each server since the last progress. A server that is lost again before the run
/// makes progress gets only the rest of its budget.
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
    /// A budget of `limit` for each server.
    pub fn new(limit: Duration) -> RetryBudgets {
        RetryBudgets { limit, spent_by_server: HashMap::new() }
    }

    /// The budget of each server.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Restores the full budget of every server. Called when the run makes progress.
    pub fn reset(&mut self) {
        self.spent_by_server.clear();
    }

    /// Retries `open` with exponential backoff until it succeeds or the server's budget is used up. `open` receives the
    /// remaining budget, which it may spend on connection attempts of its own.
    ///
    /// # Errors
    /// [`ReconnectError`].
    pub fn retry<T>(
        &mut self,
        lost: &Loss,
        mut open: impl FnMut(Duration) -> Result<T, RegistryError>,
    ) -> Result<T, ReconnectError> {
        let limit = self.limit;
        let budget = self.spent_by_server.entry(lost.endpoint().to_owned()).or_default();
        let mut last = None;
        loop {
            // Rounded to whole milliseconds, because error messages print it.
            let left = limit.saturating_sub(budget.spent + budget.pause).as_millis() as u64;
            if left == 0 {
                let again = || ReconnectError::RetriesUsedUp { lost: lost.clone(), limit };
                return Err(last.map_or_else(again, |source| ReconnectError::new(limit, source)));
            }
            let start = Instant::now();
            std::thread::sleep(budget.pause);
            budget.pause = (2 * budget.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            let opened = open(Duration::from_millis(left));
            budget.spent += start.elapsed();
            match opened {
                Ok(opened) => return Ok(opened),
                Err(source) if is_transient(&source) => last = Some(source),
                Err(source) => return Err(ReconnectError::new(limit, source)),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use fanout::cpu::{CpuDevice, MathMode};
    use std::io::{self, ErrorKind};

    const SERVER: &str = "10.0.0.5:50052";
    const OTHER: &str = "10.0.0.6:50052";

    fn lost() -> Loss {
        Loss::Server { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
    }

    fn gone() -> DeviceError {
        DeviceError::ConnectionLost { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
    }

    fn on(error: DeviceError) -> DeviceError {
        DeviceError::OnDevice { device: "both".to_owned(), error: Box::new(error) }
    }

    fn sched(error: DeviceError) -> EngineError {
        EngineError::Sched(SchedError::Device { device: format!("{SERVER}/0"), error })
    }

    fn load(error: DeviceError) -> anyhow::Error {
        LoadError::Device { device: format!("{SERVER}/0"), error }.into()
    }

    #[test]
    fn a_lost_connection_is_found_in_every_error_type_that_can_carry_it() {
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
    fn a_loss_without_retry_names_the_option_and_an_error_that_does_not_report_it() {
        let remedy = "10.0.0.5:50052: connection lost: it is gone; with --retry, the run reconnects, loads the lost weights \
            again and continues";
        for (error, cause) in [(load(gone()), None), (load(DeviceError::Ended), Some(load(DeviceError::Ended)))] {
            let error = anyhow::Error::new(LostServer::new(lost(), error));
            let found: Vec<String> = error.chain().map(ToString::to_string).collect();
            assert_eq!(found[0], remedy);
            assert_eq!(found.get(1), cause.map(|cause| cause.to_string()).as_ref());
        }
    }

    #[test]
    fn out_of_memory_is_recoverable_only_after_a_loss_without_progress() {
        let short = || DeviceError::OutOfMemory { requested: 9, available: 5, limit: 12 };
        let mut retry_budgets = RetryBudgets::new(Duration::from_secs(60));
        let errors = || [load(short()), load(on(short())), sched(short()).into(), sched(on(short())).into()];
        for error in errors() {
            assert_eq!(find_loss(&error, &[], Some(&retry_budgets)), None, "the server was never lost");
        }
        retry_budgets.retry(&lost(), |_| Ok(())).unwrap();
        for error in errors() {
            let lost = find_loss(&error, &[], Some(&retry_budgets)).unwrap();
            assert!(matches!(&lost, Loss::MemoryHeld { endpoint, .. } if endpoint == SERVER), "{lost:?}");
            let want = "10.0.0.5:50052: out of memory: 9 B requested, 5 B of 12 B available; it may still hold the memory \
                of the lost connection";
            assert_eq!(lost.to_string(), want);
        }
        let elsewhere = LoadError::Device { device: format!("{OTHER}/0"), error: short() };
        for error in [elsewhere.into(), load(DeviceError::Ended)] {
            assert_eq!(find_loss(&error, &[], Some(&retry_budgets)), None, "{error:#}");
        }
        retry_budgets.reset();
        for error in errors() {
            assert_eq!(find_loss(&error, &[], Some(&retry_budgets)), None, "a token was generated since the loss");
        }
    }

    #[test]
    fn failed_peer_transfers_are_distinguished_from_failed_compute_work() {
        let device = |name: &str| CpuDevice::new(name, 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
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
                    // With a single server there is no peer to send to.
                    assert_eq!(find_loss(&error, &both[..2], None), None, "{error:#}");
                }
            }
        }
        for name in [format!("{SERVER}/CPU"), SERVER.to_owned(), "10.0.0.7:1 (device 0, sending)".to_owned()] {
            assert_eq!(find_loss(&sched(remote(&name)).into(), &both, None), None, "{name}");
        }
    }

    #[test]
    fn retry_time_adds_up_until_there_is_progress() {
        let limit = Duration::from_millis(200);
        let reason = "10.0.0.5:50052 (device 0, sending): cannot".to_owned();
        for lost in [lost(), Loss::PeerTransfer { endpoint: SERVER.to_owned(), reason }] {
            let mut retry_budgets = RetryBudgets::new(limit);
            // Every reopen succeeds, and the server is lost again at once.
            let (start, mut before) = (Instant::now(), limit);
            let end = loop {
                let reached = retry_budgets.retry(&lost, |left| {
                    assert!(left <= before);
                    before = left;
                    Ok(())
                });
                match reached {
                    Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "the retries do not end"),
                    Err(end) => break end.to_string(),
                }
            };
            assert!(end.starts_with(&lost.to_string()) && end.contains("200ms"), "{end}");
            retry_budgets.reset();
            assert!(retry_budgets.retry(&lost, |_| Ok(())).is_ok());
            // Another server has a budget of its own.
            let other = Loss::Server { endpoint: OTHER.to_owned(), reason: String::new() };
            let whole = retry_budgets.retry(&other, |left| {
                assert_eq!(left, limit);
                Ok(())
            });
            assert!(whole.is_ok());
        }
    }

    fn refused() -> ConnectError {
        ConnectError::Connect {
            endpoint: SERVER.to_owned(),
            error: io::Error::from(ErrorKind::ConnectionRefused).into(),
        }
    }

    fn unknown() -> RegistryError {
        RegistryError::UnknownDevice { name: format!("{SERVER}/CUDA0"), available: format!("{SERVER}/CPU") }
    }

    fn nameless() -> RegistryError {
        let error = io::Error::other("the resolver is away");
        RegistryError::Endpoint(ConnectError::Host { endpoint: SERVER.to_owned(), error })
    }

    #[test]
    fn a_changed_server_is_distinguished_from_an_unreachable_one() {
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
        // The error of `open`; whether it is tried only once; the start of the message; text that the message contains.
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
    fn retries_continue_while_devices_or_the_host_name_are_missing() {
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

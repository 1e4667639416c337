//! Recovery from lost servers: finds the loss that caused an error, and limits the time of retries.
//!
//! A lost connection takes everything with it that was loaded on the server. Only the runtime can compute that again, so devices
//! do not reconnect by themselves. After an error, a runtime
//! 1. finds the loss ([`Loss::find`]), and drops its schedulers and queues of all devices;
//! 2. opens the devices of a lost server again ([`RetryBudgets::reopen`]): regions and plans of the old ones are useless;
//! 3. loads the weights of these devices ([`weights`](crate::weights)), makes a new scheduler, and repeats the lost work;
//! 4. restores the budgets when the work has got further than before ([`RetryBudgets::reset`]).
//!
//! ```no_run
//! use fanout::device::Device;
//! use fanout::recovery::{Loss, RetryBudgets};
//! use fanout::registry::{Options, Registry};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! # fn load_weights(device: &Arc<dyn Device>) {}
//! # fn work(devices: &[Arc<dyn Device>], budgets: &mut RetryBudgets) -> Result<(), fanout::sched::SchedError> { Ok(()) }
//! let (registry, mut options) = (Registry::detect(), Options::default());
//! let mut devices = registry.open("host-a:50052,host-b:50052", &options)?;
//! devices.iter().for_each(load_weights);
//! let mut budgets = RetryBudgets::new(Duration::from_secs(60));
//! while let Err(error) = work(&devices, &mut budgets) {
//!     let Some(loss) = Loss::find(&error, &devices, Some(&budgets)) else { return Err(error.into()) };
//!     let reopened = budgets.reopen(&loss, &mut devices, |names, left| {
//!         options.rpc.retry = left;
//!         options.rpc.connect_timeout = options.rpc.connect_timeout.min(left);
//!         registry.open(names, &options)
//!     })?;
//!     reopened.into_iter().for_each(|number| load_weights(&devices[number]));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod retry;
#[cfg(test)]
mod tests;

use crate::device::{Device, DeviceError};
use crate::registry::RegistryError;
use crate::rpc::client::{ConnectError, is_sending_queue};
use crate::sched::SchedError;
use crate::weights::WeightsError;
pub use retry::{ReconnectError, RetryBudgets};
use std::error::Error;
use std::iter;
use std::sync::Arc;
use thiserror::Error;

/// A failure that a runtime can recover from.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The connection to a server is lost, and with it everything that was loaded there.
    #[error("{endpoint}: connection lost: {reason}")]
    Server {
        /// `host:port`.
        endpoint: String,
        /// The error on the connection.
        reason: String,
    },
    /// A server is out of memory, probably because it has not yet noticed that an earlier connection is lost, and still holds that
    /// connection's memory. Later retries may find it free; nothing that is loaded is lost.
    #[error("{endpoint}: {reason}; it may still hold the memory of the lost connection")]
    MemoryHeld {
        /// `host:port`.
        endpoint: String,
        /// The server's error message.
        reason: String,
    },
    /// A direct transfer between two servers failed, while both are still connected to this process and keep what is loaded.
    #[error("{reason}")]
    PeerTransfer {
        /// The sending server, `host:port`.
        endpoint: String,
        /// The server's error message.
        reason: String,
    },
}

impl Loss {
    /// The loss that caused an error of this crate, or `None` if no loss did. `error` or one of its
    /// [sources](std::error::Error::source) is a [`DeviceError`], [`SchedError`], [`WeightsError`], [`RegistryError`] or
    /// [`ConnectError`]; from an error type of their own that hides the error of this crate, callers pass the inner error.
    ///
    /// `devices` are all devices of the failed work. If the error names no lost connection, the devices of servers are probed
    /// ([`Device::memory`]), because the error of one server may only report that another server did not send: this blocks until the
    /// servers reply, or are lost, too. `budgets` has the servers that were lost since the last progress, and so may still hold memory;
    /// with `None`, an error for lack of memory is no loss.
    pub fn find(
        error: &(dyn Error + 'static),
        devices: &[Arc<dyn Device>],
        budgets: Option<&RetryBudgets>,
    ) -> Option<Loss> {
        let chain = || iter::successors(Some(error), |&error| error.source()).filter_map(device_failure);
        let probed = || {
            let remote = devices.iter().filter(|device| device.endpoint().is_some());
            remote.filter_map(|device| device.memory().err()).find_map(|error| lost_server(&error))
        };
        let held = || chain().find_map(|failure| memory_held(failure, devices, budgets?));
        let transfer = || chain().find_map(|(_, error)| failed_peer_transfer(error, devices));
        chain().find_map(|(_, error)| lost_server(error)).or_else(probed).or_else(held).or_else(transfer)
    }

    /// The server to which the retry time is charged, `host:port`.
    pub fn endpoint(&self) -> &str {
        match self {
            Loss::Server { endpoint, .. } | Loss::MemoryHeld { endpoint, .. } | Loss::PeerTransfer { endpoint, .. } => {
                endpoint
            }
        }
    }
}

/// The failure of a device that an error reports, with the device's name if the error has it.
fn device_failure<'a>(error: &'a (dyn Error + 'static)) -> Option<(Option<&'a str>, &'a DeviceError)> {
    if let Some(error) = error.downcast_ref::<SchedError>() {
        return error.device_failure().map(|(device, error)| (Some(device), error));
    }
    if let Some(WeightsError::Device { device, error }) = error.downcast_ref() {
        return Some((Some(device), error));
    }
    let of_registry = || match error.downcast_ref()? {
        RegistryError::Device(error) | RegistryError::Endpoint(ConnectError::Device(error)) => Some(error),
        _ => None,
    };
    let of_connection = || match error.downcast_ref()? {
        ConnectError::Device(error) => Some(error),
        _ => None,
    };
    Some((None, error.downcast_ref().or_else(of_registry).or_else(of_connection)?))
}

/// The lost connection that the error reports, if it reports one.
fn lost_server(error: &DeviceError) -> Option<Loss> {
    match error.root() {
        DeviceError::ConnectionLost { endpoint, reason } => {
            Some(Loss::Server { endpoint: endpoint.clone(), reason: reason.clone() })
        }
        _ => None,
    }
}

/// An out-of-memory error of a server that was lost since the last progress.
fn memory_held(
    (device, error): (Option<&str>, &DeviceError),
    devices: &[Arc<dyn Device>],
    budgets: &RetryBudgets,
) -> Option<Loss> {
    let full @ DeviceError::OutOfMemory { .. } = error.root() else { return None };
    let device = devices.iter().find(|other| Some(&*other.info().name) == device)?;
    let endpoint = device.endpoint().filter(|endpoint| budgets.was_lost(endpoint))?;
    Some(Loss::MemoryHeld { endpoint: endpoint.to_owned(), reason: full.to_string() })
}

/// A failed transfer from one server to another. The sending queue reports it, other than an error of compute work, and only the
/// former may be a broken connection between the servers, which a retry can get past.
fn failed_peer_transfer(error: &DeviceError, devices: &[Arc<dyn Device>]) -> Option<Loss> {
    let error @ DeviceError::Remote { device: sender, .. } = error.root() else { return None };
    let servers = || devices.iter().filter_map(|device| device.endpoint());
    let first = servers().next()?;
    servers().find(|other| *other != first)?;
    let endpoint = servers().find(|endpoint| is_sending_queue(sender, endpoint))?.to_owned();
    Some(Loss::PeerTransfer { endpoint, reason: error.to_string() })
}

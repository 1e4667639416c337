//! Why devices cannot be named, registered or opened.

use crate::device::DeviceError;
#[cfg(feature = "client")]
use crate::rpc::client::ConnectError;
use thiserror::Error;

/// A list of devices that cannot be opened, or a device that cannot be registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// A name or number of no device.
    #[error("no device {name:?}; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// Names of what there is.
        known: String,
    },
    /// The name of a device whose backend has none on this machine, or the number of a GPU where there is none.
    #[error("no device {name:?}: {why}; there are: {known}")]
    NoGpu {
        /// What was asked for.
        name: String,
        /// What is missing, and what to do.
        why: String,
        /// Names of what there is.
        known: String,
    },
    /// A GPU that there are no kernels for.
    #[error("{name} cannot be used: {reason}{}", instead(known))]
    Unusable {
        /// The device.
        name: String,
        /// What it lacks.
        reason: String,
        /// Names of what can be used; empty where only this one was looked at.
        known: String,
    },
    /// Neither one size of memory nor one for each device.
    #[error("{sizes} sizes of memory for {devices} devices: give one for each of them, or a single one for all")]
    Sizes {
        /// How many were given.
        sizes: usize,
        /// How many devices.
        devices: usize,
    },
    /// A registered device more than once in a list: it is open already, and only once.
    #[error("{name} is in the list more than once; a device that was registered, or is a server's, can be used once")]
    Twice {
        /// The device.
        name: String,
    },
    /// A device to be registered whose name is another one's.
    #[error("a device {name:?} cannot be registered: there is one of that name")]
    Taken {
        /// The name.
        name: String,
    },
    /// A device to be registered that no list could name.
    #[error("a device {name:?} cannot be registered: {reason}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The CPU device cannot start.
    #[error("{name}: {source}")]
    Open {
        /// The device.
        name: String,
        /// The system's word.
        source: std::io::Error,
    },
    /// A server cannot be reached, or is none.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Endpoint(#[from] ConnectError),
    /// Several servers cannot be reached, or are none.
    #[cfg(feature = "client")]
    #[error("{} of {servers} servers cannot be used: {}", errors.len(), joined(errors))]
    Endpoints {
        /// How many the list has.
        servers: usize,
        /// Why not, of each.
        errors: Vec<ConnectError>,
    },
    /// A GPU cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn instead(known: &str) -> String {
    if known.is_empty() { String::new() } else { format!("; there are: {known}") }
}

#[cfg(feature = "client")]
fn joined(errors: &[ConnectError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

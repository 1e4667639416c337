//! Errors of the registry: a list that names no device, a device that cannot be registered or opened.

use crate::device::DeviceError;
#[cfg(feature = "client")]
use crate::rpc::client::ConnectError;
use crate::size::Bytes;
use thiserror::Error;

/// A list of devices cannot be opened, or a device cannot be registered.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// No device has this name or number.
    #[error("no device {name:?}; available: {available}{}", name_hint(name))]
    UnknownDevice {
        /// The name in the list.
        name: String,
        /// Names of the usable devices.
        available: String,
    },
    /// The name belongs to a backend without devices on this machine, or it is the number of a GPU and the machine has none.
    #[error("no device {name:?}: {reason}; available: {available}")]
    NoGpu {
        /// The name in the list.
        name: String,
        /// The missing component, and how to install it.
        reason: String,
        /// Names of the usable devices.
        available: String,
    },
    /// A device that was found but is not supported: a GPU for which fanout has no kernels.
    #[error("{name} cannot be used: {reason}{}", or_available(available))]
    Unusable {
        /// The device.
        name: String,
        /// The reason.
        reason: String,
        /// Names of the usable devices; empty if a single device was opened, not a list.
        available: String,
    },
    /// The number of memory sizes is neither 1 nor the number of devices.
    #[error("{sizes} memory sizes for {devices} devices: give one size for each device, or one for all")]
    MemorySizeCount {
        /// The number of sizes.
        sizes: usize,
        /// The number of devices.
        devices: usize,
    },
    /// Memory sizes for a list without a device of this machine.
    #[error(
        "all devices belong to servers, whose memory their own --mem limits; sizes here limit devices of this machine only"
    )]
    MemoryOfServers,
    /// Memory limits of one device that are together more than it has.
    #[error(
        "{name}: the limits of {devices} device{} on it are {} together, more than its {} of memory: a single size counts \
         for each device; give smaller sizes",
        if *devices == 1 { "" } else { "s" },
        Bytes(*requested),
        Bytes(*total)
    )]
    BeyondMachine {
        /// The device.
        name: String,
        /// How many entries of the list are this device.
        devices: u64,
        /// Sum of their limits, in bytes.
        requested: u64,
        /// Memory of the device, used or free, in bytes.
        total: u64,
    },
    /// A registered or remote device is listed more than once. It is already open, so it can be used only once.
    #[error("{name} is in the list more than once; a registered device or a device of a server can be used only once")]
    ListedTwice {
        /// The device.
        name: String,
    },
    /// A device to be registered has the name of another device.
    #[error("device {name:?} cannot be registered: the name is in use")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A device to be registered has a name that lists cannot contain, or that is reserved.
    #[error("device {name:?} cannot be registered: {reason}")]
    InvalidName {
        /// The name.
        name: String,
        /// The violated rule.
        reason: &'static str,
    },
    /// The CPU device cannot start its threads.
    #[error(
        "{name} cannot start its threads: {error}; raise the limits of threads (ulimit -u) and of memory (ulimit -v)"
    )]
    CpuStart {
        /// The device.
        name: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// Connecting to a server failed.
    #[cfg(feature = "client")]
    #[error(transparent)]
    Endpoint(#[from] ConnectError),
    /// Connecting to several servers failed.
    #[cfg(feature = "client")]
    #[error("{} of {servers} servers cannot be used: {}", errors.len(), joined(errors))]
    Endpoints {
        /// The number of servers in the list.
        servers: usize,
        /// The errors, one for each server that failed.
        errors: Vec<ConnectError>,
    },
    /// A GPU cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl RegistryError {
    /// Whether the same list may be opened later without any change of configuration: servers cannot be reached, and none of them
    /// refuses this client for good.
    #[cfg(feature = "client")]
    pub fn is_transient(&self) -> bool {
        match self {
            RegistryError::Endpoint(error) => error.is_transient(),
            RegistryError::Endpoints { errors, .. } => errors.iter().all(ConnectError::is_transient),
            _ => false,
        }
    }
}

fn or_available(available: &str) -> String {
    if available.is_empty() { String::new() } else { format!("; available: {available}") }
}

#[cfg(feature = "client")]
fn joined(errors: &[ConnectError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// What is likely wrong with a name: empty, or a host without a port. Empty for other names.
fn name_hint(name: &str) -> &'static str {
    if name.is_empty() {
        return "; a name is empty: the list has a comma too many, or is empty";
    }
    let host = !name.contains(':') && (name == "localhost" || name.contains('.'));
    if cfg!(feature = "client") && host {
        "; the devices of a server are named HOST:PORT: the port is missing"
    } else {
        ""
    }
}

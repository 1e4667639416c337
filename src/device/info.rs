//! Facts about devices: identity, copy domain, limits, and what they report about themselves.

use crate::setters::setters;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A device's identity within this process.
///
/// Code compares identities: whether a buffer belongs to a device, whether a plan was made for these devices. Names are for
/// people; two devices may share one. A wrapper that hands out the buffers of the device that it wraps has that device's identity,
/// because [`Buffer::device`](super::Buffer::device) must equal the `id` of the device that the caller sees.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceId(u64);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl DeviceId {
    /// An identity that no other device of this process has or had.
    pub fn unique() -> DeviceId {
        DeviceId(NEXT_ID.fetch_add(1, Ordering::Relaxed))
    }
}

/// A set of devices that copy from each other's memory by themselves ([`Queue::copy_from`](super::Queue::copy_from)): all
/// CPU devices of the process, the GPUs of one driver, the devices behind one connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Domain {
    name: Arc<str>,
    /// 0 for a domain that its name identifies.
    instance: u64,
}

impl Domain {
    /// The domain of this name: the same one wherever the name is given.
    pub fn named(name: impl Into<Arc<str>>) -> Domain {
        Domain { name: name.into(), instance: 0 }
    }

    /// A domain that differs from every other one, whatever their names.
    pub fn unique(name: impl Into<Arc<str>>) -> Domain {
        Domain { name: name.into(), instance: NEXT_ID.fetch_add(1, Ordering::Relaxed) }
    }

    /// Its name, for people.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's processors.
    Cpu,
    /// A GPU.
    Gpu,
}

/// Facts about a device that do not change. Made by [`DeviceInfo::new`]; the fields may then be set.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its identity.
    pub id: DeviceId,
    /// Addressable name: `CPU`, `CUDA0`. For people and for lists of devices; never compared to tell devices apart.
    pub name: String,
    /// Model, threads at first, instruction sets: for people. [`Device::features`](super::Device::features) has the threads of now.
    pub description: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Every tensor's first byte lies at a multiple of this: a power of two.
    pub alignment: u64,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
    /// Devices of one domain copy from each other's memory by themselves. Between two domains bytes go through the host,
    /// unless the device has [`PeerCopies`](super::PeerCopies).
    pub domain: Domain,
    /// How its queues behave.
    pub caps: Caps,
}

impl DeviceInfo {
    /// A new identity, in a copy domain of its own. Alignment is 1, buffers are unlimited, nothing else is promised.
    pub fn new(name: impl Into<String>, kind: DeviceKind) -> DeviceInfo {
        let name = name.into();
        DeviceInfo {
            id: DeviceId::unique(),
            description: String::new(),
            kind,
            alignment: 1,
            max_buffer: u64::MAX,
            domain: Domain::unique(&*name),
            caps: Caps::default(),
            name,
        }
    }
}

setters!(DeviceInfo {
    with_description description: String,
    with_alignment alignment: u64,
    with_max_buffer max_buffer: u64,
    with_domain domain: Domain,
    with_caps caps: Caps,
});

/// How the queues of a device behave. What a device can do beyond the core is not listed here: the capability itself answers
/// ([`Device::pinned_memory`](super::Device::pinned_memory) and its siblings).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Caps {
    /// Submitted work proceeds while the submitter does something else.
    pub asynchronous: bool,
    /// [`Queue::wait`](super::Queue::wait) returns at once for a point of its domain: later work waits, the caller does not.
    pub events: bool,
}

setters!(Caps {
    with_asynchronous asynchronous: bool,
    with_events events: bool,
});

/// Traffic on the connection of a remote device. Devices of one endpoint share it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LinkStats {
    /// The server, as it was given: `host:port`.
    pub endpoint: String,
    /// Bytes sent to the server.
    pub sent: u64,
    /// Bytes received from the server.
    pub received: u64,
    /// How often a caller here had to wait for the server.
    pub waits: u64,
}

impl LinkStats {
    /// A connection without traffic so far, to a server `host:port`.
    pub fn new(endpoint: impl Into<String>) -> LinkStats {
        LinkStats { endpoint: endpoint.into(), sent: 0, received: 0, waits: 0 }
    }
}

setters!(LinkStats {
    with_sent sent: u64,
    with_received received: u64,
    with_waits waits: u64,
});

/// Something that a device has or is set to, for people and for reports: an instruction set, a driver's version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Feature {
    /// What it is; the same for all devices that have it.
    pub name: String,
    /// Which, or how much of it.
    pub value: String,
}

impl Feature {
    /// A feature with its value as text.
    pub fn new(name: impl Into<String>, value: impl ToString) -> Feature {
        Feature { name: name.into(), value: value.to_string() }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.value)
    }
}

/// A device's memory in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Not in use by anyone.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

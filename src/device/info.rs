//! Descriptions of devices: identity, copy domain, limits, queue behaviour, features and traffic counters.

use crate::setters::setters;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A device's identity within this process.
///
/// Code compares identities, not names: whether a buffer belongs to a device, whether a plan was made for these devices. Names
/// are for users, and two devices may share one. A wrapper that returns buffers of the wrapped device has the wrapped device's
/// identity, because [`Buffer::device`](super::Buffer::device) must equal the `id` of the device that the caller sees.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceId(u64);

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl DeviceId {
    /// A new identity. Identities are not reused within a process.
    pub fn unique() -> DeviceId {
        DeviceId(NEXT_ID.fetch_add(1, Ordering::Relaxed))
    }
}

/// A copy domain: a set of devices that copy from each other's memory without the host
/// ([`Queue::copy_from`](super::Queue::copy_from)). Examples are all CPU devices of the process, the GPUs of one driver, and
/// the devices behind one connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Domain {
    name: Arc<str>,
    /// 0 for a domain that its name identifies.
    instance: u64,
}

impl Domain {
    /// The domain with this name. Two calls with the same name return the same domain.
    pub fn named(name: impl Into<Arc<str>>) -> Domain {
        Domain { name: name.into(), instance: 0 }
    }

    /// A new domain that differs from all others, also from those with the same name.
    pub fn unique(name: impl Into<Arc<str>>) -> Domain {
        Domain { name: name.into(), instance: NEXT_ID.fetch_add(1, Ordering::Relaxed) }
    }

    /// The domain's name, for users.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The kind of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The processors of this host or of a server.
    Cpu,
    /// A GPU.
    Gpu,
}

/// The unchanging description of a device. Made by [`DeviceInfo::new`]; the fields may then be set.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Identity of the device.
    pub id: DeviceId,
    /// Name: `CPU`, `CUDA0`. For users and for lists of devices; compare `id` to distinguish devices.
    pub name: String,
    /// Text for users: model, initial number of threads, instruction sets. [`Device::features`](super::Device::features) has
    /// the current number of threads.
    pub description: String,
    /// CPU or GPU.
    pub kind: DeviceKind,
    /// Alignment in bytes of each tensor's first byte within its buffer: a power of two.
    pub alignment: u64,
    /// Largest buffer in bytes.
    pub max_buffer: u64,
    /// Copy domain. Copies between two domains go through the host, unless the destination device has
    /// [`PeerCopies`](super::PeerCopies).
    pub domain: Domain,
    /// Behaviour of the device's queues.
    pub caps: Caps,
}

impl DeviceInfo {
    /// A description with a new identity, a new copy domain, alignment 1, no limit on buffer sizes and default [`Caps`].
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

/// Behaviour of a device's queues, like `ggml_backend_dev_caps`. Optional capabilities are not listed here: their accessors
/// report them ([`Device::pinned_memory`](super::Device::pinned_memory) and others).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Caps {
    /// Submitted work runs concurrently with the submitting thread.
    pub asynchronous: bool,
    /// [`Queue::wait`](super::Queue::wait) for a point of the same domain does not block the caller: only later work waits.
    pub events: bool,
}

setters!(Caps {
    with_asynchronous asynchronous: bool,
    with_events events: bool,
});

/// Traffic counters of a remote device's connection, which all devices of one endpoint share.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LinkStats {
    /// The server's address as the user wrote it: `host:port`.
    pub endpoint: String,
    /// Bytes sent to the server.
    pub sent: u64,
    /// The part of `sent` in messages that carry a graph. A graph is sent once and then run by its number, except to servers of ggml's
    /// protocol that cannot run one again.
    pub sent_graphs: u64,
    /// Bytes received from the server.
    pub received: u64,
    /// How many times a thread of this process blocked for a reply of the server.
    pub waits: u64,
}

impl LinkStats {
    /// Counters at 0 for a server `host:port`.
    pub fn new(endpoint: impl Into<String>) -> LinkStats {
        LinkStats { endpoint: endpoint.into(), sent: 0, sent_graphs: 0, received: 0, waits: 0 }
    }
}

setters!(LinkStats {
    with_sent sent: u64,
    with_sent_graphs sent_graphs: u64,
    with_received received: u64,
    with_waits waits: u64,
});

/// A hardware feature or a setting of a device, for reports: an instruction set, a driver's version.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Feature {
    /// Name of the feature; the same on all devices that have it.
    pub name: String,
    /// Value, as text.
    pub value: String,
}

impl Feature {
    /// A feature; the value is formatted as text.
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
    /// Bytes that can be allocated now.
    pub free: u64,
    /// Bytes in total.
    pub total: u64,
}

/// Time to load a module of kernels of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleLoad {
    /// Name of the module: `mul_mat_mma_q4_k.sm_80`.
    pub name: String,
    /// Time until it was loaded.
    pub time: Duration,
}

impl ModuleLoad {
    /// A module that loads faster than this was in the driver's cache: compiling a small one takes longer.
    pub const MAX_CACHED_TIME: Duration = Duration::from_millis(5);

    /// Whether the driver had the module's code in its cache. Drivers do not tell, so this is judged by the time.
    pub fn was_cached(&self) -> bool {
        self.time < ModuleLoad::MAX_CACHED_TIME
    }
}

/// How much a device has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceActivity {
    /// For how long it has worked since it was opened: the growth over a time is its load.
    pub busy: Duration,
    /// Queues that wait for their turn.
    pub waiting: usize,
}

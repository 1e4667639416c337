//! The state of a server for its operator: `/api/status`, the status page and `rpc-server --status` show it.

use serde::{Deserialize, Serialize};

/// The state of a server. Sizes are in bytes, times in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ServerStatus {
    /// Program and version.
    pub build: String,
    /// `ready` or `draining`.
    pub state: String,
    /// [`machine_id`] of the server: servers with the same one share cores and memory, whatever their addresses are. Empty: not known.
    pub machine: String,
    /// The server's clock: time since 1970, in UTC.
    pub time: f64,
    /// Time since the start of the process.
    pub uptime: f64,
    /// The ports on which the server listens.
    pub listeners: Vec<ListenerStatus>,
    /// The devices. A client with a key sees those that it may use.
    pub devices: Vec<DeviceStatus>,
    /// Host memory of clients outside of devices.
    pub host_memory: HostMemoryStatus,
    /// Means of the last minute, or since the start of the server.
    pub rates: Rates,
    /// Sums since the start of the server.
    pub totals: Totals,
    /// Transfers, groups and connections between this server and others.
    pub links: Links,
    /// The sessions that run, in the order of their beginning, except for the one that asks. At most [`ServerStatus::MAX_SESSIONS`].
    pub sessions: Vec<SessionStatus>,
    /// Number of these sessions, listed or not.
    pub session_count: usize,
    /// The clients' keys with sessions, by name and at most 256. Empty for clients without a key, and over HTTP.
    pub keys: Vec<KeyStatus>,
    /// Limits on what clients may use, and how far they are used, as names and values. Empty over HTTP.
    pub limits: Vec<(String, String)>,
}

/// Identifies the running system that this process is part of, until it starts again: the boot id of Linux, which its containers have
/// in common. `None` on other systems.
pub fn machine_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

impl ServerStatus {
    /// The most sessions that are listed.
    pub const MAX_SESSIONS: usize = 256;
}

/// A port on which a server listens.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListenerStatus {
    /// The port.
    pub port: u16,
    /// Versions of ggml's protocol: `8.0, else 7.0; 3.x; gen0`.
    pub protocol: String,
    /// Whether clients connect over TLS.
    pub tls: bool,
}

/// A device of a server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceStatus {
    /// Its name on the server, such as `CUDA0`.
    pub name: String,
    /// For users, such as the model of a GPU.
    pub description: String,
    /// Memory that is free and in all. `None`: the device has failed, or was not asked yet.
    pub memory: Option<DeviceMemoryStatus>,
    /// Share of the last minute in which it has worked, 0 to 1. `None`: the device does not know.
    pub load: Option<f64>,
    /// Why it is lost, if it is.
    pub lost: Option<String>,
}

/// Memory of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceMemoryStatus {
    /// Bytes that can be allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// Host memory that clients use outside of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostMemoryStatus {
    /// Used bytes.
    pub used: u64,
    /// The limit.
    pub limit: u64,
    /// The most that was used.
    pub peak: u64,
}

/// Means over a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// That time.
    pub seconds: f64,
    /// Bytes per second from clients.
    pub received: f64,
    /// Bytes per second to clients.
    pub sent: f64,
    /// Graphs per second.
    pub graphs: f64,
}

/// Sums since the start of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Sessions.
    pub sessions: u64,
    /// Bytes from clients.
    pub received: u64,
    /// Bytes to clients.
    pub sent: u64,
    /// Graphs.
    pub graphs: u64,
    /// Time in which devices worked for clients.
    pub device_time: f64,
}

/// Transfers, groups and connections between this server and others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Links {
    /// Tensor groups with ranks on this server.
    pub groups: usize,
    /// Tokens with which other servers may still send data.
    pub transfers: usize,
}

/// A client's key with sessions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyStatus {
    /// Name of the key on the server.
    pub name: String,
    /// Number of its open sessions.
    pub sessions: u32,
    /// Device memory that they hold.
    pub memory: u64,
}

/// A session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionStatus {
    /// Its number since the start of the server, from 1.
    pub number: u64,
    /// The client's address, with the name of its key. Only clients of loopback see it.
    pub peer: Option<String>,
    /// Version of ggml's protocol.
    pub protocol: String,
    /// Whether the client uses the extension.
    pub extended: bool,
    /// Time since it began.
    pub seconds: f64,
    /// Bytes from the client.
    pub received: u64,
    /// Bytes to the client.
    pub sent: u64,
    /// Graphs.
    pub graphs: u64,
    /// Time in which devices worked for it.
    pub device_time: f64,
    /// Device memory that it holds.
    pub memory: u64,
    /// The most that it has held.
    pub peak_memory: u64,
    /// The session's activity: `idle`, `receiving`, `sending`, or the name of a request.
    pub activity: String,
    /// For how long.
    pub activity_seconds: f64,
}

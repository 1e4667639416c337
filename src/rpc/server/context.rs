//! Server context: everything that the sessions of a server share, read-only or synchronized by itself.
//!
//! The listener and admission control are not part of it: only `mod.rs` accepts and rejects connections.

use std::sync::Arc;

use super::audit::SessionAudit;
use super::collectives::Rendezvous;
use super::gguf_index::GgufIndex;
use super::groups::GroupTable;
use super::hangup_watch::HangupWatch;
use super::host_memory::HostMemory;
use super::http::HttpPool;
use super::lifecycle::Lifecycle;
use super::limits::Config;
use super::listen::ListenerInfo;
use super::log_limits::{LogKind, LogLimits};
use super::peers::PeerAllowlist;
use super::statistics::Statistics;
use super::tenants::Tenants;
use super::tensor_cache::TensorCache;
use super::transfer_tokens::TokenTable;
use super::versions::VersionProbe;
use crate::device::Device;
use crate::rpc::transport::PeerAddr;

/// Shared by all sessions of a server.
pub(super) struct ServerContext {
    /// All devices. Sessions use [`ServerContext::devices_of`] instead.
    pub(super) all_devices: Vec<Arc<dyn Device>>,
    pub(super) config: Config,
    /// Limits the log lines that clients cause.
    pub(super) logs: Arc<LogLimits>,
    /// The addresses on which the server listens.
    pub(super) listeners: Vec<ListenerInfo>,
    /// Tensor data on disk for SET_TENSOR_HASH. `None`: disabled.
    pub(super) tensor_cache: Option<TensorCache>,
    /// Tokens for transfers from other servers. One table for all sessions: a token that one session issues arrives on the
    /// connection of another session.
    pub(super) transfer_tokens: Arc<TokenTable>,
    /// Groups for collectives. One table for all sessions: a group that one session joins is attached on the connection of
    /// another.
    pub(super) groups: Arc<GroupTable>,
    /// Allow-list of the servers that this server may connect to.
    pub(super) peers: Arc<PeerAllowlist>,
    /// Index of the GGUF files for load by digest. `None`: disabled.
    pub(super) gguf_index: Option<GgufIndex>,
    pub(super) lifecycle: Arc<Lifecycle>,
    /// Host memory of all sessions.
    pub(super) host_memory: Arc<HostMemory>,
    pub(super) statistics: Statistics,
    /// Connections that show the state of the server.
    pub(super) http: HttpPool,
    pub(super) hangup_watch: HangupWatch,
    /// Limits per client address.
    pub(super) tenants: Arc<Tenants>,
    /// The version of ggml's protocol that works, per client address.
    pub(super) version_probe: VersionProbe,
    /// Pending COMM_INITs.
    pub(super) rendezvous: Rendezvous,
}

impl ServerContext {
    /// Counts a graph of a session. The log tells of the data that has arrived for it, if that is much.
    pub(super) fn count_graph(&self, audit: &SessionAudit) {
        audit.count_graph();
        if let Some(line) = audit.arrived_data() {
            self.logs.log(audit.peer(), LogKind::DataArrived, format_args!("{line}"));
        }
    }

    /// The devices of the client at `peer`, which names a device by its position in this list: the devices of its key, or else all.
    pub(super) fn devices_of(&self, peer: PeerAddr) -> Vec<&Arc<dyn Device>> {
        match self.tenants.devices(peer) {
            Some(devices) => devices.iter().filter_map(|&at| self.all_devices.get(at as usize)).collect(),
            None => self.all_devices.iter().collect(),
        }
    }
}

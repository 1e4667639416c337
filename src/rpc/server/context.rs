//! What all sessions of a server share: its devices, its settings, and its stores of bytes.
//!
//! This is the base that sessions stand on. It has no listener and admits nobody: that is for the server's top.

use std::sync::Arc;

use super::gguf_index::GgufIndex;
use super::lifecycle::Lifecycle;
use super::limits::Config;
use super::peers::PeerList;
use super::tensor_cache::Cache;
use super::transfer_tokens::TokenTable;
use crate::device::Device;

/// What sessions share.
pub(super) struct ServerContext {
    /// A client names a device by its position here.
    pub(super) devices: Vec<Arc<dyn Device>>,
    pub(super) config: Config,
    /// Tensor data for SET_TENSOR_HASH.
    pub(super) tensor_cache: Option<Cache>,
    /// Tokens for transfers from other servers. One table: a token of one session arrives on another session's connection.
    pub(super) transfer_tokens: Arc<TokenTable>,
    /// The servers that this one may dial.
    pub(super) peers: Arc<PeerList>,
    /// GGUF files for loads by digest.
    pub(super) models: Option<GgufIndex>,
    pub(super) lifecycle: Arc<Lifecycle>,
}

//! Errors of ggml's requests that the session core does not check.

use thiserror::Error;

use super::graph_store::MissingGraph;
use super::graphs::StoredId;
use crate::rpc::server::collectives::ExchangeError;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::transport::PeerAddr;

/// An invalid request. The client is at fault.
#[derive(Debug, Error)]
pub(super) enum GgmlError {
    #[error("device {0} has no last graph: none was computed, or a buffer of it was freed")]
    NoLastGraph(u32),
    #[error("device {} has no graph {}: {reason}", id.device, id.uid)]
    NoStoredGraph { id: StoredId, reason: MissingGraph },
    #[error("{count} rows of {size} bytes: expected at least one row with at least one byte")]
    NoRows { size: u64, count: u64 },
    #[error(
        "{count} rows of {size} bytes, {stride} bytes apart from offset {offset} on, reach past their tensor of {extent} \
         bytes"
    )]
    RowsOutsideTensor { offset: u64, size: u64, count: u64, stride: u64, extent: u64 },
    #[error("rows of {size} bytes that are {stride} bytes apart overlap: they can be written, but not read")]
    OverlappingRows { size: u64, stride: u64 },
    #[error("expected {expected} bytes of rows, got {have}")]
    RowBytes { expected: u64, have: u64 },
    #[error("the client has closed its connection while the server waited for the other server")]
    HungUpDuringCommInit,
    #[error("device {0} has no connection for collectives: COMM_INIT was answered 0, or not sent")]
    NoCommunicator(u32),
    #[error("tensor {name:?} cannot be reduced: expected a tensor of type F32 without gaps on device {device}")]
    NotReducible { name: String, device: u32 },
    #[error("the sum with the other server, {peer}, has failed: {error}")]
    Exchange { peer: PeerAddr, error: ExchangeError },
}

impl From<GgmlError> for SessionError {
    fn from(e: GgmlError) -> SessionError {
        SessionError::front_end(e)
    }
}

//! What is wrong with a request of ggml's, beyond what the session core checks.

use thiserror::Error;

use crate::rpc::server::session::failure::SessionError;

/// A request that cannot be served: the client's fault.
#[derive(Debug, Error)]
pub(super) enum GgmlError {
    #[error("device {0} has no last graph: none was computed, or a buffer of it was freed")]
    NoGraph(u32),
}

impl From<GgmlError> for SessionError {
    fn from(e: GgmlError) -> SessionError {
        SessionError::refused(e)
    }
}

//! Errors of ggml's requests that the session core does not check.

use thiserror::Error;

use crate::rpc::server::session::failure::SessionError;

/// An invalid request. The client is at fault.
#[derive(Debug, Error)]
pub(super) enum GgmlError {
    #[error("device {0} has no last graph: none was computed, or a buffer of it was freed")]
    NoLastGraph(u32),
}

impl From<GgmlError> for SessionError {
    fn from(e: GgmlError) -> SessionError {
        SessionError::front_end(e)
    }
}

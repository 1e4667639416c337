//! COMM_INIT of protocol 8.0: a client asks two servers to connect, so that they can add tensors without it.
//!
//! Collectives are not served: the reply is 0, and the client adds through itself, which takes longer and gives the same result.
//! llama.cpp's server would listen on every interface, or connect to any host, on any client's request.

use log::warn;

use super::session::GgmlSession;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::wire::{CommInit, Response};

/// Rank of the server that connects to the other one.
const CONNECTING_RANK: u32 = 1;

impl GgmlSession<'_> {
    /// COMM_INIT: replies that the device is not connected.
    pub(super) fn comm_init(&mut self, request: &CommInit) -> Result<(), SessionError> {
        // One line per session: a client may send any number of these requests.
        if request.rank == CONNECTING_RANK && !std::mem::replace(&mut self.warned_of_collectives, true) {
            // Rank 0 may be llama.cpp's server, which waits for this one without a limit, and its client with it.
            warn!(
                "{}: COMM_INIT: collectives are not served; if the client hangs, start it with GGML_RPC_NO_COMM=1, because its \
                 other server is llama.cpp's and waits for a connection",
                self.resources.peer
            );
        }
        self.reply(&Response::CommInit(false))
    }
}

//! Transfer tokens of a connection's server. A transfer token is a single-use capability token: a peer server that presents it may
//! write the bytes of one RECEIVE_FROM_PEER.

use std::sync::Mutex;

use super::super::connection::ConnectionShared;
use crate::device::DeviceError;
use crate::poison::lock;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, ExtResponse, IssueTokens, TRANSFER_TOKEN_BYTES, TransferToken};

/// Tokens per request: the limit of a server, which allows four times as many unused ones.
const TOKEN_BATCH: u32 = 256;

/// Tokens that no RECEIVE_FROM_PEER has named.
pub(super) type TransferTokens = Mutex<Vec<TransferToken>>;

impl ConnectionShared {
    /// Whether a token can be taken without a request to the server.
    pub(super) fn has_token(&self) -> bool {
        self.session.as_ref().is_some_and(|session| !lock(&session.peers.tokens).is_empty())
    }

    /// Takes a token. Blocks for a round trip once per [`TOKEN_BATCH`] tokens.
    pub(super) fn take_token(&self) -> Result<TransferToken, DeviceError> {
        // The lock is held during the request, so that concurrent callers do not repeat it.
        let mut tokens = lock(&self.session()?.peers.tokens);
        if tokens.is_empty() {
            let len = 4 + u64::from(TOKEN_BATCH) * TRANSFER_TOKEN_BYTES as u64;
            let request = ExtRequest::IssueTokens(IssueTokens { count: TOKEN_BATCH });
            let command = ExtCommand::IssueTokens;
            let reply = self.call_encoded(command.name(), len..=len, |out| request.encode(out))?;
            match ExtResponse::decode(command, &reply) {
                Ok(ExtResponse::IssueTokens(issued)) => tokens.extend_from_slice(issued),
                other => _ = self.fail(format!("the server replied to {command} with {other:?}")),
            }
        }
        tokens.pop().ok_or(DeviceError::Ended)
    }
}

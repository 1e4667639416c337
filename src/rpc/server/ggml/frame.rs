//! Headers of ggml's requests.

use crate::rpc::server::session::failure::Failure;
use crate::rpc::server::session::request_error::RequestError;
use crate::rpc::wire::ext::ExtCommand;
use crate::rpc::wire::{REQUEST_HEADER, RequestHeader};

/// Decodes a header. A GREET gets an error of its own: it was sent too early or too late.
pub(super) fn decode(header: [u8; REQUEST_HEADER]) -> Result<RequestHeader, Failure> {
    if header[0] == ExtCommand::Greet as u8 {
        return Err(Failure::new(Some(ExtCommand::Greet.name()), RequestError::GreetSecond));
    }
    RequestHeader::decode(&header).map_err(|e| Failure::new(None, e))
}

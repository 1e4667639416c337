//! Replies to requests of the extensions.

use super::super::codec::{Field, Reader, WireError};
use super::command::ExtCommand;
use super::fields::TransferToken;
use super::hello_ext::{HelloExtReply, ServerState};
use super::{DeviceFault, text, write_text};

/// A reply to a request of the extensions. Commands without a variant have no reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ExtResponse<'a> {
    /// Reply to HELLO_EXT: description of the server.
    HelloExt(HelloExtReply),
    /// Reply to SUPPORTS_OP. `Ok(true)`: supported, and worth copying the weights to this device. `Err`: not supported, and
    /// why.
    SupportsOp(Result<bool, DeviceFault>),
    /// Reply to LOAD: whether a tensor with the digest was found.
    Load(bool),
    /// Reply to ISSUE_TOKENS: the tokens.
    IssueTokens(&'a [TransferToken]),
    /// Reply to PROBE_PEER. `Err`: why the server does not reach the peer.
    ProbePeer(Result<(), &'a str>),
    /// Reply to ATTACH_GROUP. `Err`: why the connection is not bound to the group.
    AttachGroup(Result<(), &'a str>),
    /// Reply to PING: state of the server and number of its sessions.
    Ping(ServerState, u32),
    /// Reply to STATUS: the state as JSON.
    Status(&'a str),
}

impl<'a> ExtResponse<'a> {
    /// Decodes the body of the reply to `command`.
    ///
    /// # Errors
    /// [`WireError`], which names the first field that is missing or invalid; [`WireError::UnknownCommand`] for a command
    /// without a reply.
    pub fn decode(command: ExtCommand, body: &'a [u8]) -> Result<ExtResponse<'a>, WireError> {
        let mut r = Reader::new(body);
        let response = match command {
            ExtCommand::HelloExt => ExtResponse::HelloExt(HelloExtReply::read(&mut r)?),
            ExtCommand::SupportsOp => ExtResponse::SupportsOp(match r.u8("support")? {
                0 => Err(DeviceFault::read(&mut r)?),
                1 => Ok(false),
                2 => Ok(true),
                have => return Err(WireError::BadValue { what: "support", expected: "0 to 2", have: have.into() }),
            }),
            ExtCommand::Load => ExtResponse::Load(Field::read(&mut r, "found")?),
            ExtCommand::IssueTokens => {
                let count = r.u32("tokens")?;
                ExtResponse::IssueTokens(r.arrays("tokens", count)?)
            }
            ExtCommand::ProbePeer => ExtResponse::ProbePeer(read_success(&mut r, "reachable")?),
            ExtCommand::AttachGroup => ExtResponse::AttachGroup(read_success(&mut r, "attached")?),
            ExtCommand::Ping => ExtResponse::Ping(ServerState::read(&mut r)?, r.u32("sessions")?),
            ExtCommand::Status => ExtResponse::Status(text(&mut r, "status")?),
            no_reply => return Err(WireError::UnknownCommand(no_reply as u8)),
        };
        r.finish(command.name())?;
        Ok(response)
    }

    /// Appends the body, without a header. The reply to HELLO_EXT has a response header of 7.0; all others are sent as
    /// notifications of kind REPLY.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            ExtResponse::HelloExt(reply) => reply.write(out),
            ExtResponse::SupportsOp(Ok(offload)) => out.push(1 + u8::from(*offload)),
            ExtResponse::SupportsOp(Err(fault)) => {
                out.push(0);
                fault.write(out);
            }
            ExtResponse::Load(found) => found.write(out),
            ExtResponse::IssueTokens(tokens) => {
                (tokens.len() as u32).write(out); // a request is for few
                out.extend_from_slice(tokens.as_flattened());
            }
            ExtResponse::ProbePeer(success) | ExtResponse::AttachGroup(success) => {
                success.is_ok().write(out);
                write_text(success.err().unwrap_or_default(), out);
            }
            ExtResponse::Ping(state, sessions) => {
                out.push(*state as u8);
                sessions.write(out);
            }
            ExtResponse::Status(json) => write_text(json, out),
        }
    }
}

/// Decodes whether a request succeeded, and the reason if not.
fn read_success<'a>(r: &mut Reader<'a>, what: &'static str) -> Result<Result<(), &'a str>, WireError> {
    let success: bool = Field::read(r, what)?;
    let reason = text(r, "reason")?;
    Ok(if success { Ok(()) } else { Err(reason) })
}

//! Replies to requests of the extensions. The reply to HELLO_EXT has a response header of 7.0; all others are sent as notifications
//! of kind REPLY.

use super::super::codec::{Field, Reader, WireError};
use super::super::messages::responses;
use super::DeviceFault;
use super::command::ExtCommand;
use super::fields::TransferToken;
use super::hello_ext::{HelloExtReply, ServerState};

responses! {
    /// A reply to a request of the extensions. Commands without a variant have no reply.
    ExtResponse: ExtCommand;
    /// Description of the server.
    HelloExt(reply: HelloExtReply);
    /// `Ok(true)`: supported, and worth copying the weights to this device. `Err`: not supported, and why.
    SupportsOp(support: Result<bool, DeviceFault>);
    /// Whether a tensor with the digest was found.
    Load(found: bool);
    /// The tokens.
    IssueTokens(tokens: &'a [TransferToken]);
    /// `Err`: why the server does not reach the peer.
    ProbePeer(reachable: Result<(), &'a str>);
    /// `Err`: why the connection is not bound to the group.
    AttachGroup(attached: Result<(), &'a str>);
    /// State of the server and number of its sessions.
    Ping(state: ServerState, sessions: u32);
    /// The state as JSON.
    Status(status: &'a str);
}

impl Field<'_> for Result<bool, DeviceFault> {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        match r.u8(what)? {
            0 => Ok(Err(Field::read(r, "reason")?)),
            1 => Ok(Ok(false)),
            2 => Ok(Ok(true)),
            have => Err(WireError::BadValue { what, expected: "0 to 2", have: have.into() }),
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Ok(offload) => out.push(1 + u8::from(*offload)),
            Err(fault) => {
                out.push(0);
                fault.write(out);
            }
        }
    }
}

/// Whether a request succeeded, and the reason if not.
impl<'a> Field<'a> for Result<(), &'a str> {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let success: bool = Field::read(r, what)?;
        let reason = Field::read(r, "reason")?;
        Ok(if success { Ok(()) } else { Err(reason) })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.is_ok().write(out);
        self.err().unwrap_or_default().write(out);
    }
}

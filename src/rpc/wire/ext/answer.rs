//! What a server answers in the extensions.

use super::super::codec::{Field, Reader, WireError};
use super::command::ExtCommand;
use super::greet::{GreetReply, State};
use super::request::{Part, TicketList};
use super::{Fault, text, write_text};

/// What a server answers to the requests of the extensions that have a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Answer<'a> {
    /// To GREET.
    Greet(GreetReply),
    /// To SUPPORT: `Ok(true)` where weights are worth bringing for it; why not.
    Support(Result<bool, Fault>),
    /// To LOAD: whether the bytes were found.
    Load(bool),
    /// To TICKETS.
    Tickets(TicketList<'a>),
    /// To REACH: that it does, or why not.
    Reach(Result<(), &'a str>),
    /// To PING: its state and its sessions.
    Ping(State, u32),
}

impl<'a> Answer<'a> {
    /// Reads the body of the answer to `command`.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing or wrong; [`WireError::UnknownCommand`] for a command that has
    /// no answer.
    pub fn decode(command: ExtCommand, body: &'a [u8]) -> Result<Answer<'a>, WireError> {
        let mut r = Reader::new(body);
        let answer = match command {
            ExtCommand::Greet => Answer::Greet(GreetReply::read(&mut r)?),
            ExtCommand::Support => Answer::Support(match r.u8("support")? {
                0 => Err(Fault::read(&mut r)?),
                1 => Ok(false),
                2 => Ok(true),
                have => return Err(WireError::BadValue { what: "support", expected: "0 to 2", have: have.into() }),
            }),
            ExtCommand::Load => Answer::Load(Field::read(&mut r, "found")?),
            ExtCommand::Tickets => {
                let count = r.u32("tickets")?;
                Answer::Tickets(TicketList(r.arrays("tickets", count)?))
            }
            ExtCommand::Reach => {
                let reaches: bool = Field::read(&mut r, "reaches")?;
                let reason = text(&mut r, "reason")?;
                Answer::Reach(if reaches { Ok(()) } else { Err(reason) })
            }
            ExtCommand::Ping => Answer::Ping(State::read(&mut r)?, r.u32("sessions")?),
            silent => return Err(WireError::UnknownCommand(silent as u8)),
        };
        r.finish(command.name())?;
        Ok(answer)
    }

    /// Appends the body; what stands before it is the frame's: a response header before GREET's, else that of a notice.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Answer::Greet(reply) => reply.write(out),
            Answer::Support(Ok(offload)) => out.push(1 + u8::from(*offload)),
            Answer::Support(Err(fault)) => {
                out.push(0);
                fault.write(out);
            }
            Answer::Load(found) => found.write(out),
            Answer::Tickets(tickets) => tickets.put(out),
            Answer::Reach(reaches) => {
                reaches.is_ok().write(out);
                write_text(reaches.err().unwrap_or_default(), out);
            }
            Answer::Ping(state, sessions) => {
                out.push(*state as u8);
                sessions.write(out);
            }
        }
    }
}

//! Notices: what the server says after it has greeted.

use super::super::connection::{Shared, To};
use super::super::reader::Reader;
use super::session::Session;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, NOTICE_HEADER, Notice, NoticeHeader, NoticeKind, Ping, State};

/// The longest notice that is read to be shown to people: a reason.
const REASON: u64 = 64 << 10;

impl Reader {
    /// Reads one notice. `Err` is why the connection cannot go on.
    pub(in super::super) fn notice(&mut self) -> Result<(), String> {
        let mut header = [0; NOTICE_HEADER];
        self.read_exact(&mut header)?;
        let header = NoticeHeader::decode(&header).map_err(|e| format!("the server sent no notice: {e}"))?;
        let most = match header.kind {
            NoticeKind::Reply => return self.reply(header.size),
            NoticeKind::Data => return self.data(header.size),
            NoticeKind::Reached => 12,
            NoticeKind::State => 1,
            NoticeKind::Failed | NoticeKind::Refused => REASON,
        };
        if header.size > most {
            return Err(format!("the server sent a notice ({:?}) of {} bytes", header.kind, header.size));
        }
        let body = self.bytes(header.size, "a notice")?;
        let notice = Notice::decode(header.kind, &body);
        let notice = notice.map_err(|e| format!("the server sent a notice that is none: {e}"))?;
        match notice {
            Notice::Reached { queue, number } => self.session()?.reached(queue, number),
            Notice::Failed { queue, fault } => self.session()?.failed(queue, fault),
            Notice::Refused(reason) => Err(format!("the server refused to go on: {reason}")),
            Notice::State(state) => {
                let endpoint = self.shared.endpoint();
                match state {
                    State::Ready => log::info!("{endpoint} takes clients"),
                    State::Full => log::info!("{endpoint} has as many clients as it may have"),
                    State::Draining => log::warn!("{endpoint} is about to end, and takes no more clients"),
                }
                Ok(())
            }
            Notice::Reply(_) | Notice::Data { .. } => Ok(()),
        }
    }

    /// DATA: no more than a READ asked for, whose sender has room for it.
    fn data(&mut self, size: u64) -> Result<(), String> {
        let mut id = [0; 8];
        let short = || format!("the server sent DATA of {size} bytes, whose number alone has 8");
        let size = size.checked_sub(id.len() as u64).ok_or_else(short)?;
        self.read_exact(&mut id)?;
        let id = u64::from_le_bytes(id);
        let session = self.session()?;
        let Some(lengths) = session.lengths(id)? else {
            // Of a queue that has ended here meanwhile.
            let most = session.server.max_message;
            if size > most {
                return Err(format!("the server sent {size} bytes for READ {id}, which bring at most {most}"));
            }
            return self.skip(size);
        };
        let asked: u64 = lengths.iter().sum();
        if size != asked {
            return Err(format!("the server sent {size} bytes for READ {id}, which asked for {asked}"));
        }
        let bytes = lengths.iter().map(|&len| self.bytes(len, ExtCommand::Read.name())).collect::<Result<_, _>>()?;
        self.answered();
        self.session()?.data(id, bytes);
        Ok(())
    }

    fn session(&self) -> Result<&Session, String> {
        self.shared.session.as_ref().ok_or_else(|| "a notice from a server that has not greeted".to_owned())
    }
}

impl Shared {
    /// Asks a server that has greeted whether it is there.
    pub(in super::super) fn ping(&self) {
        if self.session.is_some() {
            self.later(|turn| {
                let ping = ExtRequest::Ping(Ping {});
                turn.ask(ExtCommand::Ping.name(), 5..=5, To::Nobody, |out| ping.encode(out))
            });
        }
    }
}

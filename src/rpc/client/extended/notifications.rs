//! Notices: what the server says after it has greeted.

use std::sync::Arc;

use super::super::connection::{ConnectionShared, ReplySink};
use super::super::reader::ConnectionReader;
use super::session::ClientSession;
use crate::rpc::connection::ReadError;
use crate::rpc::wire::WireError;
use crate::rpc::wire::ext::{ExtCommand, ExtRequest, NOTICE_HEADER, Notice, NoticeHeader, NoticeKind, Ping, State};

/// The longest notice that is read to be shown to people: a reason.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// Reads one notice.
pub(in super::super) fn read_notification(reader: &mut ConnectionReader) -> Result<(), ReadError> {
    let mut header = [0; NOTICE_HEADER];
    reader.read_exact(&mut header)?;
    let bad = |e: WireError| ReadError::Notification(format!("the server sent no notice: {e}"));
    let header = NoticeHeader::decode(&header).map_err(bad)?;
    let most = match header.kind {
        NoticeKind::Reply => return reader.read_reply(header.size),
        NoticeKind::Data => return read_data(reader, header.size),
        NoticeKind::Reached => 12,
        NoticeKind::State => 1,
        NoticeKind::Failed | NoticeKind::Refused => MAX_REASON_BYTES,
    };
    if header.size > most {
        let said = format!("the server sent a notice ({:?}) of {} bytes", header.kind, header.size);
        return Err(ReadError::Notification(said));
    }
    let body = reader.read_bytes(header.size, "a notice")?;
    let notice = Notice::decode(header.kind, &body);
    let bad = |e: WireError| ReadError::Notification(format!("the server sent a notice that is none: {e}"));
    reader.requester().notice(notice.map_err(bad)?).map_err(ReadError::Notification)
}

/// DATA: no more than a READ asked for, whose sender has room for it.
fn read_data(reader: &mut ConnectionReader, size: u64) -> Result<(), ReadError> {
    let mut id = [0; 8];
    let short = || ReadError::Notification(format!("the server sent DATA of {size} bytes, whose number alone has 8"));
    let size = size.checked_sub(id.len() as u64).ok_or_else(short)?;
    reader.read_exact(&mut id)?;
    let id = u64::from_le_bytes(id);
    let shared = Arc::clone(reader.requester());
    let session = shared.session_of_notification().map_err(ReadError::Notification)?;
    let Some(lengths) = session.span_lengths(id).map_err(ReadError::Notification)? else {
        // Of a queue that has ended here meanwhile.
        let most = session.server.max_message;
        if size > most {
            let said = format!("the server sent {size} bytes for READ {id}, which bring at most {most}");
            return Err(ReadError::Notification(said));
        }
        return reader.skip(size);
    };
    let asked: u64 = lengths.iter().sum();
    if size != asked {
        let said = format!("the server sent {size} bytes for READ {id}, which asked for {asked}");
        return Err(ReadError::Notification(said));
    }
    let bytes = lengths.iter().map(|&len| reader.read_bytes(len, ExtCommand::Read.name())).collect::<Result<_, _>>()?;
    reader.record_answer();
    session.complete_read(id, bytes);
    Ok(())
}

impl ConnectionShared {
    /// Takes a notice. `Err` is why the connection cannot go on.
    fn notice(&self, notice: Notice<'_>) -> Result<(), String> {
        match notice {
            Notice::Reached { queue, number } => self.session_of_notification()?.handle_reached(queue, number),
            Notice::Failed { queue, fault } => self.session_of_notification()?.handle_failed(queue, fault),
            Notice::Refused(reason) => Err(format!("the server refused to go on: {reason}")),
            Notice::State(state) => {
                let endpoint = self.endpoint();
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

    fn session_of_notification(&self) -> Result<&ClientSession, String> {
        self.session.as_ref().ok_or_else(|| "a notice from a server that has not greeted".to_owned())
    }

    /// Asks a server that has greeted whether it is there.
    pub(in super::super) fn send_ping(&self) {
        if self.session.is_some() {
            self.defer_send(|turn| {
                let ping = ExtRequest::Ping(Ping {});
                turn.request_encoded(ExtCommand::Ping.name(), 5..=5, ReplySink::Discard, |out| ping.encode(out))
            });
        }
    }
}

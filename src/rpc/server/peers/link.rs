//! A connection to another server, on which a session's bytes are put.
//!
//! A thread of its own dials, and then reads what the other server says: behind the last PUT of each SEND comes a PING, and its
//! answer tells that all of them were taken. Until then whoever sent them is told if the connection ends.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::dial::dial;
use super::{Fail, PeerList, Times};
use crate::rpc::wire::ext::Ticket;
use crate::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, NOTICE_HEADER, Notice, NoticeHeader, Ping, Put};

/// The longest notice that has a place here: a text that says why.
const NOTICE: u64 = 64 << 10;

/// How long someone who could not write waits for the other server's own word on it.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Link {
    /// As the client gave it.
    address: String,
    times: Times,
    state: Mutex<State>,
    changed: Condvar,
    /// One message at a time.
    writer: Mutex<Vec<u8>>,
}

struct State {
    stage: Stage,
    /// Who has sent something that is not known to have been taken, and since when, in the order of their PINGs.
    sent: VecDeque<(Instant, Fail)>,
}

enum Stage {
    Dialling,
    Up(Arc<TcpStream>),
    /// Why.
    Down(String),
}

impl Link {
    /// Dials `address`, if `list` has it, on a thread of the link's own.
    pub(super) fn start(address: &str, list: &Arc<PeerList>, times: Times) -> Result<Arc<Link>, String> {
        let link = Arc::new(Link {
            address: address.to_owned(),
            times,
            state: Mutex::new(State { stage: Stage::Dialling, sent: VecDeque::new() }),
            changed: Condvar::new(),
            writer: Mutex::default(),
        });
        let (own, list) = (Arc::clone(&link), Arc::clone(list));
        let started = std::thread::Builder::new().name("peer".to_owned()).spawn(move || own.serve(&list));
        started.map_err(|e| format!("{address}: cannot start a thread for the connection: {e}"))?;
        Ok(link)
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self.lock().stage, Stage::Down(_))
    }

    /// The connection, once it is there.
    ///
    /// # Errors
    /// Why there is none, or none until then.
    pub(super) fn up(&self, until: Instant) -> Result<Arc<TcpStream>, String> {
        let mut state = self.lock();
        loop {
            match &state.stage {
                Stage::Up(stream) => return Ok(Arc::clone(stream)),
                Stage::Down(why) => return Err(why.clone()),
                Stage::Dialling => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.say("no connection in time"));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Puts the bytes of a ticket. With the last of a SEND comes who is told if it is not known to have been taken.
    ///
    /// # Errors
    /// Why the connection ended.
    pub(super) fn put(&self, ticket: Ticket, data: &[u8], last: Option<&Fail>) -> Result<(), String> {
        let stream = self.up(Instant::now() + self.times.handshake)?;
        // Whoever panics here leaves at most a buffer that is cleared, and a connection that the other end finds cut off.
        let mut out = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        out.clear();
        ExtRequest::Put(Put { ticket, data }).encode(&mut out);
        if let Some(fail) = last {
            ExtRequest::Ping(Ping {}).encode(&mut out);
            let mut state = self.lock();
            if let Stage::Down(why) = &state.stage {
                return Err(why.clone());
            }
            state.sent.push_back((Instant::now(), Arc::clone(fail)));
        }
        let Err(e) = (&*stream).write_all(&out) else { return Ok(()) };
        // The message is cut off: nothing more can follow. What the other server has said tells more than this error.
        let _ = stream.shutdown(Shutdown::Write);
        let state = self.lock();
        let up = |state: &mut State| !matches!(state.stage, Stage::Down(_));
        let waited = self.changed.wait_timeout_while(state, LAST_WORDS, up);
        drop(waited);
        Err(self.down(&match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => format!("it took nothing within {:?}", self.times.stall),
            _ => format!("connection lost: {e}"),
        }))
    }

    /// Ends it with its session: there is nobody to be told.
    pub(super) fn close(&self) {
        self.lock().sent.clear();
        self.down("the session has ended");
    }

    /// Ends it, if it has not ended; why it did. All who have sent something that may be lost are told.
    fn down(&self, why: &str) -> String {
        let mut state = self.lock();
        if let Stage::Down(why) = &state.stage {
            return why.clone();
        }
        let why = self.say(why);
        if let Stage::Up(stream) = std::mem::replace(&mut state.stage, Stage::Down(why.clone())) {
            // Fails where the other server was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let sent = std::mem::take(&mut state.sent);
        drop(state);
        self.changed.notify_all();
        sent.iter().for_each(|(_, fail)| fail(super::failure(&self.address, why.clone())));
        why
    }

    fn say(&self, why: &str) -> String {
        format!("{}: {why}", self.address)
    }

    fn serve(&self, list: &PeerList) {
        let until = Instant::now() + self.times.handshake;
        let dialled = list.targets(&self.address).and_then(|targets| dial(&targets, until));
        let ready = dialled.and_then(|stream| {
            let stall = Some(self.times.stall.max(Duration::from_millis(1)));
            stream.set_write_timeout(stall).map(|()| Arc::new(stream)).map_err(|e| e.to_string())
        });
        let stream = match ready {
            Ok(stream) => stream,
            Err(why) => {
                self.down(&why);
                return;
            }
        };
        let mut state = self.lock();
        if let Stage::Dialling = state.stage {
            state.stage = Stage::Up(Arc::clone(&stream));
        }
        drop(state);
        self.changed.notify_all();
        while !self.is_down() {
            if let Err(why) = self.notice(&stream) {
                self.down(&why);
            }
        }
    }

    /// Takes one notice.
    fn notice(&self, stream: &TcpStream) -> Result<(), String> {
        let mut header = [0; NOTICE_HEADER];
        self.read(stream, &mut header)?;
        let NoticeHeader { kind, size } = NoticeHeader::decode(&header).map_err(|e| e.to_string())?;
        if size > NOTICE {
            return Err(format!("it sent a notice of {size} bytes that nobody asked for"));
        }
        let mut body = vec![0; size as usize]; // at most NOTICE
        self.read(stream, &mut body)?;
        match Notice::decode(kind, &body).map_err(|e| e.to_string())? {
            Notice::Reply(body) => {
                Answer::decode(ExtCommand::Ping, body).map_err(|e| e.to_string())?;
                self.lock().sent.pop_front().map(drop).ok_or_else(|| "it answers what nobody asked".to_owned())
            }
            Notice::Refused(why) => Err(format!("it refuses what it was sent: {why}")),
            Notice::State(_) => Ok(()),
            Notice::Reached { .. } | Notice::Data { .. } | Notice::Failed { .. } => {
                Err("it speaks of a queue that nobody opened".to_owned())
            }
        }
    }

    /// Fills `buf`, however long that takes, unless an answer is overdue.
    fn read(&self, mut stream: &TcpStream, mut buf: &mut [u8]) -> Result<(), String> {
        let lost = |e: std::io::Error| format!("connection lost: {e}");
        while !buf.is_empty() {
            let stall = self.times.stall;
            // An answer to what is sent meanwhile is due later than this.
            let oldest = self.lock().sent.front().map(|(since, _)| *since);
            let left = oldest.map_or(stall, |since| (since + stall).saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(format!("it has not said within {stall:?} that it took the bytes"));
            }
            stream.set_read_timeout(Some(left)).map_err(lost)?;
            match stream.read(buf) {
                Ok(0) => return Err("it closed the connection".to_owned()),
                Ok(n) => buf = buf.get_mut(n..).unwrap_or_default(),
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) => return Err(lost(e)),
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Changes are single steps: a panic elsewhere cannot have left it torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

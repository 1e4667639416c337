//! The thread that reads what the server sends, and gives each reply to whoever it is for.

use std::io::{self, ErrorKind, Read};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::Shared;
use crate::rpc::wire::{RESPONSE_HEADER, ResponseHeader};

/// Bytes read ahead: many small replies cost one read.
const BUFFER: usize = 16 << 10;

pub(super) fn start(shared: Arc<Shared>) -> io::Result<()> {
    let reader = Reader {
        buffer: vec![0; BUFFER].into(),
        start: 0,
        end: 0,
        heard: Instant::now(),
        answered: Instant::now(),
        pinged: false,
        hurried: false,
        shared,
    };
    reader.wait_for(reader.pause())?;
    std::thread::Builder::new().name("rpc-replies".to_owned()).spawn(move || reader.serve()).map(drop)
}

pub(super) struct Reader {
    pub(super) shared: Arc<Shared>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// When the server last said anything.
    heard: Instant,
    /// When it last brought what it was asked for.
    answered: Instant,
    /// Whether it was asked since whether it is there.
    pinged: bool,
    /// Whether the socket's timeout is another than usual.
    hurried: bool,
}

impl Reader {
    fn serve(mut self) {
        let next = if self.shared.session.is_some() { Reader::notice } else { Reader::response };
        loop {
            if let Err(reason) = next(&mut self).and_then(|()| self.overdue()) {
                self.shared.fail(reason);
                return;
            }
        }
    }

    /// Reads one response of 7.0. `Err` is why the connection cannot go on.
    fn response(&mut self) -> Result<(), String> {
        let mut header = [0; RESPONSE_HEADER];
        self.read_exact(&mut header)?;
        self.reply(ResponseHeader::decode(&header).size)
    }

    /// Reads the body of the reply that comes next.
    pub(super) fn reply(&mut self, size: u64) -> Result<(), String> {
        let Some((command, len)) = self.shared.due() else {
            return Err("the server sent a reply that nothing had asked for".to_owned());
        };
        if !len.contains(&size) {
            let (least, most) = len.into_inner();
            let asked = if least == most { least.to_string() } else { format!("{least} to {most}") };
            return Err(format!("the server answered {command} with {size} bytes, {asked} were asked for"));
        }
        let body = self.bytes(size, command)?;
        self.answered();
        let Some(reply) = self.shared.arrived() else { return Ok(()) };
        reply.to.give(Ok(body)).map_err(|e| format!("the server answered {command} with nonsense: {e}"))
    }

    /// The server has brought what it was asked for.
    pub(super) fn answered(&mut self) {
        self.answered = self.heard;
    }

    /// A server that says other things all the while is not silent, but whoever waits for a reply waits.
    fn overdue(&self) -> Result<(), String> {
        let longest = self.shared.longest;
        if self.heard.duration_since(self.answered) < longest {
            return Ok(());
        }
        match self.shared.owed() {
            Some((command, since)) if self.heard.duration_since(since.max(self.answered)) >= longest => {
                Err(format!("the server did not answer {command} within {longest:?}"))
            }
            _ => Ok(()),
        }
    }

    /// The next bytes: no more than somebody of this process asked for, who has room for them.
    pub(super) fn bytes(&mut self, len: u64, command: &'static str) -> Result<Vec<u8>, String> {
        let len = usize::try_from(len).map_err(|e| e.to_string())?;
        let mut body = Vec::new();
        body.try_reserve_exact(len).map_err(|_| format!("no memory for the {len} bytes of a reply to {command}"))?;
        body.resize(len, 0);
        self.read_exact(&mut body)?;
        Ok(body)
    }

    /// Drops the next bytes.
    pub(super) fn skip(&mut self, mut len: u64) -> Result<(), String> {
        let mut waste = [0; 4096];
        while len > 0 {
            let piece = len.min(waste.len() as u64);
            self.read_exact(&mut waste[..piece as usize])?;
            len -= piece;
        }
        Ok(())
    }

    pub(super) fn read_exact(&mut self, mut dst: &mut [u8]) -> Result<(), String> {
        loop {
            let n = dst.len().min(self.end - self.start);
            dst[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
            self.start += n;
            dst = &mut dst[n..];
            match dst.len() {
                0 => return Ok(()),
                1..BUFFER => {
                    let mut buffer = std::mem::take(&mut self.buffer);
                    let got = self.receive(&mut buffer);
                    self.buffer = buffer;
                    (self.start, self.end) = (0, got?);
                }
                _ => {
                    let got = self.receive(dst)?;
                    dst = &mut dst[got..];
                }
            }
        }
    }

    /// At least one byte, within the patience that whatever is due has.
    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, String> {
        loop {
            match (&self.shared.stream).read(dst) {
                Ok(0) => return Err(self.closed()),
                Ok(n) => {
                    self.heard = Instant::now();
                    self.pinged = false;
                    self.shared.count_received(n);
                    if std::mem::take(&mut self.hurried) {
                        self.wait_for(self.pause()).map_err(|e| e.to_string())?;
                    }
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let left = self.silence()?;
                    self.hurried = left != self.pause();
                    self.wait_for(left).map_err(|e| e.to_string())?;
                }
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted) => {
                    return Err(self.closed());
                }
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    /// How long the server may be silent before it is looked after.
    fn pause(&self) -> Duration {
        let patience = self.shared.patience;
        if self.shared.session.is_some() { patience / 3 } else { patience }
    }

    /// The server has said nothing for a while: how long it may go on so. `Err` when that was too long.
    fn silence(&mut self) -> Result<Duration, String> {
        let (patience, pause) = (self.shared.patience, self.pause());
        let oldest = self.shared.oldest();
        let alive = self.heard.max(self.shared.taken());
        let silent = oldest.map_or(alive, |(_, since)| since.max(alive)).elapsed();
        if let Some((command, _)) = oldest.filter(|_| silent >= patience) {
            return Err(format!("the server said nothing for {patience:?} while {command} was due"));
        }
        if silent < pause {
            return Ok(pause - silent);
        }
        // Also where nothing is due: its work may be what another server waits for, and nobody else asks this one.
        if !std::mem::replace(&mut self.pinged, true) {
            self.shared.ping();
        }
        Ok(if oldest.is_some() { patience - silent } else { pause })
    }

    fn wait_for(&self, time: Duration) -> io::Result<()> {
        self.shared.stream.set_read_timeout(Some(time.max(Duration::from_millis(1))))
    }

    fn closed(&self) -> String {
        match self.shared.oldest() {
            Some((command, _)) => {
                format!("the server closed the connection while {command} was due; its log says why")
            }
            None => "the server closed the connection; its log says why".to_owned(),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // However the thread ends: nobody waits for replies that nobody reads.
        self.shared.fail("nobody reads its replies any more");
    }
}

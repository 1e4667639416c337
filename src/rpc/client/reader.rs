//! The thread that reads replies and gives each to whoever it is for.

use std::io::{self, ErrorKind, Read};
use std::sync::Arc;
use std::time::Instant;

use super::connection::{Reply, Shared, To};
use crate::rpc::wire::{Command, RESPONSE_HEADER, Response, ResponseHeader};

/// Bytes read ahead: many small replies cost one read.
const BUFFER: usize = 16 << 10;

pub(super) fn start(shared: Arc<Shared>) -> io::Result<()> {
    let reader =
        Reader { shared, buffer: vec![0; BUFFER].into(), start: 0, end: 0, heard: Instant::now(), hurried: false };
    std::thread::Builder::new().name("rpc-replies".to_owned()).spawn(move || reader.serve()).map(drop)
}

struct Reader {
    shared: Arc<Shared>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// When the server last said anything.
    heard: Instant,
    /// Whether the socket's timeout is shorter than usual.
    hurried: bool,
}

impl Reader {
    fn serve(mut self) {
        loop {
            if let Err(reason) = self.reply() {
                self.shared.fail(reason);
                return;
            }
        }
    }

    /// Reads one reply. `Err` is why the connection cannot go on.
    fn reply(&mut self) -> Result<(), String> {
        let mut header = [0; RESPONSE_HEADER];
        self.read_exact(&mut header)?;
        let size = ResponseHeader::decode(&header).size;
        let Some((command, len, _)) = self.shared.due() else {
            return Err("the server sent a reply that nothing had asked for".to_owned());
        };
        if size != len {
            return Err(format!("the server answered {command} with {size} bytes, {len} were asked for"));
        }
        // No more than somebody of this process asked for, who has room for it.
        let len = usize::try_from(len).map_err(|e| e.to_string())?;
        let mut body = Vec::new();
        body.try_reserve_exact(len).map_err(|_| format!("no memory for the {len} bytes of a reply to {command}"))?;
        body.resize(len, 0);
        self.read_exact(&mut body)?;
        let Some(Reply { to, proves, .. }) = self.shared.arrived() else { return Ok(()) };
        if let Some(proof) = proves {
            self.shared.proved(proof);
        }
        match to {
            To::Ticket(to) => to.send(Ok(body)),
            To::Consent(track) => match Response::decode(command, &body) {
                Ok(Response::CopyTensor(copied)) => {
                    if let Some(track) = track.upgrade().filter(|_| !copied) {
                        track.refused(Command::CopyTensor);
                    }
                }
                Ok(other) => return Err(format!("{command} was answered as {}", other.command())),
                Err(e) => return Err(format!("the server answered {command} with nonsense: {e}")),
            },
            To::Nobody => {}
        }
        Ok(())
    }

    fn read_exact(&mut self, mut dst: &mut [u8]) -> Result<(), String> {
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

    /// At least one byte, within the patience that a reply that is due has.
    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, String> {
        let patience = self.shared.patience;
        loop {
            match (&self.shared.stream).read(dst) {
                Ok(0) => return Err(self.closed()),
                Ok(n) => {
                    self.heard = Instant::now();
                    if std::mem::take(&mut self.hurried) {
                        self.shared.stream.set_read_timeout(Some(patience)).map_err(|e| e.to_string())?;
                    }
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let mut left = patience;
                    if let Some((command, _, since)) = self.shared.due() {
                        left = (since.max(self.heard) + patience).saturating_duration_since(Instant::now());
                        if left.is_zero() {
                            return Err(format!(
                                "the server said nothing for {patience:?}, and a reply to {command} is due"
                            ));
                        }
                    }
                    self.hurried = left < patience;
                    self.shared.stream.set_read_timeout(Some(left)).map_err(|e| e.to_string())?;
                }
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted) => {
                    return Err(self.closed());
                }
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    fn closed(&self) -> String {
        match self.shared.due() {
            Some((command, ..)) => {
                format!("the server closed the connection while a reply to {command} was due; its log says why")
            }
            None => "the server closed the connection; its log says why".to_owned(),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // However the thread ends: nobody waits for replies that nobody reads.
        self.shared.fail("nobody reads its replies any more".to_owned());
    }
}

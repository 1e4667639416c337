//! Reading from sockets with one deadline for all of it, and looking ahead.

use std::io::{self, ErrorKind, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// What is left until then; an error when that is nothing, because the system takes no timeout of zero.
pub(super) fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Fills `buf` until then, however slowly its bytes drip.
pub(super) fn read(mut stream: &TcpStream, mut buf: &mut [u8], until: Instant) -> io::Result<()> {
    while !buf.is_empty() {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(buf) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => buf = &mut buf[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Whether a read would return at once, be it with the end.
#[cfg(unix)]
pub(super) fn comes(stream: &TcpStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    // Looking at the bytes themselves would take the socket's lock, for which whoever sends to it would have to wait.
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&at_once)) != Ok(0)
}

/// No system call that others have tells without waiting: whoever reads waits.
#[cfg(not(unix))]
pub(super) fn comes(_: &TcpStream) -> bool {
    true
}

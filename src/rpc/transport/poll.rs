//! Readiness of non-blocking sockets, by `poll(2)`.

use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::{Deadline, Interest, TransportError};

/// Longest single wait: some systems reject timeouts above 24 days.
const MAX_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The timeout of a poll that does not wait.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Whether the peer has ended its sending direction, or the connection has ended. On Linux also if unread bytes precede the
/// end: `POLLRDHUP` reports the end of the stream without reading up to it.
#[cfg(target_os = "linux")]
pub(super) fn hung_up(stream: &TcpStream) -> bool {
    // POLLHUP and POLLERR are always reported.
    matches!(poll(&mut [PollFd::new(stream, PollFlags::RDHUP)], Some(&AT_ONCE)), Ok(1..))
}

/// On other systems, the end is found only when all bytes before it have been read.
#[cfg(not(target_os = "linux"))]
pub(super) fn hung_up(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(n) => n == 0,
        Err(e) => !matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted),
    }
}

/// Waits until a socket is ready. `false`: the deadline has passed. May return early.
pub(super) fn wait(socket: &impl AsFd, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
    let flags = match interest {
        Interest::Read => PollFlags::IN,
        Interest::Write => PollFlags::OUT,
        Interest::ReadOrWrite => PollFlags::IN | PollFlags::OUT,
    };
    let left = deadline.remaining().unwrap_or_default().min(MAX_WAIT);
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    match poll(&mut [PollFd::new(socket, flags)], Some(&timeout)) {
        Ok(0) => Ok(deadline.remaining().is_some()),
        Ok(_) | Err(Errno::INTR) => Ok(true),
        Err(e) => Err(TransportError::system(e.into())),
    }
}

/// Whether a read would return at once.
pub(super) fn readable(socket: &impl AsFd) -> bool {
    poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&AT_ONCE)) != Ok(0)
}

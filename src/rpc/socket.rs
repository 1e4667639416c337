//! Reading from sockets: with one deadline for all of it, or with a look ahead.

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

/// Looks for bytes again and again, for at most so long, and lets others run between two looks: whether there is something
/// to be read now, if only the end. A thread that slept would be woken later: 45 us and more where the core sleeps too.
pub(super) fn linger(stream: &TcpStream, time: Duration) -> bool {
    let since = Instant::now();
    loop {
        if comes(stream) {
            return true;
        }
        if since.elapsed() >= time {
            return false;
        }
        std::thread::yield_now();
    }
}

/// Whether a read would return at once.
#[cfg(unix)]
pub(super) fn comes(stream: &TcpStream) -> bool {
    let mut one = [std::mem::MaybeUninit::uninit()];
    let peeked = socket2::SockRef::from(stream).recv_with_flags(&mut one, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    !matches!(peeked, Err(e) if e.kind() == ErrorKind::WouldBlock)
}

/// No system call that others have tells without waiting: whoever reads waits.
#[cfg(not(unix))]
pub(super) fn comes(_: &TcpStream) -> bool {
    true
}

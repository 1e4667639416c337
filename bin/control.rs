//! The messages between the supervisor and its worker, over a pair of Unix sockets: the worker's standard input is its end, so
//! that no descriptor numbers are passed.
//!
//! ```text
//! worker                                supervisor
//!   SOCKETS  ──────────────────────────►  binds the addresses, unless an earlier worker has requested them
//!            ◄──────────────────────────  SOCKETS with up to 64 descriptors, repeated
//!            ◄──────────────────────────  FIRST_START or RESTART
//!   READY    ──────────────────────────►
//!   BEAT     ──────────────────────────►  every second (`heartbeat.rs`)
//! ```
//!
//! Each message is one byte. Everything else is a signal or the end of a process.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use fanout::rpc::server::BoundSocket;
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

/// A worker requests the listening sockets; a message of the supervisor carries some of them.
pub(crate) const SOCKETS: u8 = b'S';

/// A worker serves. Its failures up to here would recur, those after it are survived by a restart.
pub(crate) const READY: u8 = b'R';

/// A worker runs.
pub(crate) const BEAT: u8 = b'B';

/// Follows the sockets of the first worker, which prints the addresses.
const FIRST_START: u8 = b'F';

/// Follows the sockets of a worker that replaces one that was ready.
const RESTART: u8 = b'A';

/// Descriptors in a message; Linux allows 253.
const DESCRIPTORS: usize = 64;

/// Sends the listening sockets to a worker.
pub(crate) fn send_sockets(link: &UnixStream, sockets: &[BoundSocket], restart: bool) -> io::Result<()> {
    for sockets in sockets.chunks(DESCRIPTORS) {
        let descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(link, &[IoSlice::new(&[SOCKETS])], &mut ancillary, SendFlags::empty())?;
    }
    (&mut &*link).write_all(&[if restart { RESTART } else { FIRST_START }])
}

/// Requests the listening sockets from the supervisor, and returns `count` of them and whether this worker replaces another.
pub(crate) fn request_sockets(mut link: &UnixStream, count: usize) -> io::Result<(Vec<BoundSocket>, bool)> {
    link.write_all(&[SOCKETS])?;
    let mut sockets = Vec::new();
    while sockets.len() < count {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(link, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, RecvFlags::empty())?;
        if received.bytes == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the supervisor has ended"));
        }
        let before = sockets.len();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                let taken: io::Result<Vec<_>> = descriptors.map(|fd: OwnedFd| BoundSocket::try_from(fd)).collect();
                sockets.extend(taken?);
            }
        }
        if sockets.len() == before {
            return Err(io::Error::new(ErrorKind::InvalidData, "the supervisor has sent a message without sockets"));
        }
    }
    let mut start = [0];
    link.read_exact(&mut start)?;
    Ok((sockets, start == [RESTART]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanout::rpc::server::ListenAddress;

    #[test]
    fn sockets_arrive_in_their_order_however_many_they_are() {
        for (count, restart) in [(1, false), (DESCRIPTORS, true), (DESCRIPTORS + 1, false)] {
            let sockets: Vec<_> =
                (0..count).map(|_| ListenAddress::new("127.0.0.1", 0).bind().expect("a socket")).collect();
            let (worker, supervisor) = UnixStream::pair().expect("a pair");
            send_sockets(&supervisor, &sockets, restart).expect("room");
            let (arrived, restarted) = request_sockets(&worker, count).expect("sockets");
            let numbers = |sockets: &[BoundSocket]| -> Vec<_> {
                sockets.iter().map(|socket| rustix::net::getsockname(socket).expect("a socket")).collect()
            };
            assert_eq!((numbers(&arrived), restarted), (numbers(&sockets), restart), "{count}");
        }
        let (worker, supervisor) = UnixStream::pair().expect("a pair");
        drop(supervisor);
        assert!(request_sockets(&worker, 1).is_err());
    }
}

//! The messages between the supervisor and its worker, over a pair of Unix sockets: the worker's standard input is its end, so
//! that no descriptor numbers are passed.
//!
//! ```text
//! worker                                supervisor
//!   SOCKETS  ──────────────────────────►  binds the addresses, unless an earlier worker has requested them
//!            ◄──────────────────────────  SOCKETS with up to 64 descriptors, repeated
//!            ◄──────────────────────────  FIRST_START or RESTART, and the clients to refuse
//!   READY    ──────────────────────────►
//!   BEAT     ──────────────────────────►  every second (`heartbeat.rs`)
//!   FAULT    ──────────────────────────►  with the client whose kernel has made a device unusable (`faults.rs`)
//! ```
//!
//! Each message is one byte, which a text follows after FAULT, and the list of clients after FIRST_START and RESTART. Everything
//! else is a signal or the end of a process.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fanout::rpc::server::{BoundSocket, RefusedClient};
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

/// A kernel of a client has made a device unusable. The client's text follows.
pub(crate) const FAULT: u8 = b'C';

/// Longest text of a client in bytes, so that the list of clients fits into the buffer of the connection.
const MAX_CLIENT_BYTES: usize = 320;

/// Follows the sockets of the first worker, which prints the addresses.
const FIRST_START: u8 = b'F';

/// Follows the sockets of a worker that replaces one that was ready.
const RESTART: u8 = b'A';

/// Descriptors in a message; Linux allows 253.
const DESCRIPTORS: usize = 64;

/// Sends a worker the listening sockets, whether it replaces another worker, and the clients that it refuses.
pub(crate) fn send_sockets(
    link: &UnixStream,
    sockets: &[BoundSocket],
    restart: bool,
    refused: &[RefusedClient],
) -> io::Result<()> {
    for sockets in sockets.chunks(DESCRIPTORS) {
        let descriptors: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(link, &[IoSlice::new(&[SOCKETS])], &mut ancillary, SendFlags::empty())?;
    }
    let mut message = vec![if restart { RESTART } else { FIRST_START }];
    message.extend(u16::try_from(refused.len()).map_err(io::Error::other)?.to_le_bytes());
    for client in refused {
        message.extend(u32::try_from(client.remaining.as_secs()).unwrap_or(u32::MAX).to_le_bytes());
        message.extend(client_text(&client.identity)?);
    }
    (&mut &*link).write_all(&message)
}

/// Reports that a kernel of `client` has made a device unusable.
pub(crate) fn report_fault(mut link: &UnixStream, client: &str) -> io::Result<()> {
    // In one call: the supervisor does not wait for the rest of a message.
    link.write_all(&[&[FAULT][..], &client_text(client)?].concat())
}

/// The text of a client on the wire: its length and the bytes.
fn client_text(client: &str) -> io::Result<Vec<u8>> {
    let too_long = || io::Error::new(ErrorKind::InvalidInput, "the text of a client is too long");
    let len = u16::try_from(client.len()).ok().filter(|len| usize::from(*len) <= MAX_CLIENT_BYTES);
    let len = len.ok_or_else(too_long)?.to_le_bytes();
    Ok([&len[..], client.as_bytes()].concat())
}

/// Reads the text of a client: after FAULT, and in the list of clients.
pub(crate) fn read_client(mut link: &UnixStream) -> io::Result<String> {
    let invalid = |what| io::Error::new(ErrorKind::InvalidData, what);
    let mut len = [0; 2];
    link.read_exact(&mut len)?;
    let len = usize::from(u16::from_le_bytes(len));
    if len > MAX_CLIENT_BYTES {
        return Err(invalid("the text of a client is too long"));
    }
    let mut text = vec![0; len];
    link.read_exact(&mut text)?;
    let text = String::from_utf8(text).map_err(|_| invalid("the text of a client is not UTF-8"))?;
    // The worker may be in the hands of an attacker, and the text goes to the log.
    let is_printable = text.chars().all(|c| c.is_ascii_graphic() || c == ' ');
    if is_printable { Ok(text) } else { Err(invalid("the text of a client has other characters than printable ASCII")) }
}

/// The settings with which a worker starts.
pub(crate) struct Start {
    pub(crate) sockets: Vec<BoundSocket>,
    /// Whether the worker replaces another one.
    pub(crate) is_restart: bool,
    pub(crate) refused: Vec<RefusedClient>,
}

/// Requests the `count` listening sockets from the supervisor.
pub(crate) fn request_sockets(mut link: &UnixStream, count: usize) -> io::Result<Start> {
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
    let mut clients = [0; 2];
    link.read_exact(&mut clients)?;
    let mut refused = Vec::new();
    for _ in 0..u16::from_le_bytes(clients) {
        let mut seconds = [0; 4];
        link.read_exact(&mut seconds)?;
        let remaining = Duration::from_secs(u32::from_le_bytes(seconds).into());
        refused.push(RefusedClient { identity: read_client(link)?, remaining });
    }
    Ok(Start { sockets, is_restart: start == [RESTART], refused })
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
            let client = |n: usize| RefusedClient { identity: "k".repeat(n), remaining: Duration::from_secs(n as u64) };
            let refused: Vec<_> = (0..count).map(client).collect();
            send_sockets(&supervisor, &sockets, restart, &refused).expect("room");
            let start = request_sockets(&worker, count).expect("sockets");
            let numbers = |sockets: &[BoundSocket]| -> Vec<_> {
                sockets.iter().map(|socket| rustix::net::getsockname(socket).expect("a socket")).collect()
            };
            assert_eq!((numbers(&start.sockets), start.is_restart), (numbers(&sockets), restart), "{count}");
            assert_eq!(start.refused, refused, "{count}");
        }
        let (worker, supervisor) = UnixStream::pair().expect("a pair");
        drop(supervisor);
        assert!(request_sockets(&worker, 1).is_err());
    }

    #[test]
    fn clients_of_faults_arrive_and_invalid_ones_are_errors() {
        let (worker, supervisor) = UnixStream::pair().expect("a pair");
        supervisor.set_nonblocking(true).expect("a socket");
        let read = |bytes: &[u8]| {
            (&worker).write_all(bytes).expect("room");
            let mut message = [0];
            (&supervisor).read_exact(&mut message).expect("a message");
            assert_eq!(message, [FAULT]);
            read_client(&supervisor).map_err(|e| e.kind())
        };
        report_fault(&worker, "address 10.0.0.1").expect("room");
        assert_eq!(read(b"").as_deref(), Ok("address 10.0.0.1"));
        assert!(report_fault(&worker, &"k".repeat(MAX_CLIENT_BYTES + 1)).is_err());
        assert_eq!(read(b"C\x02\x00a\n"), Err(ErrorKind::InvalidData));
        assert_eq!(read(b"C\x02\x00\xff\xff"), Err(ErrorKind::InvalidData));
        assert_eq!(read(b"C\xff\xff"), Err(ErrorKind::InvalidData));
        assert_eq!(read(b"C\x02\x00a"), Err(ErrorKind::WouldBlock), "a part is no message");
    }
}

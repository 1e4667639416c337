//! Socket activation: takes over listening sockets that the parent of this process has bound, such as systemd for a socket unit
//! (`sd_listen_fds(3)`). Their descriptors are those from 3 on. `LISTEN_FDS` is their number, `LISTEN_PID` the process for which they
//! are: its children inherit the variables, and ignore them.
//!
//! The sockets take the place of those that the process would bind for its addresses, in the same order. The settings of an
//! address (`--listen`: version, `plain`, `allow`) hold for its socket, so the ports must be the same.
#![allow(unsafe_code)] // one of the modules that tests/layout lists: only unsafe calls take descriptors by their numbers

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use fanout::rpc::server::{BoundSocket, ListenAddress};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::getsockname;

/// The first descriptor; 0 to 2 are the standard streams.
const FIRST: RawFd = 3;

/// What to do about variables that no service manager would set.
const BY_MANAGER: &str =
    "; a service manager sets these variables, for a socket unit with ListenStream=: unset them otherwise";

/// Takes the sockets for `addresses`; `None` if the environment announces none to this process.
///
/// Must be called once, before this process opens a file: until then, every open descriptor from 3 on is the parent's.
///
/// # Errors
/// The environment is malformed, or the sockets do not fit `addresses`.
pub(crate) fn take(addresses: &[ListenAddress]) -> Result<Option<Vec<BoundSocket>>, String> {
    let variable = |name| std::env::var_os(name);
    let count = announced(variable("LISTEN_PID"), variable("LISTEN_FDS"), std::process::id())?;
    let Some(count) = count else { return Ok(None) };
    if count != addresses.len() {
        return Err(format!(
            "LISTEN_FDS announces {count} sockets, but the options name {} addresses: give --port or --listen for each socket, in the \
             order of the socket unit",
            addresses.len()
        ));
    }
    (FIRST..).zip(addresses).map(|(number, address)| take_one(number, address)).collect::<Result<_, _>>().map(Some)
}

/// The number of sockets that the variables announce to the process `own`.
fn announced(pid: Option<OsString>, count: Option<OsString>, own: u32) -> Result<Option<usize>, String> {
    let Some(pid) = pid else { return Ok(None) };
    let for_process: u32 =
        number(&pid).ok_or_else(|| format!("LISTEN_PID={}: not a process number{BY_MANAGER}", pid.display()))?;
    if for_process != own {
        return Ok(None);
    }
    let count = count.ok_or_else(|| format!("LISTEN_PID is set, but not LISTEN_FDS{BY_MANAGER}"))?;
    match number(&count) {
        Some(sockets) if sockets > 0 => Ok(Some(sockets)),
        _ => Err(format!("LISTEN_FDS={}: not a number of sockets{BY_MANAGER}", count.display())),
    }
}

fn number<T: std::str::FromStr>(text: &OsStr) -> Option<T> {
    text.to_str()?.parse().ok()
}

/// Takes the descriptor `number` as the socket of `address`.
fn take_one(number: RawFd, address: &ListenAddress) -> Result<BoundSocket, String> {
    let socket = own_descriptor(number).and_then(BoundSocket::try_from);
    let socket = socket.map_err(|e| format!("descriptor {number} of LISTEN_FDS: {e}{BY_MANAGER}"))?;
    let local = getsockname(&socket).ok().and_then(|local| SocketAddr::try_from(local).ok());
    match local {
        Some(local) if [0, local.port()].contains(&address.port()) => Ok(socket),
        _ => {
            let local = local.map_or("another address".to_owned(), |local| local.to_string());
            Err(format!(
                "descriptor {number} of LISTEN_FDS listens on {local}, but the options have port {} in its place: give --port or \
                 --listen with the port of the socket unit",
                address.port()
            ))
        }
    }
}

/// Takes ownership of an open descriptor, and closes it in programs that this process starts: a worker gets the sockets from its
/// supervisor.
fn own_descriptor(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD takes any number, and fails if it is no open descriptor.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open. It was inherited, because this process has opened none yet (`take`), and nothing else takes
    // inherited descriptors from 3 on, so that it has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_for_this_process_are_announced() {
        for (pid, count, expected) in [
            (None, None, Ok(None)),
            (None, Some("1"), Ok(None)),
            (Some("8"), Some("1"), Ok(None)),
            (Some("8"), Some("x"), Ok(None)),
            (Some("7"), Some("1"), Ok(Some(1))),
            (Some("7"), Some("12"), Ok(Some(12))),
            (Some("7"), None, Err("LISTEN_PID is set, but not LISTEN_FDS")),
            (Some("7"), Some("0"), Err("LISTEN_FDS=0: not a number of sockets")),
            (Some("7"), Some("-1"), Err("LISTEN_FDS=-1: not a number of sockets")),
            (Some("7"), Some(""), Err("LISTEN_FDS=: not a number of sockets")),
            (Some("seven"), Some("1"), Err("LISTEN_PID=seven: not a process number")),
        ] {
            let found = announced(pid.map(OsString::from), count.map(OsString::from), 7);
            let expected = expected.map_err(|start| format!("{start}{BY_MANAGER}"));
            assert_eq!(found, expected, "{pid:?}, {count:?}");
        }
    }
}

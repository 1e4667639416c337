//! The disposition of SIGHUP. With a list of allowed keys it rereads the list. Otherwise it ends the server as SIGTERM does, when
//! its terminal is closed, unless the process was started with SIGHUP ignored (`nohup`).
#![allow(unsafe_code)] // one of the modules that tests/layout lists: signal dispositions and masks are set by unsafe calls

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// Unblocks SIGHUP, which the parent may have blocked ([`while_blocked`]). In a process that rereads a list it is ignored from now
/// on, until `signals` or the supervisor registers the handler.
pub(crate) fn prepare(rereads_keys: bool) -> io::Result<()> {
    // SAFETY: SIG_IGN runs no code, and it replaces no handler of this program, which registers one for SIGHUP only later.
    if rereads_keys && unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) } == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    change_mask(libc::SIG_UNBLOCK)
}

/// Whether this process ignores SIGHUP.
pub(crate) fn is_ignored() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: no new action is given (null), so that the call only writes the present one; zeroes are a valid value of it.
    unsafe {
        libc::sigaction(libc::SIGHUP, ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Runs `spawn` with SIGHUP blocked in this thread. A child inherits the mask, so a SIGHUP that arrives before the child calls
/// [`prepare`] waits. Without the mask it would end the child: `exec` resets a signal with a handler to its default.
pub(crate) fn while_blocked<T>(spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    change_mask(libc::SIG_BLOCK)?;
    let spawned = spawn();
    change_mask(libc::SIG_UNBLOCK)?;
    spawned
}

/// Blocks or unblocks SIGHUP in this thread.
fn change_mask(how: libc::c_int) -> io::Result<()> {
    let mut hangup = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set before `sigaddset` and `pthread_sigmask` read it; SIGHUP is a valid signal, so
    // the first two cannot fail. The former mask is not requested (null).
    let error = unsafe {
        libc::sigemptyset(hangup.as_mut_ptr());
        libc::sigaddset(hangup.as_mut_ptr(), libc::SIGHUP);
        libc::pthread_sigmask(how, hangup.as_ptr(), ptr::null_mut())
    };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
    use std::process::{Command, Stdio};

    /// A child that has not handled SIGHUP yet survives it while it is blocked.
    #[test]
    #[expect(clippy::zombie_processes, reason = "waitpid reaps the children")]
    fn a_blocked_hangup_does_not_end_a_child() {
        // Under `nohup` a process ignores SIGHUP, and so would the children.
        // SAFETY: no Rust code runs as a handler, and no other test of this process depends on SIGHUP.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        let spawn = || Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        for (is_blocked, expected) in [(false, Signal::HUP), (true, Signal::TERM)] {
            let child = if is_blocked { while_blocked(spawn) } else { spawn() }.expect("cat");
            let pid = Pid::from_child(&child);
            for signal in [Signal::HUP, Signal::TERM] {
                // SIGTERM fails if SIGHUP has ended the child already.
                let _ = kill_process(pid, signal);
            }
            let (_, status) = waitpid(Some(pid), WaitOptions::empty()).expect("a child").expect("its end");
            assert_eq!(status.terminating_signal(), Some(expected.as_raw()), "blocked: {is_blocked}");
        }
    }
}

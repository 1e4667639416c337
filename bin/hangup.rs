//! The disposition of SIGHUP, whose default ends the process together with its terminal. It is ignored, unless there is a list
//! of keys to reread (`signals`).
#![allow(unsafe_code)] // one of the modules that tests/layout lists: signal dispositions and masks are set by unsafe calls

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

/// Ignores SIGHUP in this process and its later children. Unblocks the signal, which the parent may have blocked
/// ([`while_blocked`]).
pub(crate) fn ignore() -> io::Result<()> {
    // SAFETY: SIG_IGN runs no code, and it replaces no handler of this program, which registers one for SIGHUP only later.
    let before = unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { change_mask(libc::SIG_UNBLOCK) }
}

/// Runs `spawn` with SIGHUP blocked in this thread. A child inherits the mask, so a SIGHUP that arrives before the child calls
/// [`ignore`] waits. Without the mask it would end the child: `exec` resets a signal with a handler to its default.
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

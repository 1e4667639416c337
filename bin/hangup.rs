//! SIGHUP does nothing, unless there is a list of keys to reread (`signals`): its default would end the process with the terminal.
#![allow(unsafe_code)] // one of the modules that tests/layout lists: setting a signal's disposition is an unsafe call

use std::io;

/// Ignores SIGHUP in this process and in those that it starts: `exec` keeps a signal ignored, but resets one with a handler to
/// its default, which would end a worker in its first milliseconds.
pub(crate) fn ignore() -> io::Result<()> {
    // SAFETY: SIG_IGN is no code that could run at a bad moment, and no handler of this program is replaced: it registers one
    // for SIGHUP only later.
    let before = unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

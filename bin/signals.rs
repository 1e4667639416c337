//! Signals of the process that serves. The supervisor has its own handlers.

use std::io;

use fanout::rpc::server::{ServerHandle, ServerKeys};

/// What a second SIGINT, SIGTERM or SIGHUP does to a process that ends or drains already.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SecondSignal {
    /// The process exits at once, with status 128 + signal.
    Exit,
    /// The process goes on draining. A worker gets each signal twice, from the terminal or the service manager and from its
    /// supervisor; the supervisor kills the worker at a second signal of its own.
    Ignore,
}

/// Calls `end`, on a thread of its own, at the first SIGINT or SIGTERM, and at SIGHUP unless the process ignores it.
#[cfg(unix)]
pub(crate) fn end_on_signals(second: SecondSignal, end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    let signaled = Arc::new(AtomicBool::new(false));
    let ending: &[i32] = if super::hangup::is_ignored() { &[SIGINT, SIGTERM] } else { &[SIGINT, SIGTERM, SIGHUP] };
    for &signal in ending {
        // The order of the two handlers matters: the conditional shutdown must run before the flag is set, else the first
        // signal would exit the process.
        if second == SecondSignal::Exit {
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&signaled))?;
        }
        signal_hook::flag::register(signal, Arc::clone(&signaled))?;
    }
    let mut signals = signal_hook::iterator::Signals::new(ending)?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if signals.forever().next().is_some() {
            end();
        }
    })?;
    Ok(())
}

/// SIGHUP rereads the list of allowed keys, and ends the sessions of keys that are no longer on it or may use other devices.
#[cfg(unix)]
pub(crate) fn reread_on_hangup(handle: ServerHandle, keys: ServerKeys) -> io::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGHUP])?;
    // A signal between the first reading of the list and the registration above was lost. An error here, inside of the sandbox,
    // would occur at each later reading, too.
    handle.reread_keys().map_err(io::Error::other)?;
    let reread = move || {
        let reread = || match handle.reread_keys() {
            Ok(()) => log::info!("allowed keys: {}", keys.allowed().unwrap_or_default()),
            Err(e) => log::error!(
                "the list of allowed keys stays as it was: {e}; correct it, because the server and its worker need a valid \
                 list to start again"
            ),
        };
        signals.forever().for_each(|_| reread());
    };
    std::thread::Builder::new().name("hangup".to_owned()).spawn(reread).map(drop)
}

#[cfg(not(unix))]
pub(crate) fn reread_on_hangup(_: ServerHandle, _: ServerKeys) -> io::Result<()> {
    Ok(())
}

/// Without signal handlers, the system ends the process.
#[cfg(not(unix))]
pub(crate) fn end_on_signals(_: SecondSignal, _: impl FnOnce() + Send + 'static) -> io::Result<()> {
    Ok(())
}

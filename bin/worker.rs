//! The worker: the process that opens the devices and serves, on the sockets of its supervisor (`supervisor.rs`).

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::process::getppid;

use super::control;
use super::heartbeat::BEAT_INTERVAL;

/// The worker's connection to its supervisor.
pub(crate) struct SupervisorLink {
    stream: UnixStream,
}

impl SupervisorLink {
    /// Binds the life of this process to that of its supervisor, the process `supervisor`, and takes the connection to it from
    /// standard input.
    ///
    /// # Errors
    /// This process was not started by a supervisor, or the supervisor has ended.
    pub(crate) fn open(supervisor: u32) -> Result<SupervisorLink, String> {
        #[cfg(target_os = "linux")]
        {
            use rustix::process::{Signal, set_parent_process_death_signal};
            // The kernel kills this process when the supervisor's main thread, which has forked it, ends.
            set_parent_process_death_signal(Some(Signal::KILL))
                .map_err(|e| format!("the system does not bind this process to its supervisor: {e}"))?;
            // The name of the executed file is /proc/self/exe, so the process would be listed as `exe`.
            let _ = rustix::thread::set_name(c"rpc-server");
        }
        // After the line above: a supervisor that ended before it is no longer the parent, and sends no signal any more.
        let parent = getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
        if u32::try_from(parent) != Ok(supervisor) {
            return Err(format!(
                "only for processes that a supervisor starts: the parent is {parent}, not {supervisor}"
            ));
        }
        let stream = io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
        match stream.and_then(|stream| stream.peer_addr().map(|_| stream)) {
            Ok(stream) => Ok(SupervisorLink { stream }),
            Err(e) => Err(format!(
                "only for processes that a supervisor starts: standard input is not a connection to it: {e}"
            )),
        }
    }

    /// Starts the thread that shows the supervisor that this process runs.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start_heartbeat(&self) -> io::Result<()> {
        let mut stream = self.stream.try_clone()?;
        let beat = move || {
            // It ends with the supervisor, and this process does, too.
            while stream.write_all(&[control::BEAT]).is_ok() {
                std::thread::sleep(BEAT_INTERVAL);
            }
        };
        std::thread::Builder::new().name("heartbeat".to_owned()).spawn(beat).map(drop)
    }

    /// The listening sockets, and what else the supervisor knows at the start.
    pub(crate) fn request_sockets(&self, count: usize) -> io::Result<control::Start> {
        control::request_sockets(&self.stream, count)
    }

    /// Returns a function that reports that a kernel of a client has made a device unusable.
    ///
    /// # Errors
    /// The process has no descriptor for it.
    pub(crate) fn fault_report(&self) -> io::Result<impl Fn(&str) + Send + Sync + 'static> {
        let stream = self.stream.try_clone()?;
        Ok(move |client: &str| {
            if let Err(e) = control::report_fault(&stream, client) {
                log::warn!("cannot report {client} to the supervisor: {e}");
            }
        })
    }

    /// Reports that this process serves: from now on, the supervisor replaces it when it dies.
    pub(crate) fn report_ready(mut self) -> io::Result<()> {
        self.stream.write_all(&[control::READY])?;
        #[cfg(not(target_os = "linux"))]
        std::thread::Builder::new().name("supervisor".to_owned()).spawn(move || {
            use std::io::Read;
            // The supervisor sends nothing any more; the end of the stream is its end.
            let _ = self.stream.read(&mut [0]);
            std::process::exit(1);
        })?;
        Ok(())
    }
}

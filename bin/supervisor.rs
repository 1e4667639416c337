//! The supervisor: binds the listening sockets, starts a worker process that serves on them, and replaces it when it dies.
//!
//! The supervisor opens no device and accepts no connection, so nothing that a client or a device driver does can end it. While
//! no worker runs, connections wait in the sockets' queues. Its main thread sleeps in `poll` and starts the workers: Linux ends
//! a worker with the thread that has forked it. A second thread writes the log (`log_writer.rs`). As process 1 of a container
//! the supervisor also reaps orphans, since it waits for any child.

use std::error::Error;
use std::io::{self, ErrorKind, Read};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use fanout::io_hint::io_hint;
use fanout::rpc::server::{BindError, BoundSocket, ListenAddress};
use log::{debug, error, info};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::getsockname;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::signal_name;

use super::announce::Announcement;
use super::backoff::Backoff;
use super::death::{Death, Seconds};
use super::faults::FaultCounts;
use super::heartbeat::Heartbeat;
use super::{control, fail, hangup, log_writer};

/// How long the supervisor waits for the end of a worker that it has killed: a worker may be blocked in a device driver.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a worker may take to end by itself, without a heartbeat: the kernel writes a core dump, or frees its memory.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Messages of the worker that are handled before signals and deadlines are checked again.
const MAX_MESSAGES: usize = 256;

/// Time from the end of a worker's grace period (`--drain`) to its kill. A healthy worker needs up to 10 s of it, for sessions that
/// are blocked on a device; a stopped or hung worker would not end at all.
const DRAIN_MARGIN: Duration = Duration::from_secs(15);

/// Workers in a row that may fail to serve, after one has served, before the supervisor gives up: the pauses between their starts
/// are 90 s or more together, so the cause lasts. A worker that serves and then dies is not counted, because a client may have
/// caused that.
const MAX_FAILED_STARTS: u32 = 10;

/// The options that the supervisor uses.
pub(crate) struct Settings {
    pub(crate) addresses: Vec<ListenAddress>,
    /// The sockets of the addresses, if a service manager has bound them.
    pub(crate) sockets: Option<Vec<BoundSocket>>,
    /// The grace period of a worker.
    pub(crate) drain: Duration,
    /// Whether SIGHUP lets workers reread the list of allowed keys. Otherwise it ends the server.
    pub(crate) rereads_keys: bool,
    /// The folder for the file with the addresses.
    pub(crate) announce: Option<PathBuf>,
}

/// Supervises workers until one cannot start, or a signal ends the server. The result is the exit status of the program.
pub(crate) fn run(settings: Settings) -> ExitCode {
    let signals = log_writer::start().and_then(|()| hangup::prepare(settings.rereads_keys));
    let signals = signals.and_then(|()| SignalStreams::register(settings.rereads_keys));
    let supervisor = signals.map(|signals| Supervisor {
        addresses: settings.addresses,
        drain_timeout: settings.drain + DRAIN_MARGIN,
        sockets: settings.sockets,
        announce: settings.announce,
        announcement: None,
        signals,
        worker: None,
        start_at: Some(Instant::now()),
        backoff: Backoff::default(),
        has_served: false,
        failed_starts: 0,
        hangup_pending: false,
        faults: FaultCounts::default(),
        end: None,
    });
    match supervisor.and_then(Supervisor::run) {
        Ok(code) => ExitCode::from(code),
        Err(e) => fail(&format!("supervisor: {e}{}", io_hint(&e))),
    }
}

/// Exit status of the program if the worker dies while it drains, or does not end.
const DRAIN_FAILED: u8 = 1;

/// A stream for each signal: its handler writes one byte per signal.
struct SignalStreams {
    terminate: UnixStream,
    interrupt: UnixStream,
    child: UnixStream,
    /// SIGHUP, unless it is ignored.
    hangup: Option<UnixStream>,
    /// Whether SIGHUP is forwarded.
    rereads_keys: bool,
}

impl SignalStreams {
    fn register(rereads_keys: bool) -> io::Result<SignalStreams> {
        let stream = |signal| {
            let (reader, writer) = UnixStream::pair()?;
            reader.set_nonblocking(true)?;
            signal_hook::low_level::pipe::register(signal, writer)?;
            io::Result::Ok(reader)
        };
        let hangup = (rereads_keys || !hangup::is_ignored()).then(|| stream(SIGHUP)).transpose()?;
        let (terminate, interrupt, child) = (stream(SIGTERM)?, stream(SIGINT)?, stream(SIGCHLD)?);
        Ok(SignalStreams { terminate, interrupt, child, hangup, rereads_keys })
    }

    /// The next signal that ends the server.
    fn next_end(&mut self) -> Option<i32> {
        let arrived = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok_and(|bytes| bytes > 0);
        if arrived(&self.terminate) {
            return Some(SIGTERM);
        }
        if !self.rereads_keys && self.take_hangup() {
            return Some(SIGHUP);
        }
        arrived(&self.interrupt).then_some(SIGINT)
    }

    /// Whether SIGHUP has arrived.
    fn take_hangup(&mut self) -> bool {
        let read = |mut stream: &UnixStream| stream.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0);
        self.hangup.as_ref().is_some_and(read)
    }

    /// Discards the SIGCHLDs: every pass of the loop reaps all children that have ended.
    fn drain_child(&mut self) {
        while self.child.read(&mut [0; 64]).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// A running worker.
struct Worker {
    pid: Pid,
    /// Its control connection; `None` once it has ended.
    link: Option<UnixStream>,
    started: Instant,
    ready: Option<Instant>,
    /// `None` until the worker is ready.
    heartbeat: Option<Heartbeat>,
    /// When the supervisor first noticed that the kernel is ending the process, which therefore sends no heartbeat.
    ending: Option<Instant>,
    has_reported_fault: bool,
}

impl Worker {
    /// A worker that has just been started.
    fn new(pid: Pid, link: Option<UnixStream>) -> Worker {
        Worker {
            pid,
            link,
            started: Instant::now(),
            ready: None,
            heartbeat: None,
            ending: None,
            has_reported_fault: false,
        }
    }
}

/// Whether the kernel is ending the process: it writes a core dump, or frees its memory, and all its threads have stopped.
fn is_ending(pid: Pid) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    std::fs::read_to_string(path).is_ok_and(|status| status.contains("CoreDumping:\t1") || !status.contains("VmSize:"))
}

/// How the program ends.
#[derive(Clone, Copy)]
enum End {
    /// The worker drains, and is killed if it still runs at `until`.
    Drain { until: Instant },
    /// The worker is killed.
    Kill { status: u8, until: Instant },
}

struct Supervisor {
    addresses: Vec<ListenAddress>,
    /// How long a worker may take to end after SIGTERM.
    drain_timeout: Duration,
    /// Bound when the first worker has opened its devices, so that no client connects to a server that then fails to start.
    sockets: Option<Vec<BoundSocket>>,
    /// The folder of the announcement.
    announce: Option<PathBuf>,
    /// Present from the time when the first worker serves until the server drains: connections wait while a worker is replaced.
    announcement: Option<Announcement>,
    signals: SignalStreams,
    worker: Option<Worker>,
    /// When the next worker starts; `None` while one runs.
    start_at: Option<Instant>,
    backoff: Backoff,
    /// Whether a worker has been ready. If none has, the failure of one ends the program.
    has_served: bool,
    /// Workers since the last one that was ready.
    failed_starts: u32,
    /// Whether a SIGHUP is to be forwarded.
    hangup_pending: bool,
    /// The clients whose kernels have ended workers.
    faults: FaultCounts,
    end: Option<End>,
}

impl Supervisor {
    fn run(mut self) -> io::Result<u8> {
        loop {
            if self.start_at.is_some_and(|at| at <= Instant::now()) {
                self.start_worker()?;
            }
            self.sleep()?;
            while let Some(signal) = self.signals.next_end() {
                if let Some(status) = self.end_on(signal) {
                    return Ok(status);
                }
            }
            self.read_link(MAX_MESSAGES);
            self.check_heartbeat(Instant::now());
            self.forward_hangup();
            self.signals.drain_child();
            if let Some(status) = self.reap()? {
                return Ok(status);
            }
            match self.end {
                Some(End::Drain { until }) if until <= Instant::now() => {
                    error!("supervisor: the worker still runs {:?} after SIGTERM: it is killed", self.drain_timeout);
                    self.kill(DRAIN_FAILED);
                }
                Some(End::Kill { status, until }) if until <= Instant::now() => {
                    error!("supervisor: the worker still runs {KILL_TIMEOUT:?} after SIGKILL");
                    return Ok(status);
                }
                _ => {}
            }
        }
    }

    /// Starts a worker: this program again, with the control connection as its standard input.
    fn start_worker(&mut self) -> io::Result<()> {
        match spawn_worker() {
            Ok(worker) => {
                debug!("supervisor: worker {} starts", worker.pid);
                (self.worker, self.start_at) = (Some(worker), None);
                Ok(())
            }
            Err(e) if self.has_served && self.failed_starts + 1 < MAX_FAILED_STARTS => {
                self.failed_starts += 1;
                let pause = self.backoff.after_death(Duration::ZERO);
                error!("supervisor: cannot start a worker: {e}; next attempt in {}", Seconds(pause));
                self.start_at = Some(Instant::now() + pause);
                Ok(())
            }
            Err(e) => {
                let (proc, remedy) = if cfg!(target_os = "linux") {
                    (", which needs /proc", "; mount it, or serve without a supervisor (--no-supervise)")
                } else {
                    ("", "; serve without a supervisor (--no-supervise)")
                };
                // Without a kind, so that no hint for files is added.
                Err(io::Error::other(format!("cannot start a worker{proc}: {e}{remedy}")))
            }
        }
    }

    /// Waits for a signal, a message of the worker, or the time of the next action.
    fn sleep(&self) -> io::Result<()> {
        let until = match self.end {
            Some(End::Drain { until } | End::Kill { until, .. }) => Some(until),
            None => self.start_at.or_else(|| Some(self.worker.as_ref()?.heartbeat.as_ref()?.next_check())),
        };
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        // Rounds up, so that the loop does not spin until the time has come.
        let timeout = timeout.and_then(|time| Timespec::try_from(time + Duration::from_millis(1)).ok());
        let link = self.worker.as_ref().and_then(|worker| worker.link.as_ref());
        let streams = [&self.signals.terminate, &self.signals.interrupt, &self.signals.child].into_iter();
        let streams = streams.chain(&self.signals.hangup).chain(link);
        let mut fds: Vec<_> = streams.map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Handles a signal that ends the server: the first drains the worker, the second one kills it. Returns the exit status if there is
    /// nothing to wait for.
    fn end_on(&mut self, signal: i32) -> Option<u8> {
        self.announcement = None;
        let name = signal_name(signal).unwrap_or("signal");
        let second_status = u8::try_from(128 + signal).unwrap_or(u8::MAX);
        let Some(worker) = &self.worker else {
            info!("supervisor: {name}: ends, no worker runs");
            return Some(0);
        };
        match self.end {
            None if worker.ready.is_some() => {
                info!("supervisor: {name}: the worker drains");
                // A worker that has ended is reaped in the same pass.
                let _ = kill_process(worker.pid, Signal::TERM);
                self.end = Some(End::Drain { until: Instant::now() + self.drain_timeout });
            }
            None => {
                info!("supervisor: {name}: ends, the worker does not serve yet");
                self.kill(0);
            }
            Some(End::Drain { .. }) => self.kill(second_status),
            Some(End::Kill { .. }) => return Some(second_status),
        }
        None
    }

    /// Forwards SIGHUP to the worker as soon as it serves.
    fn forward_hangup(&mut self) {
        self.hangup_pending |= self.signals.rereads_keys && self.signals.take_hangup();
        if self.hangup_pending
            && let Some(worker) = self.worker.as_ref().filter(|worker| worker.ready.is_some())
        {
            // A worker that has ended is reaped in the same pass.
            let _ = kill_process(worker.pid, Signal::HUP);
            self.hangup_pending = false;
        }
    }

    /// Kills the worker; the program then ends with `status`.
    fn kill(&mut self, status: u8) {
        if let Some(worker) = &self.worker {
            // Fails if the worker has ended; it is then reaped.
            let _ = kill_process(worker.pid, Signal::KILL);
        }
        self.end = Some(End::Kill { status, until: Instant::now() + KILL_TIMEOUT });
    }

    /// Handles at most so many messages of the worker: one that an attacker has taken over may send them without end.
    fn read_link(&mut self, most: usize) {
        for _ in 0..most {
            let Some(worker) = &mut self.worker else { return };
            let Some(mut link) = worker.link.as_ref() else { return };
            let mut message = [0];
            match link.read(&mut message) {
                Ok(1) if message == [control::SOCKETS] => {
                    if let Err(e) = self.bind_and_send() {
                        // The worker must end before the program: it would report that its supervisor has ended.
                        let _ = fail(&e);
                        self.kill(1);
                    }
                }
                Ok(1) if message == [control::BEAT] => {
                    worker.heartbeat.iter_mut().for_each(Heartbeat::beat);
                }
                // A worker ends with the fault that it reports: further reports are an attacker's.
                Ok(1) if message == [control::FAULT] && !worker.has_reported_fault => {
                    match control::read_client(link) {
                        Ok(client) => {
                            worker.has_reported_fault = true;
                            self.record_fault(client);
                        }
                        Err(e) => {
                            debug!("supervisor: worker {} names no client of its fault: {e}", worker.pid);
                            worker.link = None;
                        }
                    }
                }
                Ok(1) if message == [control::READY] => {
                    let now = Instant::now();
                    (worker.ready, worker.heartbeat) = (Some(now), Some(Heartbeat::start(now)));
                    self.has_served = true;
                    if let Err(e) = self.write_announcement() {
                        let _ = fail(&e);
                        self.kill(1);
                    }
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
                // Its end is reported when it is reaped.
                _ => worker.link = None,
            }
        }
    }

    /// Counts a fault of a client's kernel, which ends the worker.
    fn record_fault(&mut self, client: String) {
        match self.faults.record(client.clone(), Instant::now()) {
            Some(time) => {
                error!("supervisor: a kernel of {client} has made a device unusable again: refused for {time:?}")
            }
            None => info!("supervisor: a kernel of {client} has made a device unusable"),
        }
    }

    /// Kills the worker if it has stopped, unless the program ends, which has limits of its own. Its death is then like any other.
    fn check_heartbeat(&mut self, now: Instant) {
        if let (Some(worker), None) = (&mut self.worker, &self.end)
            && worker.heartbeat.as_mut().is_some_and(|heartbeat| heartbeat.has_stopped(now))
        {
            if is_ending(worker.pid) && now < *worker.ending.get_or_insert(now) + END_TIMEOUT {
                return;
            }
            // Said and done once: a process that is blocked in a driver does not end at once.
            worker.heartbeat = None;
            error!("supervisor: worker {} has stopped: it sends no heartbeat. It is killed", worker.pid);
            // Fails if the worker has ended; it is then reaped.
            let _ = kill_process(worker.pid, Signal::KILL);
        }
    }

    /// Sends the listening sockets to the worker, and binds them for the first one.
    fn bind_and_send(&mut self) -> Result<(), BindError> {
        let sockets = match self.sockets.take() {
            Some(sockets) => sockets,
            None => self.addresses.iter().map(ListenAddress::bind).collect::<Result<_, _>>()?,
        };
        let sockets = self.sockets.insert(sockets);
        if let Some(worker) = &mut self.worker
            && let Some(link) = &worker.link
            && let Err(e) = control::send_sockets(link, sockets, self.has_served, &self.faults.refused(Instant::now()))
        {
            // A worker that waits for the rest ends with the connection.
            debug!("supervisor: cannot send the sockets to worker {}: {e}", worker.pid);
            worker.link = None;
        }
        Ok(())
    }

    /// Announces the addresses, when the first worker serves and there is a folder for it.
    fn write_announcement(&mut self) -> Result<(), Box<dyn Error>> {
        let (Some(folder), None, Some(sockets)) = (&self.announce, &self.announcement, &self.sockets) else {
            return Ok(());
        };
        let address = |socket| io::Result::Ok(SocketAddr::try_from(getsockname(socket)?)?);
        // Clients of HTTP alone are no clients of the devices.
        let served = sockets.iter().zip(&self.addresses).filter(|(_, address)| !address.is_http_only());
        let addresses = served.map(|(socket, _)| address(socket)).collect::<io::Result<Vec<_>>>()?;
        self.announcement = Some(Announcement::write(folder, &addresses)?);
        Ok(())
    }

    /// Reaps all children that have ended. Returns the exit status if the program ends with the worker.
    fn reap(&mut self) -> io::Result<Option<u8>> {
        loop {
            let (pid, status) = match wait(WaitOptions::NOHANG) {
                Ok(Some(child)) => child,
                Ok(None) | Err(rustix::io::Errno::CHILD) => return Ok(None),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            if !self.worker.as_ref().is_some_and(|worker| worker.pid == pid) {
                debug!("supervisor: reaped process {pid}, which is not the worker");
                continue;
            }
            // A worker that was ready and died at once has left its message. It sends no more of them.
            self.read_link(usize::MAX);
            if let Some(worker) = self.worker.take()
                && let Some(status) = self.after_death(&worker, Death::of(status))
            {
                return Ok(Some(status));
            }
        }
    }

    /// Plans the next worker after the end of one. Returns the exit status if there is to be none.
    fn after_death(&mut self, worker: &Worker, death: Death) -> Option<u8> {
        let lived = Seconds(worker.started.elapsed());
        let pid = worker.pid;
        match self.end {
            Some(End::Kill { status, .. }) => return Some(status),
            Some(End::Drain { .. }) if death.exit_code == Some(0) => return Some(0),
            Some(End::Drain { .. }) => {
                error!("supervisor: worker {pid} {death} after {lived}, while it drained");
                return Some(DRAIN_FAILED);
            }
            None if !self.has_served => {
                // A worker that fails has printed the reason.
                if matches!(death.exit_code, None | Some(0)) {
                    error!("supervisor: worker {pid} {death} after {lived}, before it served");
                }
                return Some(death.failure_status());
            }
            None => {}
        }
        self.failed_starts = if worker.ready.is_some() { 0 } else { self.failed_starts + 1 };
        if self.failed_starts >= MAX_FAILED_STARTS {
            error!(
                "supervisor: worker {pid} {death} after {lived}; {MAX_FAILED_STARTS} workers in a row could not serve"
            );
            return Some(death.failure_status());
        }
        let served = worker.ready.map_or(Duration::ZERO, |ready| ready.elapsed());
        let pause = self.backoff.after_death(served);
        let next = if pause.is_zero() { "at once".to_owned() } else { format!("in {}", Seconds(pause)) };
        error!("supervisor: worker {pid} {death} after {lived}; a new one starts {next}");
        self.start_at = Some(Instant::now() + pause);
        None
    }
}

/// Starts a worker.
fn spawn_worker() -> io::Result<Worker> {
    let (supervisor_end, worker_end) = UnixStream::pair()?;
    supervisor_end.set_nonblocking(true)?;
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "rpc-server".into());
    let mut command = Command::new(executable()?);
    command
        .arg0(name)
        .args(["--worker", &std::process::id().to_string()])
        .args(arguments)
        .stdin(Stdio::from(OwnedFd::from(worker_end)));
    let child = hangup::while_blocked(|| command.spawn())?;
    let (pid, link) = (Pid::from_child(&child), Some(supervisor_end));
    Ok(Worker::new(pid, link))
}

/// The file of this program. On Linux the link to the running program: its file may have been replaced by another version.
fn executable() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

#[cfg(test)]
mod tests;

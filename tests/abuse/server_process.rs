//! The attacked server: a process of the program, and the resources that Linux reports for it.

use std::io::{BufRead, BufReader, Error};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// `--threads` of the server.
const WORKERS: usize = 2;

/// `max-host-memory` of the server in bytes.
pub(crate) const HOST_MEMORY: u64 = 512 << 20;

/// Threads of any server: accept loop, signals, hang-up watch.
const SERVER_THREADS: usize = 3;

/// Threads of the queues of a CPU device.
const QUEUE_THREADS: usize = 3;

/// Threads of a session: its own; completions and heartbeat.
const SESSION_THREADS: usize = 2;

/// Threads, mappings and memory of a process; of two, the maximum is that of each.
#[derive(Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) threads: usize,
    pub(crate) mappings: usize,
    /// Highest resident memory since the start of the process, in bytes.
    pub(crate) peak_resident: u64,
}

impl Usage {
    /// What a process uses now.
    pub(crate) fn of(process: u32) -> std::io::Result<Usage> {
        let threads = std::fs::read_dir(format!("/proc/{process}/task"))?.count();
        let maps = std::fs::read(format!("/proc/{process}/maps"))?;
        let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
        let field = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        // A process that has ended has no such field.
        let kibibytes: u64 = field.and_then(|number| number.parse().ok()).ok_or_else(|| Error::other("no VmHWM"))?;
        let mappings = maps.iter().filter(|&&byte| byte == b'\n').count();
        Ok(Usage { threads, mappings, peak_resident: kibibytes << 10 })
    }

    pub(crate) fn max(self, other: Usage) -> Usage {
        Usage {
            threads: self.threads.max(other.threads),
            mappings: self.mappings.max(other.mappings),
            peak_resident: self.peak_resident.max(other.peak_resident),
        }
    }
}

/// The option without which a supervisor would start the measured process. Older builds, which `--binary` may name, lack it.
fn in_one_process(binary: &Path) -> Option<&'static str> {
    const OPTION: &str = "--no-supervise";
    let help = Command::new(binary).arg("--help").output().unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
    String::from_utf8_lossy(&help.stdout).contains(OPTION).then_some(OPTION)
}

/// A server on a free port; killed on drop.
pub(crate) struct ServerProcess {
    child: Child,
    pub(crate) process: u32,
    pub(crate) address: String,
    /// Threads that the flags allow, by the table of threads in `docs/ARCHITECTURE.md`. Left out are rejections, because no
    /// attack reaches the limit of connections, and transfers.
    pub(crate) configured_threads: usize,
}

impl ServerProcess {
    /// Starts a server whose device has `memory` bytes, for so many connections, with further `flags`.
    pub(crate) fn start(binary: &Path, memory: u64, connections: usize, flags: &[&str]) -> ServerProcess {
        let mut child = Command::new(binary)
            .args(["--port", "0", "--device", "CPU", "--protocol", "7", "--mem", &memory.to_string()])
            .args(["--threads", &WORKERS.to_string(), "--max-connections", &connections.to_string()])
            .args(["--max-host-memory", &HOST_MEMORY.to_string()])
            .args(in_one_process(binary))
            .args(flags)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
        let address = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .find_map(|line| Some(line.unwrap().strip_prefix("listening on ")?.split_whitespace().next()?.to_owned()))
            .expect("the server prints the address on which it listens");
        let configured_threads = SERVER_THREADS + WORKERS + QUEUE_THREADS + SESSION_THREADS * connections;
        ServerProcess { process: child.id(), child, address, configured_threads }
    }

    pub(crate) fn usage(&self) -> std::io::Result<Usage> {
        Usage::of(self.process)
    }

    /// `None` while the server runs.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

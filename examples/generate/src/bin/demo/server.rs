//! A server as a child process, which ends with this program.

use std::cell::RefCell;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

/// How long a server may take until it serves, and until its supervisor has replaced a worker.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The shell that starts the server `"$@"` and kills it when the shell's standard input ends. That is a pipe from this program, which
/// the kernel closes however this program ends, also by a signal. A guard that kills in `drop` would not run then. The shell ignores
/// the signals of a terminal (Ctrl-C, Ctrl-\, its end), so that it does not end before the server.
const WATCHDOG: &str = r#"trap '' INT QUIT HUP TERM; "$@" 2>&1 & exec >&-; read -r end; kill -9 $!; wait $!"#;

/// A running server. It is killed when dropped.
pub struct Server {
    shell: Child,
    /// `host:port`.
    address: String,
    output: RefCell<Output>,
}

/// The lines that a server has printed.
struct Output {
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Output {
    /// The last line for which `parse` has a value; waits for the first one.
    fn last<T>(&mut self, parse: impl Fn(&str) -> Option<T>) -> anyhow::Result<T> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            self.seen.extend(self.lines.try_iter());
            if let Some(found) = self.seen.iter().rev().find_map(|line| parse(line)) {
                return Ok(found);
            }
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout) => {
                    bail!("a server does not serve after {START_TIMEOUT:?}; it printed:\n{}", self.seen.join("\n"))
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("a server has ended; it printed:\n{}", self.seen.join("\n"))
                }
            }
        }
    }
}

impl Server {
    /// Starts `program` on a free port with these devices, and waits until it serves.
    pub fn start(program: &Path, devices: &str, threads: usize) -> anyhow::Result<Server> {
        let mut shell = Command::new("sh")
            .args(["-c", WATCHDOG, "sh"])
            .arg(program)
            .args(["--port", "0", "--device", devices, "--threads", &threads.to_string()])
            // The servers add partial sums between them.
            .args(["--peer", "127.0.0.1:*"])
            // At this level, the supervisor prints the process id of each worker.
            .env("RUST_LOG", "warn,rpc_server::supervisor=debug")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start sh, which starts the server")?;
        let (sender, lines) = mpsc::channel();
        if let Some(stdout) = shell.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // The receiver is gone: the server is being killed.
                    let _ = sender.send(line);
                }
            });
        }
        let output = RefCell::new(Output { lines, seen: Vec::new() });
        let mut server = Server { shell, address: String::new(), output };
        server.address = server.output.get_mut().last(|line| {
            let address = line.strip_prefix("listening on ")?.split(' ').next()?;
            Some(address.to_owned())
        })?;
        Ok(server)
    }

    /// The name of one of its devices.
    pub fn device(&self, number: usize) -> String {
        format!("{self}/{number}")
    }

    /// The process id of the worker that serves now.
    pub fn worker(&self) -> anyhow::Result<u32> {
        self.output.borrow_mut().last(|line| {
            let (_, rest) = line.split_once("supervisor: worker ")?;
            rest.strip_suffix(" starts")?.parse().ok()
        })
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // `wait` closes the shell's standard input first. Its status does not matter: the server is dead.
        let _ = self.shell.wait();
    }
}

/// Kills a process that is no child of this one, which the standard library cannot.
pub fn kill(process: u32) -> anyhow::Result<()> {
    let killed = Command::new("sh").arg("-c").arg(format!("kill -9 {process}")).status();
    ensure!(killed.context("sh")?.success(), "cannot kill process {process}");
    Ok(())
}

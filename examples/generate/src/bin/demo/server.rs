//! A server as a child process: this program again, with the hidden subcommand `serve`.

use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, bail};
use clap::Subcommand;
use fanout::registry::{Options, Registry};
use fanout::rpc::server::{Config, Server};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Start of the line by which a server reports its address.
const LISTENING: &str = "listening on ";

/// The command line of a server process.
#[derive(Clone, Debug, Subcommand)]
pub enum Serve {
    /// Serve a device until standard input ends.
    #[command(hide = true)]
    Serve {
        /// The device.
        device: String,
        /// Threads of a CPU device.
        threads: usize,
        /// The port; 0: any free one.
        port: u16,
    },
}

impl Serve {
    /// Serves. Standard input is a pipe from the demo, which the kernel closes however the demo ends, also by a signal: no server
    /// survives it.
    ///
    /// # Errors
    /// A device that cannot be opened, or a port that is in use.
    pub fn run(&self) -> anyhow::Result<()> {
        let Serve::Serve { device, threads, port } = self;
        let devices = Registry::detect().open(device, &Options::default().with_threads(Some(*threads)))?;
        // The servers add partial sums between them.
        let config = Config::default().with_peers(vec!["127.0.0.1:*".parse()?]);
        let server = Server::bind(&LOCALHOST.to_string(), *port, devices, config)?;
        std::thread::spawn(|| {
            // An error ends the demo's side, too.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            std::process::exit(0);
        });
        writeln!(io::stdout(), "{LISTENING}{}", server.local_addr())?;
        bail!("the server ended: {:?}", server.run())
    }

    /// As [`Serve::run`]. An error goes to standard output, which the demo reads.
    pub fn main(&self) -> ExitCode {
        if let Err(error) = self.run() {
            let _ = writeln!(io::stdout(), "{error:#}");
        }
        ExitCode::FAILURE
    }

    /// Starts the process, and waits until it serves.
    fn start(&self) -> anyhow::Result<(Child, SocketAddr)> {
        let Serve::Serve { device, threads, port } = self;
        let mut child = Command::new(std::env::current_exe().context("the path of this program")?)
            .args(["serve", device, &threads.to_string(), &port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a server")?;
        let mut line = String::new();
        if let Some(stdout) = &mut child.stdout {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        match line.trim_end().strip_prefix(LISTENING) {
            Some(address) => Ok((child, address.parse().context("the address of a server")?)),
            None => {
                // It has ended.
                let _ = child.wait();
                bail!("a server does not serve: {}", line.trim_end())
            }
        }
    }
}

/// A running server. Its process is killed when the last clone is dropped.
#[derive(Clone)]
pub struct ServerProcess {
    address: SocketAddr,
    process: Arc<Mutex<Process>>,
}

struct Process {
    serve: Serve,
    child: Child,
}

impl ServerProcess {
    /// Starts a server for `device`, and waits until it serves.
    pub fn start(device: &str, threads: usize) -> anyhow::Result<ServerProcess> {
        let (child, address) = Serve::Serve { device: device.to_owned(), threads, port: 0 }.start()?;
        let serve = Serve::Serve { device: device.to_owned(), threads, port: address.port() };
        Ok(ServerProcess { address, process: Arc::new(Mutex::new(Process { serve, child })) })
    }

    /// Kills the process (SIGKILL), and starts another one on the same port, as a service manager does: in the background, so that the
    /// client meets a closed port first.
    pub fn kill_and_restart(&self) -> anyhow::Result<()> {
        let process = Arc::clone(&self.process);
        let mut killed = process.lock().unwrap_or_else(PoisonError::into_inner);
        killed.child.kill().context("cannot kill a server")?;
        killed.child.wait()?;
        drop(killed);
        std::thread::spawn(move || {
            let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
            // Without a new server, the client's attempts to connect end in an error.
            if let Ok((child, _)) = process.serve.start() {
                process.child = child;
            }
        });
        Ok(())
    }
}

/// The name of its device.
impl fmt::Display for ServerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/0", self.address)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! `rpc-server connect`: a relay by which llama.cpp's clients on this machine use servers that demand keys. The relay itself is
//! `fanout::rpc::relay`.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::keys::SecretKey;
use fanout::rpc::relay::{ForwardedServer, Relay, RelayConfig};

use super::sandbox::{self, Access, SandboxMode};
use super::signals::{SecondSignal, end_on_signals};
use super::{VERSION, count, fail, log_writer, open_files, print, seconds};

/// Files of a connection: the client's socket and the server's.
const FILES_PER_CONNECTION: u64 = 2;

#[derive(Debug, Args)]
pub(crate) struct ConnectArgs {
    /// File with the secret key that is proved to the servers, which `rpc-server keygen` writes. Its public part belongs into
    /// --allow-keys of each server.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,

    /// Servers, and for each the local address of its clients: `[[LOCALHOST:]LOCALPORT=]HOST[:PORT]=KEY`, with the server's public
    /// key. Without a local address, the first server gets 127.0.0.1:50052, the second 127.0.0.1:50053, and so on; without
    /// PORT, 50052.
    #[arg(value_name = "SERVER", required = true)]
    servers: Vec<ForwardedServer>,

    /// Listen also where other machines can connect: anyone who reaches the port can use the servers with this key, and anyone
    /// on the network path can read what is sent.
    #[arg(long)]
    insecure: bool,

    /// Maximum number of connections at a time, of all servers together; further ones are closed.
    #[arg(long, value_name = "N", default_value_t = RelayConfig::DEFAULT_MAX_CONNECTIONS as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,

    /// Maximum seconds from the connection of a client to the end of the TLS handshake with its server.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    handshake_timeout: Duration,

    /// Restrict this process to what it needs, on Linux, as `rpc-server --sandbox` does: it needs no files.
    #[arg(long, value_enum, value_name = "MODE", default_value = "auto")]
    sandbox: SandboxMode,
}

/// Forwards connections until a signal ends the relay.
pub(crate) fn run(args: &ConnectArgs) -> ExitCode {
    match relay(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e),
    }
}

fn relay(args: &ConnectArgs) -> Result<(), Box<dyn Error>> {
    let key = SecretKey::read_file(&args.key)?;
    let config = RelayConfig::new(key.clone())
        .with_insecure(args.insecure)
        .with_max_connections(count(args.max_connections))
        .with_handshake_timeout(args.handshake_timeout);
    // Before the sandbox: ports below 1024 need a capability.
    let relay = Relay::bind(&args.servers, &config)?;
    let few_files = open_files::raise_limit(args.max_connections.into(), FILES_PER_CONNECTION);
    // The sandbox restricts the calling thread and the threads that it starts later, so this precedes the first thread.
    let sandbox = sandbox::enter(args.sandbox, &Access::none()).map_err(|e| format!("--sandbox: {e}"))?;
    log_writer::start().map_err(|e| format!("cannot start the thread that writes the log: {e}"))?;
    let handle = relay.handle();
    end_on_signals(SecondSignal::Exit, move || handle.shutdown())?;
    let notes: Vec<_> = [Some(sandbox.to_string()), few_files].into_iter().flatten().collect();
    let banner = banner(&relay, &key, &notes)?;
    if let Err(e) = print(&banner) {
        log::warn!("cannot write to standard output: {e}; the log has the lines");
        banner.lines().for_each(|line| log::info!("{line}"));
    }
    try_servers(&relay, &key, args.handshake_timeout)?;
    relay.run();
    log::info!("relay ended");
    Ok(())
}

/// Where the relay listens, and for which servers.
fn banner(relay: &Relay, key: &SecretKey, notes: &[String]) -> Result<String, std::fmt::Error> {
    let mut text = format!("rpc-server {VERSION}, relay to servers with keys\n");
    for note in notes {
        writeln!(text, "{note}")?;
    }
    writeln!(text, "key: {} (for --allow-keys of servers)", key.public_key())?;
    let listeners = relay.listeners();
    for (addr, _) in listeners.iter().filter(|(addr, _)| !addr.ip().to_canonical().is_loopback()) {
        writeln!(
            text,
            "WARNING: {addr} can be reached from other machines, without authentication or encryption: anyone who can reach \
             it can use the devices."
        )?;
    }
    for (addr, server) in &listeners {
        writeln!(text, "listening on {addr} for {server}")?;
    }
    Ok(text)
}

/// Connects to each server once, and logs whether that works. The relay serves clients meanwhile: a server may start later.
fn try_servers(relay: &Relay, key: &SecretKey, timeout: Duration) -> std::io::Result<()> {
    let mut servers: Vec<_> = relay.listeners().into_iter().map(|(_, server)| server).collect();
    servers.sort_by_key(|server| (server.endpoint().to_owned(), server.key()));
    servers.dedup_by_key(|server| (server.endpoint().to_owned(), server.key()));
    for server in servers {
        let options = Options::default()
            .with_connect_timeout(timeout)
            .with_silence_timeout(timeout)
            .with_server_keys(vec![server.key()])
            .with_key(Some(key.clone()));
        let attempt = move || match Endpoint::connect(server.endpoint(), &options) {
            Ok(endpoint) => {
                let (version, devices) = (endpoint.version(), endpoint.devices().len());
                log::info!("{}: ready, protocol {version}, devices: {devices}", server.endpoint());
            }
            Err(e) => log::warn!("{e} (until that changes, the relay closes the connections of its clients)"),
        };
        std::thread::Builder::new().name("try-server".to_owned()).spawn(attempt)?;
    }
    Ok(())
}

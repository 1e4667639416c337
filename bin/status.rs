//! `rpc-server --status`: prints the state of another server.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::wire::ext::{ListenerRecord, REVISION, TenantRecord};

/// Time limit of the whole query.
const DEADLINE: Duration = Duration::from_secs(5);

/// Time limit of each request, shorter than [`DEADLINE`] so that the error of a timed-out request is printed.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(4500);

/// Queries the server at `endpoint`, with the keys of `options`, and prints its state, build and devices. Success if the server
/// accepts clients.
pub(crate) fn print(endpoint: &str, options: Options) -> ExitCode {
    let (sender, result) = mpsc::channel();
    let target = endpoint.to_owned();
    let thread = std::thread::Builder::new().spawn(move || {
        // Sending fails if the deadline has passed and the receiver is dropped.
        let _ = sender.send(query_server(&target, &options));
    });
    if let Err(e) = thread {
        return super::fail(&format!("cannot start a thread: {e}"));
    }
    match result.recv_timeout(DEADLINE) {
        Ok(Ok(text)) => super::print_or_fail(&format!("{endpoint}: ready\n{text}"), ExitCode::SUCCESS),
        Ok(Err(e)) => {
            let state = match &e {
                ConnectError::Full { .. } => format!("{endpoint}: full\n"),
                ConnectError::Draining { .. } => format!("{endpoint}: draining\n"),
                _ => String::new(),
            };
            // The reason follows on standard error, also where standard output is closed.
            let _ = super::print(&state);
            super::fail(&e)
        }
        Err(_) => super::fail(&format!("{endpoint} has not sent all replies within {DEADLINE:?}")),
    }
}

/// The line of a port on which the server listens: `port 50052: protocol 8.0, else 7.0; 3.x; gen0`.
fn describe_listener(listener: &ListenerRecord) -> String {
    format!("port {}: protocol {}\n", listener.port, listener.versions)
}

/// The line of a key with sessions, this one included: `key alice: sessions 2, device memory 12 MiB`.
fn describe_tenant(tenant: &TenantRecord) -> String {
    let TenantRecord { name, sessions, memory } = tenant;
    format!("key {name}: sessions {sessions}, device memory {} MiB\n", memory >> 20)
}

/// Connects to a server and returns a description of it: build, protocol, ports with their versions,
/// sessions, keys with sessions, limits, devices.
fn query_server(endpoint: &str, options: &Options) -> Result<String, ConnectError> {
    let options = options.clone().with_connect_timeout(CLIENT_TIMEOUT).with_silence_timeout(CLIENT_TIMEOUT);
    let endpoint = Endpoint::connect(endpoint, &options)?;
    let version = endpoint.version();
    let mut text = match endpoint.server() {
        Some(server) => format!(
            "build: {}\nprotocol: {version}, extensions {REVISION}\n{}sessions: {} besides this one\n{}{}",
            server.build,
            server.listeners.iter().map(describe_listener).collect::<String>(),
            server.sessions.saturating_sub(1),
            server.tenants.iter().map(describe_tenant).collect::<String>(),
            server.limits.iter().map(|(name, value)| format!("limit: {name}: {value}\n")).collect::<String>()
        ),
        None => format!("protocol: {version}\n"),
    };
    for device in endpoint.devices() {
        let (info, memory) = (device.info(), device.memory()?);
        let (free, total) = (memory.free >> 20, memory.total >> 20);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "device {}: {}, {free} of {total} MiB free", info.name, info.description);
    }
    Ok(text)
}

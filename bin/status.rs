//! How another server is.

use std::fmt::Write;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::wire::ext::REVISION;

/// Until when there is an answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// Until when each part of it is there: what is late can be told.
const PATIENCE: Duration = Duration::from_millis(4500);

/// Asks a server, and prints what it tells. Success where it takes clients.
pub(crate) fn print(endpoint: &str) -> ExitCode {
    let (to, answer) = mpsc::channel();
    let asked = endpoint.to_owned();
    let asking = std::thread::Builder::new().spawn(move || {
        // Nobody listens once the deadline has passed.
        let _ = to.send(ask(&asked));
    });
    if let Err(e) = asking {
        return super::fail(&format!("cannot start a thread: {e}"));
    }
    match answer.recv_timeout(DEADLINE) {
        Ok(Ok(text)) => {
            print!("{endpoint}: ready\n{text}");
            ExitCode::SUCCESS
        }
        Ok(Err(e)) => {
            match &e {
                ConnectError::Full { .. } => println!("{endpoint}: full"),
                ConnectError::Draining { .. } => println!("{endpoint}: draining"),
                _ => {}
            }
            super::fail(&e)
        }
        Err(_) => super::fail(&format!("{endpoint} has not told all that it was asked within {DEADLINE:?}")),
    }
}

fn ask(endpoint: &str) -> Result<String, ConnectError> {
    let options = Options::default().with_connect_timeout(PATIENCE).with_silence_timeout(PATIENCE);
    let endpoint = Endpoint::connect(endpoint, &options)?;
    let version = endpoint.version();
    let mut text = match endpoint.server() {
        Some(server) => format!(
            "build: {}\nprotocol: {version}, extensions {REVISION}\nsessions: {} besides this one\n",
            server.build,
            server.sessions.saturating_sub(1)
        ),
        None => format!("protocol: {version}\n"),
    };
    for device in endpoint.devices() {
        let (info, memory) = (device.info(), device.memory()?);
        let (free, total) = (memory.free >> 20, memory.total >> 20);
        // A String takes whatever is written.
        let _ = writeln!(text, "device {}: {}, {free} of {total} MiB free", info.name, info.description);
    }
    Ok(text)
}

//! `rpc-server --status`: prints the state of another server.

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use fanout::printable::{printable_json, printable_line};
use fanout::registry::Bytes;
use fanout::rpc::client::{ConnectError, Endpoint, Options, endpoint_with_port};
use fanout::rpc::status::{DeviceMemoryStatus, DeviceStatus, ServerStatus, SessionStatus};
use fanout::rpc::wire::ext::REVISION;

/// Time limit of the whole query.
const DEADLINE: Duration = Duration::from_secs(5);

/// Time limit of each request, shorter than [`DEADLINE`] so that the error of a timed-out request is printed.
const CLIENT_TIMEOUT: Duration = Duration::from_millis(4500);

/// Queries the server at `endpoint`, with the keys of `options`, and prints its state. Success if the server accepts clients.
pub(crate) fn print(endpoint: &str, options: Options, as_json: bool) -> ExitCode {
    let (sender, result) = mpsc::channel();
    // The attempt to connect explains a text of another form.
    let endpoint = endpoint_with_port(endpoint).unwrap_or_else(|| endpoint.to_owned());
    let target = endpoint.clone();
    let thread = std::thread::Builder::new().spawn(move || {
        // Sending fails if the deadline has passed and the receiver is dropped.
        let _ = sender.send(query_server(&target, &options, as_json));
    });
    if let Err(e) = thread {
        return super::fail(&format!("cannot start a thread: {e}"));
    }
    match result.recv_timeout(DEADLINE) {
        Ok(Ok(text)) => super::print_or_fail(&text, ExitCode::SUCCESS),
        Ok(Err(e @ ConnectError::Name(_))) => super::usage(&format!("--status: {e}")),
        Ok(Err(e)) => {
            let state = match &e {
                ConnectError::Full { .. } => "full",
                ConnectError::Draining { .. } => "draining",
                _ => "",
            };
            // The reason follows on standard error, also where standard output is closed.
            if as_json && !state.is_empty() {
                let _ = super::print(&format!("{{\"state\":\"{state}\"}}\n"));
            } else if !state.is_empty() {
                let _ = super::print(&format!("{endpoint}: {state}\n"));
            }
            super::fail(&e)
        }
        Err(_) => super::fail(&format!("{endpoint} has not sent all replies within {DEADLINE:?}")),
    }
}

/// Connects to a server and returns a description of it.
fn query_server(name: &str, options: &Options, as_json: bool) -> Result<String, ConnectError> {
    let options = options.clone().with_connect_timeout(CLIENT_TIMEOUT).with_silence_timeout(CLIENT_TIMEOUT);
    let endpoint = Endpoint::connect(name, &options)?;
    let status = match endpoint.server() {
        Some(_) => endpoint.status()?,
        None => status_without_extensions(&endpoint)?,
    };
    if as_json {
        // Its texts and numbers have a form in JSON.
        let json = serde_json::to_string_pretty(&status).unwrap_or_default();
        return Ok(format!("{}\n", printable_json(&json)));
    }
    let version = endpoint.version();
    let protocol = match endpoint.server() {
        Some(_) => format!("{version}, extensions {REVISION}"),
        None => version.to_string(),
    };
    Ok(describe(name, &protocol, &status, endpoint.server().is_some()))
}

/// The part of the status that every server has.
fn status_without_extensions(endpoint: &Endpoint) -> Result<ServerStatus, ConnectError> {
    let mut status = ServerStatus::default();
    status.state = "ready".to_owned();
    for device in endpoint.devices() {
        let (info, memory) = (device.info(), device.memory()?);
        let memory = Some(DeviceMemoryStatus { free: memory.free, total: memory.total });
        let (name, description) = (info.name.clone(), info.description.clone());
        status.devices.push(DeviceStatus { name, description, memory, ..DeviceStatus::default() });
    }
    Ok(status)
}

/// The state for users, a line for each part.
fn describe(name: &str, protocol: &str, status: &ServerStatus, has_extensions: bool) -> String {
    let mut lines = vec![format!("{name}: {}", status.state)];
    if has_extensions {
        lines.push(format!("build: {}, up for {}", status.build, time(status.uptime)));
    }
    lines.push(format!("protocol: {protocol}"));
    for listener in &status.listeners {
        let what = match (listener.protocol.as_str(), listener.tls) {
            ("", _) => "HTTP".to_owned(),
            (versions, true) => format!("protocol {versions}, TLS"),
            (versions, false) => format!("protocol {versions}"),
        };
        lines.push(format!("port {}: {what}", listener.port));
    }
    lines.extend(status.devices.iter().map(device_line));
    if has_extensions {
        let ServerStatus { rates, totals, links, .. } = status;
        lines.push(format!(
            "last {:.0} s: {}/s from clients, {}/s to clients, {:.1} graphs/s",
            rates.seconds,
            Bytes(rates.received as u64),
            Bytes(rates.sent as u64),
            rates.graphs
        ));
        lines.push(format!(
            "since the start: {} sessions, {} from clients, {} to clients, {} graphs, device time {}",
            totals.sessions,
            Bytes(totals.received),
            Bytes(totals.sent),
            totals.graphs,
            time(totals.device_time)
        ));
        lines.push(format!(
            "links: {} tensor groups, {} tokens for transfers from other servers",
            links.groups, links.transfers
        ));
        lines.push(format!("sessions: {} besides this one", status.session_count));
        lines.extend(status.sessions.iter().map(session_line));
        match status.session_count.saturating_sub(status.sessions.len()) {
            0 => {}
            more => lines.push(format!("and {more} more sessions")),
        }
        lines.extend(
            status
                .keys
                .iter()
                .map(|key| format!("key {}: sessions {}, device memory {}", key.name, key.sessions, Bytes(key.memory))),
        );
        lines.extend(status.limits.iter().map(|(name, value)| format!("limit: {name}: {value}")));
    }
    lines.iter().map(|line| format!("{}\n", printable_line(line))).collect()
}

fn device_line(device: &DeviceStatus) -> String {
    let DeviceStatus { name, description, memory, load, lost, .. } = device;
    let memory = memory.map_or("memory unknown".to_owned(), |memory| {
        format!("{} of {} MiB free", memory.free >> 20, memory.total >> 20)
    });
    let load = load.map_or(String::new(), |load| format!(", load {:.0} %", 100.0 * load));
    let lost = lost.as_ref().map_or(String::new(), |why| format!(", lost: {why}"));
    format!("device {name}: {description}, {memory}{load}{lost}")
}

fn session_line(session: &SessionStatus) -> String {
    let peer = session.peer.as_ref().map_or(String::new(), |peer| format!("{peer}, "));
    format!(
        "session {}: {peer}protocol {}{}, for {}, device memory {} (at most {}), {} from and {} to the client, {} graphs, device \
         time {}, {} for {}",
        session.number,
        session.protocol,
        if session.extended { " with extensions" } else { "" },
        time(session.seconds),
        Bytes(session.memory),
        Bytes(session.peak_memory),
        Bytes(session.received),
        Bytes(session.sent),
        session.graphs,
        time(session.device_time),
        session.activity,
        time(session.activity_seconds)
    )
}

/// A time for users.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1000.0),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", (s / 60.0).floor()),
        s if s < 48.0 * 3600.0 => format!("{:.0} h", (s / 3600.0).floor()),
        s => format!("{:.0} days", (s / 86_400.0).floor()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let times = [0.0, 0.25, 1.0, 119.94, 120.0, 7199.0, 7200.0, 172_800.0];
        assert_eq!(times.map(time), ["0 ms", "250 ms", "1.0 s", "119.9 s", "2 min", "119 min", "2 h", "2 days"]);
    }
}

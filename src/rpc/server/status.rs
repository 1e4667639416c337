//! The state of the server, as users see it.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use super::audit::SessionAudit;
use super::context::ServerContext;
use super::statistics::SampledFacts;
use crate::rpc::status::{
    DeviceMemoryStatus, DeviceStatus, KeyStatus, Links, ListenerStatus, Rates, ServerStatus, SessionStatus, Totals,
    machine_id,
};
use crate::rpc::transport::PeerAddr;

/// Most keys that are listed, so that the state does not grow with the list of keys.
const MAX_KEYS: usize = 256;

/// What the thread of the samples finds out each second.
pub(super) fn sample_facts(server: &ServerContext) -> SampledFacts {
    SampledFacts {
        device_memory: server.all_devices.iter().map(|device| device.memory().ok()).collect(),
        lost: server.all_devices.iter().map(|device| device.lost().map(|e| e.to_string())).collect(),
        groups: server.groups.len(),
        transfers: server.transfer_tokens.len(),
    }
}

/// The state, for `viewer`: one of another machine sees no addresses and keys of clients. Session `own` is the one that asks.
pub(super) fn of(server: &ServerContext, viewer: PeerAddr, own: Option<u64>) -> ServerStatus {
    let (statistics, facts) = (&server.statistics, server.statistics.facts());
    let [before, newest, now] = statistics.last_minute();
    let sampled_seconds = newest.at.saturating_sub(before.at).as_secs_f64();
    let seconds = now.at.saturating_sub(before.at).as_secs_f64();
    let rate = |before: u64, now: u64| if seconds > 0.0 { now.saturating_sub(before) as f64 / seconds } else { 0.0 };
    let visible = server.tenants.devices(viewer);
    let is_visible =
        |at: usize| visible.as_ref().is_none_or(|list| list.iter().any(|&one| usize::try_from(one) == Ok(at)));
    let devices = server.all_devices.iter().enumerate().filter(|&(at, _)| is_visible(at)).map(|(at, device)| {
        let info = device.info();
        let memory = facts.device_memory.get(at).copied().flatten();
        let [busy_before, busy] =
            [&before, &newest].map(|sample| Some(sample.activity.get(at).copied()??.busy.as_secs_f64()));
        DeviceStatus {
            name: info.name.clone(),
            description: info.description.clone(),
            memory: memory.map(|memory| DeviceMemoryStatus { free: memory.free, total: memory.total }),
            // A turn counts when it ends, so its time may lie before the oldest sample.
            load: busy
                .zip(busy_before)
                .map(|(now, before)| ((now - before) / sampled_seconds.max(1e-3)).clamp(0.0, 1.0)),
            lost: facts.lost.get(at).cloned().flatten(),
        }
    });
    // Both take a lock that sessions take, for which HTTP must not wait.
    let is_session = own.is_some();
    let mut sessions = statistics.sessions();
    sessions.retain(|audit| Some(audit.number()) != own);
    let with_peer = sees_peers(viewer, server.config.keys.is_some());
    let listener = |listener: &super::ListenerInfo| ListenerStatus {
        port: listener.addr.port(),
        protocol: listener.versions_text(),
        tls: listener.tls,
    };
    ServerStatus {
        build: format!("rpc-server {}", crate::VERSION),
        state: if server.lifecycle.is_ending() { "draining" } else { "ready" }.to_owned(),
        machine: machine_id().unwrap_or_default(),
        // Before 1970: no clock at all, and as far off as it looks.
        time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        uptime: statistics.uptime().as_secs_f64(),
        listeners: server.listeners.iter().map(listener).collect(),
        devices: devices.collect(),
        host_memory: server.host_memory.status(),
        rates: Rates {
            seconds,
            received: rate(before.received, now.received),
            sent: rate(before.sent, now.sent),
            graphs: rate(before.graphs, now.graphs),
        },
        totals: Totals {
            sessions: statistics.counters.sessions.load(Ordering::Relaxed),
            received: now.received,
            sent: now.sent,
            graphs: now.graphs,
            device_time: statistics.device_time().as_secs_f64(),
        },
        links: Links { groups: facts.groups, transfers: facts.transfers },
        session_count: sessions.len(),
        sessions: sessions.iter().take(ServerStatus::MAX_SESSIONS).map(|audit| session(audit, with_peer)).collect(),
        keys: if is_session { keys(server, viewer) } else { Vec::new() },
        limits: if is_session { limits(server, viewer) } else { Vec::new() },
    }
}

/// The keys with sessions, in the order of their names. A client that has proved no key learns none.
fn keys(server: &ServerContext, viewer: PeerAddr) -> Vec<KeyStatus> {
    let PeerAddr::Key(..) = viewer else { return Vec::new() };
    let mut keys = server.tenants.keys_with_sessions();
    keys.sort_by(|a, b| a.name.cmp(&b.name));
    keys.truncate(MAX_KEYS);
    keys
}

/// The limits that clients share, those of the viewer's address included, each with its option.
fn limits(server: &ServerContext, viewer: PeerAddr) -> Vec<(String, String)> {
    let (config, host_memory) = (&server.config, server.host_memory.status());
    let mut limits = server.tenants.describe(viewer);
    let memory = config.max_memory.map_or("that of the devices".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
    limits.push(("device memory of a client (max-memory)".to_owned(), memory));
    let value =
        format!("{} of {} MiB, at most {}", host_memory.used >> 20, host_memory.limit >> 20, host_memory.peak >> 20);
    limits.push(("host memory of clients (max-host-memory)".to_owned(), value));
    if let Some(index) = &server.gguf_index {
        let (hashed, tensors) = index.progress();
        limits.push(("tensors of models that are indexed (--models)".to_owned(), format!("{hashed} of {tensors}")));
    }
    let duration = |time: Option<Duration>| time.map_or("none".to_owned(), |time| format!("{time:?}"));
    limits.push(("pause before a request (idle-timeout)".to_owned(), duration(config.idle_timeout)));
    limits.push(("time of one graph on a CPU device (max-run)".to_owned(), duration(config.max_run)));
    limits
}

/// Whether a viewer sees the addresses and keys of clients: on this machine, and with a key if clients have keys.
fn sees_peers(viewer: PeerAddr, with_keys: bool) -> bool {
    let is_here = viewer.ip().is_none_or(|ip| ip.to_canonical().is_loopback());
    is_here && (!with_keys || matches!(viewer, PeerAddr::Key(..)))
}

fn session(audit: &SessionAudit, with_peer: bool) -> SessionStatus {
    let (activity, activity_time) = audit.activity();
    SessionStatus {
        number: audit.number(),
        peer: with_peer.then(|| audit.peer().to_string()),
        protocol: audit.protocol(),
        extended: audit.is_extended(),
        seconds: audit.age().as_secs_f64(),
        received: audit.received(),
        sent: audit.sent(),
        graphs: audit.graphs(),
        device_time: audit.device_time().as_secs_f64(),
        memory: audit.budget().map_or(0, |budget| budget.used()),
        peak_memory: audit.budget().map_or(0, |budget| budget.peak()),
        activity: activity.to_string(),
        activity_seconds: activity_time.as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_see_no_addresses() {
        for (viewer, with_keys, want) in [
            ("127.0.0.1:1", false, true),
            ("[::1]:1", false, true),
            ("[::ffff:127.0.0.1]:1", false, true),
            ("10.0.0.5:1", false, false),
            ("[::ffff:10.0.0.5]:1", false, false),
            ("127.0.0.1:1", true, false),
        ] {
            let peer = PeerAddr::Ip(viewer.parse().unwrap());
            assert_eq!(sees_peers(peer, with_keys), want, "{viewer}, {with_keys}");
        }
    }
}

//! What goes over the connections to servers, by what it was for.

use fanout::device::{Device, LinkStats};
use serde_json::{Value, json};
use std::sync::Arc;

/// What a run is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Connecting, and weights.
    #[default]
    Load,
    /// The prompt.
    Prompt,
    /// Token by token.
    Decode,
    /// All that a lost server cost.
    Recovery,
}

impl Phase {
    const ALL: [(Phase, &str); 4] =
        [(Phase::Load, "load"), (Phase::Prompt, "prompt"), (Phase::Decode, "decode"), (Phase::Recovery, "recovery")];
}

/// Counts of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes to the server.
    pub sent: u64,
    /// Bytes from it.
    pub received: u64,
    /// How often somebody had to wait for it.
    pub waits: u64,
}

/// All connections there were to a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerTraffic {
    /// `host:port`.
    pub endpoint: String,
    /// By [`Phase`].
    traffic: [Traffic; Phase::ALL.len()],
    /// What the connection of now had counted when it was last looked at.
    last_seen: Traffic,
}

/// The connections of a run.
#[derive(Clone, Debug, Default)]
pub struct LinkTraffic {
    servers: Vec<ServerTraffic>,
}

impl LinkTraffic {
    /// Counts what has gone over the devices' connections since the last time for a phase.
    pub fn record_all(&mut self, devices: &[Arc<dyn Device>], phase: Phase) {
        devices.iter().filter_map(|device| device.link_stats()).for_each(|link| self.record(&link, phase));
    }

    fn record(&mut self, link: &LinkStats, phase: Phase) {
        let server = self.server(&link.endpoint);
        let now = Traffic { sent: link.sent, received: link.received, waits: link.waits };
        // Devices of a server share the connection: for all but the first nothing is new.
        let (seen, to) = (std::mem::replace(&mut server.last_seen, now), &mut server.traffic[phase as usize]);
        to.sent += now.sent.saturating_sub(seen.sent);
        to.received += now.received.saturating_sub(seen.received);
        to.waits += now.waits.saturating_sub(seen.waits);
    }

    fn server(&mut self, endpoint: &str) -> &mut ServerTraffic {
        let at = self.servers.iter().position(|server| server.endpoint == endpoint).unwrap_or_else(|| {
            self.servers.push(ServerTraffic { endpoint: endpoint.to_owned(), ..ServerTraffic::default() });
            self.servers.len() - 1
        });
        &mut self.servers[at]
    }

    /// The server's next connection begins with nothing.
    pub fn reconnected(&mut self, endpoint: &str) {
        let server = self.servers.iter_mut().find(|server| server.endpoint == endpoint);
        server.into_iter().for_each(|server| server.last_seen = Traffic::default());
    }

    /// The servers.
    pub fn servers(&self) -> &[ServerTraffic] {
        &self.servers
    }
}

impl ServerTraffic {
    /// What went over it in a phase.
    pub fn traffic(&self, phase: Phase) -> Traffic {
        self.traffic[phase as usize]
    }

    /// One object, with one for each phase.
    pub fn json(&self) -> Value {
        let mut object = json!({ "endpoint": self.endpoint });
        for (phase, name) in Phase::ALL {
            let Traffic { sent, received, waits } = self.traffic(phase);
            object[name] = json!({ "sent": sent, "received": received, "waits": waits });
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_once_for_their_phase_and_on_over_a_new_connection() {
        let link =
            |endpoint: &str, sent| LinkStats::new(endpoint).with_sent(sent).with_received(2 * sent).with_waits(1);
        let mut links = LinkTraffic::default();
        links.record(&link("a:1", 100), Phase::Load);
        links.record(&link("a:1", 100), Phase::Load); // its second device
        links.record(&link("b:2", 7), Phase::Load);
        links.record(&link("a:1", 130), Phase::Decode);
        links.reconnected("a:1");
        links.record(&link("a:1", 90), Phase::Recovery);
        links.record(&link("a:1", 95), Phase::Decode);
        let [a, b] = links.servers() else { unreachable!("two servers: {links:?}") };
        assert_eq!(a.traffic(Phase::Load), Traffic { sent: 100, received: 200, waits: 1 });
        assert_eq!(a.traffic(Phase::Decode), Traffic { sent: 35, received: 70, waits: 0 });
        assert_eq!(a.traffic(Phase::Recovery), Traffic { sent: 90, received: 180, waits: 1 });
        assert_eq!((&*b.endpoint, b.traffic(Phase::Decode)), ("b:2", Traffic::default()));
        assert_eq!(a.json()["decode"], json!({ "sent": 35, "received": 70, "waits": 0 }));
        assert_eq!(b.json()["endpoint"], json!("b:2"));
    }
}

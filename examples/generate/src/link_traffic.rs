//! Traffic statistics of the connections to servers: bytes and round trips, by server and by phase of the run.

use fanout::device::{Device, LinkStats};
use serde_json::{Value, json};
use std::sync::Arc;

/// A phase of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Connecting and loading weights.
    #[default]
    Load,
    /// Evaluating the prompt.
    Prompt,
    /// Decoding token by token.
    Decode,
    /// Recovering from lost servers; interrupts any other phase.
    Recovery,
}

impl Phase {
    const ALL: [(Phase, &str); 4] =
        [(Phase::Load, "load"), (Phase::Prompt, "prompt"), (Phase::Decode, "decode"), (Phase::Recovery, "recovery")];
}

/// Traffic counters of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes to the server.
    pub sent: u64,
    /// The part of `sent` in messages that carry a graph.
    pub sent_graphs: u64,
    /// Bytes from the server.
    pub received: u64,
    /// How often a thread blocked until a reply of the server arrived.
    pub waits: u64,
}

/// Traffic of a server, summed over all connections to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerTraffic {
    /// `host:port`.
    pub endpoint: String,
    /// By [`Phase`].
    traffic: [Traffic; Phase::ALL.len()],
    /// Counters of the current connection when they were last recorded. New traffic is the difference to them.
    last_seen: Traffic,
}

/// Traffic of all servers of a run.
#[derive(Clone, Debug, Default)]
pub struct LinkTraffic {
    servers: Vec<ServerTraffic>,
}

impl LinkTraffic {
    /// Adds the traffic since the last call, on the connections of these devices, to `phase`.
    pub fn record_all(&mut self, devices: &[Arc<dyn Device>], phase: Phase) {
        devices.iter().filter_map(|device| device.link_stats()).for_each(|link| self.record(&link, phase));
    }

    fn record(&mut self, link: &LinkStats, phase: Phase) {
        let server = self.server(&link.endpoint);
        let now =
            Traffic { sent: link.sent, sent_graphs: link.sent_graphs, received: link.received, waits: link.waits };
        // The devices of a server share one connection: the first device records all new traffic, the others record none.
        let (seen, to) = (std::mem::replace(&mut server.last_seen, now), &mut server.traffic[phase as usize]);
        to.sent += now.sent.saturating_sub(seen.sent);
        to.sent_graphs += now.sent_graphs.saturating_sub(seen.sent_graphs);
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

    /// Resets the last counters of a server, because a new connection counts from 0.
    pub fn reconnected(&mut self, endpoint: &str) {
        let server = self.servers.iter_mut().find(|server| server.endpoint == endpoint);
        server.into_iter().for_each(|server| server.last_seen = Traffic::default());
    }

    /// The servers, in the order of their first traffic.
    pub fn servers(&self) -> &[ServerTraffic] {
        &self.servers
    }
}

impl ServerTraffic {
    /// Traffic in a phase.
    pub fn traffic(&self, phase: Phase) -> Traffic {
        self.traffic[phase as usize]
    }

    /// A JSON object with the endpoint and one object per phase.
    pub fn json(&self) -> Value {
        let mut object = json!({ "endpoint": self.endpoint });
        for (phase, name) in Phase::ALL {
            let Traffic { sent, sent_graphs, received, waits } = self.traffic(phase);
            object[name] = json!({ "sent": sent, "sent_graphs": sent_graphs, "received": received, "waits": waits });
        }
        object
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_counted_once_per_phase_and_across_reconnections() {
        let link = |endpoint: &str, sent| {
            LinkStats::new(endpoint).with_sent(sent).with_sent_graphs(sent / 2).with_received(2 * sent).with_waits(1)
        };
        let mut links = LinkTraffic::default();
        links.record(&link("a:1", 100), Phase::Load);
        links.record(&link("a:1", 100), Phase::Load); // its second device
        links.record(&link("b:2", 7), Phase::Load);
        links.record(&link("a:1", 130), Phase::Decode);
        links.reconnected("a:1");
        links.record(&link("a:1", 90), Phase::Recovery);
        links.record(&link("a:1", 95), Phase::Decode);
        let [a, b] = links.servers() else { unreachable!("two servers: {links:?}") };
        assert_eq!(a.traffic(Phase::Load), Traffic { sent: 100, sent_graphs: 50, received: 200, waits: 1 });
        assert_eq!(a.traffic(Phase::Decode), Traffic { sent: 35, sent_graphs: 17, received: 70, waits: 0 });
        assert_eq!(a.traffic(Phase::Recovery), Traffic { sent: 90, sent_graphs: 45, received: 180, waits: 1 });
        assert_eq!((&*b.endpoint, b.traffic(Phase::Decode)), ("b:2", Traffic::default()));
        assert_eq!(a.json()["decode"], json!({ "sent": 35, "sent_graphs": 17, "received": 70, "waits": 0 }));
        assert_eq!(b.json()["endpoint"], json!("b:2"));
    }
}

//! The version of one connection: which one its HELLO is answered with, and what the connection then shows about the version of
//! its client.

use std::cell::Cell;
use std::time::Instant;

use log::debug;

use super::evidence::{Consequence, FAILED_STARTS};
use super::probe::{HangUpReport, ProbedClient, ProvenSession};
use super::{ServedVersion, VERSIONS, VersionPolicy, VersionProbe, ports};
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::{HelloForm, RpcCommand};

/// The choice of the version of one connection. The session calls [`VersionChoice::answer`] when it replies to HELLO, and then
/// reports what the client did, unless that says nothing about the version: fanout's clients (HELLO_EXT) work with each.
pub(in crate::rpc::server) struct VersionChoice<'a> {
    policy: &'a VersionPolicy,
    probe: &'a VersionProbe,
    peer: PeerAddr,
    /// Set by the first command. The connection is a session of its address until [`VersionChoice::end_session`].
    session: Cell<Option<ProvenSession>>,
}

impl Drop for VersionChoice<'_> {
    fn drop(&mut self) {
        self.end_session();
    }
}

impl<'a> VersionChoice<'a> {
    /// The choice for a connection of `peer` to a listener with this policy.
    pub(in crate::rpc::server) fn new(
        policy: &'a VersionPolicy,
        probe: &'a VersionProbe,
        peer: PeerAddr,
    ) -> VersionChoice<'a> {
        VersionChoice { policy, probe, peer, session: Cell::default() }
    }

    /// The version by which to serve a client that begins with a HELLO of this form; `None` if the listener has none.
    pub(in crate::rpc::server) fn answer(&self, form: HelloForm) -> Option<ServedVersion> {
        if form != HelloForm::Caps {
            return self.policy.versions().iter().copied().find(|version| version.hello_form() == form);
        }
        match self.probed() {
            Some(client) => self.probe.answer(client, Instant::now()),
            None => self.policy.tried().next(),
        }
    }

    /// Reports a command of a client that was answered `answered`: the version works. Returns whether the command counts.
    pub(in crate::rpc::server) fn report_command(&self, answered: ServedVersion, command: RpcCommand) -> bool {
        use RpcCommand::{DeviceCount, GetAlignment, GetDeviceMemory, GetMaxSize, Hello};
        // Where no extensions are offered, fanout's clients do not show themselves by HELLO_EXT. They accept each version, and
        // `rpc-server --status` only lists the devices.
        let is_query = matches!(command, DeviceCount | GetAlignment | GetMaxSize | GetDeviceMemory);
        if command == Hello || is_query && !answered.offers_extensions() {
            return false;
        }
        if let Some(client) = self.probed()
            && answered.is_tried()
        {
            self.session.set(Some(self.probe.session_began(client, answered, Instant::now())));
        }
        true
    }

    /// The connection has ended. Called before its resources are freed, which takes time: the next connections of the client
    /// must not overtake the end of this one.
    pub(in crate::rpc::server) fn end_session(&self) {
        if let Some(session) = self.session.take() {
            self.probe.session_ended(session, Instant::now());
        }
    }

    /// The client for which the probe chooses the version; `None`: the listener tries no versions.
    fn probed(&self) -> Option<ProbedClient> {
        ProbedClient::of(self.peer).filter(|_| self.policy.tries_several())
    }

    /// The client.
    pub(in crate::rpc::server) fn peer(&self) -> PeerAddr {
        self.peer
    }

    /// The versions that the listener serves, for messages.
    pub(in crate::rpc::server) fn served(&self) -> String {
        listed(self.policy.versions())
    }

    /// Reports that the client was answered `answered` and closed the connection without a command, as a client of another
    /// version does. Returns the consequence for the log if it is new, so that a health check cannot fill the log; otherwise it
    /// is logged at level debug.
    pub(in crate::rpc::server) fn report_hang_up(&self, answered: ServedVersion) -> Option<String> {
        let (is_news, text) = self.describe_hang_up(answered, Instant::now())?;
        let text = format!("{}: answered protocol {answered}, and the client hung up {text}", self.peer);
        if is_news {
            return Some(text);
        }
        debug!("{text}");
        None
    }

    /// As [`VersionChoice::report_hang_up`]: whether the consequence is new, and how its text continues. `None`: there is none.
    fn describe_hang_up(&self, answered: ServedVersion, now: Instant) -> Option<(bool, String)> {
        if !answered.is_tried() {
            let is_news =
                ProbedClient::of(self.peer).is_some_and(|client| self.probe.is_first_hang_up(client, answered, now));
            let text = "without a command after an empty HELLO, as a client of 1.0 or 2.0 does, which this server does not \
                        support: update the llama.cpp of the client";
            return Some((is_news, text.to_owned()));
        }
        let HangUpReport { consequence, is_news, proven, all_failed } =
            self.probe.hung_up(self.probed()?, answered, now);
        let list = self.probe.list();
        let two_versions = format!(
            "If clients of two versions use the address, give each version a port: {}. If it is a health check, it must read \
             /health, or use a port of its own",
            port_for_each(list)
        );
        let text = match consequence {
            Consequence::Outdated => return None,
            Consequence::Idle => "without a command after a session, as a working client does".to_owned(),
            Consequence::SameStart => "without a command, as part of the last failed start".to_owned(),
            Consequence::Kept(failed) => format!(
                "without a command, as a client of another version does when it starts. {answered} has worked for this address \
                 and is kept; after {left} more starts with no session open or between, the next version is tried. \
                 {two_versions}",
                left = FAILED_STARTS.saturating_sub(failed),
            ),
            Consequence::TwoVersions => format!(
                "without a command, as a client of another version does when it starts, {FAILED_STARTS} times by now, beside or \
                 between sessions of {answered}, for which no other version is tried. {two_versions}"
            ),
            Consequence::Changed(_) if all_failed && is_news => format!(
                "without a command, as with each version that this address tries ({}): if its llama.cpp has another version, {}",
                listed(list),
                other_remedy(list)
            ),
            Consequence::Changed(next) => match proven {
                Some(proven) if proven == answered => format!(
                    "without a command, {FAILED_STARTS} starts in a row: the next connection from this address is answered \
                     {next}. {two_versions}"
                ),
                Some(proven) => format!(
                    "without a command: {proven} has worked for this address, and the next connection is answered {next}. \
                     {two_versions}. If its llama.cpp has another version, {}",
                    other_remedy(list)
                ),
                None => format!(
                    "without a command, as a client of another version does: the next connection from this address is answered \
                     {next}. To serve such clients without a failed attempt, give them a port: --listen PORT={next}"
                ),
            },
        };
        Some((is_news, text))
    }
}

/// Versions for messages.
fn listed(versions: &[ServedVersion]) -> String {
    versions.iter().map(ServedVersion::to_string).collect::<Vec<_>>().join(", ")
}

/// The flags that give each version of a list a port, as an example.
fn port_for_each(list: &[ServedVersion]) -> String {
    let flag = |(port, version): (u16, &ServedVersion)| format!("--listen {port}={}", version.shortest_name());
    (50052..).zip(list).map(flag).collect::<Vec<_>>().join(" ")
}

/// How to serve a client that has none of the versions of a list, which are tried.
fn other_remedy(list: &[ServedVersion]) -> String {
    let others = VERSIONS.iter().map(|row| row.version);
    let others = ports(others.filter(|version| version.is_tried() && !version.is_exact() && !list.contains(version)));
    if others.is_empty() { "update it".to_owned() } else { format!("update it, or give it a port: {others}") }
}

#[cfg(test)]
mod tests {
    use super::ServedVersion::{V7_0, V8_0};
    use super::*;

    const SERVED: &[ServedVersion] = &ServedVersion::DEFAULT_ORDER;

    fn peer() -> PeerAddr {
        PeerAddr::Ip(([10, 0, 0, 1], 1).into())
    }

    #[test]
    fn the_form_of_the_hello_chooses_among_the_versions_of_a_listener() {
        use HelloForm::{Absent, Caps, Empty};
        use ServedVersion::{Gen0, V3, V3_0_0, V5_0};
        for (order, want) in [
            (SERVED, [Some(V8_0), Some(V3), Some(Gen0)]),
            (&[V7_0], [Some(V7_0), None, None]),
            (&[V3_0_0, V3], [None, Some(V3_0_0), None]),
            (&[Gen0, V5_0], [Some(V5_0), None, Some(Gen0)]),
        ] {
            let policy = VersionPolicy::new(None, order).unwrap();
            let probe = VersionProbe::of_order(order);
            let choice = VersionChoice::new(&policy, &probe, peer());
            assert_eq!([Caps, Empty, Absent].map(|form| choice.answer(form)), want, "{order:?}");
        }
    }

    /// A client that works opens connections without a command while its session is open, and after it: nothing is logged, and
    /// each of them gets the version that works.
    #[test]
    fn connections_of_a_working_client_without_a_command_are_no_news() {
        let (policy, probe) = (VersionPolicy::new(None, SERVED).unwrap(), VersionProbe::of_order(SERVED));
        let connect = || VersionChoice::new(&policy, &probe, peer());
        let session = connect();
        assert_eq!(session.answer(HelloForm::Caps), Some(V8_0));
        assert!(session.report_command(V8_0, RpcCommand::DeviceCount));
        let mut session = Some(session);
        for number in 0..8 {
            let idle = connect();
            assert_eq!(idle.answer(HelloForm::Caps), Some(V8_0), "{number}");
            assert_eq!(idle.report_hang_up(V8_0), None, "{number}");
            session.take_if(|_| number == 4);
        }
    }

    /// The line of the log while clients of another version start at an address.
    #[test]
    fn texts_about_failed_starts() {
        let (policy, probe) = (VersionPolicy::new(None, SERVED).unwrap(), VersionProbe::of_order(SERVED));
        let choice = VersionChoice::new(&policy, &probe, peer());
        let start = Instant::now();
        let text = |seconds: u64, answered| {
            choice.describe_hang_up(answered, start + std::time::Duration::from_secs(seconds)).unwrap()
        };
        let flags = "--listen 50052=8 --listen 50053=7";
        let session = probe.session_began(ProbedClient::of(peer()).unwrap(), V8_0, start);
        assert!(!text(0, V8_0).0);
        probe.session_ended(session, start);
        let (is_news, kept) = text(4, V8_0);
        assert!(
            is_news && kept.contains("after 2 more starts") && kept.contains(flags) && kept.contains("/health"),
            "{kept}"
        );
        assert!(!text(6, V8_0).0);
        let (is_news, changed) = text(8, V8_0);
        assert!(is_news && changed.contains("3 starts in a row") && changed.contains("is answered 7.0"), "{changed}");
        let (is_news, back) = text(10, V7_0);
        assert!(
            is_news && back.contains("8.0 has worked for this address, and the next connection is answered 8.0"),
            "{back}"
        );
        assert!(back.contains(flags) && back.contains("--listen PORT=5.1"), "{back}");
        let (is_news, two) = text(12, V8_0);
        assert!(is_news && two.contains("two versions") && two.contains(flags), "{two}");
        assert!(!text(14, V8_0).0, "once");
    }
}

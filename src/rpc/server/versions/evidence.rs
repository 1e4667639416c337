//! Version evidence: the state machine of one client address, which decides the version that its next HELLO is answered with.
//!
//! The HELLO of 7.0 and of 8.0 are the same bytes, and a client aborts its process when the answer is not its own version. A
//! command proves that the answer before it was right. A connection that ends after the reply to HELLO without a command
//! proves nothing: a client of another version does that when it aborts, and so do working clients of llama.cpp, health checks
//! and port scanners. A llama.cpp client that measures memory (`-fit`, on by default) frees the four pipelining events of each
//! device over a new connection each, while no other is open: 8 such connections in a row for a server with two devices. A
//! client of another version aborts at its first connection, so it has one. Only number and spacing tell the two apart.
//!
//! A *failed start* is a connection that ends without a command while its answer is proven, [`START_SPACING`] or more away from
//! all others that do. Ends that are closer together are a burst of one process, and no failed start. But a burst that lasts
//! [`START_LENGTH`] is a process that is restarted in a loop, and counts as one for each such time. Failed starts are counted
//! from the last command of a new connection, and from the end of the last open session.
//!
//! | state of the address | what happens | next state |
//! |---|---|---|
//! | any | a connection ends before its HELLO is complete | the same: nothing is recorded |
//! | any | the first command of a connection that was answered `v` | `v` proven, no failed starts |
//! | any | an end without a command of a connection whose answer is no longer the current one | the same |
//! | `v` unproven | an end without a command | the version after `v` in the list, unproven |
//! | `v` proven | an end without a command in a burst | the same, and the burst is no failed start |
//! | `v` proven | failed start 1 to [`FAILED_STARTS`] − 1 | the same, counted |
//! | `v` proven, sessions open | failed start [`FAILED_STARTS`] and later | the same: two versions use this address at once |
//! | `v` proven, no session open | a HELLO after failed start [`FAILED_STARTS`] | the version after `v`, on trial |
//! | `w` on trial | an end without a command | the version after `w`, on trial; proven again if that is `v` |
//! | `v` proven | the last session ends | the same, no failed starts |
//!
//! `v` unproven, `v` proven and `w` on trial are the three cases of [`Evidence::proven`]. Each row has a test.

use std::time::{Duration, Instant};

use super::ServedVersion;

/// Failed starts in a row after which another version than the proven one is tried. It bounds the aborts of a client at an
/// address at which another version is proven.
pub(super) const FAILED_STARTS: u32 = 3;

/// Ends without a command that are closer together are a burst of one process. On a link with a round trip of 0.2 s, the ends
/// of a burst are 0.4 s apart.
pub(super) const START_SPACING: Duration = Duration::from_secs(1);

/// A burst that lasts as long is a process that is restarted in a loop, and counts as a failed start. 64 connections (those of
/// 16 devices) take as long over a link with a round trip of 0.15 s.
pub(super) const START_LENGTH: Duration = Duration::from_secs(20);

/// What is known about the version of the clients at an address.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    /// The version that the next HELLO is answered with.
    answer: ServedVersion,
    /// The version of the last command. `None`: `answer` is unproven. Another one than `answer`: `answer` is on trial.
    proven: Option<ServedVersion>,
    /// Open connections that have sent a command.
    sessions: u32,
    /// Failed starts in a row, without the one that `burst` may be.
    failed_starts: u32,
    /// The last end without a command, with those close before it.
    burst: Option<Burst>,
}

/// Ends without a command, each less than [`START_SPACING`] after the one before.
#[derive(Clone, Copy, Debug)]
struct Burst {
    /// The first end, or the one that completed the last [`START_LENGTH`].
    began: Instant,
    last: Instant,
    /// Whether it has one end, so that it is a failed start, if no further one follows soon.
    is_single: bool,
}

/// The consequence of a connection that ended after the reply to HELLO without a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HangUp {
    /// The address is answered another version by now: several connections of one process end at the same time.
    Outdated,
    /// The answer is proven and stays. The end is one of a burst, so it is no failed start.
    Burst,
    /// The answer is proven and stays, after this number of failed starts.
    Kept(u32),
    /// The answer is proven and stays, because sessions use it; yet so many failed starts beside them come from clients of
    /// another version.
    TwoVersions,
    /// The next connection is answered this version. Where a version was proven: the next one that is not part of a burst.
    Changes(ServedVersion),
}

impl Evidence {
    /// An address of which nothing is known.
    pub(super) const fn new(answer: ServedVersion) -> Evidence {
        Evidence { answer, proven: None, sessions: 0, failed_starts: 0, burst: None }
    }

    /// The version that a HELLO is answered with. `list` is the order in which versions are tried.
    pub(super) fn answer(&mut self, list: &[ServedVersion], now: Instant) -> ServedVersion {
        let is_far = self.burst.is_none_or(|burst| now.saturating_duration_since(burst.last) >= START_SPACING);
        let failed = if is_far { self.failed_starts() } else { self.failed_starts };
        if self.is_proven() && !self.has_session() && failed >= FAILED_STARTS {
            self.try_next(list);
        }
        self.answer
    }

    /// Whether a connection is open that has sent a command.
    pub(super) const fn has_session(&self) -> bool {
        self.sessions > 0
    }

    /// Whether a command has proved the current answer.
    pub(super) fn is_proven(&self) -> bool {
        self.proven == Some(self.answer)
    }

    /// A connection that was answered `answered` sends its first command.
    pub(super) fn session_began(&mut self, answered: ServedVersion) {
        (self.answer, self.proven) = (answered, Some(answered));
        self.sessions += 1;
        self.forget_failed_starts();
    }

    /// A connection that has sent a command ends.
    pub(super) fn session_ended(&mut self) {
        self.sessions = self.sessions.saturating_sub(1);
        if self.sessions == 0 {
            self.forget_failed_starts();
        }
    }

    /// A connection that was answered `answered` ends without a command. `list` is the order in which versions are tried.
    pub(super) fn ended_without_command(
        &mut self,
        answered: ServedVersion,
        list: &[ServedVersion],
        now: Instant,
    ) -> HangUp {
        if answered != self.answer {
            return HangUp::Outdated;
        }
        if !self.is_proven() {
            self.try_next(list);
            return HangUp::Changes(self.answer);
        }
        let before = self.failed_starts();
        self.add_to_burst(now);
        match self.failed_starts() {
            failed if failed <= before => HangUp::Burst,
            failed if failed < FAILED_STARTS => HangUp::Kept(failed),
            _ if self.has_session() => HangUp::TwoVersions,
            _ => HangUp::Changes(after(list, answered)),
        }
    }

    /// Adds an end to the burst, or begins another one.
    fn add_to_burst(&mut self, now: Instant) {
        match &mut self.burst {
            Some(burst) if now.saturating_duration_since(burst.last) < START_SPACING => {
                (burst.last, burst.is_single) = (now, false);
                if now.saturating_duration_since(burst.began) >= START_LENGTH {
                    burst.began = now;
                    self.failed_starts = self.failed_starts.saturating_add(1);
                }
            }
            _ => {
                self.failed_starts = self.failed_starts();
                self.burst = Some(Burst { began: now, last: now, is_single: true });
            }
        }
    }

    /// Failed starts in a row, if the last end is not followed by another one of a burst.
    fn failed_starts(&self) -> u32 {
        self.failed_starts.saturating_add(u32::from(self.burst.is_some_and(|burst| burst.is_single)))
    }

    fn forget_failed_starts(&mut self) {
        (self.failed_starts, self.burst) = (0, None);
    }

    fn try_next(&mut self, list: &[ServedVersion]) {
        self.answer = after(list, self.answer);
        self.forget_failed_starts();
    }
}

/// The version that is tried after `version`: the next one of the list, in a circle.
fn after(list: &[ServedVersion], version: ServedVersion) -> ServedVersion {
    let next = list.iter().position(|&listed| listed == version).map_or(0, |at| (at + 1) % list.len());
    list.get(next).copied().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::HangUp::{Changes, Kept, Outdated, TwoVersions};
    use super::ServedVersion::{V5_1, V7_0, V8_0};
    use super::*;

    /// An event at the address.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A connection is answered this version.
        Answered(ServedVersion),
        /// A connection that was answered this version ends without a command.
        End(ServedVersion, HangUp),
        /// The same, in a burst.
        Burst(ServedVersion),
        /// A connection that was answered this version sends its first command, and stays open.
        Begin(ServedVersion),
        /// The same, and it ends.
        Session(ServedVersion),
        /// A session ends.
        Close,
        /// So many milliseconds pass.
        Pass(u64),
        /// The spacing of starts passes.
        Wait,
    }
    use Event::*;

    const LIST: [ServedVersion; 2] = [V8_0, V7_0];
    const SPACING: u64 = START_SPACING.as_millis() as u64;

    fn run(name: &str, list: &[ServedVersion], events: &[Event]) {
        let (mut evidence, mut now) = (Evidence::new(list[0]), Instant::now());
        for (number, event) in events.iter().enumerate() {
            let at = format!("{name}, event {number}: {event:?}");
            match *event {
                Answered(version) => assert_eq!(evidence.answer(list, now), version, "{at}"),
                End(answered, want) => {
                    assert_eq!(evidence.ended_without_command(answered, list, now), want, "{at}");
                }
                Burst(answered) => {
                    assert_eq!(evidence.ended_without_command(answered, list, now), HangUp::Burst, "{at}");
                }
                Begin(answered) => evidence.session_began(answered),
                Session(answered) => {
                    evidence.session_began(answered);
                    evidence.session_ended();
                }
                Close => evidence.session_ended(),
                Pass(millis) => now += Duration::from_millis(millis),
                Wait => now += START_SPACING,
            }
        }
    }

    /// The events up to the first failed start that changes the answer from 8.0.
    const FAIL: [Event; 6] =
        [Session(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, End(V8_0, Changes(V7_0))];

    #[test]
    #[rustfmt::skip] // a row, a line or two
    fn rows_of_the_table() {
        let cases: [(&str, &[Event]); 14] = [
            ("a command proves the first version", &[Answered(V8_0), Session(V8_0), Answered(V8_0)]),
            ("a command proves the second version",
             &[End(V8_0, Changes(V7_0)), Answered(V7_0), Session(V7_0), Answered(V7_0)]),
            ("an unproven version changes at each end",
             &[End(V8_0, Changes(V7_0)), End(V7_0, Changes(V8_0)), End(V8_0, Changes(V7_0)), Answered(V7_0)]),
            ("connections of one process that end together",
             &[End(V8_0, Changes(V7_0)), End(V8_0, Outdated), End(V8_0, Outdated), Answered(V7_0)]),
            ("a late command of the earlier answer",
             &[End(V8_0, Changes(V7_0)), Session(V8_0), Answered(V8_0), End(V7_0, Outdated), Answered(V8_0)]),
            ("a burst of a working client, while its session is open",
             &[Begin(V8_0), End(V8_0, Kept(1)), Burst(V8_0), Pass(SPACING - 1), Burst(V8_0), Wait, Answered(V8_0)]),
            ("bursts of a working client, while none of its sessions is open",
             &[Session(V8_0), End(V8_0, Kept(1)), Burst(V8_0), Burst(V8_0), Wait, End(V8_0, Kept(1)), Burst(V8_0), Wait,
               End(V8_0, Kept(1)), Burst(V8_0), Wait, Answered(V8_0), End(V8_0, Kept(1))]),
            ("a command ends the count",
             &[Session(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Session(V8_0), End(V8_0, Kept(1)), Wait,
               End(V8_0, Kept(2)), Begin(V8_0), End(V8_0, Kept(1))]),
            ("two versions at once",
             &[Begin(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, End(V8_0, TwoVersions), Wait,
               End(V8_0, TwoVersions), Burst(V8_0), Wait, Answered(V8_0)]),
            ("starts beside a session do not count after it",
             &[Begin(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, End(V8_0, TwoVersions), Close, Wait,
               Answered(V8_0), End(V8_0, Kept(1))]),
            ("the first of two sessions ends",
             &[Begin(V8_0), Begin(V8_0), Close, End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait,
               End(V8_0, TwoVersions), Close, Wait, Answered(V8_0)]),
            ("an end that comes twice", &[Begin(V8_0), Close, Close, Begin(V8_0), Close, End(V8_0, Kept(1))]),
            ("an end of a version outside of the list", &[Session(V5_1), End(V8_0, Outdated), Answered(V5_1)]),
            ("a burst that is older than its session", &[End(V8_0, Changes(V7_0)), Session(V7_0), End(V7_0, Kept(1))]),
        ];
        for (name, events) in cases {
            run(name, &LIST, events);
        }
        let after_failed_starts: [(&str, &[Event]); 6] = [
            ("another version works", &[Wait, Answered(V7_0), Session(V7_0), Answered(V7_0), End(V7_0, Kept(1))]),
            ("a burst after the last failed start", &[Pass(SPACING - 1), Answered(V8_0), Burst(V8_0), Wait, Answered(V8_0)]),
            ("one more failed start", &[Wait, End(V8_0, Changes(V7_0)), Wait, Answered(V7_0)]),
            ("a trial that fails leads back",
             &[Wait, Answered(V7_0), End(V7_0, Changes(V8_0)), Answered(V8_0), End(V8_0, Kept(1)), Wait, Answered(V8_0)]),
            ("a late command of the proven version during a trial",
             &[Wait, Answered(V7_0), Begin(V8_0), Answered(V8_0), End(V7_0, Outdated), End(V8_0, Kept(1))]),
            ("a session before the change", &[Begin(V8_0), Wait, Answered(V8_0), Close, Wait, Answered(V8_0)]),
        ];
        for (name, events) in after_failed_starts {
            run(name, &LIST, &[&FAIL, events].concat());
        }
    }

    /// A process that is restarted in a loop, ten times a second: a failed start each [`START_LENGTH`].
    #[test]
    fn a_loop_of_starts_counts_by_its_length() {
        let (mut evidence, start) = (Evidence::new(V8_0), Instant::now());
        evidence.session_began(V8_0);
        evidence.session_ended();
        let changes = (0..1000).find(|&number| {
            let now = start + number * Duration::from_millis(100);
            let changes = evidence.answer(&LIST, now) == V7_0;
            evidence.ended_without_command(V8_0, &LIST, now);
            changes
        });
        assert_eq!(changes, Some(3 * 200 + 1));
    }

    #[test]
    fn all_versions_of_the_list_are_tried() {
        let list = [V7_0, V8_0, V5_1];
        let circle = [End(V7_0, Changes(V8_0)), End(V8_0, Changes(V5_1)), End(V5_1, Changes(V7_0)), Answered(V7_0)];
        run("unproven", &list, &circle);
        let mut trial = FAIL.to_vec();
        trial.splice(5.., [End(V8_0, Changes(V5_1)), Wait, Answered(V5_1), End(V5_1, Changes(V7_0))]);
        trial.extend([Answered(V7_0), End(V7_0, Changes(V8_0)), Answered(V8_0), End(V8_0, Kept(1))]);
        run("on trial", &list, &trial);
    }
}

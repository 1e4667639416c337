//! Version fallback: the state machine of one client address, which chooses the version in the reply to its next HELLO. It has
//! hysteresis: one command proves a version, several failed starts in a row are needed to leave it.
//!
//! The HELLO of 7.0 and of 8.0 are the same bytes, and a client aborts its process when the answer is not its own version. A
//! command proves that the answer before it was right. A hang-up, the end of a connection after the reply to HELLO without a
//! command, proves nothing: a client of another version hangs up when it aborts, and so do working clients and health checks.
//! A llama.cpp client that measures memory (`-fit`, on by default) frees the four pipelining events of each device over a new
//! connection each, one after the other: 8 hang-ups in a row for a server with two devices. They follow the end of a connection
//! with commands of the same process directly. A client of another version aborts at its first connection, so its hang-up does
//! not.
//!
//! A hang-up is *idle* if it comes less than [`IDLE_GAP`] after the end of a session (a connection with a command) or after
//! another idle hang-up; at most [`MAX_IDLE`] after one session. Any other hang-up under a proven answer is a *failed start*,
//! with those that follow less than [`START_SPACING`] after it: processes that start together, or one in a loop.
//!
//! | row | state of the address | what happens | next state |
//! |---|---|---|---|
//! | 1 | any | a connection ends before its HELLO is complete | the same: nothing is recorded |
//! | 2 | any | the first command of a connection that was answered `v` | `v` proven, no failed starts |
//! | 3 | any | a hang-up after another answer than the current one | the same |
//! | 4 | `v` unproven | a hang-up | the version after `v` in the list, unproven |
//! | 5 | `v` proven | an idle hang-up, or a further one of a failed start | the same |
//! | 6 | `v` proven | failed start 1 to [`FAILED_STARTS`] − 1 in a row | the same, counted |
//! | 7 | `v` proven, sessions open | failed start [`FAILED_STARTS`] and later in a row | the same, counted |
//! | 8 | `v` proven, no session open | failed start [`FAILED_STARTS`] in a row | the version after `v`, on trial |
//! | 9 | `w` on trial | a hang-up | the version after `w`, on trial; proven again if that is `v` |
//! | 10 | `v` proven | the last session ends | the same, no failed starts |
//!
//! `v` unproven, `v` proven and `w` on trial are the three cases of [`Evidence::proven`]. From the third failed start at a proven
//! version on, in a row or not, two versions seem to share the address ([`Consequence::TwoVersions`]). Row 1 is tested by
//! `connections_of_other_clients_do_not_count` in `tests/rpc`, the others below, by number.

use std::time::{Duration, Instant};

use super::ServedVersion;

/// Failed starts in a row after which another version than the proven one is tried. It bounds the failed starts of a client at
/// an address at which another version is proven.
pub(super) const FAILED_STARTS: u32 = 3;

/// Hang-ups that are closer to the beginning of a failed start belong to it.
pub(super) const START_SPACING: Duration = Duration::from_secs(1);

/// Hang-ups that follow a session, or one another, more closely come from the process of the session. Each takes three round
/// trips through a relay (TCP, TLS, HELLO), so that a round trip may take a second.
pub(super) const IDLE_GAP: Duration = Duration::from_secs(3);

/// Idle hang-ups after one session, as many as for 16 devices. A client of another version that is restarted in a loop right
/// after a session must not count as idle for ever.
pub(super) const MAX_IDLE: u32 = 64;

/// The evidence of the version of the clients at an address.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    /// The version that the next HELLO is answered with.
    answer: ServedVersion,
    /// The version of the last command. `None`: `answer` is unproven. Another one than `answer`: `answer` is on trial.
    proven: Option<ServedVersion>,
    /// Open connections that have sent a command.
    sessions: u32,
    /// Failed starts in a row.
    failed_starts: u32,
    /// Failed starts since the proven version was proved first, whatever was between them.
    all_failed_starts: u32,
    /// When the last failed start began.
    last_failed: Option<Instant>,
    /// The end of the last session, or the last idle hang-up after it, and how many idle hang-ups may still come.
    idle: Option<(Instant, u32)>,
}

/// The consequence of a hang-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consequence {
    /// The address is answered another version by now: several connections of one process end at the same time.
    Outdated,
    /// The hang-up is idle.
    Idle,
    /// The hang-up belongs to the last failed start.
    SameStart,
    /// The answer is proven and stays, after this number of failed starts in a row.
    Kept(u32),
    /// The answer is proven and stays, because of sessions, after [`FAILED_STARTS`] failed starts between or beside these.
    TwoVersions,
    /// The next HELLO is answered this version.
    Changed(ServedVersion),
}

impl Evidence {
    /// An address about which nothing is known.
    pub(super) const fn new(answer: ServedVersion) -> Evidence {
        Evidence {
            answer,
            proven: None,
            sessions: 0,
            failed_starts: 0,
            all_failed_starts: 0,
            last_failed: None,
            idle: None,
        }
    }

    /// The version that the next HELLO is answered with.
    pub(super) const fn answer(&self) -> ServedVersion {
        self.answer
    }

    /// The version of the last command.
    pub(super) const fn proven(&self) -> Option<ServedVersion> {
        self.proven
    }

    /// Whether a connection is open that has sent a command.
    pub(super) const fn has_session(&self) -> bool {
        self.sessions > 0
    }

    /// A connection that was answered `answered` sends its first command. Returns whether that proves another version than
    /// before.
    pub(super) fn session_began(&mut self, answered: ServedVersion) -> bool {
        let is_other = self.proven != Some(answered);
        if is_other {
            self.all_failed_starts = 0;
        }
        (self.answer, self.proven) = (answered, Some(answered));
        self.sessions += 1;
        self.failed_starts = 0;
        is_other
    }

    /// A connection that has sent a command ends.
    pub(super) fn session_ended(&mut self, now: Instant) {
        self.sessions = self.sessions.saturating_sub(1);
        // The server may notice the first idle hang-up before the end of the session that it follows.
        if self.last_failed.take_if(|began| now.saturating_duration_since(*began) < START_SPACING).is_some() {
            self.failed_starts = self.failed_starts.saturating_sub(1);
            self.all_failed_starts = self.all_failed_starts.saturating_sub(1);
        }
        if self.sessions == 0 {
            self.failed_starts = 0;
        }
        self.idle = Some((now, MAX_IDLE));
    }

    /// A connection that was answered `answered` hangs up. `list` is the order in which versions are tried.
    pub(super) fn hung_up(&mut self, answered: ServedVersion, list: &[ServedVersion], now: Instant) -> Consequence {
        if answered != self.answer {
            return Consequence::Outdated;
        }
        if self.proven != Some(self.answer) {
            return self.try_next(list);
        }
        if let Some((last, left)) = &mut self.idle
            && *left > 0
            && now.saturating_duration_since(*last) < IDLE_GAP
        {
            (*last, *left) = (now, *left - 1);
            return Consequence::Idle;
        }
        if self.last_failed.is_some_and(|began| now.saturating_duration_since(began) < START_SPACING) {
            return Consequence::SameStart;
        }
        (self.idle, self.last_failed) = (None, Some(now));
        self.failed_starts = self.failed_starts.saturating_add(1);
        self.all_failed_starts = self.all_failed_starts.saturating_add(1);
        if self.failed_starts >= FAILED_STARTS && !self.has_session() {
            return self.try_next(list);
        }
        if self.all_failed_starts >= FAILED_STARTS {
            return Consequence::TwoVersions;
        }
        Consequence::Kept(self.failed_starts)
    }

    fn try_next(&mut self, list: &[ServedVersion]) -> Consequence {
        self.answer = after(list, self.answer);
        (self.failed_starts, self.last_failed) = (0, None);
        Consequence::Changed(self.answer)
    }
}

/// The version that is tried after `version`: the next one of the list, in a circle.
fn after(list: &[ServedVersion], version: ServedVersion) -> ServedVersion {
    let next = list.iter().position(|&listed| listed == version).map_or(0, |at| (at + 1) % list.len());
    list.get(next).copied().unwrap_or(version)
}

#[cfg(test)]
mod tests {
    use super::Consequence::{Changed, Idle, Kept, Outdated, SameStart, TwoVersions};
    use super::ServedVersion::{V5_1, V7_0, V8_0};
    use super::*;

    /// An event at the address.
    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// A connection is answered this version.
        Answered(ServedVersion),
        /// A connection that was answered this version hangs up.
        End(ServedVersion, Consequence),
        /// A connection that was answered this version sends its first command, and stays open.
        Begin(ServedVersion),
        /// The same, it ends, and so long passes that no hang-up is idle.
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
    const GAP: u64 = IDLE_GAP.as_millis() as u64;

    fn run(name: &str, list: &[ServedVersion], events: &[Event]) {
        let (mut evidence, mut now) = (Evidence::new(list[0]), Instant::now());
        for (number, event) in events.iter().enumerate() {
            let at = format!("{name}, event {number}: {event:?}");
            match *event {
                Answered(version) => assert_eq!(evidence.answer(), version, "{at}"),
                End(answered, want) => assert_eq!(evidence.hung_up(answered, list, now), want, "{at}"),
                Begin(answered) => drop(evidence.session_began(answered)),
                Session(answered) => {
                    evidence.session_began(answered);
                    evidence.session_ended(now);
                    now += IDLE_GAP;
                }
                Close => evidence.session_ended(now),
                Pass(millis) => now += Duration::from_millis(millis),
                Wait => now += START_SPACING,
            }
        }
    }

    /// The events up to the failed start that changes the answer from 8.0.
    const FAIL: [Event; 6] =
        [Session(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, End(V8_0, Changed(V7_0))];

    #[test]
    #[rustfmt::skip] // a row, a line or two
    fn rows_of_the_table() {
        let cases: [(&str, &[Event]); 18] = [
            ("2: a command proves the first version", &[Answered(V8_0), Session(V8_0), Answered(V8_0)]),
            ("2: a command proves the second version",
             &[End(V8_0, Changed(V7_0)), Answered(V7_0), Session(V7_0), Answered(V7_0)]),
            ("2: a late command of the earlier answer",
             &[End(V8_0, Changed(V7_0)), Session(V8_0), Answered(V8_0), End(V7_0, Outdated), Answered(V8_0)]),
            ("2: a command ends the count",
             &[Session(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, Session(V8_0), End(V8_0, TwoVersions), Wait,
               End(V8_0, TwoVersions), Wait, End(V8_0, Changed(V7_0))]),
            ("2: a late command of the proven version during a trial",
             &[&FAIL[..], &[Answered(V7_0), Session(V8_0), Answered(V8_0), End(V7_0, Outdated)]].concat()),
            ("3: connections of one process that end together",
             &[End(V8_0, Changed(V7_0)), End(V8_0, Outdated), End(V8_0, Outdated), Answered(V7_0)]),
            ("3: a hang-up of a version outside of the list", &[Session(V5_1), End(V8_0, Outdated), Answered(V5_1)]),
            ("4: an unproven version changes at each hang-up",
             &[End(V8_0, Changed(V7_0)), End(V7_0, Changed(V8_0)), End(V8_0, Changed(V7_0)), Answered(V7_0)]),
            ("5: idle hang-ups after a session",
             &[Begin(V8_0), Close, Pass(GAP - 1), End(V8_0, Idle), Pass(GAP - 1), End(V8_0, Idle), Pass(GAP),
               End(V8_0, Kept(1)), End(V8_0, SameStart)]),
            ("5: idle hang-ups after one of two sessions",
             &[Begin(V8_0), Begin(V8_0), Close, End(V8_0, Idle), Pass(GAP), End(V8_0, Kept(1))]),
            ("5: the end of the session is noticed after the first idle hang-up",
             &[Begin(V8_0), End(V8_0, Kept(1)), Close, End(V8_0, Idle), Pass(GAP), End(V8_0, Kept(1)), Wait,
               End(V8_0, Kept(2)), Wait, End(V8_0, Changed(V7_0))]),
            ("5: processes that start together",
             &[Session(V8_0), End(V8_0, Kept(1)), Pass(SPACING - 1), End(V8_0, SameStart), Pass(1), End(V8_0, Kept(2))]),
            ("7: two versions at once",
             &[Begin(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, End(V8_0, TwoVersions), Wait,
               End(V8_0, TwoVersions), End(V8_0, SameStart), Wait, Answered(V8_0)]),
            ("7: two versions in turn",
             &[Session(V8_0), End(V8_0, Kept(1)), Wait, Session(V8_0), End(V8_0, Kept(1)), Wait, Session(V8_0),
               End(V8_0, TwoVersions), Answered(V8_0)]),
            ("8: another version works", &[&FAIL[..], &[Session(V7_0), Answered(V7_0), End(V7_0, Kept(1))]].concat()),
            ("9: a trial that fails leads back",
             &[&FAIL[..], &[End(V7_0, Changed(V8_0)), Answered(V8_0), Wait, End(V8_0, TwoVersions)]].concat()),
            ("10: starts beside a session do not count after it",
             &[Begin(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, Close, Pass(GAP), End(V8_0, TwoVersions),
               Wait, End(V8_0, TwoVersions), Wait, End(V8_0, Changed(V7_0))]),
            ("10: the first of two sessions ends",
             &[Begin(V8_0), Begin(V8_0), End(V8_0, Kept(1)), Wait, End(V8_0, Kept(2)), Wait, Close, Pass(GAP),
               End(V8_0, TwoVersions), Answered(V8_0)]),
        ];
        for (name, events) in cases {
            run(name, &LIST, events);
        }
    }

    /// A process that is restarted ten times a second, right after a session of the other version.
    #[test]
    fn a_loop_of_starts_counts_after_the_idle_hang_ups() {
        let (mut evidence, start) = (Evidence::new(V8_0), Instant::now());
        evidence.session_began(V8_0);
        evidence.session_ended(start);
        let changes = (1..1000).find(|&number| {
            evidence.hung_up(V8_0, &LIST, start + number * Duration::from_millis(100)) == Changed(V7_0)
        });
        assert_eq!(changes, Some(MAX_IDLE + 1 + 10 * (FAILED_STARTS - 1)));
    }

    #[test]
    fn all_versions_of_the_list_are_tried() {
        let list = [V7_0, V8_0, V5_1];
        let circle = [End(V7_0, Changed(V8_0)), End(V8_0, Changed(V5_1)), End(V5_1, Changed(V7_0)), Answered(V7_0)];
        run("unproven", &list, &circle);
        let mut trial = FAIL.to_vec();
        trial.splice(5.., [End(V8_0, Changed(V5_1)), Answered(V5_1), End(V5_1, Changed(V7_0)), Answered(V7_0)]);
        trial.extend([End(V7_0, Changed(V8_0)), Answered(V8_0), Wait, End(V8_0, TwoVersions)]);
        run("on trial", &list, &trial);
    }
}

//! The harnesses: each sets up a structure of the core, uses it from two to five threads, and asserts its invariants.

mod budgets;
mod channels;
mod timelines;

use crate::rpc::server::extended::harness as completions;

/// The harnesses with their names.
pub(crate) const ALL: &[(&str, fn())] = &[
    ("timeline: waiters, callbacks and a failure", timelines::waiters_and_a_failure),
    ("timeline: deadlines", timelines::deadlines),
    ("timeline: registrations that are dropped", timelines::dropped_registrations),
    ("timeline: a source that notifies late", timelines::late_source),
    ("pending read: results and ends", timelines::pending_reads),
    ("pending read: deadlines", timelines::pending_reads_with_deadlines),
    ("budget: children of one parent", budgets::children_of_one_parent),
    ("channel: commands of two sessions", channels::two_sessions),
    ("channel: a full channel", channels::full),
    ("channel: many commands", channels::many_commands),
    ("channel: a command that waits for a point", channels::parked),
    ("channel: a point that has to be polled", channels::polled),
    ("channel: closed by another thread", channels::closed),
    ("channel: turns of threads", channels::turns_of_threads),
    ("completions: in order", completions::in_order),
    ("completions: a failure", completions::failure),
    ("completions: a failure of another thread", completions::ordered_failure),
    ("completions: a queue that is closed", completions::closed),
    ("completions: deadlines", completions::deadlines),
];

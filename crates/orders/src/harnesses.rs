//! The harnesses: each sets up a structure of the core, uses it from two or more threads, and asserts its invariants.

mod budgets;
pub(crate) mod channels;
pub(crate) mod ranks;
mod timelines;

use crate::rpc::server::admission_harness as admissions;
use crate::rpc::server::extended::harness as completions;
use crate::rpc::server::groups::{harness as groups, link_harness as links};
use crate::rpc::server::peers::harness as peers;

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
    ("completions: two queues", completions::two_queues),
    ("completions: points that have to be polled", completions::polled),
    ("completions: failures at once", completions::failed_at_once),
    ("completions: a heartbeat", completions::heartbeat),
    ("peer connection: acknowledgements", peers::acknowledgements),
    ("peer connection: closed by its session", peers::closed),
    ("peer connection: a server that cannot be dialled", peers::failed_dial),
    ("peer connection: a server that stalls", peers::stalls),
    ("link: messages of two ranks", links::messages_of_two_ranks),
    ("link: closed before it is attached", links::closed_before_it_is_attached),
    ("link: a lost connection", links::lost),
    ("link: a heartbeat", links::heartbeat),
    ("ranks: rounds of one process", ranks::rounds),
    ("ranks: a failure", ranks::failure),
    ("group: rounds of two servers", groups::rounds),
    ("group: a failure", groups::failure),
    ("group: a failure while the servers connect", groups::early_failure),
    ("admission: handshakes and sessions", admissions::handshakes),
    ("admission: clients that send nothing", admissions::silent_clients),
    ("admission: a drain", admissions::drain),
    ("admission: connections that are aborted", admissions::aborted),
];

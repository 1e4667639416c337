//! Detection of data races with vector clocks: two unordered accesses to the same bytes, one of them a write.

use fanout::device::Buffer;
use std::collections::HashMap;
use std::ops::Range;

/// A vector clock: for each queue, the number of its commands that are ordered before a moment.
#[derive(Clone, Default)]
pub(crate) struct VectorClock(Vec<u64>);

impl VectorClock {
    /// The number of a queue's commands that are ordered before the moment.
    fn done(&self, queue: usize) -> u64 {
        self.0.get(queue).copied().unwrap_or(0)
    }

    /// Orders command `done` of a queue, and all commands before it on that queue, before this moment.
    pub(crate) fn advance(&mut self, queue: usize, done: u64) {
        if self.0.len() <= queue {
            self.0.resize(queue + 1, 0);
        }
        self.0[queue] = self.0[queue].max(done);
    }

    /// The maximum of both clocks, for each queue.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        for (queue, &done) in other.0.iter().enumerate() {
            self.advance(queue, done);
        }
    }
}

/// Bytes of a buffer that a command reads or writes.
#[derive(Clone)]
pub(crate) struct MemoryAccess {
    /// Bytes from the start of the buffer.
    pub(crate) range: Range<u64>,
    pub(crate) writes: bool,
    pub(crate) queue: usize,
    /// Number of the command on its queue, from 1.
    pub(crate) seq: u64,
    /// The kind of command, for messages.
    pub(crate) what: &'static str,
}

/// Records the accesses of all commands and finds the races among them.
#[derive(Default)]
pub(crate) struct RaceDetector {
    /// By buffer: accesses that a later access may race with.
    accesses: HashMap<u64, Vec<MemoryAccess>>,
    /// Descriptions of the races found.
    pub(crate) found: Vec<String>,
}

impl RaceDetector {
    /// Records an access by a command that starts at `clock`, and the races with earlier accesses.
    pub(crate) fn record(&mut self, buffer: &Buffer, new: MemoryAccess, clock: &VectorClock) {
        if new.range.is_empty() {
            return;
        }
        let (found, earlier) = (&mut self.found, self.accesses.entry(buffer.id()).or_default());
        earlier.retain(|old| {
            let ordered = clock.done(old.queue) >= old.seq;
            let overlap = old.range.start < new.range.end && new.range.start < old.range.end;
            if overlap && !ordered && (old.writes || new.writes) {
                let [a, b] = [old, &new].map(MemoryAccess::describe);
                found.push(format!("{a} and {b} of {buffer:?} are not ordered"));
            }
            // The old access is dropped if every later access that races with it also races with the new access.
            let covered = new.range.start <= old.range.start && old.range.end <= new.range.end;
            !(ordered && covered && (new.writes || !old.writes))
        });
        earlier.push(new);
    }
}

impl MemoryAccess {
    fn describe(&self) -> String {
        let MemoryAccess { range, writes, queue, seq, what } = self;
        let verb = if *writes { "writes" } else { "reads" };
        format!("{what} (command {seq} of queue {queue}) {verb} bytes {range:?}")
    }
}

//! Detection of data races by vector clocks: two accesses to the same bytes, one of them a write, that nothing orders.

use fanout::device::Buffer;
use std::collections::HashMap;
use std::ops::Range;

/// A vector clock: by queue, how many of its commands are known to be done.
#[derive(Clone, Default)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    fn done(&self, queue: usize) -> u64 {
        self.0.get(queue).copied().unwrap_or(0)
    }

    /// Command `done` of a queue, and all before it, are known to be done.
    pub(crate) fn advance(&mut self, queue: usize, done: u64) {
        if self.0.len() <= queue {
            self.0.resize(queue + 1, 0);
        }
        self.0[queue] = self.0[queue].max(done);
    }

    /// Knows from now on what `other` knows, too.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (queue, &done) in other.0.iter().enumerate() {
            self.advance(queue, done);
        }
    }
}

/// Bytes of a buffer that a command reads or writes.
#[derive(Clone)]
pub(crate) struct Access {
    /// Bytes from the start of the buffer.
    pub(crate) range: Range<u64>,
    pub(crate) writes: bool,
    pub(crate) queue: usize,
    /// Number of the command on its queue, from 1.
    pub(crate) seq: u64,
    /// The kind of command, for messages.
    pub(crate) what: &'static str,
}

/// The accesses so far.
#[derive(Default)]
pub(crate) struct Races {
    /// By buffer: accesses that a later one may race with.
    accesses: HashMap<u64, Vec<Access>>,
    /// Descriptions of the races found.
    pub(crate) found: Vec<String>,
}

impl Races {
    /// Records an access by a command that knows `clock` when it begins, and reports the races with earlier ones.
    pub(crate) fn record(&mut self, buffer: &Buffer, new: Access, clock: &Clock) {
        if new.range.is_empty() {
            return;
        }
        let (found, earlier) = (&mut self.found, self.accesses.entry(buffer.id()).or_default());
        earlier.retain(|old| {
            let known = clock.done(old.queue) >= old.seq;
            let overlap = old.range.start < new.range.end && new.range.start < old.range.end;
            if overlap && !known && (old.writes || new.writes) {
                let [a, b] = [old, &new].map(Access::describe);
                found.push(format!("{a} and {b} of {buffer:?} in no order"));
            }
            // A later access that races with the old one races with the new one too, so the old one is not needed any more.
            let covered = new.range.start <= old.range.start && old.range.end <= new.range.end;
            !(known && covered && (new.writes || !old.writes))
        });
        earlier.push(new);
    }
}

impl Access {
    fn describe(&self) -> String {
        let Access { range, writes, queue, seq, what } = self;
        let verb = if *writes { "writes" } else { "reads" };
        format!("{what} (command {seq} of queue {queue}) {verb} bytes {range:?}")
    }
}

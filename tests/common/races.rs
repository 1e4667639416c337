//! Accesses to memory that nothing orders.

use fanout::device::Buffer;
use std::collections::HashMap;
use std::ops::Range;

/// How many commands of each lane are known to be done.
#[derive(Clone, Default)]
pub struct Clock(Vec<u64>);

impl Clock {
    fn of(&self, lane: usize) -> u64 {
        self.0.get(lane).copied().unwrap_or(0)
    }

    pub fn learn(&mut self, lane: usize, done: u64) {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] = self.0[lane].max(done);
    }

    pub fn join(&mut self, other: &Clock) {
        for (lane, &done) in other.0.iter().enumerate() {
            self.learn(lane, done);
        }
    }
}

/// Bytes of a buffer that a command reads or writes.
#[derive(Clone)]
pub struct Access {
    pub range: Range<u64>,
    pub writes: bool,
    pub lane: usize,
    pub seq: u64,
    pub what: &'static str,
}

/// What was accessed so far.
#[derive(Default)]
pub struct Races {
    /// By buffer: accesses that a later one may collide with.
    accesses: HashMap<u64, Vec<Access>>,
    /// Collisions, told.
    pub found: Vec<String>,
}

impl Races {
    /// Takes note of an access by who knows `clock`.
    pub fn accessed(&mut self, buffer: &Buffer, new: Access, clock: &Clock) {
        if new.range.is_empty() {
            return;
        }
        let (found, earlier) = (&mut self.found, self.accesses.entry(buffer.id()).or_default());
        earlier.retain(|old| {
            let known = clock.of(old.lane) >= old.seq;
            let meet = old.range.start < new.range.end && new.range.start < old.range.end;
            if meet && !known && (old.writes || new.writes) {
                let [a, b] = [old, &new].map(Access::described);
                found.push(format!("{a} and {b} of {buffer:?} in no order"));
            }
            // What collides with the old one and comes after the new one collides with that too.
            let covered = new.range.start <= old.range.start && old.range.end <= new.range.end;
            !(known && covered && (new.writes || !old.writes))
        });
        earlier.push(new);
    }
}

impl Access {
    fn described(&self) -> String {
        let Access { range, writes, lane, seq, what } = self;
        let verb = if *writes { "writes" } else { "reads" };
        format!("{what} (command {seq} of queue {lane}) {verb} bytes {range:?}")
    }
}

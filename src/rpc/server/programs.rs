//! The graphs that a session has run, found again by the bytes of their GRAPH_COMPUTE.
//!
//! A decoding client sends the same few bodies for each token. Finding one costs a comparison of its bytes: equal bytes
//! mean the same device and buffers too, because handles are never reused and a freed buffer takes its programs along.
//!
//! Programs are host memory that no account pays for. A session's share of it is [`MAX_BYTES`], over all its devices:
//! what is kept, what was dropped but may wait in a queue yet, and what is being made.

use std::sync::Arc;

use crate::device::{Program, Region};

/// Programs kept per session: more than any client alternates between.
pub(super) const MAX_PROGRAMS: usize = 64;

/// Bytes of host memory that a session's programs take, about. A graph that the limits allow may alone take more, and
/// is then the only one.
pub(super) const MAX_BYTES: usize = 40 << 20;

/// The part of it that old programs may keep when a new one comes, so that room is not made for each new one.
const KEPT_BYTES: usize = MAX_BYTES / 2;

/// A program with everything to run it.
pub(super) struct Stored {
    key: u64,
    device: u32,
    body: Box<[u8]>,
    /// What it takes of [`MAX_BYTES`].
    bytes: usize,
    /// The program that ran after this one last time: the first guess for the next time.
    then: u64,
    used: u64,
    pub(super) program: Program,
    pub(super) bindings: Arc<[Region]>,
}

/// The programs of a session.
#[derive(Default)]
pub(super) struct Programs {
    stored: Vec<Stored>,
    /// The one that ran last, by device.
    last: Vec<Option<u64>>,
    clock: u64,
    /// Bytes of programs that were dropped here and may wait in a queue yet.
    dropped: usize,
}

impl Programs {
    /// The program of an earlier message with the same body; it is its device's last one from now on.
    pub(super) fn find(&mut self, device: u32, body: &[u8]) -> Option<&Stored> {
        let same = |s: &Stored| *s.body == *body;
        let guess = self.last_index(device).map(|last| self.stored[last].then);
        let guess = guess.and_then(|key| self.index(key)).filter(|&i| same(&self.stored[i]));
        let found = guess.or_else(|| self.stored.iter().position(same))?;
        self.use_now(found);
        Some(&self.stored[found])
    }

    /// Drops what was used longest ago to make room for a program of `bytes`. True when the session must wait for its
    /// queues, and then call [`Programs::settle`], before it makes it: they may hold too much of what was dropped.
    pub(super) fn make_room(&mut self, bytes: usize) -> bool {
        if self.stored.len() >= MAX_PROGRAMS || self.bytes() + self.dropped + bytes > MAX_BYTES {
            let most = KEPT_BYTES.min(MAX_BYTES.saturating_sub(bytes));
            while !self.stored.is_empty() && (self.stored.len() >= MAX_PROGRAMS || self.bytes() > most) {
                let oldest = (0..self.stored.len()).min_by_key(|&i| self.stored[i].used).unwrap_or(0);
                self.dropped += self.stored.swap_remove(oldest).bytes;
            }
        }
        self.dropped > 0 && self.bytes() + self.dropped + bytes > MAX_BYTES
    }

    /// All work submitted so far is done: what was dropped is gone.
    pub(super) fn settle(&mut self) {
        self.dropped = 0;
    }

    /// Keeps a new program, which is its device's last one from now on; [`Programs::make_room`] has made room for its
    /// `bytes`.
    pub(super) fn store(
        &mut self,
        device: u32,
        body: Box<[u8]>,
        bytes: usize,
        program: Program,
        bindings: Arc<[Region]>,
    ) {
        self.clock += 1;
        self.stored.push(Stored { key: self.clock, device, body, bytes, then: 0, used: 0, program, bindings });
        self.use_now(self.stored.len() - 1);
    }

    /// The program that ran last on a device, unless it is gone.
    pub(super) fn last(&self, device: u32) -> Option<&Stored> {
        self.last_index(device).map(|i| &self.stored[i])
    }

    /// Drops the programs that touch a buffer.
    pub(super) fn forget(&mut self, buffer: u64) {
        let before = self.bytes();
        self.stored.retain(|s| s.bindings.iter().all(|region| region.buffer().id() != buffer));
        self.dropped += before - self.bytes();
    }

    fn bytes(&self) -> usize {
        self.stored.iter().map(|s| s.bytes).sum()
    }

    fn use_now(&mut self, at: usize) {
        self.clock += 1;
        let (key, device) = (self.stored[at].key, self.stored[at].device);
        if let Some(before) = self.last_index(device) {
            self.stored[before].then = key;
        }
        self.stored[at].used = self.clock;
        let slot = device as usize;
        if self.last.len() <= slot {
            self.last.resize(slot + 1, None);
        }
        self.last[slot] = Some(key);
    }

    fn last_index(&self, device: u32) -> Option<usize> {
        self.last.get(device as usize).copied().flatten().and_then(|key| self.index(key))
    }

    fn index(&self, key: u64) -> Option<usize> {
        self.stored.iter().position(|s| s.key == key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuDevice, Path};
    use crate::device::{Account, Device};
    use crate::graph::Graph;

    fn program(device: &CpuDevice) -> (Program, Arc<[Region]>, u64) {
        let buffer = device.alloc(64, &Account::new(64)).unwrap();
        let graph = crate::graph::validate::foreign(&[], &[], vec![64]).unwrap();
        let program = device.prepare(Arc::<Graph>::new(graph)).unwrap();
        (program, Arc::from([buffer.whole()]), buffer.id())
    }

    fn cpu() -> Arc<CpuDevice> {
        CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap()
    }

    #[test]
    fn bodies_are_found_and_freed_buffers_take_theirs_along() {
        let (device, mut programs) = (cpu(), Programs::default());
        assert!(programs.find(0, b"a").is_none() && programs.last(0).is_none());
        let ((a, on_a, _), (b, on_b, id)) = (program(&device), program(&device));
        programs.store(0, (*b"aa").into(), 2, a.clone(), Arc::clone(&on_a));
        programs.store(0, (*b"ab").into(), 2, b, on_b);
        programs.store(3, (*b"c").into(), 2, a, on_a);
        for _ in 0..3 {
            assert_eq!(*programs.find(0, b"aa").unwrap().body, *b"aa");
            assert_eq!(*programs.last(0).unwrap().body, *b"aa");
            assert_eq!(*programs.find(0, b"ab").unwrap().body, *b"ab");
            assert_eq!(*programs.last(3).unwrap().body, *b"c");
        }
        assert!(programs.find(0, b"a").is_none() && programs.last(1).is_none());
        programs.forget(id);
        assert!(programs.last(0).is_none() && programs.find(0, b"ab").is_none());
        assert!(programs.find(0, b"aa").is_some() && programs.last(0).is_some());
    }

    #[test]
    fn the_longest_unused_makes_room() {
        let (device, mut programs) = (cpu(), Programs::default());
        let (program, bindings, _) = program(&device);
        let add = |programs: &mut Programs, body: &[u8], bytes| {
            let full = programs.make_room(bytes);
            programs.store(0, body.into(), bytes, program.clone(), Arc::clone(&bindings));
            full
        };
        for i in 0..MAX_PROGRAMS as u8 {
            assert!(!add(&mut programs, &[i], 1));
        }
        programs.find(0, &[0]).unwrap();
        assert!(!add(&mut programs, b"new", 1));
        assert!(programs.find(0, &[0]).is_some() && programs.find(0, &[1]).is_none());
        assert!(programs.find(0, &[2]).is_some());
        assert!(add(&mut programs, b"huge", MAX_BYTES), "the queues may hold some of the others");
        programs.settle();
        assert!(programs.stored.len() == 1 && programs.last(0).is_some());
        assert!(add(&mut programs, b"next", 1) && programs.stored.len() == 1, "and now the huge one");
    }

    #[test]
    fn what_waits_in_queues_counts_until_it_is_settled() {
        let (device, mut programs) = (cpu(), Programs::default());
        let (program, bindings, id) = program(&device);
        let tenth = MAX_BYTES / 10;
        let mut settled = 0;
        for i in 0..100 {
            if programs.make_room(tenth) {
                programs.settle();
                settled += 1;
            }
            programs.store(0, Box::new([i]), tenth, program.clone(), Arc::clone(&bindings));
            assert!(programs.bytes() + programs.dropped <= MAX_BYTES);
        }
        assert!((10..=20).contains(&settled), "{settled}: each time a part of the programs was replaced");
        programs.forget(id);
        assert!(programs.make_room(MAX_BYTES / 2));
    }
}

//! The graphs that a session has run on one device, found again by the bytes of their GRAPH_COMPUTE.
//!
//! A decoding client sends the same few bodies for each token. Finding one costs a comparison of its bytes: equal bytes
//! mean the same buffers too, because handles are never reused and a freed buffer takes its programs along.

use std::sync::Arc;

use crate::device::{Program, Region};

/// Programs kept per device: more than any client alternates between.
const MAX_PROGRAMS: usize = 32;

/// Bytes of host memory that the programs of a device take, about. The newest is kept whatever its size, which the limits
/// of messages and nodes bound.
const MAX_BYTES: usize = 32 << 20;

/// Bytes that a prepared node takes, about: its descriptors, its kernel, its place in the graph.
const NODE_BYTES: usize = 1 << 10;

/// A program with everything to run it.
pub(super) struct Stored {
    key: u64,
    body: Box<[u8]>,
    /// The program that ran after this one last time: the first guess for the next time.
    then: u64,
    used: u64,
    pub(super) program: Program,
    pub(super) bindings: Arc<[Region]>,
}

/// The programs of one device.
#[derive(Default)]
pub(super) struct Programs {
    stored: Vec<Stored>,
    /// The one that ran last.
    last: Option<u64>,
    clock: u64,
    /// Bytes of programs that were dropped here and may wait in the queue yet.
    dropped: usize,
}

impl Stored {
    fn bytes(&self) -> usize {
        bytes(&self.body, &self.program)
    }
}

fn bytes(body: &[u8], program: &Program) -> usize {
    body.len() + program.graph().nodes().len() * NODE_BYTES
}

impl Programs {
    /// The program of an earlier message with the same body; it is the last one from now on.
    pub(super) fn find(&mut self, body: &[u8]) -> Option<&Stored> {
        let same = |s: &Stored| *s.body == *body;
        let guess = self.last_index().map(|last| self.stored[last].then);
        let guess = guess.and_then(|key| self.index(key)).filter(|&i| same(&self.stored[i]));
        let found = guess.or_else(|| self.stored.iter().position(same))?;
        self.use_now(found);
        Some(&self.stored[found])
    }

    /// Keeps a new program, which is the last one from now on; the ones used longest ago make room.
    pub(super) fn store(&mut self, body: &[u8], program: Program, bindings: Arc<[Region]>) -> &Stored {
        let mut total = bytes(body, &program) + self.bytes();
        while !self.stored.is_empty() && (self.stored.len() >= MAX_PROGRAMS || total > MAX_BYTES) {
            let oldest = (0..self.stored.len()).min_by_key(|&i| self.stored[i].used).unwrap_or(0);
            let bytes = self.stored.swap_remove(oldest).bytes();
            total -= bytes;
            self.dropped += bytes;
        }
        self.clock += 1;
        self.stored.push(Stored { key: self.clock, body: body.into(), then: 0, used: 0, program, bindings });
        let at = self.stored.len() - 1;
        self.use_now(at);
        &self.stored[at]
    }

    /// The program that ran last, unless it is gone.
    pub(super) fn last(&self) -> Option<&Stored> {
        self.last_index().map(|i| &self.stored[i])
    }

    /// Drops the programs that touch a buffer.
    pub(super) fn forget(&mut self, buffer: u64) {
        let before = self.bytes();
        self.stored.retain(|s| s.bindings.iter().all(|region| region.buffer().id() != buffer));
        self.dropped += before - self.bytes();
    }

    /// Whether programs dropped since [`Programs::settle`] are so large that the queue, which may hold them all, should
    /// be waited for.
    pub(super) fn unsettled(&self) -> bool {
        self.dropped > MAX_BYTES
    }

    /// All work submitted so far is done: what was dropped is gone.
    pub(super) fn settle(&mut self) {
        self.dropped = 0;
    }

    fn bytes(&self) -> usize {
        self.stored.iter().map(Stored::bytes).sum()
    }

    fn use_now(&mut self, at: usize) {
        self.clock += 1;
        let key = self.stored[at].key;
        if let Some(before) = self.last_index() {
            self.stored[before].then = key;
        }
        self.stored[at].used = self.clock;
        self.last = Some(key);
    }

    fn last_index(&self) -> Option<usize> {
        self.last.and_then(|key| self.index(key))
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
    use crate::graph::{Builder, Graph};
    use crate::ops::unary::Unary;
    use crate::tensor::DType;

    fn program(device: &CpuDevice) -> (Program, Arc<[Region]>, u64) {
        let buffer = device.alloc(64, &Account::new(64)).unwrap();
        let graph = crate::graph::validate::foreign(&[], &[], vec![64]).unwrap();
        let program = device.prepare(Arc::<Graph>::new(graph)).unwrap();
        (program, Arc::from([buffer.whole()]), buffer.id())
    }

    #[test]
    fn bodies_are_found_and_freed_buffers_take_theirs_along() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap();
        let mut programs = Programs::default();
        assert!(programs.find(b"a").is_none() && programs.last().is_none());
        let ((a, on_a, _), (b, on_b, id)) = (program(&device), program(&device));
        programs.store(b"aa", a, on_a);
        programs.store(b"ab", b, on_b);
        for _ in 0..3 {
            assert_eq!(*programs.find(b"aa").unwrap().body, *b"aa");
            assert_eq!(*programs.find(b"ab").unwrap().body, *b"ab");
        }
        assert!(programs.find(b"a").is_none());
        programs.forget(id);
        assert!(programs.last().is_none() && programs.find(b"ab").is_none());
        assert!(programs.find(b"aa").is_some() && programs.last().is_some());
    }

    #[test]
    fn the_longest_unused_makes_room() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap();
        let mut programs = Programs::default();
        let (program, bindings, _) = program(&device);
        let add = |programs: &mut Programs, body: &[u8]| {
            programs.store(body, program.clone(), Arc::clone(&bindings));
        };
        for i in 0..MAX_PROGRAMS as u8 {
            add(&mut programs, &[i]);
        }
        programs.find(&[0]).unwrap();
        add(&mut programs, b"new");
        assert!(programs.find(&[0]).is_some() && programs.find(&[1]).is_none() && programs.find(&[2]).is_some());
        add(&mut programs, &vec![7; MAX_BYTES + 1]);
        assert!(programs.stored.len() == 1 && programs.last().is_some());
    }

    #[test]
    fn nodes_count_and_not_only_bodies() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap();
        let (nodes, mut builder) = (MAX_BYTES / NODE_BYTES / 4, Builder::new());
        let (x, y) = (builder.leaf(DType::F32, [1; 4]).unwrap(), builder.leaf(DType::F32, [1; 4]).unwrap());
        for _ in 0..nodes {
            builder.node_onto(Unary::Sqr, &[Some(x)], y).unwrap();
        }
        let graph = Arc::new(builder.build().unwrap());
        let buffer = device.alloc(graph.slots()[0] as u64, &Account::new(1 << 20)).unwrap();
        let (program, bindings) = (device.prepare(graph).unwrap(), Arc::<[Region]>::from([buffer.whole()]));
        let mut programs = Programs::default();
        for i in 0..5 {
            programs.store(&[i], program.clone(), Arc::clone(&bindings));
        }
        assert_eq!(programs.stored.len(), 3, "four would be over the limit by their bodies");
        assert!(programs.find(&[1]).is_none() && programs.find(&[2]).is_some() && programs.find(&[4]).is_some());
        assert!(!programs.unsettled(), "two quarters have been dropped");
        programs.store(&[5], program.clone(), Arc::clone(&bindings));
        programs.forget(buffer.id());
        assert!(programs.unsettled(), "and four more");
        programs.settle();
        assert!(!programs.unsettled());
    }
}

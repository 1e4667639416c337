//! A device that runs what its primary cannot on a second one, node by node.
//!
//! To the outside it is the primary: its name, its memory, its buffers. It takes every node that either of the two takes.
//! A graph that the primary takes as a whole is the primary's program, and nothing here touches it. Any other is cut into
//! runs of nodes (`cut`): the primary's run where its memory is; for the others the bytes that they need are brought
//! to one buffer of the second device and what they wrote is brought back, and no more (`worker`).
//!
//! A queue is the primary's too until its first program that falls back. That one, and what comes while it runs, goes to
//! a thread (`queue`), because moving bytes means to wait for them.

mod cut;
mod queue;
mod worker;

use crate::device::{
    Account, Device, DeviceError, DeviceId, DeviceInfo, Feature, ForwardDevice, HostThreads, PeerCopies, Program,
    Queue, Support, Unsupported,
};
use crate::graph::Graph;
use crate::ops::{NodeView, OpCode};
use cut::Cut;
use log::warn;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A primary device with a second one behind it.
#[derive(Debug)]
pub struct Fallback {
    primary: Arc<dyn Device>,
    second: Arc<dyn Device>,
    by_op: [OfOp; OpCode::ALL.len()],
    /// From which other devices' memory the primary copies, as far as it has been asked.
    copies: Mutex<HashMap<DeviceId, bool>>,
    /// For queues and programs.
    this: Weak<Fallback>,
}

/// What an op has done here.
#[derive(Debug)]
struct OfOp {
    /// Nodes that ran on the second device.
    ran: AtomicU64,
    /// Whether the log has it.
    said: AtomicBool,
}

/// Which of the two devices runs a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Primary,
    Second,
}

impl Fallback {
    /// `primary`, with `second` for the nodes that it does not run. The result has the primary's identity, since it hands out the
    /// primary's buffers.
    pub fn new(primary: Arc<dyn Device>, second: Arc<dyn Device>) -> Arc<Fallback> {
        let by_op = [const { OfOp { ran: AtomicU64::new(0), said: AtomicBool::new(false) } }; OpCode::ALL.len()];
        Arc::new_cyclic(|this| Fallback { primary, second, by_op, copies: Mutex::default(), this: this.clone() })
    }

    /// How many nodes of an op have run on the second device.
    pub fn ran(&self, op: OpCode) -> u64 {
        self.of(op).map_or(0, |of| of.ran.load(Relaxed))
    }

    /// The ops that have run on the second device, each with its number of nodes.
    pub fn counts(&self) -> Vec<(OpCode, u64)> {
        OpCode::ALL.iter().map(|&op| (op, self.ran(op))).filter(|&(_, nodes)| nodes > 0).collect()
    }

    fn copies(&self) -> MutexGuard<'_, HashMap<DeviceId, bool>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, ops: &[(OpCode, u64)]) {
        for &(op, nodes) in ops {
            if let Some(of) = self.of(op) {
                of.ran.fetch_add(nodes, Relaxed);
            }
        }
    }

    fn of(&self, op: OpCode) -> Option<&OfOp> {
        self.by_op.get(op as usize)
    }

    /// Who runs a node, and for the second device why.
    fn side(&self, node: NodeView<'_>) -> Result<(Side, Option<Unsupported>), Unsupported> {
        let Support::No(lacks) = self.primary.support(node) else { return Ok((Side::Primary, None)) };
        match self.second.support(node) {
            Support::Yes | Support::Offload => Ok((Side::Second, Some(lacks))),
            Support::No(too) => {
                let (first, second) = (&self.primary.info().name, &self.second.info().name);
                let reason = format!("on {first}: {}; on {second}: {}", lacks.reason, too.reason);
                Err(Unsupported { op: lacks.op, reason })
            }
        }
    }

    /// Says in the log that an op falls back, the first time.
    fn say(&self, no: &Unsupported) {
        if self.of(no.op).is_some_and(|of| !of.said.swap(true, Relaxed)) {
            let (first, second) = (&self.primary.info().name, &self.second.info().name);
            warn!(
                "{first} does not run {} ({}): it runs on {second}, and its data is moved there and back",
                no.op, no.reason
            );
        }
    }
}

impl ForwardDevice for Fallback {
    fn inner(&self) -> &dyn Device {
        &*self.primary
    }

    fn features(&self) -> Vec<Feature> {
        let second = Feature::new("fallback", &self.second.info().name);
        self.primary.features().into_iter().chain([second]).collect()
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match self.primary.support(node) {
            Support::No(_) => self.side(node).map_or_else(Support::No, |_| Support::Yes),
            runs => runs,
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        match self.primary.prepare(Arc::clone(&graph)) {
            Err(DeviceError::Unsupported(_)) => {}
            done => return done,
        }
        let cut = Cut::new(self, &graph)?;
        Ok(Program::new(graph, Box::new(cut)))
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let this = self.this.upgrade().ok_or(DeviceError::Ended)?;
        Ok(Box::new(queue::FallbackQueue::new(this, account)?))
    }

    /// Always present: the answers are kept, because they are needed while the primary's queue is with the thread.
    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }

    /// Present if either device has threads: nodes run on both.
    fn host_threads(&self) -> Option<&dyn HostThreads> {
        self.primary.host_threads().or(self.second.host_threads()).map(|_| self as &dyn HostThreads)
    }
}

impl PeerCopies for Fallback {
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        let copies = self.primary.copies_from(other);
        self.copies().insert(other.id, copies);
        copies
    }
}

impl HostThreads for Fallback {
    /// Sets those of both devices, as far as they have threads. The second one may be a device by itself too, which then has
    /// as many. If one of them fails, the other may have changed.
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        let set = |device: &dyn Device| device.host_threads().map_or(Ok(()), |its| its.set_threads(threads));
        let (primary, second) = (set(&*self.primary), set(&*self.second));
        primary.and(second)
    }
}

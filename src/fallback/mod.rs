//! The fallback device: runs the nodes that its primary device does not support on a secondary device (usually a GPU and the
//! CPU).
//!
//! It has the primary's name, memory and buffers, and supports every node that either device supports. Start with [`Fallback`]
//! in this file. Users of several devices with a scheduler do not need it: the scheduler places such nodes itself.
//!
//! A graph that the primary supports as a whole is the primary's own program, without any overhead here. Any other graph is
//! partitioned into segments of consecutive nodes (`partition.rs`). The primary's segments run in its memory. For a secondary
//! segment, the bytes that its nodes read are copied to one scratch buffer of the secondary device, and the bytes that they
//! wrote are copied back (`worker.rs`).
//!
//! A queue forwards to the primary's queue until the first program that falls back. That program, and all commands submitted
//! while it runs, go to a thread (`queue.rs`), because copies between the devices have to wait for downloads.

mod partition;
mod queue;
mod worker;

use crate::device::{
    Device, DeviceError, DeviceId, DeviceInfo, Feature, ForwardDevice, HostThreads, MemoryBudget, PeerCopies, Program,
    Queue, Support, Unsupported,
};
use crate::graph::Graph;
use crate::ops::{NodeView, Op, OpCode};
use crate::poison::lock;
use log::warn;
use partition::PartitionedGraph;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

/// A primary device, and a secondary device for the nodes that the primary does not support. See the [module](self).
#[derive(Debug)]
pub struct Fallback {
    primary: Arc<dyn Device>,
    secondary: Arc<dyn Device>,
    by_op: [OpCounters; OpCode::ALL.len()],
    /// Cache: whether the primary copies from the memory of another device, for the devices queried so far.
    copy_support: Mutex<HashMap<DeviceId, bool>>,
    /// Handed to queues and programs, which refer to this device.
    weak_self: Weak<Fallback>,
}

/// Counters of one op.
#[derive(Debug)]
struct OpCounters {
    /// Nodes with this op that ran on the secondary device.
    secondary_nodes: AtomicU64,
    /// Whether the warning of [`Fallback::warn_once`] was logged.
    logged: AtomicBool,
}

/// One of the two devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Primary,
    Secondary,
}

impl Side {
    fn other(self) -> Side {
        if self == Side::Primary { Side::Secondary } else { Side::Primary }
    }
}

impl Fallback {
    /// Combines `primary` with `secondary`, which runs the nodes that the primary does not support. The result has the
    /// primary's identity, because its buffers are the primary's.
    pub fn new(primary: Arc<dyn Device>, secondary: Arc<dyn Device>) -> Arc<Fallback> {
        let by_op = [const { OpCounters { secondary_nodes: AtomicU64::new(0), logged: AtomicBool::new(false) } };
            OpCode::ALL.len()];
        Arc::new_cyclic(|this| Fallback {
            primary,
            secondary,
            by_op,
            copy_support: Mutex::default(),
            weak_self: this.clone(),
        })
    }

    /// The number of nodes with this op that ran on the secondary device so far.
    pub fn secondary_nodes(&self, op: OpCode) -> u64 {
        self.op_counters(op).map_or(0, |counters| counters.secondary_nodes.load(Relaxed))
    }

    /// The ops that ran on the secondary device, each with its number of nodes.
    pub fn secondary_counts(&self) -> Vec<(OpCode, u64)> {
        OpCode::ALL.iter().map(|&op| (op, self.secondary_nodes(op))).filter(|&(_, nodes)| nodes > 0).collect()
    }

    /// Counts nodes that ran on the secondary device.
    fn count_secondary_nodes(&self, ops: &[(OpCode, u64)]) {
        for &(op, nodes) in ops {
            if let Some(counters) = self.op_counters(op) {
                counters.secondary_nodes.fetch_add(nodes, Relaxed);
            }
        }
    }

    fn op_counters(&self, op: OpCode) -> Option<&OpCounters> {
        self.by_op.get(op as usize)
    }

    /// Chooses the device for a node; for the secondary device with the reason why the primary does not support the node.
    ///
    /// # Errors
    /// [`Unsupported`] with the reasons of both devices.
    fn choose_side(&self, node: NodeView<'_>) -> Result<(Side, Option<Unsupported>), Unsupported> {
        let Support::No(unsupported) = self.primary.support(node) else { return Ok((Side::Primary, None)) };
        if matches!(node.op, Op::Collective(_)) {
            // The user does not know the secondary's queue, which is no rank of a group.
            return Err(unsupported);
        }
        match self.secondary.support(node) {
            Support::Yes | Support::Offload => Ok((Side::Secondary, Some(unsupported))),
            Support::No(also) => {
                let (primary, secondary) = (&self.primary.info().name, &self.secondary.info().name);
                let reason = format!("on {primary}: {}; on {secondary}: {}", unsupported.reason, also.reason);
                Err(Unsupported { op: unsupported.op, reason })
            }
        }
    }

    /// Logs a warning the first time that an op falls back.
    fn warn_once(&self, no: &Unsupported) {
        if self.op_counters(no.op).is_some_and(|counters| !counters.logged.swap(true, Relaxed)) {
            let (primary, secondary) = (&self.primary.info().name, &self.secondary.info().name);
            warn!(
                "{primary} does not support {} ({}): it runs on {secondary}, and its data are copied there and back",
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
        let secondary = Feature::new("fallback", &self.secondary.info().name);
        self.primary.features().into_iter().chain([secondary]).collect()
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        match self.primary.support(node) {
            Support::No(_) => self.choose_side(node).map_or_else(Support::No, |_| Support::Yes),
            runs => runs,
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        match self.primary.prepare(Arc::clone(&graph)) {
            Err(DeviceError::Unsupported(_)) => {}
            done => return done,
        }
        let partitioned = PartitionedGraph::new(self, &graph)?;
        Ok(Program::new(graph, Box::new(partitioned)))
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let device = self.weak_self.upgrade().ok_or(DeviceError::Ended)?;
        Ok(Box::new(queue::FallbackQueue::new(device, budget)?))
    }

    /// Always present: results are cached, because `copy_from` needs them while the thread holds the primary's queue.
    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }

    /// Present if either device computes on host threads.
    fn host_threads(&self) -> Option<&dyn HostThreads> {
        self.primary.host_threads().or(self.secondary.host_threads()).map(|_| self as &dyn HostThreads)
    }
}

impl PeerCopies for Fallback {
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        let copies = self.primary.copies_from(other);
        lock(&self.copy_support).insert(other.id, copies);
        copies
    }
}

impl HostThreads for Fallback {
    /// Sets the threads of both devices, as far as they have this capability. The secondary device may also be in use as a
    /// device of its own, which then has the same number. If one device fails, the number of the other may have changed.
    fn set_threads(&self, threads: usize) -> Result<(), DeviceError> {
        let set = |device: &dyn Device| {
            device.host_threads().map_or(Ok(()), |host_threads| host_threads.set_threads(threads))
        };
        let (primary, secondary) = (set(&*self.primary), set(&*self.secondary));
        primary.and(secondary)
    }
}

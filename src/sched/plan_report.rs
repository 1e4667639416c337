//! Plan report: the queryable properties of a plan, its memory requirements, and its text form.

use super::{ArenaSizes, AssignReason, Devices, Plan, ReplicaOrigin, SchedError, StepAction, Storage};
use crate::graph::TensorId;
use std::fmt;

/// Memory that a plan needs on a device, in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryRequirement {
    /// The device's name.
    pub device: String,
    /// Bytes for stored tensors that have no region yet.
    pub stored: u64,
    /// Bytes for arenas and rings, which hold computed tensors and replicas.
    pub computed: u64,
    /// Free memory of the device.
    pub free: u64,
}

impl fmt::Display for MemoryRequirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let (all, MemoryRequirement { device, stored, computed, free }) =
            (self.stored.saturating_add(self.computed), self);
        let free = free >> 20;
        write!(
            f,
            "{device} needs {} MiB ({} for weights and caches, {} for computing) and has {free} MiB free",
            mib(all),
            mib(*stored),
            mib(*computed)
        )
    }
}

impl ArenaSizes {
    /// Total bytes, with `depth` ring copies.
    pub(crate) fn total_bytes(&self, depth: usize) -> u64 {
        let sum = |parts: &[u64]| parts.iter().fold(0, |sum: u64, &part| sum.saturating_add(part));
        sum(&self.arena).saturating_add(sum(&self.ring).saturating_mul(depth as u64))
    }
}

impl Plan {
    /// The number of splits: programs per run.
    pub fn splits(&self) -> usize {
        self.split_graph.splits.len()
    }

    /// The number of copies between devices per run.
    pub fn copies(&self) -> usize {
        self.split_graph.replicas.iter().filter(|replica| replica.origin != ReplicaOrigin::Host).count()
    }

    /// The maximum number of runs in flight.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The device that runs a node, and the placement rule that chose it.
    pub fn device_of(&self, node: usize) -> Option<(usize, AssignReason)> {
        self.assignments.get(node).map(|assigned| (assigned.device, assigned.reason))
    }

    /// A tensor's home: the device that holds its memory. `None` for inputs, which have a replica on each device that reads
    /// them.
    pub fn home_of(&self, id: TensorId) -> Option<usize> {
        self.home(self.task.span(id)?.0)
    }

    /// By device: bytes of arenas and rings that the plan needs.
    pub fn buffer_sizes(&self) -> Vec<u64> {
        self.layout.arenas.iter().map(|sizes| sizes.total_bytes(self.depth)).collect()
    }

    /// The memory that the plan needs on each device, and the memory that is free there.
    ///
    /// # Errors
    /// When a query of a device's free memory fails; [`SchedError::ForeignPlan`] when these are not the plan's devices.
    pub fn memory_requirements(&self, devices: &Devices) -> Result<Vec<MemoryRequirement>, SchedError> {
        if devices.len() != self.devices.len() {
            return Err(SchedError::ForeignPlan);
        }
        let computed = self.buffer_sizes();
        let mut needs = Vec::with_capacity(devices.len());
        for (number, device) in devices.iter().enumerate() {
            let name = device.info().name.clone();
            let free = device.memory().map_err(|e| SchedError::from_device(&name, e))?.free;
            let computed = computed.get(number).copied().unwrap_or(0);
            needs.push(MemoryRequirement { device: name, stored: 0, computed, free });
        }
        for (slot, storage) in (0..).zip(self.task.storage()) {
            if let Storage::Stored { device, region: None } = *storage
                && let Some(id) = self.task.slot_tensor(slot)
                && let Some(tensor) = self.task.graph().tensor(id)
            {
                let (Some(device), Some(needs)) = (devices.get(device), needs.get_mut(device)) else {
                    return Err(SchedError::ForeignPlan);
                };
                // Checked arithmetic: a remote server may reply with any size.
                let needed = device.alloc_size(&tensor.desc).checked_next_multiple_of(device.info().alignment.max(1));
                needs.stored = needs.stored.saturating_add(needed.unwrap_or(u64::MAX));
            }
        }
        Ok(needs)
    }

    /// Checks that each device has enough free memory for the plan.
    ///
    /// # Errors
    /// [`SchedError::NotEnoughMemory`] with the requirements of all devices.
    pub fn check_memory(&self, devices: &Devices) -> Result<(), SchedError> {
        let needs = self.memory_requirements(devices)?;
        let full = needs.iter().any(|needs| needs.stored.saturating_add(needs.computed) > needs.free);
        if full { Err(SchedError::NotEnoughMemory { needs }) } else { Ok(()) }
    }

    fn tensor_label(&self, id: TensorId) -> String {
        let name = self.task.name(id);
        if name.is_empty() { format!("#{}", id.index()) } else { name.to_owned() }
    }
}

/// One line for each split, each node, each replica, each device's arenas and each step.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let task = &self.task;
        for (number, split) in self.split_graph.splits.iter().enumerate() {
            writeln!(f, "split {number} on {}", self.devices[split.device])?;
            for node in split.nodes.clone() {
                let (why, of) = (self.assignments[node].reason, &task.graph().nodes()[node]);
                writeln!(f, "  {} {} ({why:?})", of.op.code(), self.tensor_label(of.dst))?;
            }
        }
        for (number, replica) in self.split_graph.replicas.iter().enumerate() {
            let from = match replica.origin {
                ReplicaOrigin::Host => "the host".to_owned(),
                ReplicaOrigin::Device(home) => self.devices[home].clone(),
                ReplicaOrigin::Experts { home, ids } => {
                    format!("{}, experts of {}", self.devices[home], self.tensor_label(ids))
                }
            };
            let what = task.slot_tensor(replica.slot).map_or_else(String::new, |id| self.tensor_label(id));
            let bytes = &replica.range;
            writeln!(f, "replica {number}: {what} {bytes:?} on {} from {from}", self.devices[replica.device])?;
        }
        for (device, sizes) in self.devices.iter().zip(&self.layout.arenas) {
            writeln!(f, "{device}: arena {:?}, {} x ring {:?}", sizes.arena, self.depth, sizes.ring)?;
        }
        for step in &self.steps {
            let queue = self.queues[step.queue];
            write!(f, "{} {}:", self.devices[queue.device], format!("{:?}", queue.role).to_lowercase())?;
            for wait in &step.waits {
                write!(f, " wait {}", wait.mark)?;
                if wait.runs_ago > 0 {
                    write!(f, "@-{}", wait.runs_ago)?;
                }
                f.write_str(",")?;
            }
            match step.action {
                StepAction::UploadInput(n) => write!(f, " upload {n}")?,
                StepAction::DeviceCopy(n) => write!(f, " copy {n}")?,
                StepAction::Download(n) => write!(f, " download {n}")?,
                StepAction::UploadStaged(n) => write!(f, " upload-staged {n}")?,
                StepAction::CopyExperts(n) => write!(f, " experts {n}")?,
                StepAction::RunSplit(n) => write!(f, " run {n}")?,
            }
            match step.mark {
                Some(mark) => writeln!(f, ", mark {mark}")?,
                None => writeln!(f)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_sizes_from_servers_saturate() {
        let needs =
            MemoryRequirement { device: "a:1/0".to_owned(), stored: u64::MAX, computed: 1 << 20, free: 1 << 20 };
        assert!(needs.to_string().contains("needs 17592186044416 MiB"), "{needs}");
        let sizes = ArenaSizes { arena: vec![u64::MAX - 1, 7], ring: vec![1 << 62, 1 << 62] };
        assert_eq!([1, 8].map(|depth| sizes.total_bytes(depth)), [u64::MAX; 2]);
    }
}

//! Assignment pass: chooses the device that runs each node.
//!
//! All nodes that write one computed slot run on one device, the slot's home. The first of them, the slot's maker, is placed on
//! a device that supports the whole group. The rest of the group, its followers, goes to the same device.

use super::split::written_slots;
use super::{AssignReason, Assignment, Devices, Options, SchedError, Storage, Task, node_name};
use crate::device::{DeviceKind, Support, Unsupported};
use crate::graph::Node;
use std::collections::BTreeMap;

#[cfg(test)]
pub(super) mod tests;

/// Assigns each node to a device that supports it. [`AssignReason`] lists the rules; the first rule that applies decides.
///
/// # Errors
/// [`SchedError::NoDeviceForNode`] for a node that no device supports, or that the one required device does not support;
/// [`SchedError::UnknownDevice`] for a pin or a stored tensor with a device index out of range.
pub(crate) fn assign(task: &Task, devices: &Devices, options: &Options) -> Result<Vec<Assignment>, SchedError> {
    let mut pass = AssignPass::new(task, devices);
    pass.check_stored_devices()?;
    pass.assign_pinned()?;
    pass.assign_destinations()?;
    pass.assign_stored(options.offload);
    let nodes = pass.nodes.len();
    // GPUs spread to their neighbours first, in both directions; then CPUs do.
    for with_cpus in [false, true] {
        pass.assign_neighbours(0..nodes, with_cpus);
        pass.assign_neighbours((0..nodes).rev(), with_cpus);
    }
    pass.assign_remaining()
}

/// Cached result of a support query. Each query runs at most once, and only when its result matters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CachedSupport {
    NotQueried,
    Yes,
    Offload,
    No,
}

struct AssignPass<'a> {
    task: &'a Task,
    devices: &'a Devices,
    nodes: &'a [Node],
    /// By node, then by device.
    support_cache: Vec<CachedSupport>,
    /// By slot: the first node that writes it.
    makers: Vec<Option<u32>>,
    /// By maker of a computed slot: its followers, the later nodes that write the slot.
    followers: BTreeMap<usize, Vec<usize>>,
    /// By node.
    assigned: Vec<Option<Assignment>>,
}

impl<'a> AssignPass<'a> {
    fn new(task: &'a Task, devices: &'a Devices) -> AssignPass<'a> {
        let nodes = task.graph().nodes();
        let mut makers = vec![None; task.storage().len()];
        let mut followers = BTreeMap::<usize, Vec<usize>>::new();
        for (at, node) in nodes.iter().enumerate() {
            let Some((slot, _)) = task.write_range(node) else { continue };
            let maker = *makers[slot as usize].get_or_insert(at as u32) as usize;
            if maker != at && matches!(task.storage()[slot as usize], Storage::Computed) {
                followers.entry(maker).or_default().push(at);
            }
        }
        let support_cache = vec![CachedSupport::NotQueried; nodes.len() * devices.len()];
        AssignPass { task, devices, nodes, support_cache, makers, followers, assigned: vec![None; nodes.len()] }
    }

    /// Checks that the devices of stored tensors exist.
    fn check_stored_devices(&self) -> Result<(), SchedError> {
        for (slot, storage) in self.task.storage().iter().enumerate() {
            if let Storage::Stored { device, .. } = *storage {
                self.check_device(device, || match self.task.slot_tensor(slot as u32).map(|id| self.task.name(id)) {
                    Some(name) if !name.is_empty() => format!("{name:?}"),
                    _ => format!("the stored tensor of slot {slot}"),
                })?;
            }
        }
        Ok(())
    }

    /// Places pinned nodes, and all nodes that write the same memory, on their pinned devices.
    fn assign_pinned(&mut self) -> Result<(), SchedError> {
        for at in 0..self.nodes.len() {
            let Some(device) = self.task.pin(at) else { continue };
            self.check_device(device, || node_name(self.task, at))?;
            let maker = self.maker(at);
            let home = self.destination(at).or_else(|| self.assigned[maker].map(|a| a.device));
            if let Some(home) = home.filter(|&home| home != device) {
                let reason = format!("it writes memory that lies on {}", self.device_name(home));
                return Err(self.unsupported_error(at, device, Unsupported { op: self.nodes[at].op.code(), reason }));
            }
            if home.is_none() {
                self.require_support(maker, device)?;
                self.assign_group(maker, device, AssignReason::Destination);
            } else {
                self.require_support(at, device)?;
            }
            self.assigned[at] = Some(Assignment { device, reason: AssignReason::Pinned });
        }
        Ok(())
    }

    /// Places nodes that write stored memory on the device of that memory.
    fn assign_destinations(&mut self) -> Result<(), SchedError> {
        for at in 0..self.nodes.len() {
            if let Some(home) = self.destination(at).filter(|_| self.assigned[at].is_none()) {
                self.require_support(at, home)?;
                self.assign_group(at, home, AssignReason::Destination);
            }
        }
        Ok(())
    }

    /// Places nodes on the device of the largest stored tensor that they read. If that device is a CPU, a device earlier in the
    /// list that prefers the node despite the copy (offload) takes it instead.
    fn assign_stored(&mut self, offload: bool) {
        let written = if offload { written_slots(self.task) } else { Vec::new() };
        for at in 0..self.nodes.len() {
            if self.assigned[at].is_some() || self.maker(at) != at {
                continue;
            }
            let mut largest: Option<(usize, usize, usize)> = None;
            for (_, slot, range) in self.task.reads(&self.nodes[at]) {
                if let Storage::Stored { device, .. } = self.task.storage()[slot as usize]
                    && largest.is_none_or(|(bytes, ..)| range.len() > bytes)
                {
                    largest = Some((range.len(), device, slot as usize));
                }
            }
            let Some((_, home, slot)) = largest else { continue };
            let better = match offload && self.is_cpu(home) && !written[slot] {
                true => (0..home).find(|&d| !self.is_cpu(d) && self.prefers_offload(at, d)),
                false => None,
            };
            if let Some(device) = better {
                self.assign_group(at, device, AssignReason::Offload);
            } else if self.supports_group(at, home) {
                self.assign_group(at, home, AssignReason::Stored);
            }
        }
    }

    /// Places unassigned nodes on the device of the last assigned node before them in `order`. Without `with_cpus`, CPU nodes
    /// do not spread.
    fn assign_neighbours(&mut self, order: impl Iterator<Item = usize>, with_cpus: bool) {
        let mut near = None;
        for at in order {
            if let Some(Assignment { device, .. }) = self.assigned[at] {
                near = Some(device).filter(|&device| with_cpus || !self.is_cpu(device));
            } else if let Some(device) = near
                && self.maker(at) == at
                && self.supports_group(at, device)
            {
                self.assign_group(at, device, AssignReason::Neighbour);
            }
        }
    }

    /// Places the remaining nodes on the supporting device that holds the most bytes of their sources.
    fn assign_remaining(mut self) -> Result<Vec<Assignment>, SchedError> {
        let mut held = vec![0u64; self.devices.len()];
        let mut order = Vec::new();
        for at in 0..self.nodes.len() {
            if self.assigned[at].is_some() {
                continue;
            }
            held.fill(0);
            for (_, slot, range) in self.task.reads(&self.nodes[at]) {
                if let Some(home) = self.home(slot as usize) {
                    held[home] = held[home].saturating_add(range.len() as u64);
                }
            }
            order.clear();
            order.extend(0..self.devices.len());
            // The sort is stable: among equal devices, the lower index comes first.
            order.sort_by_key(|&device| std::cmp::Reverse(held[device]));
            match order.iter().find(|&&device| self.supports_group(at, device)) {
                Some(&device) => self.assign_group(at, device, AssignReason::LastResort),
                None => return Err(self.no_device_error(at)),
            }
        }
        // Every node has a device here, so `flatten` drops none.
        Ok(self.assigned.into_iter().flatten().collect())
    }

    /// The device of the stored memory that a node writes.
    fn destination(&self, at: usize) -> Option<usize> {
        let (slot, _) = self.task.write_range(&self.nodes[at])?;
        match self.task.storage()[slot as usize] {
            Storage::Stored { device, .. } => Some(device),
            Storage::Input | Storage::Computed => None,
        }
    }

    /// The first node that writes the computed slot that this node writes.
    fn maker(&self, at: usize) -> usize {
        match self.task.write_range(&self.nodes[at]) {
            Some((slot, _)) if matches!(self.task.storage()[slot as usize], Storage::Computed) => {
                self.makers[slot as usize].map_or(at, |maker| maker as usize)
            }
            _ => at,
        }
    }

    /// The device of a slot, if it is decided.
    fn home(&self, slot: usize) -> Option<usize> {
        match self.task.storage()[slot] {
            Storage::Stored { device, .. } => Some(device),
            Storage::Input => None,
            Storage::Computed => self.makers[slot].and_then(|at| self.assigned[at as usize]).map(|a| a.device),
        }
    }

    fn assign_group(&mut self, at: usize, device: usize, reason: AssignReason) {
        self.assigned[at] = Some(Assignment { device, reason });
        for &follower in self.followers.get(&at).into_iter().flatten() {
            self.assigned[follower] = Some(Assignment { device, reason: AssignReason::Destination });
        }
    }

    /// Whether a device supports a node and its followers.
    fn supports_group(&mut self, at: usize, device: usize) -> bool {
        self.first_unsupported(at, device).is_none()
    }

    /// Whether a device supports a node and its followers, and prefers to run the node even if the weights must be copied.
    fn prefers_offload(&mut self, at: usize, device: usize) -> bool {
        self.cached_support(at, device) == CachedSupport::Offload && self.supports_group(at, device)
    }

    /// Returns an error unless a device supports a node and its followers.
    fn require_support(&mut self, at: usize, device: usize) -> Result<(), SchedError> {
        match self.first_unsupported(at, device).and_then(|node| Some((node, self.unsupported(node, device)?))) {
            Some((node, reason)) => Err(self.unsupported_error(node, device, reason)),
            None => Ok(()),
        }
    }

    /// The first of a node and its followers that a device does not support.
    fn first_unsupported(&mut self, at: usize, device: usize) -> Option<usize> {
        if self.cached_support(at, device) == CachedSupport::No {
            return Some(at);
        }
        let mut next = 0;
        while let Some(&follower) = self.followers.get(&at).and_then(|all| all.get(next)) {
            if self.cached_support(follower, device) == CachedSupport::No {
                return Some(follower);
            }
            next += 1;
        }
        None
    }

    fn cached_support(&mut self, at: usize, device: usize) -> CachedSupport {
        let index = at * self.devices.len() + device;
        if self.support_cache[index] == CachedSupport::NotQueried {
            self.support_cache[index] = match self.support(at, device) {
                Support::Yes => CachedSupport::Yes,
                Support::Offload => CachedSupport::Offload,
                Support::No(_) => CachedSupport::No,
            };
        }
        self.support_cache[index]
    }

    fn support(&self, at: usize, device: usize) -> Support {
        let node = &self.nodes[at];
        match self.task.graph().node_view(node) {
            Some(view) => self.devices[device].support(view),
            None => Support::No(Unsupported { op: node.op.code(), reason: "it names no tensor".to_owned() }),
        }
    }

    fn unsupported(&self, at: usize, device: usize) -> Option<Unsupported> {
        match self.support(at, device) {
            Support::No(reason) => Some(reason),
            Support::Yes | Support::Offload => None,
        }
    }

    fn is_cpu(&self, device: usize) -> bool {
        self.devices[device].info().kind == DeviceKind::Cpu
    }

    fn device_name(&self, device: usize) -> String {
        self.devices[device].info().name.clone()
    }

    fn check_device(&self, device: usize, what: impl FnOnce() -> String) -> Result<(), SchedError> {
        let devices = self.devices.len();
        if device < devices { Ok(()) } else { Err(SchedError::UnknownDevice { what: what(), device, devices }) }
    }

    fn unsupported_error(&self, at: usize, device: usize, reason: Unsupported) -> SchedError {
        SchedError::NoDeviceForNode {
            node: node_name(self.task, at),
            refusals: vec![(self.device_name(device), reason)],
        }
    }

    /// The error for a node that no device supports, with each device's reason, which may be about one of the node's followers.
    fn no_device_error(&mut self, at: usize) -> SchedError {
        let mut refusals = Vec::new();
        for device in 0..self.devices.len() {
            if let Some(reason) = self.first_unsupported(at, device).and_then(|node| self.unsupported(node, device)) {
                refusals.push((self.device_name(device), reason));
            }
        }
        SchedError::NoDeviceForNode { node: node_name(self.task, at), refusals }
    }
}

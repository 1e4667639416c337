//! Memory that graphs allocate.
//!
//! An allocation node owns its memory from its creation on, at a fixed address. The memory is freed when the graph and all
//! executable graphs made from it are destroyed. Launches only track which memory is in use between allocation and free nodes.

use super::{AllocNode, GraphNode, Graphs};
use crate::driver::Driver;
use crate::driver::memory::{AllocationOrigin, memory_error};
use crate::driver::{DriverState, StateGuard};
use crate::error::{Error, Result};
use crate::handle::{ContextId, GraphId, NodeId};

/// Memory of one allocation node.
#[derive(Clone, Copy, Debug)]
pub struct GraphMemory {
    node: AllocNode,
    /// Reference count: the graph, and executable graphs made from it.
    users: u32,
    /// Whether the launches so far have allocated and not yet freed it.
    live: bool,
}

impl Graphs {
    /// The allocation node's memory at this address.
    pub fn memory(&self, address: u64) -> Option<AllocNode> {
        self.memory.get(&address).map(|memory| memory.node)
    }

    /// Adds a reference.
    pub(super) fn add_use(&mut self, address: u64) {
        if let Some(memory) = self.memory.get_mut(&address) {
            memory.users += 1;
        }
    }

    /// Drops a reference. Returns the address if it was the last and the memory must be freed.
    pub(super) fn drop_use(&mut self, address: u64) -> Option<u64> {
        let memory = self.memory.get_mut(&address)?;
        memory.users = memory.users.saturating_sub(1);
        if memory.users > 0 || memory.live {
            return None;
        }
        self.memory.remove(&address).map(|_| address)
    }

    /// Marks memory as freed by the program. `Some(true)` if no graph references it, so that it must be freed now. `None` if it
    /// is not in use, or not graph memory.
    pub fn free_from_host(&mut self, address: u64) -> Option<bool> {
        let memory = self.memory.get_mut(&address).filter(|memory| memory.live)?;
        memory.live = false;
        let last = memory.users == 0;
        if last {
            self.memory.remove(&address);
        }
        Some(last)
    }

    /// Tracks the memory of one launch. Allocating memory that is in use fails, unless the launch frees it first (`auto_free`).
    pub(super) fn apply_memory_nodes<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a GraphNode> + Clone,
        auto_free: bool,
    ) -> Result<()> {
        let in_use = |address: &u64| self.memory.get(address).is_some_and(|memory| memory.live);
        let allocated = |node: &&GraphNode| matches!(node, GraphNode::Alloc(memory) if in_use(&memory.address));
        if !auto_free && nodes.clone().any(|node| allocated(&node)) {
            return Err(Error::InvalidValue);
        }
        for node in nodes {
            let (address, live) = match node {
                GraphNode::Alloc(memory) => (memory.address, true),
                GraphNode::Free(address) => (*address, false),
                _ => continue,
            };
            if let Some(memory) = self.memory.get_mut(&address) {
                memory.live = live;
                let device = memory.node.device;
                let used = self.used(device);
                let high = self.high.entry(device).or_default();
                *high = used.max(*high);
            }
        }
        Ok(())
    }

    fn used(&self, device: u32) -> u64 {
        self.sum(device, |memory| memory.live)
    }

    fn sum(&self, device: u32, which: impl Fn(&GraphMemory) -> bool) -> u64 {
        let memory = self.memory.values().filter(|memory| memory.node.device == device && which(memory));
        memory.map(|memory| memory.node.bytes).sum()
    }

    /// `cuDeviceGetGraphMemAttribute` in bytes: used now, most used, reserved now, most reserved.
    pub fn memory_attribute(&self, device: u32, attribute: u32) -> Result<u64> {
        let reserved = self.sum(device, |_| true);
        let high = self.high.get(&device).copied().unwrap_or(0);
        match attribute {
            0 => Ok(self.used(device)),
            1 => Ok(high),
            2 => Ok(reserved),
            3 => Ok(high.max(reserved)),
            _ => Err(Error::InvalidValue),
        }
    }

    /// `cuDeviceSetGraphMemAttribute`: resets a high-water mark, for which only the value 0 is valid; it becomes the current
    /// use.
    pub fn reset_memory_attribute(&mut self, device: u32, attribute: u32, value: u64) -> Result<()> {
        if !matches!(attribute, 1 | 3) || value != 0 {
            return Err(Error::InvalidValue);
        }
        let used = self.used(device);
        self.high.insert(device, used);
        Ok(())
    }
}

impl Driver {
    /// `cuGraphAddMemAllocNode`: returns the node and the address.
    pub fn add_alloc_node<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        graph: GraphId,
        after: &[NodeId],
        device: u32,
        bytes: u64,
        context: ContextId,
    ) -> Result<(NodeId, u64, StateGuard<'a>)> {
        state.graphs.get(graph)?;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        let allocation =
            self.space().alloc(device, bytes, "cuGraphAddMemAllocNode").map_err(|error| memory_error(&error))?;
        let node = AllocNode { address: allocation.base(), bytes, device };
        let added = state.graphs.add(graph, after, GraphNode::Alloc(node));
        match added {
            Ok(id) => {
                state.memory.add(&allocation, context, AllocationOrigin::Graph);
                state.graphs.memory.insert(node.address, GraphMemory { node, users: 1, live: false });
                Ok((id, node.address, state))
            }
            Err(error) => {
                // Allocated above and not yet visible to the program.
                let _ = self.space().free(node.address);
                Err(error)
            }
        }
    }
}

impl DriverState {
    /// A node that frees the memory of an allocation node.
    pub fn free_node(&self, address: u64) -> Result<GraphNode> {
        self.graphs.memory(address).map(|_| GraphNode::Free(address)).ok_or(Error::InvalidValue)
    }
}

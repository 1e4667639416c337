//! Programs by the content of their graphs. A host builds each graph anew, mostly with the same tensors at the same addresses
//! as before. Such a graph costs one comparison of all its tensors.

use crate::abi::{Buffer, Tensor};
use fanout::device::{Program, Region};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Programs that are kept for each device. A context has one for each number of tokens and of splits that it repeats.
const MAX_PROGRAMS: usize = 32;

/// A graph that was prepared, with the memory that it is bound to.
#[derive(Clone)]
pub(crate) struct PreparedGraph {
    /// The graph's tensors as they were: the nodes in order, then sources that are not nodes.
    pub(crate) tensors: Arc<[(*const Tensor, Tensor)]>,
    /// By node: how many nodes of the host's whole graph read it.
    pub(crate) readers: Arc<[i32]>,
    /// `None` for a graph that computes nothing.
    pub(crate) program: Option<Program>,
    pub(crate) bindings: Arc<[Region]>,
    /// The host's objects of the memory, in the order of `bindings`.
    pub(crate) buffers: Arc<[*mut Buffer]>,
    pub(crate) outputs: Arc<[Output]>,
    /// Ranges of memory beyond one run that the graph writes, such as those of caches: numbers in `buffers`, and bytes.
    pub(crate) writes: Arc<[(usize, Range<u64>)]>,
    /// Different for every graph that was prepared.
    pub(crate) serial: u64,
    /// Of the device that it was prepared on.
    pub(crate) generation: u64,
}

/// A tensor that the host may read after the run.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    /// Number in [`PreparedGraph::buffers`].
    pub(crate) buffer: usize,
    /// The first byte in the buffer.
    pub(crate) start: u64,
    pub(crate) bytes: u64,
    /// Whether it is delivered in any case. Else only if the host reads results that are no outputs.
    pub(crate) always: bool,
}

/// The programs of a device, the last used first.
#[derive(Default)]
pub(crate) struct ProgramCache(VecDeque<PreparedGraph>);

// SAFETY: the pointers of a prepared graph are compared, and followed only in a call that has the host's same pointers.
unsafe impl Send for ProgramCache {}

impl ProgramCache {
    /// The graph of a device's generation with exactly these nodes and counts of readers.
    ///
    /// # Safety
    /// `nodes` are nodes of a graph of the host, whose sources are tensors.
    pub(crate) unsafe fn find(
        &mut self,
        nodes: &[*mut Tensor],
        readers: &[i32],
        generation: u64,
    ) -> Option<PreparedGraph> {
        let current = |known: &PreparedGraph| known.generation == generation && *known.readers == *readers;
        // SAFETY: the caller passes valid nodes.
        let at = self.0.iter().position(|known| current(known) && unsafe { known.is(nodes) })?;
        let found = self.0.remove(at)?;
        self.0.push_front(found.clone());
        Some(found)
    }

    pub(crate) fn insert(&mut self, graph: PreparedGraph) {
        self.0.truncate(MAX_PROGRAMS - 1);
        self.0.push_front(graph);
    }

    /// Forgets all programs.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets all programs that use a buffer, and thereby its memory.
    pub(crate) fn forget_buffer(&mut self, buffer: *mut Buffer) {
        self.0.retain(|graph| !graph.buffers.contains(&buffer));
    }
}

impl PreparedGraph {
    /// Whether this is the graph of these nodes.
    ///
    /// # Safety
    /// As for [`ProgramCache::find`].
    unsafe fn is(&self, nodes: &[*mut Tensor]) -> bool {
        let pointers = self.tensors.iter().map(|(pointer, _)| *pointer);
        self.readers.len() == nodes.len()
            && pointers.zip(nodes).all(|(known, &node)| std::ptr::eq(known, node))
            // Nodes first: where they are equal, so are the pointers of their sources, and these are tensors of this graph.
            // SAFETY: the caller passes valid nodes, whose sources are valid.
            && self.tensors.iter().all(|(pointer, known)| unsafe { same(&**pointer, known) })
    }
}

/// Whether a tensor is as it was.
fn same(tensor: &Tensor, known: &Tensor) -> bool {
    let Tensor { dtype, buffer, ne, nb, op, op_params, flags, src, view_src, view_offs, data } = tensor;
    (*dtype, *buffer, *op, *flags, *data) == (known.dtype, known.buffer, known.op, known.flags, known.data)
        && (ne, nb, op_params, src) == (&known.ne, &known.nb, &known.op_params, &known.src)
        && (*view_src, *view_offs) == (known.view_src, known.view_offs)
}

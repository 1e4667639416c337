//! Self-test of a device: a small graph for each op, with the results compared to an exact CPU device's. It finds a device whose
//! driver, kernels or memory give wrong results, before a model does.
//!
//! [`cases`] lists the graphs, and [`check`] runs one of them on a device. A case covers one op, and for products, rows and attention one
//! type of weights or of cache. Its inputs are seeded, so a difference repeats. Memory is filled with a pattern before a run: a
//! byte that changes outside of the results is a difference, too.
//!
//! Bounds are NMSEs, and are in each case's row. They allow what devices may round: columns of quantised products to 8 bits, other
//! factors to the type of the weights.
//!
//! ```
//! use fanout::cpu::{CpuDevice, MathMode};
//! use fanout::device::MemoryBudget;
//! use fanout::self_test::{self, Verdict};
//! use std::time::{Duration, Instant};
//!
//! let device = CpuDevice::new("CPU", 1, MathMode::Fast, 16 << 20)?;
//! let reference = CpuDevice::new("reference", 1, MathMode::Exact, 16 << 20)?;
//! let (budget, cases) = (MemoryBudget::new(16 << 20), self_test::cases()?);
//! let case = cases.iter().find(|case| case.name() == "MUL_MAT Q4_0").expect("a case for each type of weights");
//! let deadline = Instant::now() + Duration::from_secs(60);
//! let verdict = self_test::check(case, &*device, &*reference, &budget, deadline)?;
//! assert!(matches!(verdict, Verdict::Same { .. }), "{verdict:?}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Start with this file. `cases.rs` has the builder of cases and the bounds, the files in `cases/` the rows, by kind of op, and
//! `values.rs` the inputs and their bytes.

mod cases;
#[cfg(test)]
mod tests;
pub mod values;

pub use cases::cases;

use crate::device::{Device, DeviceError, MemoryBudget, Support, UploadSource};
use crate::graph::{Graph, Node, Tensor};
use crate::ops::Op;
use crate::ops::sort::Sort;
use std::sync::Arc;
use std::time::Instant;

/// A small graph with seeded inputs for one op.
#[derive(Clone, Debug)]
pub struct Case {
    name: String,
    graph: Arc<Graph>,
    /// The memory before a run: the inputs, and a pattern elsewhere, so that stray writes are found.
    memory: Vec<u8>,
    /// Largest NMSE of a result.
    bound: f64,
}

impl Case {
    /// The op, with the type of weights or the kind where an op has several cases: `ADD`, `MUL_MAT Q4_K`. Unique.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The graph. All its tensors are in slot 0.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Device memory that a run allocates, in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Runs the graph, and returns the memory after it.
    fn run_on(
        &self,
        device: &dyn Device,
        budget: &Arc<MemoryBudget>,
        deadline: Instant,
    ) -> Result<Vec<u8>, DeviceError> {
        let program = device.prepare(Arc::clone(&self.graph))?;
        let buffer = device.alloc(self.bytes(), budget)?;
        let mut queue = device.queue(budget)?;
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&self.memory))?;
        queue.run(&program, &Arc::from([buffer.whole()]))?;
        queue.download(buffer.whole())?.wait(Some(deadline))
    }

    /// Compares the memory after a run with that of the reference.
    fn compare(&self, got: &[u8], want: &[u8]) -> Verdict {
        if let Some(offset) = self.stray_write(got) {
            return Verdict::StrayWrite { offset };
        }
        let errors = self.graph.nodes().iter().flat_map(|node| {
            self.results(node).map(|result| {
                match (result_values(node, result, got), result_values(node, result, want)) {
                    (Some(got), Some(want)) => values::nmse(&got, &want),
                    _ => f64::INFINITY,
                }
            })
        });
        let (nmse, bound) = (errors.fold(0.0, f64::max), self.bound);
        if nmse <= bound { Verdict::Same { nmse } } else { Verdict::Differs { nmse, bound } }
    }

    /// The tensors that a node writes: its destination, and the sources that it updates.
    fn results<'a>(&'a self, node: &'a Node) -> impl Iterator<Item = &'a Tensor> {
        let updated = node.srcs.iter().enumerate().filter(|&(i, _)| node.op.updates(i)).filter_map(|(_, id)| *id);
        updated.chain([node.dst]).filter_map(|id| self.graph.tensor(id))
    }

    /// The first byte outside of all results that a run has changed.
    fn stray_write(&self, after: &[u8]) -> Option<usize> {
        let mut is_result = vec![false; self.memory.len()];
        for result in self.graph.nodes().iter().flat_map(|node| self.results(node)) {
            let Some(place) = result.place else { continue };
            values::for_each_block(&result.desc, |at| {
                let start = place.offset + at;
                is_result[start..start + result.desc.dtype().block_bytes()].fill(true);
            });
        }
        let bytes = self.memory.iter().zip(after).zip(is_result);
        bytes.into_iter().position(|((before, after), is_result)| !is_result && before != after)
    }
}

/// The values of a node's result in a memory. Those of TOP_K, whose order is free, are sorted within each row.
fn result_values(node: &Node, result: &Tensor, memory: &[u8]) -> Option<Vec<f64>> {
    let mut values = values::decode(&result.desc, memory.get(result.place?.offset..)?)?;
    if node.op == Op::Sort(Sort::TopK) {
        values.chunks_mut(result.desc.ne()[0].max(1)).for_each(|row| row.sort_by(f64::total_cmp));
    }
    Some(values)
}

/// How the results of a device compare with the reference's.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Within the bound.
    Same {
        /// The largest NMSE of the case's results.
        nmse: f64,
    },
    /// Beyond the bound.
    Differs {
        /// The largest NMSE of the case's results; infinite if NaNs or infinities differ.
        nmse: f64,
        /// The largest NMSE that the case allows.
        bound: f64,
    },
    /// The run has changed a byte that belongs to no result: of an input, or beside a tensor.
    StrayWrite {
        /// The first such byte, from the start of the case's memory.
        offset: usize,
    },
    /// The device does not run the op with these types.
    Unsupported {
        /// The device's reason.
        reason: String,
    },
}

/// Runs a case on `device` and on `reference`, an exact CPU device, and compares the results. Both allocate from `budget`,
/// [`Case::bytes`] and what their queues need, one after the other.
///
/// # Errors
/// The errors of `device`, also [`DeviceError::Deadline`] when the results are not there at `deadline`. The work of the device is then
/// discarded, as by every drop of a queue. An error of the reference has its name ([`DeviceError::OnDevice`]).
pub fn check(
    case: &Case,
    device: &dyn Device,
    reference: &dyn Device,
    budget: &Arc<MemoryBudget>,
    deadline: Instant,
) -> Result<Verdict, DeviceError> {
    for node in case.graph.nodes().iter().filter_map(|node| case.graph.node_view(node)) {
        if let Support::No(unsupported) = device.support(node) {
            // A device of a lost server supports nothing, and this request tells why.
            device.memory()?;
            return Ok(Verdict::Unsupported { reason: unsupported.reason });
        }
    }
    let got = case.run_on(device, budget, deadline)?;
    let want = case.run_on(reference, budget, deadline).map_err(|e| e.on_device(&reference.info().name))?;
    Ok(case.compare(&got, &want))
}

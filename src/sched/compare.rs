//! Node-by-node comparison of a plan's devices with a reference device, to find the first node with different results.

use super::{ObservedNode, Observer, Options, Plan, PreparedPlan, SchedError, Scheduler, Storage, Task};
use crate::device::{DEVICE_TIMEOUT, Device, MemoryBudget, UploadSource};
use crate::graph::TensorId;
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// Chunk size for copying a stored tensor through the host: the host holds at most this many bytes of it.
const COPY_CHUNK_BYTES: u64 = 16 << 20;

impl Scheduler {
    /// Copies all stored tensors of a plan, with their current contents, to another device. Returns the task with that device
    /// as device 0. The copies' memory is charged to `budget`.
    ///
    /// # Errors
    /// A device's failure; [`SchedError::StoredWithoutRegion`] for a stored tensor without memory; [`SchedError::ForeignPlan`].
    pub fn copy_stored_to(
        &mut self,
        prepared: &PreparedPlan,
        device: &Arc<dyn Device>,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Task, SchedError> {
        self.check_owner(prepared)?;
        let task = Arc::clone(&prepared.plan().task);
        let on_target = |e| SchedError::from_device(&device.info().name, e);
        let mut queue = device.queue(budget).map_err(on_target)?;
        let mut regions = BTreeMap::new();
        for (slot, storage) in (0..).zip(task.storage()) {
            let Storage::Stored { device: home, region } = storage else { continue };
            let Some(from) = region else {
                return Err(SchedError::StoredWithoutRegion { name: task.slot_name(slot).to_owned() });
            };
            let tensor = task.slot_tensor(slot).and_then(|id| task.graph().tensor(id));
            let bytes = tensor.map_or(0, |tensor| device.alloc_size(&tensor.desc)).max(from.bytes());
            let to = device.alloc(bytes, budget).map_err(on_target)?.whole();
            let mut at = 0;
            while at < from.bytes() {
                let n = COPY_CHUNK_BYTES.min(from.bytes() - at);
                let (from, to) = (from.subregion(at, n), to.subregion(at, n));
                let chunk = self.download_blocking(*home, from.map_err(on_target)?)?;
                let submitted = to.and_then(|to| queue.upload(to, None, UploadSource::Borrowed(&chunk)));
                submitted.map_err(on_target)?;
                at += n;
            }
            regions.insert(slot, to);
        }
        queue.mark().wait(Some(Instant::now() + DEVICE_TIMEOUT)).map_err(on_target)?;
        Ok(task.moved_to_device_0(&regions))
    }
}

/// Callback of [`compare`]: a node, its bytes on the plan's devices, and its bytes on the reference. `Break` ends the
/// comparison.
pub type CompareReporter<'a> = dyn FnMut(ObservedNode<'_>, &[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Runs a plan on its devices and its task on a reference device, both from the current contents of the stored tensors, and
/// passes both results of each node to `report`. The reference's result then replaces that of the plan's device, so every node
/// computes from the reference's sources: only nodes that compute differently differ. Stored tensors that the task writes, such as
/// a KV cache, hold the reference's values afterwards.
///
/// # Errors
/// A failure on either side. If the reference cannot run the task, [`SchedError::NoDeviceForNode`] or
/// [`SchedError::NotEnoughMemory`] before anything is copied.
pub fn compare(
    (scheduler, prepared): (&mut Scheduler, &mut PreparedPlan),
    reference: &Arc<dyn Device>,
    budget: &Arc<MemoryBudget>,
    inputs: &[(TensorId, &[u8])],
    report: &mut CompareReporter<'_>,
) -> Result<(), SchedError> {
    // Plans for the reference before anything is copied, to check that it supports all nodes and has enough memory.
    let planned_only = Arc::new(prepared.plan().task.moved_to_device_0(&BTreeMap::new()));
    let reference_only = [Arc::clone(reference)];
    Plan::new(planned_only, &reference_only, &Options::default())?.check_memory(&reference_only)?;
    let task = Arc::new(scheduler.copy_stored_to(prepared, reference, budget)?);
    let (send, results) = bounded(1);
    std::thread::scope(|scope| {
        let reference_run = scope.spawn(move || {
            let mut reference_scheduler = Scheduler::new(vec![Arc::clone(reference)], Options::default(), budget)?;
            let mut prepared = reference_scheduler.build(&task)?;
            reference_scheduler.run_observed(&mut prepared, inputs, &mut ReferenceObserver(send)).map(drop)
        });
        // When this run ends, it drops the receiver. The reference's next send then fails, which ends the reference's run.
        let mut observer = ComparingObserver { results, reference: None, report };
        let on_plan = scheduler.run_observed(prepared, inputs, &mut observer);
        drop(observer);
        let on_reference = reference_run.join().unwrap_or(Err(SchedError::Bug("the reference's thread panicked")));
        on_plan.map(drop).and(on_reference)
    })
}

/// Sends each result of the reference to the [`ComparingObserver`].
struct ReferenceObserver(Sender<Vec<u8>>);

impl Observer for ReferenceObserver {
    fn selects(&mut self, _: ObservedNode<'_>) -> bool {
        true
    }

    fn on_result(&mut self, _: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()> {
        match self.0.send(bytes.to_vec()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

/// Receives the reference's result for each node, reports both, and continues with the reference's.
struct ComparingObserver<'a> {
    results: Receiver<Vec<u8>>,
    /// The reference's result for the last node, if it differs.
    reference: Option<Vec<u8>>,
    report: &'a mut CompareReporter<'a>,
}

impl Observer for ComparingObserver<'_> {
    fn selects(&mut self, _: ObservedNode<'_>) -> bool {
        true
    }

    fn on_result(&mut self, node: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()> {
        match self.results.recv() {
            Ok(reference) => {
                let flow = (self.report)(node, bytes, &reference);
                self.reference = Some(reference).filter(|reference| reference != bytes);
                flow
            }
            // The reference's run has failed; its thread returns the error.
            Err(_) => ControlFlow::Break(()),
        }
    }

    fn replacement(&mut self) -> Option<Vec<u8>> {
        self.reference.take()
    }
}

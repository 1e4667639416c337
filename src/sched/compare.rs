//! Two devices node by node: where do their results part?

use super::{ObservedNode, Observer, Options, Plan, PreparedPlan, SchedError, Scheduler, Storage, Task};
use crate::device::{Account, Device, PATIENCE, Source};
use crate::graph::TensorId;
use crossbeam::channel::{Receiver, Sender, bounded};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a stored tensor that are on their way at once.
const COPY_CHUNK_BYTES: u64 = 16 << 20;

impl Scheduler {
    /// The task of a plan with a copy of all that is stored, as it is now, on another device, which is the task's device 0.
    /// `account` pays for the memory there.
    ///
    /// # Errors
    /// A device's failure; [`SchedError::Unplaced`] for a stored tensor without memory; [`SchedError::Foreign`].
    pub fn copy_stored_to(
        &mut self,
        prepared: &PreparedPlan,
        device: &Arc<dyn Device>,
        account: &Arc<Account>,
    ) -> Result<Task, SchedError> {
        self.check_owner(prepared)?;
        let task = Arc::clone(&prepared.plan().task);
        let there = |e| SchedError::from_device(&device.info().name, e);
        let mut queue = device.queue(account).map_err(there)?;
        let mut regions = BTreeMap::new();
        for (slot, storage) in (0..).zip(task.storage()) {
            let Storage::Stored { device: home, region } = storage else { continue };
            let Some(from) = region else {
                return Err(SchedError::StoredWithoutRegion { name: task.slot_name(slot).to_owned() });
            };
            let tensor = task.slot_tensor(slot).and_then(|id| task.graph().tensor(id));
            let bytes = tensor.map_or(0, |tensor| device.alloc_size(&tensor.desc)).max(from.bytes());
            let to = device.alloc(bytes, account).map_err(there)?.whole();
            let mut at = 0;
            while at < from.bytes() {
                let n = COPY_CHUNK_BYTES.min(from.bytes() - at);
                let (from, to) = (from.part(at, n), to.part(at, n));
                let piece = self.download_blocking(*home, from.map_err(there)?)?;
                let put = to.and_then(|to| queue.upload(to, None, Source::Borrowed(&piece)));
                put.map_err(there)?;
                at += n;
            }
            regions.insert(slot, to);
        }
        queue.mark().wait(Some(Instant::now() + PATIENCE)).map_err(there)?;
        Ok(task.moved_to_device_0(&regions))
    }
}

/// Told what a node gave here and on the reference.
pub type CompareReporter<'a> = dyn FnMut(ObservedNode<'_>, &[u8], &[u8]) -> ControlFlow<()> + 'a;

/// Runs a plan on its devices and its task on a reference device, both from what is stored now, and shows each node's result on
/// both, each side going on with its own: the node, its bytes here, its bytes on the reference. `Break` ends it.
///
/// # Errors
/// A failure on either side; [`SchedError::Nowhere`] and [`SchedError::Full`] where the reference cannot run it, before anything
/// was copied.
pub fn compare(
    (scheduler, prepared): (&mut Scheduler, &mut PreparedPlan),
    reference: &Arc<dyn Device>,
    account: &Arc<Account>,
    inputs: &[(TensorId, &[u8])],
    tell: &mut CompareReporter<'_>,
) -> Result<(), SchedError> {
    // Before anything is copied: whether the reference runs it, and has the room.
    let unplaced = Arc::new(prepared.plan().task.moved_to_device_0(&BTreeMap::new()));
    let alone = [Arc::clone(reference)];
    Plan::new(unplaced, &alone, &Options::default())?.check_memory(&alone)?;
    let task = Arc::new(scheduler.copy_stored_to(prepared, reference, account)?);
    let (send, results) = bounded(1);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            let mut other = Scheduler::new(vec![Arc::clone(reference)], Options::default(), account)?;
            let mut prepared = other.build(&task)?;
            other.run_observed(&mut prepared, inputs, &mut ReferenceObserver(send)).map(drop)
        });
        // Whatever ends this side lets go of the results, which ends the other one.
        let here = scheduler.run_observed(prepared, inputs, &mut ComparingObserver { results, tell });
        let there = other.join().unwrap_or(Err(SchedError::Bug("the reference's thread panicked")));
        here.map(drop).and(there)
    })
}

/// Tells what the reference computes.
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

/// Waits for the reference after each node.
struct ComparingObserver<'a> {
    results: Receiver<Vec<u8>>,
    tell: &'a mut CompareReporter<'a>,
}

impl Observer for ComparingObserver<'_> {
    fn selects(&mut self, _: ObservedNode<'_>) -> bool {
        true
    }

    fn on_result(&mut self, seen: ObservedNode<'_>, bytes: &[u8]) -> ControlFlow<()> {
        match self.results.recv() {
            Ok(reference) => (self.tell)(seen, bytes, &reference),
            // The reference has failed, which its thread returns.
            Err(_) => ControlFlow::Break(()),
        }
    }
}

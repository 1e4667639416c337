//! Limits on the memory mappings that CPU devices make, for the process and for each client.

use crate::device::{DeviceError, MemoryBudget};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most mappings of CPU device memory in a process. The rest of what the system allows (65,530 on Linux) is left to threads
/// (three mappings each), libraries and the allocator.
const MAX_MAPPINGS: usize = 4096;

/// Part of the mappings that one client may take: three further clients always find some.
const CLIENT_SHARE: usize = 4;

/// Part of the mappings that buffers leave to scratch: a queue that finds none for its program fails, and llama.cpp's process
/// ends then, while a buffer that is refused is an ordinary reply.
const SCRATCH_SHARE: usize = 8;

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    Buffer,
    /// Scratch of a queue.
    Scratch,
}

/// Limits on mappings, reserved before a mapping is made: one for the process ([`MappingBudget::reserve`]), and a quarter of it
/// for each client ([`MappingBudget::reserve_share`]).
///
/// The count is an upper bound of the kernel's entries for them: adjacent anonymous mappings may merge into one entry, and
/// unmapping one in the middle splits the entry again, but each entry holds at least one mapping that is counted.
pub(super) struct MappingBudget {
    limit: usize,
    used: AtomicUsize,
}

impl MappingBudget {
    pub(super) fn new(limit: usize) -> Arc<MappingBudget> {
        Arc::new(MappingBudget { limit, used: AtomicUsize::new(0) })
    }

    /// [`MAX_MAPPINGS`], or a quarter of what the system allows if that is less.
    pub(super) fn for_process() -> Arc<MappingBudget> {
        let system = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        MappingBudget::new(process_limit(system.and_then(|text| text.trim().parse().ok())))
    }

    /// Reserves one mapping until the permit is dropped. The last eighth is for scratch only.
    pub(super) fn reserve(self: &Arc<Self>, purpose: Purpose) -> Result<MappingPermit, DeviceError> {
        let (limit, kept) = match purpose {
            Purpose::Buffer => {
                let kept = self.limit / SCRATCH_SHARE;
                (self.limit - kept, format!(", of which {kept} are kept for scratch"))
            }
            Purpose::Scratch => (self.limit, String::new()),
        };
        match take_below(&self.used, limit) {
            Ok(_) => Ok(MappingPermit(Arc::clone(self))),
            Err(used) => Err(exhausted(format!(
                "CPU devices use {used} mappings, and the limit of a process is {}{kept}",
                self.limit
            ))),
        }
    }

    /// Counts one mapping of the client of `budget` until the permit is dropped. `None`: `budget` is no client's, and only the
    /// limit of the process holds for it.
    pub(super) fn reserve_share(&self, budget: &Arc<MemoryBudget>) -> Result<Option<SharePermit>, DeviceError> {
        let Some((client, mappings)) = budget.client() else { return Ok(None) };
        match take_below(mappings, self.limit.div_ceil(CLIENT_SHARE)) {
            Ok(_) => Ok(Some(SharePermit(Arc::clone(client)))),
            Err(used) => Err(exhausted(format!(
                "the client uses {used} mappings, and its limit is a quarter of the {} of a process",
                self.limit
            ))),
        }
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
}

/// Adds one to a count that is below its limit. Returns the count before.
fn take_below(count: &AtomicUsize, limit: usize) -> Result<usize, usize> {
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < limit).then_some(used + 1))
}

fn exhausted(reason: String) -> DeviceError {
    DeviceError::Exhausted { resource: "memory mappings", reason }
}

fn process_limit(system: Option<usize>) -> usize {
    system.map_or(MAX_MAPPINGS, |system| MAX_MAPPINGS.min(system / 4))
}

/// One reserved mapping.
pub(super) struct MappingPermit(Arc<MappingBudget>);

impl Drop for MappingPermit {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One mapping that counts for a client.
pub(super) struct SharePermit(Arc<MemoryBudget>);

impl Drop for SharePermit {
    fn drop(&mut self) {
        if let Some((_, mappings)) = self.0.client() {
            mappings.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_least_of_ours_and_a_quarter_of_the_systems() {
        for (system, want) in
            [(None, 4096), (Some(65_530), 4096), (Some(1 << 20), 4096), (Some(4000), 1000), (Some(0), 0)]
        {
            assert_eq!(process_limit(system), want, "{system:?}");
        }
    }

    #[test]
    fn a_refused_mapping_names_the_limit_and_reserves_nothing() {
        let budget = MappingBudget::new(2);
        let permits = [Purpose::Buffer, Purpose::Scratch].map(|purpose| budget.reserve(purpose).unwrap());
        let refused = budget.reserve(Purpose::Scratch).err().unwrap().to_string();
        assert!(refused.contains("memory mappings") && refused.contains("limit of a process is 2"), "{refused}");
        assert_eq!(budget.used(), 2);
        drop(permits);
        assert_eq!(budget.used(), 0);
    }
}

//! Limit on the memory mappings that CPU devices make.

use crate::device::DeviceError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most mappings of CPU device memory in a process. The rest of what the system allows (65,530 on Linux) is left to threads
/// (three mappings each), libraries and the allocator.
const MAX_MAPPINGS: usize = 4096;

/// A limit on mappings. It is reserved before a mapping is made.
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

    /// Reserves one mapping until the permit is dropped.
    pub(super) fn reserve(self: &Arc<Self>) -> Result<MappingPermit, DeviceError> {
        let taken = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < self.limit).then_some(used + 1));
        match taken {
            Ok(_) => Ok(MappingPermit(Arc::clone(self))),
            Err(used) => Err(DeviceError::Exhausted {
                resource: "memory mappings",
                reason: format!("CPU devices use {used} mappings, and the limit of a process is {}", self.limit),
            }),
        }
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }
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
        let permits = [budget.reserve().unwrap(), budget.reserve().unwrap()];
        let refused = budget.reserve().err().unwrap().to_string();
        assert!(refused.contains("memory mappings") && refused.contains("limit of a process is 2"), "{refused}");
        assert_eq!(budget.used(), 2);
        drop(permits);
        assert_eq!(budget.used(), 0);
    }
}

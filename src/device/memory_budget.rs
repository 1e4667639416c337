//! Memory budgets: the account of a session or tenant. A memory budget limits bytes and counts the reservations against them; it
//! also counts device time, and is a session's or tenant's place in the order of turns on a device.
//!
//! A memory budget may lie within a parent: a server gives each session a budget within that of its tenant. The budget of a tenant
//! ([`MemoryBudget::for_client`]) also counts the tenant's memory mappings: a CPU device gives each tenant a share.

use super::DeviceError;
use super::budget::{Budget, Reservation};
use super::fair_queue::DEFAULT_SHARE;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{Arc, LazyLock, OnceLock, static_atomic};
use std::ops::Deref;
use std::time::Duration;

/// Most mappings of CPU device memory in a process. The rest of what the system allows (65,530 on Linux) is left to threads
/// (three mappings each), libraries and the allocator.
const MAX_MAPPINGS: u64 = 4096;

/// Part of the mappings that one tenant may take: three further tenants always find some.
const TENANT_SHARE: u64 = 4;

/// The memory mappings that CPU devices of this process may make: [`MAX_MAPPINGS`], or a quarter of what the system allows if
/// that is less.
///
/// The count is an upper bound of the kernel's entries for them: adjacent anonymous mappings may merge into one entry, and
/// unmapping one in the middle splits the entry again, but each entry holds at least one mapping that is counted.
///
/// Not for harnesses of crates/orders: the static would outlive their executions.
pub(crate) fn process_mappings() -> &'static Arc<Budget> {
    static MAPPINGS: LazyLock<Arc<Budget>> = LazyLock::new(|| {
        let system = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        Budget::new(mappings_limit(system.and_then(|text| text.trim().parse().ok())))
    });
    &MAPPINGS
}

fn mappings_limit(system: Option<u64>) -> u64 {
    system.map_or(MAX_MAPPINGS, |system| MAX_MAPPINGS.min(system / 4))
}

/// A limit in bytes on the memory that its [`Reservation`]s may hold together: a [`Budget`]. A reservation in a child budget
/// counts against the parent too.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: Arc<Budget>,
    parent: Option<Arc<MemoryBudget>>,
    /// Memory mappings that the tenant's memory takes at most; `None`: not the budget of a tenant.
    mappings: Option<Arc<Budget>>,
    /// Unique in the process.
    id: u64,
    /// Nanoseconds that turns took, of queues with this budget.
    device_nanos: AtomicU64,
    /// Weight of the tenant's turns.
    share: AtomicU32,
    max_run: OnceLock<Duration>,
}

impl Deref for MemoryBudget {
    type Target = Budget;

    fn deref(&self) -> &Budget {
        &self.bytes
    }
}

impl MemoryBudget {
    /// A budget of `limit` bytes without a parent.
    pub fn new(limit: u64) -> Arc<MemoryBudget> {
        MemoryBudget::build(Budget::new(limit), None, None)
    }

    /// A budget of `limit` bytes for a tenant: one of many clients of this process. Memory that is allocated with it, or with a
    /// budget within it, takes at most a quarter of the memory mappings that CPU devices may make. Tenants whose queues wait
    /// for one device get equal time on it; within a tenant, the budgets within its budget do. A budget outside of all
    /// tenants counts as a tenant, together with the budgets within it.
    pub fn for_client(limit: u64) -> Arc<MemoryBudget> {
        let mappings = Budget::new(process_mappings().limit().div_ceil(TENANT_SHARE));
        MemoryBudget::build(Budget::new(limit), None, Some(mappings))
    }

    /// A budget of `limit` bytes within `parent`. The limits of several children may add up to more than the parent's: the
    /// parent's limit holds as well.
    pub fn within(parent: &Arc<MemoryBudget>, limit: u64) -> Arc<MemoryBudget> {
        MemoryBudget::build(Budget::within(&parent.bytes, limit), Some(Arc::clone(parent)), None)
    }

    fn build(
        bytes: Arc<Budget>,
        parent: Option<Arc<MemoryBudget>>,
        mappings: Option<Arc<Budget>>,
    ) -> Arc<MemoryBudget> {
        static NEXT_ID: static_atomic::AtomicU64 = static_atomic::AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (share, max_run) = (AtomicU32::new(DEFAULT_SHARE), OnceLock::new());
        Arc::new(MemoryBudget { bytes, parent, mappings, id, device_nanos: AtomicU64::new(0), share, max_run })
    }

    /// The budget of the tenant that this budget is or lies within, or the outermost one.
    fn tenant(&self) -> &MemoryBudget {
        let mut tenant = self;
        while let (None, Some(parent)) = (&tenant.mappings, &tenant.parent) {
            tenant = parent;
        }
        tenant
    }

    /// Where queues with this budget stand in the order of turns: the tenant, and the budget itself.
    pub(crate) fn flow_keys(&self) -> [u64; 2] {
        [self.tenant().id, self.id]
    }

    /// Whether both budgets are of one tenant.
    pub(crate) fn is_same_tenant(&self, other: &MemoryBudget) -> bool {
        self.tenant().id == other.tenant().id
    }

    /// The weight of the tenant in the order of turns: a tenant with twice the share of another one has twice its time on a
    /// device for which both wait.
    pub(crate) fn share(&self) -> u32 {
        self.tenant().share.load(Ordering::Relaxed)
    }

    /// Sets the weight of this tenant, which must not be 0. Holds from the next turn on.
    pub(crate) fn set_share(&self, share: u32) {
        self.share.store(share.max(1), Ordering::Relaxed);
    }

    pub(crate) fn add_device_time(&self, time: Duration) {
        self.device_nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Time of the turns of queues with this budget, not of the queues with budgets within it. Two turns at a time count twice.
    /// Not counted: GPUs while no other session uses them, transfers up to 16 KiB, and uploads above 256 KiB that the device does
    /// not pack.
    pub fn device_time(&self) -> Duration {
        Duration::from_nanos(self.device_nanos.load(Ordering::Relaxed))
    }

    /// Limits the time for which one run of a program may use a CPU device, in queues with this budget: see
    /// [`DeviceError::RunTooLong`]. Waiting for turns does not count. The first limit stays.
    pub fn limit_runs(&self, max: Duration) {
        self.max_run.get_or_init(|| max);
    }

    pub(crate) fn max_run(&self) -> Option<Duration> {
        self.max_run.get().copied()
    }

    /// The memory mappings of the tenant whose budget this is or lies within; `None`: of no tenant.
    pub(crate) fn mappings(&self) -> Option<&Arc<Budget>> {
        self.tenant().mappings.as_ref()
    }

    /// Whether nothing but one handle refers to the budget: no reservation, and no budget within it.
    pub(crate) fn is_unused(self: &Arc<Self>) -> bool {
        let mappings = self.mappings.as_ref().map_or(1, Arc::strong_count);
        [Arc::strong_count(self), Arc::strong_count(&self.bytes), mappings] == [1; 3]
    }

    /// Reserves `bytes` bytes until the returned [`Reservation`] is dropped.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when this budget or one of its parents has fewer bytes available. Nothing is reserved then.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, DeviceError> {
        Ok(self.bytes.reserve(bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_mappings_is_the_least_of_ours_and_a_quarter_of_the_systems() {
        for (system, want) in
            [(None, 4096), (Some(65_530), 4096), (Some(1 << 20), 4096), (Some(4000), 1000), (Some(0), 0)]
        {
            assert_eq!(mappings_limit(system), want, "{system:?}");
        }
    }

    #[test]
    fn a_reservation_counts_in_child_and_parent_and_is_released_in_both() {
        let device = MemoryBudget::new(100);
        let (a, b) = (MemoryBudget::within(&device, 80), MemoryBudget::within(&device, 80));
        let first = a.reserve(70).unwrap();
        assert!(matches!(a.reserve(20), Err(DeviceError::OutOfMemory { requested: 20, available: 10, limit: 80 })));
        assert!(matches!(b.reserve(40), Err(DeviceError::OutOfMemory { requested: 40, available: 30, limit: 100 })));
        assert_eq!((a.used(), b.used(), device.used()), (70, 0, 70));
        assert_eq!((a.available(), b.available(), device.available()), (10, 30, 30));
        drop(first);
        assert_eq!((a.used(), device.used()), (0, 0));
        // A refused reservation does not count for the peak, whether the budget or its parent refuses it.
        assert_eq!((a.peak(), b.peak(), device.peak()), (70, 0, 70));
        assert!(b.reserve(u64::MAX).is_err());
    }

    #[test]
    fn a_tenant_gets_another_limit_and_share_while_it_holds_memory() {
        let tenant = MemoryBudget::for_client(100);
        let session = MemoryBudget::within(&tenant, 1000);
        let held = session.reserve(80).unwrap();
        tenant.set_limit(50);
        assert_eq!((tenant.limit(), session.available()), (50, 0));
        assert!(matches!(session.reserve(1), Err(DeviceError::OutOfMemory { available: 0, limit: 50, .. })));
        drop(held);
        assert!(session.reserve(50).is_ok());
        assert_eq!(session.share(), DEFAULT_SHARE);
        tenant.set_share(7);
        assert_eq!((session.share(), MemoryBudget::new(1).share()), (7, DEFAULT_SHARE));
    }
}

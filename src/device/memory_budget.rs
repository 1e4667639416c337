//! Memory budgets: the account of a session or tenant. A budget limits bytes and counts the reservations against them; it also
//! counts device time, and is a session's or tenant's place in the order of turns on a device.
//!
//! A budget may lie within a parent: a server gives each session a budget within that of its tenant. The budget of a tenant
//! ([`MemoryBudget::for_client`]) also counts the tenant's memory mappings: a CPU device gives each tenant a share.

use super::DeviceError;
use super::fair_queue::DEFAULT_SHARE;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A limit in bytes on the memory that its [`Reservation`]s may hold together. A reservation in a child budget counts against
/// the parent too.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: AtomicU64,
    used: AtomicU64,
    /// Most bytes that were reserved at a time.
    peak: AtomicU64,
    parent: Option<Arc<MemoryBudget>>,
    /// Memory mappings that the tenant's memory takes at most; `None`: not the budget of a tenant.
    mappings: Option<AtomicUsize>,
    /// Unique in the process.
    id: u64,
    /// Nanoseconds that turns took, of queues with this budget.
    device_nanos: AtomicU64,
    /// Weight of the tenant's turns.
    share: AtomicU32,
    max_run: OnceLock<Duration>,
}

impl MemoryBudget {
    /// A budget of `limit` bytes without a parent.
    pub fn new(limit: u64) -> Arc<MemoryBudget> {
        MemoryBudget::build(limit, None, None)
    }

    /// A budget of `limit` bytes for a tenant: one of many clients of this process. Memory that is allocated with it, or with a
    /// budget within it, takes at most a quarter of the memory mappings that CPU devices may make. Tenants whose queues wait
    /// for one device get equal time on it; within a tenant, the budgets within its budget do. A budget outside of all
    /// tenants counts as a tenant, together with the budgets within it.
    pub fn for_client(limit: u64) -> Arc<MemoryBudget> {
        MemoryBudget::build(limit, None, Some(AtomicUsize::new(0)))
    }

    /// A budget of `limit` bytes within `parent`. The limits of several children may add up to more than the parent's: the
    /// parent's limit holds as well.
    pub fn within(parent: &Arc<MemoryBudget>, limit: u64) -> Arc<MemoryBudget> {
        MemoryBudget::build(limit, Some(Arc::clone(parent)), None)
    }

    fn build(limit: u64, parent: Option<Arc<MemoryBudget>>, mappings: Option<AtomicUsize>) -> Arc<MemoryBudget> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let (used, peak, device_nanos) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let (limit, share, max_run) = (AtomicU64::new(limit), AtomicU32::new(DEFAULT_SHARE), OnceLock::new());
        Arc::new(MemoryBudget { limit, used, peak, parent, mappings, id, device_nanos, share, max_run })
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

    /// Changes the limit. Reservations beyond a lower limit stay.
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
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

    /// Bytes that are reserved now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Most bytes that were reserved at a time.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Bytes that can be reserved now, which this budget and all of its parents have left.
    pub fn available(&self) -> u64 {
        let left = self.limit().saturating_sub(self.used());
        self.parent.as_ref().map_or(left, |parent| left.min(parent.available()))
    }

    /// Limits the time for which one run of a program may use a CPU device, in queues with this budget: see
    /// [`DeviceError::RunTooLong`]. Waiting for turns does not count. The first limit stays.
    pub fn limit_runs(&self, max: Duration) {
        self.max_run.get_or_init(|| max);
    }

    pub(crate) fn max_run(&self) -> Option<Duration> {
        self.max_run.get().copied()
    }

    /// The budget of the tenant that this budget is or lies within, and the tenant's count of memory mappings.
    pub(crate) fn client(self: &Arc<Self>) -> Option<(&Arc<MemoryBudget>, &AtomicUsize)> {
        match (&self.mappings, &self.parent) {
            (Some(mappings), _) => Some((self, mappings)),
            (None, Some(parent)) => parent.client(),
            (None, None) => None,
        }
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Reserves `bytes` bytes until the returned [`Reservation`] is dropped.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when this budget or one of its parents has fewer bytes available. Nothing is reserved then.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, DeviceError> {
        let limit = self.limit();
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= limit)
        });
        let used = taken.map_err(|used| DeviceError::OutOfMemory {
            requested: bytes,
            available: limit.saturating_sub(used),
            limit,
        })?;
        // From here on, dropping `reservation` releases our part, also if the parent's part fails below.
        let mut reservation = Reservation { budget: Arc::clone(self), bytes, parent: None };
        if let Some(parent) = &self.parent {
            reservation.parent = Some(Box::new(parent.reserve(bytes)?));
        }
        self.peak.fetch_max(used + bytes, Ordering::Relaxed);
        Ok(reservation)
    }
}

/// Bytes reserved in a [`MemoryBudget`] and its parents; released when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<MemoryBudget>,
    bytes: u64,
    parent: Option<Box<Reservation>>,
}

impl Reservation {
    /// The number of reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! Budgets: a limit within the limits of its parents, and what is reserved of it. Reserve before use: the guard
//! ([`Reservation`]) belongs to what uses the amount, and releases it when that is dropped.

use super::DeviceError;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// A limit on what its [`Reservation`]s hold together: bytes, threads, connections. What is reserved in a budget counts against
/// its parent too. The limits of several children may add up to more than the parent's: the parent's limit holds as well.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    peak: AtomicU64,
    parent: Option<Arc<Budget>>,
}

/// A reservation that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetRefusal {
    requested: u64,
    available: u64,
    /// The limit that is reached.
    pub(crate) limit: u64,
    /// Whether the limit is a parent's.
    pub(crate) is_parents: bool,
}

impl From<BudgetRefusal> for DeviceError {
    fn from(refusal: BudgetRefusal) -> DeviceError {
        let BudgetRefusal { requested, available, limit, .. } = refusal;
        DeviceError::OutOfMemory { requested, available, limit }
    }
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Arc<Budget> {
        Budget::build(limit, None)
    }

    pub(crate) fn within(parent: &Arc<Budget>, limit: u64) -> Arc<Budget> {
        Budget::build(limit, Some(Arc::clone(parent)))
    }

    fn build(limit: u64, parent: Option<Arc<Budget>>) -> Arc<Budget> {
        let [limit, used, peak] = [limit, 0, 0].map(AtomicU64::new);
        Arc::new(Budget { limit, used, peak, parent })
    }

    /// The limit of this budget, without the limits of its parents.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Changes the limit. Reservations beyond a lower limit stay.
    pub(crate) fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Ordering::Relaxed);
    }

    /// The reserved amount.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The most that was reserved at a time.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// The amount that can be reserved now: the least that this budget and its parents have left.
    pub fn available(&self) -> u64 {
        let left = self.limit().saturating_sub(self.used());
        self.parent.as_ref().map_or(left, |parent| left.min(parent.available()))
    }

    /// Reserves `amount` until the returned [`Reservation`] is dropped.
    ///
    /// # Errors
    /// This budget or one of its parents has less left. Nothing is reserved then.
    pub(crate) fn reserve(self: &Arc<Self>, amount: u64) -> Result<Reservation, BudgetRefusal> {
        self.take(amount)?;
        Ok(Reservation { budget: Arc::clone(self), amount })
    }

    fn take(&self, amount: u64) -> Result<(), BudgetRefusal> {
        let limit = self.limit();
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(amount).filter(|&sum| sum <= limit)
        });
        let refusal =
            |used| BudgetRefusal { requested: amount, available: limit.saturating_sub(used), limit, is_parents: false };
        let used = taken.map_err(refusal)?;
        if let Some(parent) = &self.parent
            && let Err(refusal) = parent.take(amount)
        {
            self.used.fetch_sub(amount, Ordering::Relaxed);
            return Err(BudgetRefusal { is_parents: true, ..refusal });
        }
        self.peak.fetch_max(used + amount, Ordering::Relaxed);
        Ok(())
    }

    fn give_back(&self, amount: u64) {
        let mut next = Some(self);
        while let Some(budget) = next {
            budget.used.fetch_sub(amount, Ordering::Relaxed);
            next = budget.parent.as_deref();
        }
    }
}

/// An amount that is reserved in a [`Budget`] and its parents; released when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    amount: u64,
}

impl Reservation {
    /// The number of reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.amount
    }

    /// Reserves `more`.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), BudgetRefusal> {
        self.budget.take(more)?;
        self.amount += more;
        Ok(())
    }

    /// Releases all but `amount`.
    pub(crate) fn shrink_to(&mut self, amount: u64) {
        let less = self.amount.saturating_sub(amount);
        self.budget.give_back(less);
        self.amount -= less;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.give_back(self.amount);
    }
}

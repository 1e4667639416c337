//! Memory accounts: who pays for bytes, and how many they may use.

use super::DeviceError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A limit on memory, shared by everything that charges it. A child's charges count against its parent too.
#[derive(Debug)]
pub struct Account {
    limit: u64,
    used: AtomicU64,
    parent: Option<Arc<Account>>,
}

impl Account {
    /// An account that may use `limit` bytes.
    pub fn new(limit: u64) -> Arc<Account> {
        Arc::new(Account { limit, used: AtomicU64::new(0), parent: None })
    }

    /// An account of its own limit within another.
    pub fn within(parent: &Arc<Account>, limit: u64) -> Arc<Account> {
        Arc::new(Account { limit, used: AtomicU64::new(0), parent: Some(Arc::clone(parent)) })
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Bytes that may be used in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Charges bytes until the returned [`Charge`] is dropped.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when this account or one around it has less left; nothing is charged then.
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge, DeviceError> {
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= self.limit)
        });
        if let Err(used) = taken {
            return Err(DeviceError::OutOfMemory {
                asked: bytes,
                left: self.limit.saturating_sub(used),
                limit: self.limit,
            });
        }
        // From here on the charge gives our part back, also when the parent refuses its own.
        let mut charge = Charge { account: Arc::clone(self), bytes, parent: None };
        if let Some(parent) = &self.parent {
            charge.parent = Some(Box::new(parent.charge(bytes)?));
        }
        Ok(charge)
    }
}

/// Bytes charged to an account; given back when dropped.
#[derive(Debug)]
pub struct Charge {
    account: Arc<Account>,
    bytes: u64,
    parent: Option<Box<Charge>>,
}

impl Charge {
    /// Bytes charged.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_count_in_both_and_come_back() {
        let device = Account::new(100);
        let (a, b) = (Account::within(&device, 80), Account::within(&device, 80));
        let first = a.charge(70).unwrap();
        assert!(matches!(a.charge(20), Err(DeviceError::OutOfMemory { asked: 20, left: 10, limit: 80 })));
        assert!(matches!(b.charge(40), Err(DeviceError::OutOfMemory { asked: 40, left: 30, limit: 100 })));
        assert_eq!((a.used(), b.used(), device.used()), (70, 0, 70));
        drop(first);
        assert_eq!((a.used(), device.used()), (0, 0));
        assert!(b.charge(u64::MAX).is_err());
    }
}

//! Exclusive use of a connection's writer. Unlike a mutex it holds no lock during the use, so a thread may block on the peer
//! meanwhile.

use crate::poison::Unpoisoned;
use std::sync::{Condvar, Mutex, MutexGuard};

/// Lends its value to one thread at a time. No lock is held while a thread uses the value, because the thread may block on the
/// peer. A wait for the value is bounded by that block: it ends when the peer has accepted no byte for the stall timeout, or
/// when the connection ends.
#[derive(Debug)]
pub(in crate::rpc) struct WriteSlot<T> {
    state: Mutex<WriteSlotState<T>>,
    returned: Condvar,
}

#[derive(Debug)]
struct WriteSlotState<T> {
    /// `None` while the value is lent, and after a panic.
    value: Option<T>,
    /// Number of waiting threads: a notification costs a system call even without a waiting thread.
    waiting: usize,
    /// A thread panicked while it used the value.
    poisoned: bool,
}

/// A thread panicked while it used the value, possibly within a message: the value is lost.
#[derive(Clone, Copy, Debug)]
pub(in crate::rpc) struct Poisoned;

impl<T> WriteSlot<T> {
    pub(in crate::rpc) fn new(value: T) -> WriteSlot<T> {
        WriteSlot {
            state: Mutex::new(WriteSlotState { value: Some(value), waiting: 0, poisoned: false }),
            returned: Condvar::new(),
        }
    }

    /// Calls `work` with the value, after waiting until no other thread uses it.
    pub(in crate::rpc) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Result<R, Poisoned> {
        let mut state = self.lock();
        loop {
            if state.poisoned {
                return Err(Poisoned);
            }
            if let Some(value) = state.value.take() {
                drop(state);
                return Ok(self.lend(value, work));
            }
            state.waiting += 1;
            state = self.returned.wait(state).unpoisoned();
            state.waiting -= 1;
        }
    }

    /// Calls `work` with the value; `None` if another thread uses it.
    pub(in crate::rpc) fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<Result<R, Poisoned>> {
        let mut state = self.lock();
        if state.poisoned {
            return Some(Err(Poisoned));
        }
        let value = state.value.take()?;
        drop(state);
        Some(Ok(self.lend(value, work)))
    }

    fn lend<R>(&self, mut value: T, work: impl FnOnce(&mut T) -> R) -> R {
        let panics = PoisonOnPanic(self);
        let done = work(&mut value);
        std::mem::forget(panics);
        let mut state = self.lock();
        state.value = Some(value);
        let waiting = state.waiting > 0;
        drop(state);
        if waiting {
            self.returned.notify_one();
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, WriteSlotState<T>> {
        // Ignores poisoning: the lock is held only for single assignments, which a panic cannot leave half done.
        self.state.lock().unpoisoned()
    }
}

/// Poisons the slot when dropped, which happens only by a panic of the thread that uses the value.
struct PoisonOnPanic<'a, T>(&'a WriteSlot<T>);

impl<T> Drop for PoisonOnPanic<'_, T> {
    fn drop(&mut self) {
        self.0.lock().poisoned = true;
        self.0.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn one_thread_uses_the_value_at_a_time() {
        let slot = WriteSlot::new((0, false));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        slot.with(|(count, lent)| {
                            assert!(!std::mem::replace(lent, true));
                            std::thread::yield_now();
                            (*count, *lent) = (*count + 1, false);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(slot.with(|(count, _)| *count).unwrap(), 4000);
    }

    #[test]
    fn a_lent_value_cannot_be_lent_again_and_a_panic_loses_it() {
        let slot = WriteSlot::new(1);
        slot.with(|_| assert!(slot.try_with(|_| ()).is_none())).unwrap();
        std::thread::scope(|scope| {
            let (has, waits) = std::sync::mpsc::channel();
            let slot = &slot;
            scope.spawn(move || {
                let panicked = catch_unwind(AssertUnwindSafe(|| {
                    slot.with(|_| {
                        has.send(()).unwrap();
                        // Spins until the second thread waits for the value.
                        while slot.lock().waiting == 0 {
                            std::thread::yield_now();
                        }
                        panic!("a test's panic");
                    })
                }));
                assert!(panicked.is_err());
            });
            waits.recv().unwrap();
            assert!(slot.with(|_| ()).is_err());
        });
        assert!(slot.try_with(|_| ()).unwrap().is_err());
    }
}

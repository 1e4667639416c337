//! Counts the elements that this thread's kernels read or write, for tests of the limits of claims.

use std::cell::Cell;

thread_local! {
    static ELEMENTS: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn count(elements: usize) {
    ELEMENTS.set(ELEMENTS.get().saturating_add(elements));
}

/// The elements since the last call.
pub(in crate::cpu) fn take() -> usize {
    ELEMENTS.take()
}

//! An allocator that counts: how often each thread asks for memory.
#![allow(unsafe_code)] // the interface of allocators

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub struct CountingAllocator;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

/// How often `work` asks for memory, on this thread.
pub fn allocations(work: impl FnOnce()) -> u64 {
    let before = ASKED.get();
    work();
    ASKED.get() - before
}

fn count() {
    // A thread that is at its end has no counter any more, and nobody to read it.
    let _ = ASKED.try_with(|asked| asked.set(asked.get() + 1));
}

// SAFETY: the system's allocator does all the work, called with just what came. Counting touches a plain cell that exists
// with its thread: it neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the same contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the same contract, and `ptr` came from the system's allocator.
        unsafe { System.realloc(ptr, layout, size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the same contract, and `ptr` came from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

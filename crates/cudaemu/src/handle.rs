//! Handles: opaque numbers that programs hold, and the tables that map them to the driver's objects.
//!
//! A handle is never a pointer: a wrong, stale or foreign handle is not found in its table, and nothing is dereferenced.
//! Numbers are never reused within a process. They are not canonical addresses, so a program that dereferences one faults.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// A kind of handle.
pub trait Handle: Copy {
    /// The kind, encoded in the number.
    const KIND: u16;
    /// The error for a handle that is not in the table.
    const MISSING: Error;
    /// From a number that the program passed.
    fn from_raw(raw: u64) -> Self;
    /// The number for the program.
    fn raw(self) -> u64;
    /// Whether it is the null handle.
    fn is_null(self) -> bool {
        self.raw() == 0
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident = $kind:literal, $missing:ident;)*) => { $(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u64);

        impl Handle for $name {
            const KIND: u16 = $kind;
            const MISSING: Error = Error::$missing;
            fn from_raw(raw: u64) -> Self {
                Self(raw)
            }
            fn raw(self) -> u64 {
                self.0
            }
        }
    )* };
}

handles! {
    /// `CUcontext`
    ContextId = 1, InvalidContext;
    /// `CUmodule`
    ModuleId = 2, InvalidHandle;
    /// `CUfunction`
    FunctionId = 3, InvalidHandle;
    /// `CUstream`; 0, 1 and 2 are the default streams.
    StreamId = 4, InvalidHandle;
    /// `CUevent`
    EventId = 5, InvalidHandle;
    /// `CUmemoryPool`
    PoolId = 6, InvalidValue;
    /// `CUgraph`
    GraphId = 7, InvalidValue;
    /// `CUgraphExec`
    GraphExecId = 8, InvalidValue;
    /// `CUgraphNode`
    NodeId = 9, InvalidValue;
}

/// A table from handles of one kind to objects, in the order of creation.
#[derive(Debug)]
pub struct HandleTable<H, T> {
    items: BTreeMap<u64, T>,
    kind: std::marker::PhantomData<fn() -> H>,
}

impl<H, T> Default for HandleTable<H, T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), kind: std::marker::PhantomData }
    }
}

impl<H: Handle, T> HandleTable<H, T> {
    /// Inserts an object and returns its new handle.
    pub fn insert(&mut self, item: T) -> H {
        let handle = self.reserve();
        self.items.insert(handle.raw(), item);
        handle
    }

    /// Returns the next handle without an object, for objects that must contain their own handle;
    /// [`HandleTable::insert_reserved`] adds the object.
    pub fn reserve(&mut self) -> H {
        // One counter for all tables of the process: a driver that a test recreated must not accept handles of the previous
        // one.
        static MADE: AtomicU64 = AtomicU64::new(1);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        H::from_raw(0xe000_0000_0000_0000 | u64::from(H::KIND) << 44 | number << 4)
    }

    /// Inserts an object under a handle from [`HandleTable::reserve`].
    pub fn insert_reserved(&mut self, handle: H, item: T) {
        self.items.insert(handle.raw(), item);
    }

    /// The object of a handle.
    pub fn get(&self, handle: H) -> Result<&T> {
        self.items.get(&handle.raw()).ok_or(H::MISSING)
    }

    /// The object of a handle, mutable.
    pub fn get_mut(&mut self, handle: H) -> Result<&mut T> {
        self.items.get_mut(&handle.raw()).ok_or(H::MISSING)
    }

    /// Removes a handle and returns its object.
    pub fn remove(&mut self, handle: H) -> Result<T> {
        self.items.remove(&handle.raw()).ok_or(H::MISSING)
    }

    /// All entries, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (H, &T)> {
        self.items.iter().map(|(&raw, item)| (H::from_raw(raw), item))
    }

    /// All entries, oldest first, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (H, &mut T)> {
        self.items.iter_mut().map(|(&raw, item)| (H::from_raw(raw), item))
    }

    /// Removes all entries for which `gone` returns true, and returns them.
    pub fn remove_where(&mut self, mut gone: impl FnMut(H, &T) -> bool) -> Vec<(H, T)> {
        let gone: Vec<u64> = self.iter().filter(|(h, item)| gone(*h, item)).map(|(h, _)| h.raw()).collect();
        gone.into_iter().filter_map(|raw| Some((H::from_raw(raw), self.items.remove(&raw)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_never_used_again_and_know_their_kind() {
        let mut streams = HandleTable::<StreamId, &str>::default();
        let mut events = HandleTable::<EventId, &str>::default();
        let (s, e) = (streams.insert("s"), events.insert("e"));
        assert_ne!(s.raw(), e.raw());
        assert_eq!(streams.get(s), Ok(&"s"));
        assert_eq!(streams.remove(s), Ok("s"));
        assert_eq!(streams.remove(s), Err(Error::InvalidHandle));
        assert_ne!(streams.insert("t").raw(), s.raw());
        assert_eq!(streams.get(StreamId::from_raw(e.raw())), Err(Error::InvalidHandle));
        assert_eq!(HandleTable::<ContextId, ()>::default().get(ContextId::from_raw(0)), Err(Error::InvalidContext));
    }
}

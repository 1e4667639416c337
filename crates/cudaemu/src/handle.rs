//! Handles: opaque numbers that programs hold, and the tables that say what they stand for.
//!
//! A handle is never a pointer: a wrong, stale or foreign one is found missing, and nothing is dereferenced. Numbers are not
//! used again while the process lives, and they lie outside of canonical addresses, so that a program that dereferences one stops.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// A kind of handle.
pub trait Handle: Copy {
    /// Distinguishes the kinds within the number.
    const KIND: u16;
    /// What a call answers to a handle that stands for nothing.
    const MISSING: Error;
    /// From the number that a program gave.
    fn from_raw(raw: u64) -> Self;
    /// The number to give to a program.
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
    /// `CUlibrary`
    LibraryId = 10, InvalidHandle;
    /// `CUkernel`
    KernelId = 11, InvalidHandle;
    /// `CUmemGenericAllocationHandle`
    PhysicalId = 12, InvalidValue;
    /// `CUlinkState`
    LinkId = 13, InvalidHandle;
    /// `CUuserObject`
    UserObjectId = 14, InvalidValue;
}

/// What the handles of one kind stand for, in the order of their making.
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
    /// A new handle for this.
    pub fn insert(&mut self, item: T) -> H {
        let handle = self.reserve();
        self.items.insert(handle.raw(), item);
        handle
    }

    /// The handle that the next [`Table::insert`] gives, for items that must know their own.
    pub fn reserve(&mut self) -> H {
        // One count for all tables, old and new: a driver that tests made anew does not know the handles of the one before.
        static MADE: AtomicU64 = AtomicU64::new(1);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        H::from_raw(0xe000_0000_0000_0000 | u64::from(H::KIND) << 44 | number << 4)
    }

    /// Puts an item under a handle from [`Table::reserve`].
    pub fn insert_reserved(&mut self, handle: H, item: T) {
        self.items.insert(handle.raw(), item);
    }

    /// What it stands for.
    pub fn get(&self, handle: H) -> Result<&T> {
        self.items.get(&handle.raw()).ok_or(H::MISSING)
    }

    /// What it stands for, to be changed.
    pub fn get_mut(&mut self, handle: H) -> Result<&mut T> {
        self.items.get_mut(&handle.raw()).ok_or(H::MISSING)
    }

    /// Ends the handle.
    pub fn remove(&mut self, handle: H) -> Result<T> {
        self.items.remove(&handle.raw()).ok_or(H::MISSING)
    }

    /// All, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (H, &T)> {
        self.items.iter().map(|(&raw, item)| (H::from_raw(raw), item))
    }

    /// All, oldest first, to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (H, &mut T)> {
        self.items.iter_mut().map(|(&raw, item)| (H::from_raw(raw), item))
    }

    /// Ends all handles whose item is not to be kept, and gives what they stood for.
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

//! An allocation: a range of device addresses that is backed by memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::PhysicalMemory;

/// Kind of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationKind {
    /// Memory of a device.
    Device,
    /// Memory of a device that kernels cannot write: constant variables of a module.
    Constant,
    /// Pinned host memory that the emulator allocated, at its host address.
    PinnedHost,
    /// Memory that host and devices access at the same address.
    Managed,
}

/// An allocation: live, or freed and still referenced.
#[derive(Debug)]
pub struct Allocation {
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) physical: Arc<PhysicalMemory>,
    pub(super) kind: AllocationKind,
    pub(super) origin: &'static str,
    pub(super) freed: AtomicBool,
}

impl Allocation {
    /// First address.
    #[inline(always)]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Size in bytes.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address after its last byte.
    #[inline(always)]
    pub fn end(&self) -> u64 {
        self.base + self.bytes
    }

    /// The device that owns it.
    pub fn device(&self) -> u32 {
        self.physical.device()
    }

    /// Its kind.
    pub fn kind(&self) -> AllocationKind {
        self.kind
    }

    /// The API call that made it, such as "cuMemAlloc", for reports.
    pub fn origin(&self) -> &'static str {
        self.origin
    }

    /// The memory that backs it.
    #[inline(always)]
    pub fn physical(&self) -> &Arc<PhysicalMemory> {
        &self.physical
    }

    /// Whether it was freed. A holder of a reference can still read it, but should not.
    #[inline(always)]
    pub fn is_freed(&self) -> bool {
        self.freed.load(Relaxed)
    }

    /// Whether a kernel on `device` may read or write it, given the mask `peers` of devices with enabled access.
    pub fn allows(&self, device: u32, peers: u64, write: bool) -> bool {
        match self.kind {
            AllocationKind::PinnedHost | AllocationKind::Managed => true,
            AllocationKind::Constant if write => false,
            AllocationKind::Device | AllocationKind::Constant => (peers | 1 << device) >> self.device() & 1 != 0,
        }
    }

    /// A description such as "the 4096-byte allocation at 0x… (cuMemAlloc, device 0)".
    pub(crate) fn describe(&self) -> String {
        let (bytes, base, origin, device) = (self.bytes, self.base, self.origin, self.device());
        format!("the {bytes}-byte allocation at {base:#x} ({origin}, device {device})")
    }
}

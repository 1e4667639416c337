//! A range of device addresses with memory behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::PhysicalMemory;

/// What an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationKind {
    /// Memory of a device.
    Device,
    /// The same, which kernels may not write: constant variables of a module.
    Constant,
    /// Host memory that the emulator allocated; its address is the host's.
    PinnedHost,
    /// Memory of the program; its address is the host's.
    RegisteredHost,
    /// Memory that host and devices use at the same address.
    Managed,
    /// A part of a reserved range that a handle was mapped to.
    Mapped,
}

/// What a device may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessRights {
    /// Nothing.
    None,
    /// Read.
    Read,
    /// Read and write.
    ReadWrite,
}

/// A live (or, if one still holds it, freed) allocation.
#[derive(Debug)]
pub struct Allocation {
    pub(super) base: u64,
    pub(super) bytes: u64,
    /// Where in `physical` it starts.
    pub(super) offset: u64,
    pub(super) physical: Arc<PhysicalMemory>,
    pub(super) kind: AllocationKind,
    pub(super) origin: &'static str,
    /// Devices that may read, and write: of mapped memory.
    pub(super) readers: u64,
    pub(super) writers: u64,
    pub(super) freed: AtomicBool,
}

impl Allocation {
    /// First address.
    #[inline(always)]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes.
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// One past the last address.
    #[inline(always)]
    pub fn end(&self) -> u64 {
        self.base + self.bytes
    }

    /// The device that it belongs to.
    pub fn device(&self) -> u32 {
        self.physical.device()
    }

    /// What it is.
    pub fn kind(&self) -> AllocationKind {
        self.kind
    }

    /// The call that made it, as the program knows it: "cuMemAlloc".
    pub fn origin(&self) -> &'static str {
        self.origin
    }

    /// The memory behind it.
    #[inline(always)]
    pub fn physical(&self) -> &Arc<PhysicalMemory> {
        &self.physical
    }

    /// Where in [`Allocation::physical`] its first byte is.
    #[inline(always)]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Whether it was freed (who holds it can still read it, and should not).
    #[inline(always)]
    pub fn is_freed(&self) -> bool {
        self.freed.load(Relaxed)
    }

    /// Whether a kernel on `device`, with the memory of the devices in the mask `peers` enabled, may read or write it.
    pub fn allows(&self, device: u32, peers: u64, write: bool) -> bool {
        match self.kind {
            AllocationKind::PinnedHost | AllocationKind::RegisteredHost | AllocationKind::Managed => true,
            AllocationKind::Constant if write => false,
            AllocationKind::Device | AllocationKind::Constant => (peers | 1 << device) >> self.device() & 1 != 0,
            AllocationKind::Mapped => (if write { self.writers } else { self.readers }) >> device & 1 != 0,
        }
    }

    /// "the 4096-byte allocation at 0x… (cuMemAlloc, device 0)"
    pub(crate) fn describe(&self) -> String {
        let (bytes, base, origin, device) = (self.bytes, self.base, self.origin, self.device());
        format!("the {bytes}-byte allocation at {base:#x} ({origin}, device {device})")
    }
}

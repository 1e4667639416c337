//! What an instruction sees of the machine: its warp's registers and the checked way to each memory.

use crate::code::Args;
use crate::fault::{Fault, Kind};

use super::{Lanes, Registers};

/// The context of one instruction of one warp.
#[derive(Debug)]
pub struct Cx<'a> {
    /// The warp's registers.
    pub regs: &'a mut Registers,
    /// Lanes that execute this instruction's group (before the guard is applied; the guard's result is the handler's mask).
    pub active: u32,
    /// Lanes of the warp that exist and have not exited.
    pub live: u32,
}

/// An address a lane, as the instruction computed it. Lanes outside the mask hold anything.
pub type Addresses = Lanes<u64>;

/// The memory that an instruction names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// None: the address's window decides, lane by lane ([`super::window`]).
    Generic,
    /// Global (and constant) memory: device addresses.
    Global,
    /// Shared memory of the block: offsets.
    Shared,
    /// Local memory of the thread: offsets (frame base included for variables of a frame).
    Local,
    /// The kernel's parameter block: offsets.
    Param,
}

impl Cx<'_> {
    /// Addresses of the address operand, frame base included.
    pub fn addresses(&self, args: &Args) -> Addresses {
        let _ = args;
        [0; 32]
    }

    /// Reads `N` (1, 2, 4, 8 or 16) bytes a lane, naturally aligned, every byte checked.
    pub fn load<const N: usize>(
        &mut self,
        from: Window,
        at: &Addresses,
        mask: u32,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let _ = (from, at, mask);
        Ok([[0; N]; 32])
    }

    /// Writes `N` bytes a lane; where lanes meet, the highest lane's value stays.
    pub fn store<const N: usize>(
        &mut self,
        to: Window,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
    ) -> Result<(), Box<Fault>> {
        let _ = (to, at, values, mask);
        Ok(())
    }

    /// Atomically replaces `N` (2, 4, 8 or 16) bytes a lane by `update(lane, old)`, lane after lane, and gives the old ones.
    /// `update` may be called more than once a lane where another thread interferes.
    pub fn update<const N: usize>(
        &mut self,
        at_window: Window,
        at: &Addresses,
        mask: u32,
        update: &mut dyn FnMut(usize, [u8; N]) -> [u8; N],
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let _ = (at_window, at, mask, update);
        Ok([[0; N]; 32])
    }

    /// Starts an asynchronous copy of `bytes` from global `from` to shared `to` (the rest up to `size`: zeros) for each lane;
    /// it happens when waited for, and not before.
    pub fn copy_async(
        &mut self,
        to: &Addresses,
        from: &Addresses,
        size: u32,
        bytes: &Lanes<u32>,
        mask: u32,
    ) -> Result<(), Box<Fault>> {
        let _ = (to, from, size, bytes, mask);
        Ok(())
    }

    /// Closes the group of asynchronous copies of the lanes in the mask.
    pub fn commit_async(&mut self, mask: u32) {
        let _ = mask;
    }

    /// Completes the asynchronous copies of the lanes in the mask, up to `pending` of the youngest groups; `None`: all, with
    /// those that no group holds yet.
    pub fn wait_async(&mut self, pending: Option<u32>, mask: u32) -> Result<(), Box<Fault>> {
        let _ = (pending, mask);
        Ok(())
    }

    /// Clock of the machine, in instructions of this warp: `%clock64`.
    pub fn clock(&self) -> u64 {
        0
    }

    /// Appends to the device's printf output; whole lines come out in the order of the warps' execution.
    pub fn print(&mut self, text: &str) {
        let _ = text;
    }

    /// Reports a fault that only the checker sees (uninitialised reads, races, …): an error, or a line on stderr and
    /// `Ok` where the user asked for reports only.
    pub fn report(&mut self, fault: Box<Fault>) -> Result<(), Box<Fault>> {
        Err(fault)
    }

    /// The same for one that is no access.
    pub fn report_kind(&mut self, kind: Kind, lane: usize) -> Result<(), Box<Fault>> {
        self.report(Fault::new(kind, lane))
    }
}

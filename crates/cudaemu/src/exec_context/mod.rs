//! Execution context of an instruction ([`ExecContext`]): the registers of its warp and the checked accesses to each memory.
//!
//! The executor ([`crate::exec`]) owns these parts and lends them to one instruction at a time. The instruction families
//! ([`crate::isa`]) depend on nothing else of the executor.
//!
//! | module | content |
//! |---|---|
//! | `registers` | register file of a warp |
//! | `global`, `shared`, `local` | checked accesses to each memory |
//! | `async_copy` | pending copies of `cp.async` |
//! | `counts`, `sector_set` | traffic and bank conflicts; the sectors that a block reads |
//! | [`window`] | windows of the memories in the generic address space |

#[cfg(test)]
mod access_tests;
mod async_copy;
mod counts;
#[cfg(test)]
pub(crate) mod fixture;
mod global;
mod local;
mod registers;
mod sector_set;
mod shared;
#[cfg(test)]
mod timing;
pub mod window;

pub use async_copy::AsyncCopies;
pub use counts::{MemoryCounts, Traffic};
pub use global::Global;
pub use local::Local;
pub use registers::{LANES, Lane, Lanes, Registers, each};
pub use sector_set::SectorSet;
pub use shared::Shared;

use std::fmt;

use crate::fault::{Fault, FaultAccess, FaultKind, MemorySpace};
use crate::operands::{Args, Base};

/// Receives the faults that only the checker detects.
pub trait DiagnosticSink: fmt::Debug {
    /// Reports a fault that hardware would not notice, with its warp and PTX line. `Err` stops the kernel with the fault; `Ok`
    /// has recorded it and continues.
    fn report(&mut self, fault: Box<Fault>, warp: u32, line: u32) -> Result<(), Box<Fault>>;
}

/// The context of one instruction of one warp. Its fields are public because the executor builds it from parts that it owns.
#[derive(Debug)]
pub struct ExecContext<'a> {
    /// The warp's registers.
    pub regs: &'a mut Registers,
    /// Lanes that execute this instruction's group, before the guard is applied (the handler's mask is after the guard).
    pub active: u32,
    /// Lanes of the warp that exist and have not exited.
    pub live: u32,
    /// Global memory, as this worker thread sees it.
    pub global: &'a mut Global,
    /// Shared memory of the block.
    pub shared: &'a mut Shared,
    /// Local memory of the warp.
    pub local: &'a mut Local,
    /// Asynchronous copies of the warp.
    pub copies: &'a mut AsyncCopies,
    /// The kernel's parameter block.
    pub params: &'a [u8],
    /// Offset of the group's current frame in local memory.
    pub frame: u32,
    /// Traffic counters.
    pub counts: &'a mut MemoryCounts,
    /// Sectors of global memory that the block has read, if traffic is counted.
    pub block_sectors: &'a mut SectorSet,
    /// Receives reports.
    pub console: &'a mut dyn DiagnosticSink,
    /// Index of the warp in its block.
    pub warp: u32,
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `blockDim`.
    pub shape: [u32; 3],
    /// Mask of bytes of a load's data that the program does not use ([`crate::operands::Args::padding`]); they may be
    /// unwritten.
    pub padding: u32,
    /// PTX line of the instruction, for later reports about this access.
    pub line: u32,
    /// The machine's clock: instructions executed by this warp.
    pub clock: u64,
}

/// The parts of the context that an access to memory needs.
#[derive(Debug)]
struct AccessEnv<'a> {
    counts: &'a mut MemoryCounts,
    block_sectors: &'a mut SectorSet,
    console: &'a mut dyn DiagnosticSink,
    warp: u32,
    padding: u32,
    line: u32,
}

impl AccessEnv<'_> {
    /// Reports a fault that only the checker detects: see [`DiagnosticSink::report`].
    fn report(&mut self, fault: Box<Fault>) -> Result<(), Box<Fault>> {
        self.console.report(fault, self.warp, self.line)
    }
}

/// One address per lane, as the instruction computed it; arbitrary in lanes outside the mask.
pub type Addresses = Lanes<u64>;

/// The state space that an instruction names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSpace {
    /// None: the window that contains the address determines the space, per lane ([`window`]).
    Generic,
    /// Global (and constant) memory, by device address.
    Global,
    /// The same memory for instructions with `.const`; only reports differ.
    Const,
    /// Shared memory of the block, by offset.
    Shared,
    /// Local memory of the thread, by offset (frame base included for variables of a frame).
    Local,
    /// The kernel's parameter block, by offset.
    Param,
}

/// Iterates over the lanes of a mask in ascending order.
#[inline(always)]
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = rest.trailing_zeros() as usize;
        rest &= rest.wrapping_sub(1);
        (lane < LANES).then_some(lane)
    })
}

/// Whether lane i's address is lane 0's plus `i * N`.
#[inline(always)]
fn consecutive<const N: usize>(at: &Addresses) -> bool {
    let mut difference = 0;
    for lane in 0..LANES {
        difference |= at[lane] ^ at[0].wrapping_add((lane * N) as u64);
    }
    difference == 0
}

/// Groups the lanes by the window of their address: (space, window start to subtract, lanes), at most one entry per window.
fn split(at: &Addresses, mask: u32) -> [(StateSpace, u64, u32); 4] {
    let mut parts = [
        (StateSpace::Global, 0, 0),
        (StateSpace::Shared, window::SHARED, 0),
        (StateSpace::Local, window::LOCAL, 0),
        (StateSpace::Param, window::PARAM, 0),
    ];
    for lane in lanes(mask) {
        let offset = |start: u64| at[lane].wrapping_sub(start) < window::BYTES;
        let part = (1..4).find(|&part| offset(parts[part].1)).unwrap_or(0);
        parts[part].2 |= 1 << lane;
    }
    parts
}

/// Whether all addresses are global, that is no lane of the mask is in a window.
#[inline(always)]
fn all_global(at: &Addresses, mask: u32) -> bool {
    let mut high = 0;
    for lane in 0..LANES {
        high |= if mask >> lane & 1 != 0 { at[lane] } else { 0 };
    }
    high < window::SHARED
}

impl ExecContext<'_> {
    /// Addresses of the address operand, frame base included.
    #[inline]
    pub fn addresses(&self, args: &Args) -> Addresses {
        let offset = args.offset as u64;
        match args.base {
            Base::None | Base::Param => [offset; LANES],
            Base::Wide(slot) => each(&self.regs.get::<u64>(slot), |base| base.wrapping_add(offset)),
            // 32-bit addresses wrap at 32 bits, like the memories that they address.
            Base::Narrow(slot) => each(&self.regs.get::<u32>(slot), |base| u64::from(base.wrapping_add(offset as u32))),
            Base::Frame => [u64::from(self.frame).wrapping_add(offset); LANES],
        }
    }

    #[inline(always)]
    fn parts(&mut self) -> (&mut Global, &mut Shared, &mut Local, AccessEnv<'_>) {
        let env = AccessEnv {
            counts: self.counts,
            block_sectors: self.block_sectors,
            console: self.console,
            warp: self.warp,
            padding: self.padding,
            line: self.line,
        };
        (self.global, self.shared, self.local, env)
    }

    /// Reads `N` (1, 2, 4, 8 or 16) naturally aligned bytes per lane and checks every byte. Results of lanes outside the mask
    /// are arbitrary.
    #[inline]
    pub fn load<const N: usize>(
        &mut self,
        from: StateSpace,
        at: &Addresses,
        mask: u32,
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let params = self.params;
        let (global, shared, local, mut env) = self.parts();
        match from {
            _ if mask == 0 => Ok([[0; N]; LANES]),
            StateSpace::Global => global.load(at, mask, &mut env),
            StateSpace::Const => global.load(at, mask, &mut env).map_err(in_constant_memory),
            StateSpace::Shared => shared.load(at, mask, &mut env),
            StateSpace::Local => local.load(at, mask, &mut env),
            StateSpace::Param => load_param(params, at, mask),
            StateSpace::Generic if all_global(at, mask) => global.load(at, mask, &mut env),
            StateSpace::Generic => {
                let mut out = [[0; N]; LANES];
                for (window, start, mask) in split(at, mask) {
                    let part = self.load::<N>(window, &at.map(|a| a.wrapping_sub(start)), mask)?;
                    lanes(mask).for_each(|lane| out[lane] = part[lane]);
                }
                Ok(out)
            }
        }
    }

    /// Writes `N` bytes per lane; if lanes overlap, the highest lane's value remains.
    #[inline]
    pub fn store<const N: usize>(
        &mut self,
        to: StateSpace,
        at: &Addresses,
        values: &Lanes<[u8; N]>,
        mask: u32,
    ) -> Result<(), Box<Fault>> {
        let (global, shared, local, mut env) = self.parts();
        match to {
            _ if mask == 0 => Ok(()),
            StateSpace::Global | StateSpace::Const => global.store(at, values, mask, &mut env),
            StateSpace::Shared => shared.store(at, values, mask, &mut env),
            StateSpace::Local => local.store(at, values, mask, &mut env),
            StateSpace::Param => Err(param_fault::<N>(at, mask, "kernel parameters may not be written", true)),
            StateSpace::Generic if all_global(at, mask) => global.store(at, values, mask, &mut env),
            StateSpace::Generic => {
                for (window, start, mask) in split(at, mask) {
                    self.store(window, &at.map(|a| a.wrapping_sub(start)), values, mask)?;
                }
                Ok(())
            }
        }
    }

    /// Atomically replaces `N` (2, 4, 8 or 16) bytes per lane by `update(lane, old)`, in ascending order of lanes, and returns
    /// the old values. `update` may be called repeatedly for a lane if another thread interferes.
    pub fn update<const N: usize>(
        &mut self,
        at_window: StateSpace,
        at: &Addresses,
        mask: u32,
        update: &mut dyn FnMut(usize, [u8; N]) -> [u8; N],
    ) -> Result<Lanes<[u8; N]>, Box<Fault>> {
        let (global, shared, local, mut env) = self.parts();
        match at_window {
            _ if mask == 0 => Ok([[0; N]; LANES]),
            StateSpace::Global | StateSpace::Const => global.update(at, mask, update, &mut env),
            StateSpace::Shared => shared.update(at, mask, update, &mut env),
            StateSpace::Local => local.update(at, mask, update, &mut env),
            StateSpace::Param => Err(param_fault::<N>(at, mask, "kernel parameters may not be written", true)),
            StateSpace::Generic => {
                let mut out = [[0; N]; LANES];
                for (window, start, mask) in split(at, mask) {
                    let part = self.update(window, &at.map(|a| a.wrapping_sub(start)), mask, update)?;
                    lanes(mask).for_each(|lane| out[lane] = part[lane]);
                }
                Ok(out)
            }
        }
    }

    /// Starts an asynchronous copy of `bytes` from global `from` to shared `to` for each lane; the rest up to `size` (4, 8 or
    /// 16) becomes zero. The copy executes when it is waited for.
    pub fn copy_async(
        &mut self,
        to: &Addresses,
        from: &Addresses,
        size: u32,
        bytes: &Lanes<u32>,
        mask: u32,
    ) -> Result<(), Box<Fault>> {
        let copies = &mut *self.copies;
        let (counts, block_sectors, console) = (&mut *self.counts, &mut *self.block_sectors, &mut *self.console);
        let mut env = AccessEnv { counts, block_sectors, console, warp: self.warp, padding: 0, line: self.line };
        copies.start(self.global, self.shared, to, from, size, bytes, mask, &mut env)
    }

    /// Closes the open group of asynchronous copies of the lanes in the mask.
    pub fn commit_async(&mut self, mask: u32) {
        self.copies.commit(mask);
    }

    /// Completes the asynchronous copies of the lanes in the mask, except the youngest `pending` groups. `None` completes all,
    /// including copies without a group.
    pub fn wait_async(&mut self, pending: Option<u32>, mask: u32) -> Result<(), Box<Fault>> {
        let copies = &mut *self.copies;
        let (counts, block_sectors, console) = (&mut *self.counts, &mut *self.block_sectors, &mut *self.console);
        let mut env = AccessEnv { counts, block_sectors, console, warp: self.warp, padding: 0, line: self.line };
        copies.wait(self.global, self.shared, pending, mask, &mut env)
    }

    /// One byte of one lane's generic address space, without a check for written bytes; `None` if there is no such memory.
    pub fn peek(&mut self, at: &Addresses, lane: usize) -> Option<u8> {
        let address = at[lane];
        let mut byte = [0];
        if address.wrapping_sub(window::LOCAL) < window::BYTES {
            self.local.peek(lane, address - window::LOCAL, &mut byte).ok()?;
            return Some(byte[0]);
        }
        self.load::<1>(StateSpace::Generic, at, 1 << lane).ok().map(|bytes| bytes[lane][0])
    }

    /// `%clock64`: instructions executed by this warp.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Reports a fault that only the checker detects (uninitialised reads, races, …): an error, or a line on stderr and `Ok` in
    /// the report-only configuration.
    pub fn report(&mut self, fault: Box<Fault>) -> Result<(), Box<Fault>> {
        self.console.report(fault, self.warp, self.line)
    }

    /// As [`ExecContext::report`], for a fault that is not an access.
    pub fn report_kind(&mut self, kind: FaultKind, lane: usize) -> Result<(), Box<Fault>> {
        self.report(Fault::new(kind, lane))
    }
}

/// The fault of a global access, named as a constant access: constant memory is part of the global address space.
#[cold]
fn in_constant_memory(mut fault: Box<Fault>) -> Box<Fault> {
    if let Some(access) = &mut fault.access {
        access.memory = MemorySpace::Const;
    }
    fault
}

fn param_fault<const N: usize>(at: &Addresses, mask: u32, text: &str, write: bool) -> Box<Fault> {
    let lane = mask.trailing_zeros() as usize;
    let access = FaultAccess { memory: MemorySpace::Param, address: at[lane], bytes: N as u32, write };
    Fault::access(FaultKind::NotAccessible(text.into()), lane, access)
}

/// Loads kernel parameters. A launch sets all of them, so they need no written bits.
fn load_param<const N: usize>(params: &[u8], at: &Addresses, mask: u32) -> Result<Lanes<[u8; N]>, Box<Fault>> {
    let read = |lane: usize| {
        let access = FaultAccess { memory: MemorySpace::Param, address: at[lane], bytes: N as u32, write: false };
        if !at[lane].is_multiple_of(N as u64) {
            return Err(Fault::access(FaultKind::Misaligned, lane, access));
        }
        let found = usize::try_from(at[lane]).ok().and_then(|at| params.get(at..)?.first_chunk::<N>());
        found.copied().ok_or_else(|| {
            let text = format!("the kernel has {} bytes of parameters", params.len());
            Fault::access(FaultKind::OutOfBounds(text), lane, access)
        })
    };
    let first = mask.trailing_zeros() as usize;
    let mut out = [read(first)?; LANES];
    // Usually all lanes read the same parameter.
    for lane in lanes(mask).filter(|&lane| at[lane] != at[first]) {
        out[lane] = read(lane)?;
    }
    Ok(out)
}

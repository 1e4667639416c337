//! Test fixture: the memories and registers of a block without an executor.

use std::sync::Arc;

use crate::fault::Fault;
use crate::mem::{AddressSpace, Footprint};

use super::{
    Addresses, AsyncCopies, DiagnosticSink, ExecContext, Global, Local, MemoryCounts, Registers, SectorSet, Shared,
};

/// A sink that records all reports. It returns the fault, which stops the kernel, unless `continue_after_fault` is set.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    pub(crate) continue_after_fault: bool,
    pub(crate) faults: Vec<Fault>,
}

impl DiagnosticSink for FaultLog {
    fn report(&mut self, fault: Box<Fault>, _: u32, _: u32) -> Result<(), Box<Fault>> {
        self.faults.push((*fault).clone());
        if self.continue_after_fault { Ok(()) } else { Err(fault) }
    }
}

/// The memories and registers of a block, from which [`Fixture::context`] builds execution contexts.
#[derive(Debug)]
pub(crate) struct Fixture {
    pub(crate) space: Arc<AddressSpace>,
    pub(crate) regs: Registers,
    pub(crate) global: Global,
    pub(crate) shared: Shared,
    pub(crate) local: Local,
    pub(crate) copies: Vec<AsyncCopies>,
    pub(crate) params: Vec<u8>,
    pub(crate) counts: MemoryCounts,
    pub(crate) block_sectors: SectorSet,
    pub(crate) log: FaultLog,
    pub(crate) footprint: Arc<Footprint>,
}

impl Fixture {
    /// A block on device 0 of two, with `shared` bytes of shared memory and `warps` warps. `fill` makes the allocations in
    /// global memory and returns their addresses, which `new` passes on.
    pub(crate) fn new<T>(shared: u32, warps: u32, fill: impl FnOnce(&AddressSpace) -> T) -> (Self, T) {
        let space = Arc::new(AddressSpace::new(&[1 << 30, 1 << 30]).expect("a space"));
        let filled = fill(&space);
        let footprint = Arc::new(Footprint::new(space.snapshot()));
        let fixture = Self {
            regs: Registers::default(),
            global: Global::new(space.snapshot(), 0, 0, true, Some(footprint.clone())),
            shared: Shared::new(shared, warps * 32, true),
            local: Local::new(256),
            copies: (0..warps).map(|_| AsyncCopies::default()).collect(),
            params: (0..64).collect(),
            counts: MemoryCounts::default(),
            block_sectors: SectorSet::default(),
            log: FaultLog::default(),
            footprint,
            space,
        };
        (fixture, filled)
    }

    /// The execution context of an instruction of warp `warp` at PTX line `line`, with all lanes active.
    pub(crate) fn context(&mut self, warp: u32, line: u32) -> ExecContext<'_> {
        ExecContext {
            regs: &mut self.regs,
            active: u32::MAX,
            live: u32::MAX,
            global: &mut self.global,
            shared: &mut self.shared,
            local: &mut self.local,
            copies: &mut self.copies[warp as usize],
            params: &self.params,
            frame: 0,
            counts: &mut self.counts,
            block_sectors: &mut self.block_sectors,
            console: &mut self.log,
            warp,
            block: [0; 3],
            shape: [32, 1, 1],
            padding: 0,
            line,
            clock: 0,
        }
    }
}

/// `start + lane * step` for each lane.
pub(crate) fn strided(start: u64, step: u64) -> Addresses {
    std::array::from_fn(|lane| start.wrapping_add((lane as u64).wrapping_mul(step)))
}

/// Kind and lane of a fault, such as "OutOfBounds 3"; "ok" without a fault.
pub(crate) fn fault_name<T>(result: &Result<T, Box<Fault>>) -> String {
    match result {
        Ok(_) => "ok".into(),
        Err(fault) => {
            let kind = format!("{:?}", fault.kind);
            format!("{} {}", kind.split('(').next().unwrap_or_default(), fault.lane)
        }
    }
}

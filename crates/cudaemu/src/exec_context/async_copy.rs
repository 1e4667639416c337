//! `cp.async`: copies from global to shared memory, executed as late as allowed, namely when they are waited for.
//!
//! Until then the destination bytes are *pending*: any access to them is reported, even by the thread that copies. A copy that
//! is never waited for never executes. PTX ISA, "Data movement and conversion: asynchronous copy".

use crate::fault::{Fault, FaultAccess, FaultKind, MemorySpace};

use super::{AccessEnv, Addresses, Global, LANES, Lanes, Shared, lanes};

/// Maximum bytes of one copy.
const MAX_COPY_BYTES: usize = 16;

/// A pending copy of one lane.
#[derive(Clone, Copy, Debug)]
struct PendingCopy {
    lane: u8,
    size: u8,
    /// Bytes to read from the source; the rest of the destination, up to `size`, becomes zero.
    bytes: u8,
    /// Number of its group, counted per lane.
    group: u32,
    /// PTX line of the copy.
    line: u32,
    to: u32,
    from: u64,
}

/// Asynchronous copies of a warp.
#[derive(Debug, Default)]
pub struct AsyncCopies {
    /// Pending copies in the order of their start.
    pending: Vec<PendingCopy>,
    /// For each lane the number of its open group.
    open: Lanes<u32>,
}

impl AsyncCopies {
    /// Resets for the next warp: pending copies are dropped and never execute.
    pub fn reset(&mut self) {
        self.pending.clear();
        self.open = [0; LANES];
    }

    #[allow(clippy::too_many_arguments, reason = "the instruction's own operands")]
    pub(super) fn start(
        &mut self,
        global: &mut Global,
        shared: &mut Shared,
        to: &Addresses,
        from: &Addresses,
        size: u32,
        bytes: &Lanes<u32>,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        if !matches!(size, 4 | 8 | 16) {
            let lane = mask.trailing_zeros() as usize & 31;
            return Err(Fault::new(
                FaultKind::InvalidValue(format!("cp.async of {size} bytes; it may be 4, 8 or 16")),
                lane,
            ));
        }
        let mut reported = false;
        for lane in lanes(mask) {
            let length = bytes[lane].min(size);
            let source = FaultAccess { memory: MemorySpace::Global, address: from[lane], bytes: length, write: false };
            let fault = |kind| Fault::access(kind, lane, source);
            if !from[lane].is_multiple_of(u64::from(size)) {
                return Err(fault(FaultKind::Misaligned));
            }
            if length > 0 && !global.check_source(from[lane], u64::from(length)).map_err(fault)? && !reported {
                env.report(fault(FaultKind::Uninitialised))?;
                reported = true;
            }
            let target = shared.begin_async_write(to[lane], size, lane, env)?;
            self.pending.push(PendingCopy {
                lane: lane as u8,
                size: size as u8,
                bytes: length as u8,
                group: self.open[lane],
                line: env.line,
                to: target,
                from: from[lane],
            });
        }
        global.count_sources(from, bytes, mask, env);
        shared.count_async_write(to, size, mask, env);
        Ok(())
    }

    pub(super) fn commit(&mut self, mask: u32) {
        for lane in lanes(mask) {
            self.open[lane] = self.open[lane].wrapping_add(1);
        }
    }

    pub(super) fn wait(
        &mut self,
        global: &mut Global,
        shared: &mut Shared,
        pending: Option<u32>,
        mask: u32,
        env: &mut AccessEnv<'_>,
    ) -> Result<(), Box<Fault>> {
        let open = self.open;
        let due = |copy: &PendingCopy| {
            let lane = usize::from(copy.lane);
            let age = open[lane].wrapping_sub(copy.group); // 0: the copy's group is still open
            mask >> lane & 1 != 0 && pending.is_none_or(|pending| age > pending)
        };
        let mut kept = 0;
        for i in 0..self.pending.len() {
            let copy = self.pending[i];
            if !due(&copy) {
                self.pending[kept] = copy;
                kept += 1;
                continue;
            }
            let mut data = [0; MAX_COPY_BYTES];
            let length = u32::from(copy.bytes);
            if length > 0 {
                let source =
                    FaultAccess { memory: MemorySpace::Global, address: copy.from, bytes: length, write: false };
                let fault = |kind| Fault::access(kind, usize::from(copy.lane), source);
                global.read_source(copy.from, &mut data[..usize::from(copy.bytes)]).map_err(fault)?;
            }
            shared.finish_async_write(copy.to, &data[..usize::from(copy.size)], usize::from(copy.lane), copy.line, env);
        }
        self.pending.truncate(kept);
        Ok(())
    }
}

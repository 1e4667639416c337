//! Transfers: writes, reads, fills and copies of ranges, as rows.

use super::{CpuMemory, Locking, OUT_OF_BOUNDS, TransferAccess, byte_range, check_bounds, lock_order};
use crate::device::DeviceError;
use std::cmp::Ordering;

/// Bytes of a fill or a copy between two checks whether to give way: about a millisecond.
const PIECE_BYTES: usize = 4 << 20;

impl CpuMemory {
    /// Writes bytes at an offset. `None`: nothing was written, see [`Locking`].
    pub(in crate::cpu) fn write(
        &self,
        offset: usize,
        src: &[u8],
        locking: Locking<'_>,
    ) -> Result<Option<()>, DeviceError> {
        let accesses = [(byte_range(offset, src.len())?, TransferAccess::Overwrite)];
        let Some(_guard) = self.lock_as_rows(&accesses, locking)? else { return Ok(None) };
        check_bounds(self.pages.write(offset, src)).map(Some)
    }

    /// Reads bytes from an offset on. `None`: see [`Locking`].
    pub(in crate::cpu) fn read(
        &self,
        offset: usize,
        bytes: usize,
        locking: Locking<'_>,
    ) -> Result<Option<Vec<u8>>, DeviceError> {
        let accesses = [(byte_range(offset, bytes)?, TransferAccess::Read)];
        let Some(_guard) = self.lock_as_rows(&accesses, locking)? else { return Ok(None) };
        self.pages.read(offset, bytes).ok_or(OUT_OF_BOUNDS).map(Some)
    }

    /// Sets bytes to a value, of which earlier calls have set the first `done`. Returns how many are set now: fewer than `bytes`
    /// if the call gave way, see [`Locking`].
    pub(in crate::cpu) fn fill(
        &self,
        offset: usize,
        bytes: usize,
        mut done: usize,
        value: u8,
        locking: Locking<'_>,
    ) -> Result<usize, DeviceError> {
        let range = byte_range(offset, bytes)?;
        let rest = [(range.start + done..range.end, TransferAccess::Overwrite)];
        let Some(_guard) = self.lock_as_rows(&rest, locking)? else { return Ok(done) };
        while done < bytes {
            let n = PIECE_BYTES.min(bytes - done);
            check_bounds(self.pages.fill(offset + done, n, value))?;
            done += n;
            if done < bytes && gives_way(locking) {
                break;
            }
        }
        Ok(done)
    }

    /// Copies between two memories or inside one; the ranges may overlap. Earlier calls with the same ranges have copied `done`
    /// bytes. Returns how many are copied now: fewer than `bytes` if the call gave way, see [`Locking`].
    pub(in crate::cpu) fn copy_from<'s>(
        &'s self,
        to: usize,
        src: &'s CpuMemory,
        from: usize,
        bytes: usize,
        mut done: usize,
        locking: Locking<'_>,
    ) -> Result<usize, DeviceError> {
        byte_range(from, bytes)?;
        byte_range(to, bytes)?;
        // If the ranges overlap, no piece may overwrite bytes that a later one reads.
        let ascending = to <= from;
        let rest = if ascending { done..bytes } else { 0..bytes - done };
        let (reads, writes) = (from + rest.start..from + rest.end, to + rest.start..to + rest.end);
        let (reads, writes) = ((reads, TransferAccess::Read), (writes, TransferAccess::Overwrite));
        let accesses: &[(&'s CpuMemory, &[_])] = match lock_order(src, self) {
            // The source is converted to rows before the destination's spans are removed from the map.
            Ordering::Equal => &[(self, &[reads, writes])],
            Ordering::Less => &[(src, &[reads]), (self, &[writes])],
            Ordering::Greater => &[(self, &[writes]), (src, &[reads])],
        };
        let lock = |(memory, accesses): &(&'s CpuMemory, &[_])| memory.lock_as_rows(accesses, locking).transpose();
        let guards = accesses.iter().map(lock).collect::<Option<Result<Vec<_>, _>>>().transpose()?;
        if guards.is_none() {
            return Ok(done);
        }
        while done < bytes {
            let n = PIECE_BYTES.min(bytes - done);
            let at = if ascending { done } else { bytes - done - n };
            check_bounds(self.pages.copy_from(to + at, &src.pages, from + at, n))?;
            done += n;
            if done < bytes && gives_way(locking) {
                break;
            }
        }
        Ok(done)
    }
}

fn gives_way(locking: Locking<'_>) -> bool {
    if let Locking::GiveWay(is_due) = locking { is_due() } else { false }
}

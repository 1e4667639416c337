//! Transfers: writes, reads, fills and copies of ranges, as rows.

use super::{CpuMemory, Locking, OUT_OF_BOUNDS, TransferAccess, byte_range, check_bounds, lock_order};
use crate::device::DeviceError;
use std::cmp::Ordering;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Bytes of a fill or a copy between two checks for an abort.
const ABORT_CHECK_BYTES: usize = 16 << 20;

impl CpuMemory {
    /// Writes bytes at an offset. `None`: nothing was done, see [`Locking::Try`].
    pub(in crate::cpu) fn write(&self, offset: usize, src: &[u8], locking: Locking) -> Result<Option<()>, DeviceError> {
        let accesses = [(byte_range(offset, src.len())?, TransferAccess::Overwrite)];
        let Some(_guard) = self.lock_as_rows(&accesses, locking)? else { return Ok(None) };
        check_bounds(self.pages.write(offset, src)).map(Some)
    }

    /// Reads bytes from an offset on. `None`: see [`Locking::Try`].
    pub(in crate::cpu) fn read(
        &self,
        offset: usize,
        bytes: usize,
        locking: Locking,
    ) -> Result<Option<Vec<u8>>, DeviceError> {
        let accesses = [(byte_range(offset, bytes)?, TransferAccess::Read)];
        let Some(_guard) = self.lock_as_rows(&accesses, locking)? else { return Ok(None) };
        self.pages.read(offset, bytes).ok_or(OUT_OF_BOUNDS).map(Some)
    }

    /// Sets bytes to a value. `None`: nothing was done, see [`Locking::Try`].
    ///
    /// # Errors
    /// [`DeviceError::Ended`] after `abort`, which leaves bytes out.
    pub(in crate::cpu) fn fill(
        &self,
        offset: usize,
        bytes: usize,
        value: u8,
        locking: Locking,
        abort: &AtomicBool,
    ) -> Result<Option<()>, DeviceError> {
        let range = byte_range(offset, bytes)?;
        let Some(_guard) = self.lock_as_rows(&[(range.clone(), TransferAccess::Overwrite)], locking)? else {
            return Ok(None);
        };
        for at in range.clone().step_by(ABORT_CHECK_BYTES) {
            check_abort(abort)?;
            check_bounds(self.pages.fill(at, ABORT_CHECK_BYTES.min(range.end - at), value))?;
        }
        Ok(Some(()))
    }

    /// Copies between two memories or inside one; the ranges may overlap. `None`: nothing was done, see [`Locking::Try`].
    ///
    /// # Errors
    /// [`DeviceError::Ended`] after `abort`, which leaves bytes out.
    pub(in crate::cpu) fn copy_from<'s>(
        &'s self,
        to: usize,
        src: &'s CpuMemory,
        from: usize,
        bytes: usize,
        locking: Locking,
        abort: &AtomicBool,
    ) -> Result<Option<()>, DeviceError> {
        let (reads, writes) = (byte_range(from, bytes)?, byte_range(to, bytes)?);
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
            return Ok(None);
        }
        let pieces = bytes.div_ceil(ABORT_CHECK_BYTES);
        for piece in 0..pieces {
            check_abort(abort)?;
            // If the ranges overlap, no piece may overwrite bytes that a later one reads.
            let at = if to <= from { piece } else { pieces - 1 - piece } * ABORT_CHECK_BYTES;
            let n = ABORT_CHECK_BYTES.min(bytes - at);
            check_bounds(self.pages.copy_from(to + at, &src.pages, from + at, n))?;
        }
        Ok(Some(()))
    }
}

fn check_abort(abort: &AtomicBool) -> Result<(), DeviceError> {
    if abort.load(Relaxed) { Err(DeviceError::Ended) } else { Ok(()) }
}

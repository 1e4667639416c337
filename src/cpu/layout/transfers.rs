//! Transfers: writes, reads, fills and copies of ranges, as rows. None of them changes the layout of a span that it does not
//! overwrite as a whole.

use super::{CpuMemory, Locking, OUT_OF_BOUNDS, WriteLock, byte_range, check_bounds, lock_order};
use crate::device::DeviceError;
use std::cmp::Ordering;
use std::ops::Range;

/// Bytes of a transfer between two checks whether to give way: about a millisecond.
const PIECE_BYTES: usize = 4 << 20;

/// As [`PIECE_BYTES`], where panels are packed or unpacked. A piece of a copy is staged, in the L2 cache.
const PANEL_PIECE_BYTES: usize = 256 << 10;

/// Most bytes that a read takes out of panels without a turn of the long lane: some microseconds.
const MAX_TRY_PANEL_BYTES: usize = 4 << 10;

impl CpuMemory {
    /// Writes bytes at an offset, as many as a queue stages at most. `None`: nothing was written, see [`Locking`].
    pub(in crate::cpu) fn write(
        &self,
        offset: usize,
        src: &[u8],
        locking: Locking<'_>,
    ) -> Result<Option<()>, DeviceError> {
        let range = byte_range(offset, src.len())?;
        match self.lock_for_write(&range, None, locking)? {
            None => return Ok(None),
            Some(WriteLock::Shared(_map)) => check_bounds(self.pages.write(offset, src))?,
            Some(WriteLock::Exclusive(map)) => self.write_rows(&map, offset, src)?,
        }
        Ok(Some(()))
    }

    /// Appends `bytes` bytes from an offset on to `out`, which holds what earlier calls have read of them. False: there is a
    /// rest, see [`Locking`].
    pub(in crate::cpu) fn read(
        &self,
        offset: usize,
        bytes: usize,
        out: &mut Vec<u8>,
        locking: Locking<'_>,
    ) -> Result<bool, DeviceError> {
        let range = byte_range(offset, bytes)?;
        if range.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        let Some(map) = self.read_map_with(locking) else { return Ok(false) };
        let packed = !map.is_row_major(&range);
        let piece_bytes = if packed { PANEL_PIECE_BYTES } else { PIECE_BYTES };
        if matches!(locking, Locking::Try) && packed && bytes > MAX_TRY_PANEL_BYTES {
            return Ok(false);
        }
        out.reserve_exact(bytes - out.len());
        while out.len() < bytes {
            let at = offset + out.len();
            self.read_rows(&map, at..range.end.min(map.panel_end(at + piece_bytes)), out)?;
            if out.len() < bytes && gives_way(locking) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sets bytes to a value; earlier calls have set the first `done`. Returns how many are set now: fewer than `bytes`
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
        let rest = range.start + done..range.end;
        let Some(lock) = self.lock_for_write(&rest, None, locking)? else { return Ok(done) };
        let packed = !lock.map().is_row_major(&rest);
        let piece = vec![value; if packed { PANEL_PIECE_BYTES.min(bytes) } else { 0 }];
        while done < bytes {
            let n = (bytes - done).min(if packed { PANEL_PIECE_BYTES } else { PIECE_BYTES });
            if packed {
                self.write_rows(lock.map(), offset + done, &piece[..n])?;
            } else {
                check_bounds(self.pages.fill(offset + done, n, value))?;
            }
            done += n;
            if done < bytes && gives_way(locking) {
                break;
            }
        }
        Ok(done)
    }

    /// Copies between two memories or inside one; the ranges may overlap. Earlier calls with the same ranges have copied `done`
    /// bytes. Returns how many are copied now: fewer than `bytes` if the call gave way, see [`Locking`].
    pub(in crate::cpu) fn copy_from(
        &self,
        to: usize,
        src: &CpuMemory,
        from: usize,
        bytes: usize,
        mut done: usize,
        locking: Locking<'_>,
    ) -> Result<usize, DeviceError> {
        let (source, destination) = (byte_range(from, bytes)?, byte_range(to, bytes)?);
        if source.end > src.pages.bytes() || destination.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        // If the ranges overlap, no piece may overwrite bytes that a later one reads.
        let ascending = to <= from;
        let rest = if ascending { done..bytes } else { 0..bytes - done };
        let (reads, writes) = (from + rest.start..from + rest.end, to + rest.start..to + rest.end);
        let Some((lock, source)) = self.lock_for_copy(src, &reads, &writes, locking)? else { return Ok(done) };
        let is_packed = |lock: &WriteLock<'_>| {
            let of_source = source.as_deref().unwrap_or_else(|| lock.map());
            !of_source.is_row_major(&reads) || !lock.map().is_row_major(&writes)
        };
        let packed = is_packed(&lock);
        if packed && matches!(locking, Locking::Try) && bytes > PANEL_PIECE_BYTES {
            return Ok(done);
        }
        let mut piece = Vec::new();
        while done < bytes {
            let n = (bytes - done).min(if packed { PANEL_PIECE_BYTES } else { PIECE_BYTES });
            let at = if ascending { done } else { bytes - done - n };
            if packed {
                piece.clear();
                let map = source.as_deref().unwrap_or_else(|| lock.map());
                src.read_rows(map, from + at..from + at + n, &mut piece)?;
                self.write_rows(lock.map(), to + at, &piece)?;
            } else {
                check_bounds(self.pages.copy_from(to + at, &src.pages, from + at, n))?;
            }
            done += n;
            if done < bytes && gives_way(locking) {
                break;
            }
        }
        Ok(done)
    }

    /// The lock for a copy's writes to `self`, and the one for its reads of `src`, unless that is the same memory. `None`: see
    /// [`Locking`].
    fn lock_for_copy<'a>(
        &'a self,
        src: &'a CpuMemory,
        reads: &Range<usize>,
        writes: &Range<usize>,
        locking: Locking<'_>,
    ) -> Result<Option<CopyLocks<'a>>, DeviceError> {
        Ok(match lock_order(src, self) {
            Ordering::Equal => self.lock_for_write(writes, Some(reads), locking)?.map(|lock| (lock, None)),
            Ordering::Less => {
                let Some(source) = src.read_map_with(locking) else { return Ok(None) };
                self.lock_for_write(writes, None, locking)?.map(|lock| (lock, Some(source)))
            }
            Ordering::Greater => {
                let Some(lock) = self.lock_for_write(writes, None, locking)? else { return Ok(None) };
                src.read_map_with(locking).map(|source| (lock, Some(source)))
            }
        })
    }
}

type CopyLocks<'a> = (WriteLock<'a>, Option<std::sync::RwLockReadGuard<'a, super::LayoutMap>>);

fn gives_way(locking: Locking<'_>) -> bool {
    if let Locking::GiveWay(is_due) = locking { is_due() } else { false }
}

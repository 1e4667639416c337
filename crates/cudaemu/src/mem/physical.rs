//! Bytes of a device or of the host, and which of them were ever written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::backing::Backing;
use super::{Bitmap, Error};

/// Bytes in use of one device, against what it has.
#[derive(Debug)]
pub(crate) struct MemoryUsage {
    pub(crate) used: AtomicU64,
    pub(crate) limit: u64,
}

impl MemoryUsage {
    fn charge(&self, device: u32, bytes: u64) -> Result<(), Error> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        let out_of_memory = |used| Error::OutOfMemory { device, asked: bytes, used, limit: self.limit };
        self.used.fetch_update(Relaxed, Relaxed, fits).map(|_| ()).map_err(out_of_memory)
    }
}

/// Memory: of a device, of the host, or behind a VMM handle.
#[derive(Debug)]
pub struct PhysicalMemory {
    backing: Backing,
    device: u32,
    /// Bytes that were written; `None` where all always are (host memory).
    written: Option<Bitmap>,
    /// All bytes were written: `written` need not be asked.
    full: AtomicBool,
    /// Words of `written` that are full; when all are, `full` is set.
    full_words: AtomicU64,
    /// Bytes still charged to the device.
    charged: AtomicU64,
    usage: Option<Arc<MemoryUsage>>,
}

impl PhysicalMemory {
    /// Memory of a device, none of it written.
    pub(crate) fn device_memory(device: u32, bytes: u64, usage: &Arc<MemoryUsage>) -> Result<Self, Error> {
        if bytes == 0 {
            return Err(Error::Invalid("an allocation of 0 bytes".into()));
        }
        usage.charge(device, bytes)?;
        let parts = Backing::new(bytes).and_then(|backing| Ok((backing, Bitmap::new(bytes)?)));
        match parts {
            Ok((backing, written)) => Ok(Self {
                backing,
                device,
                written: Some(written),
                full: AtomicBool::new(false),
                full_words: AtomicU64::new(0),
                charged: AtomicU64::new(bytes),
                usage: Some(usage.clone()),
            }),
            Err(error) => {
                usage.used.fetch_sub(bytes, Relaxed);
                Err(error)
            }
        }
    }

    /// Host memory: always counts as written, and as no device's.
    pub(crate) fn host(backing: Backing, device: u32) -> Self {
        Self {
            backing,
            device,
            written: None,
            full: AtomicBool::new(true),
            full_words: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            usage: None,
        }
    }

    /// Zeroed host memory.
    pub(crate) fn pinned(bytes: u64, device: u32) -> Result<Self, Error> {
        if bytes == 0 {
            return Err(Error::Invalid("an allocation of 0 bytes".into()));
        }
        Ok(Self::host(Backing::new(bytes)?, device))
    }

    /// Gives the bytes back to the device's account; they stay readable for those that still hold them.
    pub(crate) fn release_usage(&self) {
        let bytes = self.charged.swap(0, Relaxed);
        if let Some(usage) = &self.usage {
            usage.used.fetch_sub(bytes, Relaxed);
        }
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.backing.bytes() as u64
    }

    /// The device that it belongs to; of host memory: the device that asked for it.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Where it lies in the host's memory.
    pub(crate) fn host_address(&self) -> u64 {
        self.backing.host_address()
    }

    /// The bytes themselves, which know nothing of being written.
    #[inline(always)]
    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Whether all of a range was written.
    #[inline(always)]
    pub fn is_written(&self, at: u64, bytes: u64) -> bool {
        self.full.load(Relaxed) || self.written.as_ref().is_none_or(|map| map.contains(at, bytes))
    }

    /// Whether every byte was written.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Offset of the first byte of a range that was never written.
    pub fn first_unwritten(&self, at: u64, bytes: u64) -> Option<u64> {
        match &self.written {
            Some(map) if !self.is_full() => map.first_missing(at, bytes),
            _ => None,
        }
    }

    /// Marks a range as written.
    #[inline(always)]
    pub(crate) fn mark_written(&self, at: u64, bytes: u64) {
        if !self.is_full() {
            self.mark_more(at, bytes);
        }
    }

    #[inline(never)]
    fn mark_more(&self, at: u64, bytes: u64) {
        let Some(map) = &self.written else { return };
        if at == 0 && bytes == self.bytes() {
            self.full.store(true, Relaxed);
            return;
        }
        let filled = map.add(at, bytes);
        if filled != 0 && self.full_words.fetch_add(filled, Relaxed) + filled == map.word_count() {
            self.full.store(true, Relaxed);
        }
    }

    /// Marks a range as never written. Only host calls do it, which the engine keeps apart from kernels that use the range.
    fn unmark(&self, at: u64, bytes: u64) {
        let Some(map) = &self.written else { return };
        if self.is_full() {
            // The bitmap may be behind: it is not kept while `full` is set.
            map.add(0, self.bytes());
            self.full_words.store(map.word_count(), Relaxed);
            self.full.store(false, Relaxed);
        }
        let emptied = map.remove(at, bytes);
        self.full_words.fetch_sub(emptied, Relaxed);
    }

    /// Copies bytes from other memory, with the knowledge which of them were written.
    pub(crate) fn copy_from(&self, at: u64, source: &Self, from: u64, bytes: u64) {
        let mut buffer = [0; 16 << 10];
        let mut done = 0;
        while done < bytes {
            let step = (bytes - done).min(buffer.len() as u64);
            let chunk = &mut buffer[..step as usize];
            source.backing.read((from + done) as usize, chunk);
            self.backing.write((at + done) as usize, chunk);
            done += step;
        }
        let Some(map) = source.written.as_ref().filter(|map| !source.is_full() && !map.contains(from, bytes)) else {
            return self.mark_written(at, bytes);
        };
        for done in (0..bytes).step_by(64) {
            let step = (bytes - done).min(64);
            let bits = map.bits(from + done, step);
            if bits.count_ones() == step as u32 {
                self.mark_written(at + done, step);
                continue;
            }
            for i in 0..step {
                if bits >> i & 1 != 0 { self.mark_written(at + done + i, 1) } else { self.unmark(at + done + i, 1) }
            }
        }
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        self.release_usage();
    }
}

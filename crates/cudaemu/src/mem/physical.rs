//! Physical memory of a device or the host, with written bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::backing::Backing;
use super::{Bitmap, Error};

/// Memory use of one device, in bytes, and its limit.
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

/// Memory of a device or the host.
#[derive(Debug)]
pub struct PhysicalMemory {
    backing: Backing,
    device: u32,
    /// Written bits; `None` for host memory, which always counts as written.
    written: Option<Bitmap>,
    /// All bytes were written, so checks skip `written`.
    full: AtomicBool,
    /// Number of full words of `written`; when it reaches all words, `full` is set.
    full_words: AtomicU64,
    /// Bytes still counted as used on the device.
    charged: AtomicU64,
    usage: Option<Arc<MemoryUsage>>,
}

impl PhysicalMemory {
    /// Unwritten memory of a device.
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

    /// Host memory: counts as written, and not towards any device's use.
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

    /// Subtracts the bytes from the device's use; they stay readable for holders of a reference.
    pub(crate) fn release_usage(&self) {
        let bytes = self.charged.swap(0, Relaxed);
        if let Some(usage) = &self.usage {
            usage.used.fetch_sub(bytes, Relaxed);
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.backing.bytes() as u64
    }

    /// The device that owns it; for host memory, the device that was current at its allocation.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Its address in the host's address space.
    pub(crate) fn host_address(&self) -> u64 {
        self.backing.host_address()
    }

    /// The bytes, without written bits: a write through it must call [`PhysicalMemory::mark_written`].
    #[inline(always)]
    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Whether a whole range was written.
    #[inline(always)]
    pub fn is_written(&self, at: u64, bytes: u64) -> bool {
        self.full.load(Relaxed) || self.written.as_ref().is_none_or(|map| map.contains(at, bytes))
    }

    /// Whether every byte was written.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Offset of the first unwritten byte of a range.
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

    /// Marks a range as unwritten. Only host calls do this, and the engine orders them with kernels that use the range.
    fn unmark(&self, at: u64, bytes: u64) {
        let Some(map) = &self.written else { return };
        if self.is_full() {
            // The bitmap may be outdated: it is not maintained while `full` is set.
            map.add(0, self.bytes());
            self.full_words.store(map.word_count(), Relaxed);
            self.full.store(false, Relaxed);
        }
        let emptied = map.remove(at, bytes);
        self.full_words.fetch_sub(emptied, Relaxed);
    }

    /// Copies bytes and their written bits from other memory.
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

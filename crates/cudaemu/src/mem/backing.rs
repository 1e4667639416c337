//! Backing memory that several threads may access at once, and the reservation of addresses for device memory.
//!
//! Several threads run the blocks of a kernel, and a faulty kernel may race on the bytes of its buffers. In Rust that must not
//! be a data race, so the memory is never borrowed as bytes: every access is a relaxed atomic of 1, 2, 4 or 8 bytes, host
//! copies included. A race may mix widths (one thread stores a word, another loads its lower half). This is sound in practice:
//! the memory does not belong to Rust (it comes from `mmap`), no `&mut` to it exists, and on the supported targets each
//! access is a single plain load or store. So a mixed race yields some mixture of the bytes, as on a GPU, and such bytes are
//! only used as numbers.
#![allow(unsafe_code, reason = "one of the places the crate allows it in: mapped memory")]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use super::Error;

/// Bytes of inaccessible guard pages before and after each mapping.
const FENCE: usize = 64 << 10;

/// Serialises 16-byte compare-and-swaps, for which there is no portable atomic.
static WIDE: Mutex<()> = Mutex::new(());

/// Bytes in host memory, initially zero; the system commits pages when they are first touched.
#[derive(Debug)]
pub(crate) struct Backing {
    start: NonNull<u8>,
    bytes: usize,
    /// Start and length of the mapping, to unmap on drop.
    mapping: (NonNull<u8>, usize),
}

// SAFETY: no thread owns the memory, and every access to it is atomic.
unsafe impl Send for Backing {}
// SAFETY: as above.
unsafe impl Sync for Backing {}

/// Maps private anonymous memory, which uses no pages until it is touched.
fn map(bytes: usize, what: &'static str) -> Result<NonNull<u8>, Error> {
    // SAFETY: a new private mapping at an address that the system chooses; existing mappings stay unchanged.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    let failed = || Error::AddressSpace { what, bytes: bytes as u64, reason: io::Error::last_os_error().to_string() };
    if start == libc::MAP_FAILED { Err(failed()) } else { NonNull::new(start.cast()).ok_or_else(failed) }
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: only called from `drop`, with the result of `map`; no reference into the mapping outlives its owner.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}

macro_rules! atomics {
    ($($name:ident: $atomic:ty, $bytes:literal);+) => { $(
        /// The bytes at `at` as one atomic; `None` if they are not aligned.
        #[inline(always)]
        fn $name(&self, at: usize) -> Option<&$atomic> {
            let place = self.place::<$bytes>(at)?;
            // SAFETY: `place` checked bounds and alignment; the memory lives as long as `self` and is only accessed atomically
            // (module header).
            Some(unsafe { <$atomic>::from_ptr(place.cast()) })
        }
    )+ };
}

impl Backing {
    /// Zeroed memory.
    pub(crate) fn new(bytes: u64) -> Result<Self, Error> {
        let too_much = || Error::AddressSpace { what: "memory", bytes, reason: "more than an address space".into() };
        let bytes = usize::try_from(bytes).map_err(|_| too_much())?;
        let inner = bytes.checked_next_multiple_of(FENCE).ok_or_else(too_much)?;
        let length = inner.checked_add(2 * FENCE).filter(|&n| n < isize::MAX as usize).ok_or_else(too_much)?;
        let mapped = map(length, "memory")?;
        // From here on, dropping the value unmaps the memory.
        // SAFETY: `FENCE` bytes into a mapping that is longer than that.
        let start = unsafe { mapped.add(FENCE) };
        let backing = Self { start, bytes, mapping: (mapped, length) };
        // SAFETY: the range is inside the new mapping, which no other code has a pointer to.
        let rc = unsafe { libc::mprotect(start.as_ptr().cast(), inner, libc::PROT_READ | libc::PROT_WRITE) };
        if rc != 0 {
            let reason = io::Error::last_os_error().to_string();
            return Err(Error::AddressSpace { what: "memory", bytes: bytes as u64, reason });
        }
        Ok(backing)
    }

    /// Its address in the host's address space.
    pub(crate) fn host_address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pointer to `N` bytes at `at`; `None` if they are not aligned to `N`.
    #[inline(always)]
    fn place<const N: usize>(&self, at: usize) -> Option<*mut u8> {
        assert!(at <= self.bytes && self.bytes - at >= N, "{N} bytes at {at} of {}", self.bytes);
        // SAFETY: inside the memory, as checked above.
        let place = unsafe { self.start.as_ptr().add(at) };
        (place as usize).is_multiple_of(N).then_some(place)
    }

    atomics!(atomic8: AtomicU8, 1; atomic16: AtomicU16, 2; atomic32: AtomicU32, 4; atomic64: AtomicU64, 8);

    /// The eight-byte words of the memory. Bytes after the last whole word are left out.
    #[inline(always)]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped memory is page-aligned, zeroed, at least this long, and only accessed atomically.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes / 8) }
    }

    /// Loads `N` bytes: 1, 2, 4 or 8 in one access, 16 in two.
    #[inline(always)]
    pub(crate) fn load<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut out = [0; N];
        match N {
            1 if let Some(cell) = self.atomic8(at) => out.copy_from_slice(&cell.load(Relaxed).to_ne_bytes()),
            2 if let Some(cell) = self.atomic16(at) => out.copy_from_slice(&cell.load(Relaxed).to_ne_bytes()),
            4 if let Some(cell) = self.atomic32(at) => out.copy_from_slice(&cell.load(Relaxed).to_ne_bytes()),
            8 if let Some(cell) = self.atomic64(at) => out.copy_from_slice(&cell.load(Relaxed).to_ne_bytes()),
            _ => self.read(at, &mut out),
        }
        out
    }

    /// Stores `N` bytes: 1, 2, 4 or 8 in one access, 16 in two.
    #[inline(always)]
    pub(crate) fn store<const N: usize>(&self, at: usize, value: [u8; N]) {
        match N {
            1 if let Some(cell) = self.atomic8(at) => cell.store(value[0], Relaxed),
            2 if let Some(cell) = self.atomic16(at) => cell.store(number(&value) as u16, Relaxed),
            4 if let Some(cell) = self.atomic32(at) => cell.store(number(&value) as u32, Relaxed),
            8 if let Some(cell) = self.atomic64(at) => cell.store(number(&value), Relaxed),
            _ => self.write(at, &value),
        }
    }

    /// Compare-and-swap of `N` bytes (2, 4, 8 or 16): replaces `old` by `new`, or returns the current bytes as an error. Atomic
    /// against other such calls, and against 8-byte stores unless `N` is 16.
    pub(crate) fn exchange<const N: usize>(&self, at: usize, old: [u8; N], new: [u8; N]) -> Result<(), [u8; N]> {
        fn bytes<const N: usize>(found: &[u8]) -> [u8; N] {
            std::array::from_fn(|i| found[i])
        }
        let (from, to) = (number(&old), number(&new));
        match N {
            2 if let Some(cell) = self.atomic16(at) => {
                let found = cell.compare_exchange(from as u16, to as u16, Relaxed, Relaxed);
                found.map(|_| ()).map_err(|found| bytes(&found.to_ne_bytes()))
            }
            4 if let Some(cell) = self.atomic32(at) => {
                let found = cell.compare_exchange(from as u32, to as u32, Relaxed, Relaxed);
                found.map(|_| ()).map_err(|found| bytes(&found.to_ne_bytes()))
            }
            8 if let Some(cell) = self.atomic64(at) => {
                let found = cell.compare_exchange(from, to, Relaxed, Relaxed);
                found.map(|_| ()).map_err(|found| bytes(&found.to_ne_bytes()))
            }
            _ => {
                let _one_at_a_time = WIDE.lock().unwrap_or_else(PoisonError::into_inner);
                let found = self.load(at);
                if found != old {
                    return Err(found);
                }
                self.store(at, new);
                Ok(())
            }
        }
    }

    /// Bytes from `at` to the first aligned word, at most `bytes`.
    #[inline(always)]
    fn head(&self, at: usize, bytes: usize) -> usize {
        ((self.start.as_ptr() as usize).wrapping_add(at).wrapping_neg() & 7).min(bytes)
    }

    /// The aligned words of a range that starts at a word.
    #[inline(always)]
    fn whole_words(&self, at: usize, count: usize) -> &[AtomicU64] {
        if count == 0 {
            return &[];
        }
        assert!(at <= self.bytes && (self.bytes - at) / 8 >= count, "{count} words at {at} of {}", self.bytes);
        // SAFETY: inside the memory (checked above), and only accessed atomically.
        let first = unsafe { self.start.as_ptr().add(at) };
        assert!((first as usize).is_multiple_of(8), "words at an odd address");
        // SAFETY: the `count` words from there are inside too, and aligned.
        unsafe { std::slice::from_raw_parts(first.cast(), count) }
    }

    /// Reads a range.
    #[inline]
    pub(crate) fn read(&self, at: usize, out: &mut [u8]) {
        let (head, rest) = out.split_at_mut(self.head(at, out.len()));
        for (i, byte) in head.iter_mut().enumerate() {
            [*byte] = self.load(at + i);
        }
        let at = at + head.len();
        let (words, tail) = rest.as_chunks_mut::<8>();
        let source = self.whole_words(at, words.len());
        for (to, from) in words.iter_mut().zip(source) {
            *to = from.load(Relaxed).to_ne_bytes();
        }
        let at = at + words.len() * 8;
        for (i, byte) in tail.iter_mut().enumerate() {
            [*byte] = self.load(at + i);
        }
    }

    /// Writes a range.
    #[inline]
    pub(crate) fn write(&self, at: usize, data: &[u8]) {
        let (head, rest) = data.split_at(self.head(at, data.len()));
        for (i, &byte) in head.iter().enumerate() {
            self.store(at + i, [byte]);
        }
        let at = at + head.len();
        let (words, tail) = rest.as_chunks::<8>();
        for (from, to) in words.iter().zip(self.whole_words(at, words.len())) {
            to.store(u64::from_ne_bytes(*from), Relaxed);
        }
        let at = at + words.len() * 8;
        for (i, &byte) in tail.iter().enumerate() {
            self.store(at + i, [byte]);
        }
    }
}

/// Up to eight bytes as a number, in the host's byte order.
#[inline(always)]
fn number(bytes: &[u8]) -> u64 {
    match *bytes {
        [a] => u64::from(a),
        [a, b] => u64::from(u16::from_ne_bytes([a, b])),
        [a, b, c, d] => u64::from(u32::from_ne_bytes([a, b, c, d])),
        [a, b, c, d, e, f, g, h] => u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        _ => 0,
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        let (start, bytes) = self.mapping;
        unmap(start, bytes);
    }
}

/// An inaccessible range of addresses, from which device addresses are allocated, so that they collide with no other address.
#[derive(Debug)]
pub(crate) struct Reservation {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the range has no memory; this is a pair of numbers.
unsafe impl Send for Reservation {}
// SAFETY: as above.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `most` bytes, or as much as the system grants, down to `least`.
    pub(crate) fn new(most: usize, least: usize) -> Result<Self, Error> {
        let mut bytes = most;
        loop {
            match map(bytes, "address range") {
                Ok(start) => return Ok(Self { start, bytes }),
                Err(_) if bytes / 2 >= least => bytes /= 2,
                Err(error) => return Err(error),
            }
        }
    }

    /// The range of addresses.
    pub(crate) fn range(&self) -> std::ops::Range<u64> {
        let start = self.start.as_ptr() as u64;
        start..start + self.bytes as u64
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

//! Memory footprint: the distinct bytes that a kernel touches.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use super::{Allocation, AllocationKind, Bitmap, MemorySnapshot};

/// Per allocation, the bytes that a launch read and wrote. All blocks of the launch share it.
#[derive(Debug)]
pub struct Footprint {
    view: Arc<MemorySnapshot>,
    /// For each allocation of the snapshot: read, written. Allocated at the first access; `None` if the host has no memory for
    /// it.
    touched: Vec<[OnceLock<Option<Touched>>; 2]>,
}

/// Touched bytes of an allocation.
#[derive(Debug)]
struct Touched {
    map: Bitmap,
    /// The range of offsets that contains all touched bytes. A kernel may touch little of a large allocation, so only this
    /// range is searched.
    from: AtomicU64,
    to: AtomicU64,
}

/// Bytes of the distinct 32-byte sectors that a launch reads, plus bytes of the distinct sectors that it writes, for each memory
/// that holds sectors. They approximate DRAM traffic without a model of the caches: the number is exact for caches that keep all
/// data of the running launch and none of earlier launches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBytes {
    /// Memory of the launch's device, and managed memory.
    pub device: u64,
    /// Memory of other devices.
    pub peer: u64,
    /// Pinned host memory.
    pub host: u64,
}

impl Footprint {
    /// An empty footprint.
    pub fn new(view: Arc<MemorySnapshot>) -> Self {
        let touched = view.allocations().iter().map(|_| Default::default()).collect();
        Self { view, touched }
    }

    /// Adds bytes of the allocation at `index` of the snapshot.
    #[inline]
    pub fn touch(&self, index: usize, at: u64, bytes: u64, write: bool) {
        let touched = self.touched[index][usize::from(write)]
            .get_or_init(|| Touched::new(self.view.allocations()[index].bytes()).ok());
        if let Some(touched) = touched {
            touched.add(at, bytes);
        }
    }

    /// The touched allocations.
    fn maps(&self, write: bool) -> impl Iterator<Item = (&Allocation, &Touched)> {
        let pairs = self.view.allocations().iter().zip(&self.touched);
        pairs.filter_map(move |(allocation, maps)| Some((&**allocation, maps[usize::from(write)].get()?.as_ref()?)))
    }

    /// Number of distinct bytes read.
    pub fn read_bytes(&self) -> u64 {
        self.maps(false).map(|(_, touched)| touched.bytes()).sum()
    }

    /// Number of distinct bytes written.
    pub fn written_bytes(&self) -> u64 {
        self.maps(true).map(|(_, touched)| touched.bytes()).sum()
    }

    /// Bytes that the launch moved, if it ran on this device.
    pub fn moved_bytes(&self, device: u32) -> MovedBytes {
        let mut moved = MovedBytes::default();
        for (allocation, touched) in self.maps(false).chain(self.maps(true)) {
            let place = match allocation.kind() {
                AllocationKind::PinnedHost => &mut moved.host,
                AllocationKind::Device | AllocationKind::Constant if allocation.device() != device => &mut moved.peer,
                _ => &mut moved.device,
            };
            *place += touched.sector_bytes();
        }
        moved
    }
}

impl Touched {
    fn new(bytes: u64) -> Result<Self, super::Error> {
        Ok(Self { map: Bitmap::new(bytes)?, from: AtomicU64::new(u64::MAX), to: AtomicU64::new(0) })
    }

    #[inline]
    fn add(&self, at: u64, bytes: u64) {
        self.map.add(at, bytes);
        // Most accesses do not extend the range: check first, because a locked instruction costs twenty times as much.
        if at < self.from.load(Relaxed) {
            self.from.fetch_min(at, Relaxed);
        }
        if at + bytes > self.to.load(Relaxed) {
            self.to.fetch_max(at + bytes, Relaxed);
        }
    }

    /// The words of the bitmap that have bits.
    fn words(&self) -> impl Iterator<Item = u64> {
        let (from, to) = (self.from.load(Relaxed), self.to.load(Relaxed));
        (from / 64..to.div_ceil(64)).map(|index| self.map.word(index as usize))
    }

    fn bytes(&self) -> u64 {
        self.words().map(|word| u64::from(word.count_ones())).sum()
    }

    /// A word has the bits of two sectors, because allocations begin at a sector's boundary.
    fn sector_bytes(&self) -> u64 {
        self.words().map(|word| 32 * (u64::from(word as u32 != 0) + u64::from(word >> 32 != 0))).sum()
    }
}

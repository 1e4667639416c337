//! Memory footprint: the distinct bytes that a kernel touches.

use std::sync::{Arc, OnceLock};

use super::{Bitmap, MemorySnapshot};

/// Per allocation, the bytes that a launch read and wrote. All blocks of the launch share it.
#[derive(Debug)]
pub struct Footprint {
    view: Arc<MemorySnapshot>,
    /// For each allocation of the snapshot: read, written. Allocated at the first access; `None` if the host has no memory for
    /// it.
    touched: Vec<[OnceLock<Option<Bitmap>>; 2]>,
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
        let map = self.touched[index][usize::from(write)]
            .get_or_init(|| Bitmap::new(self.view.allocations()[index].bytes()).ok());
        if let Some(map) = map {
            map.add(at, bytes);
        }
    }

    /// Number of distinct bytes read, or written.
    fn bytes(&self, write: bool) -> u64 {
        let map = |maps: &[OnceLock<Option<Bitmap>>; 2]| match maps[usize::from(write)].get() {
            Some(Some(map)) => map.len(),
            _ => 0,
        };
        self.touched.iter().map(map).sum()
    }

    /// Number of distinct bytes read.
    pub fn read_bytes(&self) -> u64 {
        self.bytes(false)
    }

    /// Number of distinct bytes written.
    pub fn written_bytes(&self) -> u64 {
        self.bytes(true)
    }
}

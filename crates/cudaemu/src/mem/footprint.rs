//! The distinct bytes that a kernel touches.

use std::sync::{Arc, OnceLock};

use super::{Bitmap, MemorySnapshot};

/// Which bytes of which allocation a launch read and wrote. Shared by all blocks of the launch.
#[derive(Debug)]
pub struct Footprint {
    view: Arc<MemorySnapshot>,
    /// For each allocation of the view: read, written. Made when first touched; `None` if the host has no memory for it.
    touched: Vec<[OnceLock<Option<Bitmap>>; 2]>,
}

impl Footprint {
    /// Nothing touched yet.
    pub fn new(view: Arc<MemorySnapshot>) -> Self {
        let touched = view.allocations().iter().map(|_| Default::default()).collect();
        Self { view, touched }
    }

    /// Adds bytes of the allocation at `index` of the view.
    #[inline]
    pub fn touch(&self, index: usize, at: u64, bytes: u64, write: bool) {
        let map = self.touched[index][usize::from(write)]
            .get_or_init(|| Bitmap::new(self.view.allocations()[index].bytes()).ok());
        if let Some(map) = map {
            map.add(at, bytes);
        }
    }

    /// Distinct bytes read, or written.
    fn bytes(&self, write: bool) -> u64 {
        let map = |maps: &[OnceLock<Option<Bitmap>>; 2]| match maps[usize::from(write)].get() {
            Some(Some(map)) => map.len(),
            _ => 0,
        };
        self.touched.iter().map(map).sum()
    }

    /// Distinct bytes read.
    pub fn read_bytes(&self) -> u64 {
        self.bytes(false)
    }

    /// Distinct bytes written.
    pub fn written_bytes(&self) -> u64 {
        self.bytes(true)
    }
}

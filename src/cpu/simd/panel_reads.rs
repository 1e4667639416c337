//! How micro-kernels read panels from memory. A product of one column waits for memory, and what a core needs to keep enough loads
//! in flight differs between processors of one brand: [`crate::cpu::calibration`] measures it. Products of more columns prefetch as
//! far ahead, because the instructions between two loads of a panel leave too few loads in the window of a core.

use super::panel_format::PanelFormat;
use crate::tensor::DType;
use std::sync::atomic::{AtomicU32, Ordering};

/// Types whose kernels read panels in the same way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PanelReadClass {
    /// F32, F16 and BF16: one element of each row after the other.
    Floats,
    /// Blocks of 32 elements.
    Blocks,
    /// Superblocks with sub-blocks of 32 elements.
    Superblocks,
    /// Superblocks with sub-blocks of 16 elements: codes come from several addresses at once.
    SuperblocksOf16,
}

impl PanelReadClass {
    /// All classes, each with a type that stands for it in measurements.
    pub(crate) const ALL: [(PanelReadClass, DType); 4] = [
        (PanelReadClass::Floats, DType::F16),
        (PanelReadClass::Blocks, DType::Q4_0),
        (PanelReadClass::Superblocks, DType::Q4_K),
        (PanelReadClass::SuperblocksOf16, DType::Q6_K),
    ];

    /// The class of a block format.
    pub(super) const fn of<F: PanelFormat>() -> PanelReadClass {
        match (F::DTYPE.block_len(), F::SUB) {
            (32, _) => PanelReadClass::Blocks,
            (_, 32) => PanelReadClass::Superblocks,
            _ => PanelReadClass::SuperblocksOf16,
        }
    }
}

/// How panels are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PanelReads {
    /// Bytes that software prefetches ahead of the loads, a multiple of a cache line; 0 for none.
    pub(crate) prefetch: u32,
    /// Whether a call with one column reads its two panels one after the other, not side by side.
    pub(crate) one_panel: bool,
}

/// By class: the prefetch distance, with `one_panel` in its lowest bit.
static SETTINGS: [AtomicU32; PanelReadClass::ALL.len()] = [const { AtomicU32::new(UNSET) }; PanelReadClass::ALL.len()];

/// No setting was chosen.
const UNSET: u32 = u32::MAX;

impl PanelReads {
    /// What is used where nothing was measured. AMD's hardware prefetchers suffice for ascending addresses, and Zen 4 delays
    /// loads after software prefetches. Sub-blocks of 16 read from several addresses at once, which no prefetcher follows.
    pub(crate) fn default_of(class: PanelReadClass) -> PanelReads {
        #[cfg(target_arch = "x86_64")]
        let hardware_suffices = super::x86::is_amd();
        #[cfg(not(target_arch = "x86_64"))]
        let hardware_suffices = false;
        let none = hardware_suffices && class != PanelReadClass::SuperblocksOf16;
        PanelReads { prefetch: if none { 0 } else { 4096 }, one_panel: false }
    }

    /// The setting of a class.
    #[inline]
    pub(crate) fn of(class: PanelReadClass) -> PanelReads {
        match SETTINGS[class as usize].load(Ordering::Relaxed) {
            UNSET => PanelReads::default_of(class),
            bits => PanelReads { prefetch: bits & !1, one_panel: bits & 1 == 1 },
        }
    }

    /// Uses this setting for a class from now on. Results do not depend on it.
    pub(crate) fn set(self, class: PanelReadClass) {
        SETTINGS[class as usize].store(self.prefetch & !63 | u32::from(self.one_panel), Ordering::Relaxed);
    }
}

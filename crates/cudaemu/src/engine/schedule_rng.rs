//! Seeded random choice among the execution orders that CUDA allows.

/// A seeded sequence of choices (SplitMix64).
#[derive(Clone, Debug)]
pub struct ScheduleRng(u64);

impl ScheduleRng {
    /// The sequence for a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `count`, which must be at least 1.
    pub fn choose(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        (bits % count.max(1) as u64) as usize
    }
}

//! Passes over shared memory: it has 32 banks of 4 bytes, each of which serves one word per pass.

use super::super::{Addresses, LANES};
use crate::exec_context::MemoryCounts;
use crate::exec_context::lanes;

/// Counts the passes of an access of `N` bytes per lane, and how many of them are bank conflicts. Lanes that access the same word
/// share it. Accesses of 8 and 16 bytes are served by half and quarter warps. (CUDA C++ Programming Guide, "Shared memory".)
/// So `ldmatrix`, which reads 16 bytes in each of 8 lanes per matrix, takes a pass per matrix.
pub(super) fn count<const N: usize>(at: &Addresses, mask: u32, counts: &mut MemoryCounts) {
    let portion = LANES / (N / 4).max(1);
    let all = u32::MAX >> (LANES - portion);
    for part in 0..LANES / portion {
        let passes = passes::<N>(at, mask & all << (part * portion));
        counts.shared_passes += passes;
        counts.bank_conflicts += passes.saturating_sub(1);
    }
}

/// Maximum number of distinct words in one bank among these lanes.
fn passes<const N: usize>(at: &Addresses, mask: u32) -> u64 {
    // Linked lists of the words in each bank: `chain[i]` is the previous word in the bank of word `i`.
    let mut words = [0; LANES];
    let mut chain = [usize::MAX; LANES];
    let mut last = [usize::MAX; LANES];
    let mut deep = [0; LANES];
    let mut count = 0;
    let mut most = 0;
    for lane in lanes(mask) {
        for part in 0..(N / 4).max(1) {
            let word = at[lane] / 4 + part as u64;
            let bank = (word % LANES as u64) as usize;
            let mut met = last[bank];
            while met != usize::MAX && words[met] != word {
                met = chain[met];
            }
            if met == usize::MAX {
                words[count] = word;
                chain[count] = last[bank];
                last[bank] = count;
                deep[bank] += 1;
                most = most.max(deep[bank]);
                count += 1;
            }
        }
    }
    most
}

//! Bank conflicts: shared memory has 32 banks of 4 bytes, each of which serves one word per pass.

use super::super::{Addresses, LANES};
use crate::exec_context::lanes;

/// Extra passes of an access of `N` bytes per lane. Lanes that read the same word share it. Accesses of 8 and 16 bytes are
/// served by half and quarter warps. (CUDA C++ Programming Guide, "Shared memory".)
pub(super) fn conflicts<const N: usize>(at: &Addresses, mask: u32) -> u64 {
    let portion = LANES / (N / 4).max(1);
    let all = if portion == LANES { u32::MAX } else { (1 << portion) - 1 };
    (0..LANES / portion).map(|part| passes::<N>(at, mask & all << (part * portion)).saturating_sub(1)).sum()
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

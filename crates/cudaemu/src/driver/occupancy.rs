//! Occupancy: how many blocks are resident on a multiprocessor (CUDA C++ Programming Guide, "Hardware Multithreading").

use super::function::{BlockResources, registers_per_warp};
use crate::config::spec::{REGISTERS_PER_SM, Spec, WARP_SIZE};
use crate::error::{Error, Result};

/// Granularity of shared memory allocation, in bytes.
const SHARED_UNIT: u32 = 128;

/// Blocks of this many threads that a multiprocessor holds at once.
pub fn blocks_per_sm(needs: BlockResources, threads: u32, dynamic_shared: u64, spec: &Spec) -> Result<u32> {
    if threads == 0 {
        return Err(Error::InvalidValue);
    }
    if threads > needs.max_threads {
        return Ok(0);
    }
    let warps = threads.div_ceil(WARP_SIZE);
    let by_warps = spec.threads_per_sm / WARP_SIZE / warps;
    let by_registers = REGISTERS_PER_SM / registers_per_warp(needs.registers) / warps;
    let shared = u64::from(needs.static_shared).saturating_add(dynamic_shared);
    if shared > u64::from(spec.shared_optin) {
        return Ok(0);
    }
    let shared = (shared as u32 + spec.shared_reserved).next_multiple_of(SHARED_UNIT);
    let by_shared = spec.shared_per_sm.checked_div(shared).unwrap_or(u32::MAX);
    Ok(by_warps.min(by_registers).min(by_shared).min(spec.blocks_per_sm))
}

/// `cuOccupancyMaxPotentialBlockSize`: the block size with the most active threads, the larger of two equals, and the number of
/// blocks that fill the device. `dynamic_shared` returns the bytes for a block size; `most` limits the block size (0: no
/// limit).
pub fn best_block(
    needs: BlockResources,
    dynamic_shared: impl Fn(u32) -> u64,
    most: u32,
    spec: &Spec,
) -> Result<(u32, u32)> {
    let most = if most == 0 { needs.max_threads } else { most.min(needs.max_threads) };
    let mut best = (0, 0, 0);
    let mut threads = most;
    while threads > 0 {
        let blocks = blocks_per_sm(needs, threads, dynamic_shared(threads), spec)?;
        if blocks * threads > best.0 {
            best = (blocks * threads, blocks, threads);
        }
        threads = if threads % WARP_SIZE == 0 { threads - WARP_SIZE } else { threads - threads % WARP_SIZE };
    }
    Ok((best.1 * spec.sms, best.2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_limits_the_blocks() {
        let a100 = Spec::of((8, 0)).unwrap();
        let h100 = Spec::of((9, 0)).unwrap();
        let t4 = Spec::of((7, 5)).unwrap();
        let needs = |registers, static_shared| BlockResources { registers, static_shared, max_threads: 1024 };
        for (needs, threads, dynamic, spec, blocks) in [
            (needs(16, 0), 256, 0, &a100, 8),       // threads
            (needs(16, 0), 32, 0, &a100, 32),       // blocks
            (needs(16, 0), 32, 0, &t4, 16),         // blocks
            (needs(64, 0), 256, 0, &a100, 4),       // registers
            (needs(255, 0), 256, 0, &a100, 1),      // registers
            (needs(16, 16384), 128, 0, &a100, 9),   // shared: (16 + 1) K of 164 K
            (needs(16, 0), 128, 166_912, &a100, 1), // maximum of one block
            (needs(16, 0), 128, 166_913, &a100, 0), // above the maximum
            (needs(16, 1), 128, u64::MAX, &a100, 0),
            (needs(16, 0), 128, 232_448, &h100, 1),
            (needs(16, 0), 1024, 0, &t4, 1),
            (BlockResources { max_threads: 128, ..needs(16, 0) }, 256, 0, &a100, 0),
        ] {
            assert_eq!(blocks_per_sm(needs, threads, dynamic, spec), Ok(blocks), "{needs:?} {threads} {dynamic}");
        }
        assert_eq!(blocks_per_sm(needs(16, 0), 0, 0, &a100), Err(Error::InvalidValue));
    }

    #[test]
    fn the_best_block() {
        let a100 = Spec::of((8, 0)).unwrap();
        let needs = BlockResources { registers: 32, static_shared: 0, max_threads: 1024 };
        assert_eq!(best_block(needs, |_| 0, 0, &a100), Ok((216, 1024)));
        assert_eq!(best_block(needs, |_| 0, 200, &a100), Ok((108 * 16, 128)));
        assert_eq!(best_block(needs, |threads| u64::from(threads) * 1024, 0, &a100).map(|(_, b)| b), Ok(160));
    }
}

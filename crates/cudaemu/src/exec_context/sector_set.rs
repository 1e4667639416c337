//! The distinct sectors of global memory that a block reads, for counts of what L2 must deliver.

/// Bits of a sector's number: addresses have 48 bits, sectors 32 bytes.
const SECTOR_BITS: u32 = 43;

/// A set of sectors that is emptied in constant time, once for each block. Open addressing; an entry is a sector with the number of
/// the block in the upper bits, and entries of other blocks are free.
#[derive(Debug, Default)]
pub struct SectorSet {
    entries: Vec<u64>,
    /// Number of the block, from 1 on: zeroed entries are free.
    block: u64,
    used: usize,
}

impl SectorSet {
    /// Empties the set.
    pub fn clear(&mut self) {
        self.block += 1;
        self.used = 0;
        if self.block >> (u64::BITS - SECTOR_BITS) != 0 {
            self.entries.fill(0);
            self.block = 1;
        }
    }

    /// Adds the sector of an address. Returns whether it is new.
    #[inline]
    pub fn insert(&mut self, address: u64) -> bool {
        if 2 * self.used >= self.entries.len() {
            self.grow();
        }
        let new = self.put((self.block << SECTOR_BITS) | (address >> 5) & ((1 << SECTOR_BITS) - 1));
        self.used += usize::from(new);
        new
    }

    fn put(&mut self, entry: u64) -> bool {
        // Fibonacci hashing; the number of entries is a power of two.
        let mask = self.entries.len() - 1;
        let mut at = (entry.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & mask;
        while self.entries[at] >> SECTOR_BITS == self.block {
            if self.entries[at] == entry {
                return false;
            }
            at = (at + 1) & mask;
        }
        self.entries[at] = entry;
        true
    }

    fn grow(&mut self) {
        self.block = self.block.max(1);
        let doubled = vec![0; (2 * self.entries.len()).max(1024)];
        let old = std::mem::replace(&mut self.entries, doubled);
        let block = self.block;
        for entry in old.into_iter().filter(|entry| entry >> SECTOR_BITS == block) {
            self.put(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SectorSet;

    #[test]
    fn each_sector_of_a_block_is_new_once() {
        let mut set = SectorSet::default();
        for block in 0..3 {
            // Growth keeps the sectors; sectors that are far apart differ.
            for sector in 0..5000 {
                let address = ((sector % 2) << 47) + 32 * sector;
                assert!(set.insert(address) && !set.insert(address + 31), "block {block}, sector {sector}");
            }
            assert!((0..5000).all(|sector| !set.insert(((sector % 2) << 47) + 32 * sector)), "block {block}");
            set.clear();
        }
    }

    #[test]
    fn numbers_of_blocks_wrap() {
        let mut set = SectorSet::default();
        set.insert(0);
        set.block = (1 << 21) - 1;
        assert!(set.insert(64) && !set.insert(64));
        set.clear();
        assert!(set.block == 1 && set.insert(64) && set.insert(0));
    }
}

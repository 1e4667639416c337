//! Traffic counters of a kernel: deterministic measures of performance instead of times.

/// Accesses to one memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Warp instructions that accessed the memory.
    pub requests: u64,
    /// Bytes that the lanes requested.
    pub bytes: u64,
    /// Distinct 32-byte sectors per instruction, summed (global memory only).
    pub sectors: u64,
}

/// Memory traffic of a kernel or a part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Reads of global memory (atomics count as read and write).
    pub global_read: Traffic,
    /// Distinct 32-byte sectors of global memory that a block reads, summed over blocks: what L2 delivers if L1 keeps all that
    /// a block reads.
    pub block_sectors: u64,
    /// Writes of global memory.
    pub global_written: Traffic,
    /// Reads of shared memory.
    pub shared_read: Traffic,
    /// Writes of shared memory.
    pub shared_written: Traffic,
    /// Passes over shared memory, each of which serves at most 128 bytes; bank conflicts included.
    pub shared_passes: u64,
    /// Bank conflicts: the passes beyond those that the access needs without conflicts (4 for 16 bytes per lane).
    pub bank_conflicts: u64,
    /// Reads of local memory.
    pub local_read: Traffic,
    /// Writes of local memory.
    pub local_written: Traffic,
}

impl Traffic {
    /// Counts one warp instruction.
    #[inline(always)]
    pub fn count(&mut self, bytes: u64, sectors: u64) {
        self.requests += 1;
        self.bytes += bytes;
        self.sectors += sectors;
    }

    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.sectors += other.sectors;
    }
}

impl MemoryCounts {
    /// Adds the traffic of another part of the kernel.
    pub fn add(&mut self, other: &Self) {
        self.global_read.add(&other.global_read);
        self.block_sectors += other.block_sectors;
        self.global_written.add(&other.global_written);
        self.shared_read.add(&other.shared_read);
        self.shared_written.add(&other.shared_written);
        self.local_read.add(&other.local_read);
        self.local_written.add(&other.local_written);
        self.shared_passes += other.shared_passes;
        self.bank_conflicts += other.bank_conflicts;
    }
}

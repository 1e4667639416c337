//! What a kernel did, counted: deterministic numbers in place of times.

/// Accesses to one memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Instructions of a warp that accessed it.
    pub requests: u64,
    /// Bytes that their lanes asked for.
    pub bytes: u64,
    /// 32-byte sectors that they touched, each once an instruction (global memory only).
    pub sectors: u64,
}

/// Memory traffic of a kernel, or of a part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounts {
    /// Global memory, read (atomics count as read and written).
    pub global_read: Traffic,
    /// Global memory, written.
    pub global_written: Traffic,
    /// Shared memory, read.
    pub shared_read: Traffic,
    /// Shared memory, written.
    pub shared_written: Traffic,
    /// Extra passes over shared memory because lanes met in a bank: for each access, the most distinct words in one bank, less one.
    pub bank_conflicts: u64,
    /// Local memory, read.
    pub local_read: Traffic,
    /// Local memory, written.
    pub local_written: Traffic,
}

impl Traffic {
    /// Counts one instruction.
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
    /// Adds what another part of the kernel did.
    pub fn add(&mut self, other: &Self) {
        self.global_read.add(&other.global_read);
        self.global_written.add(&other.global_written);
        self.shared_read.add(&other.shared_read);
        self.shared_written.add(&other.shared_written);
        self.local_read.add(&other.local_read);
        self.local_written.add(&other.local_written);
        self.bank_conflicts += other.bank_conflicts;
    }
}

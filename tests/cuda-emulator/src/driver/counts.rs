//! Counts of all launches so far, and how they are shown.

use std::collections::BTreeMap;

use crate::exec::Counts;

/// Sums per kernel name.
#[derive(Debug, Default)]
pub struct Totals {
    kernels: BTreeMap<String, (u64, Counts)>,
    host_bytes: u64,
}

impl Totals {
    /// Adds what a piece of work counted.
    pub fn add(&mut self, counts: Vec<(String, Counts)>, host_bytes: u64) {
        self.host_bytes += host_bytes;
        for (name, counts) in counts {
            let (launches, sum) = self.kernels.entry(name).or_default();
            *launches += 1;
            sum.add(&counts);
        }
    }
}

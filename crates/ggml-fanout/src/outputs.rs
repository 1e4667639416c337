//! Copies of a graph's outputs in the host's memory. A host reads them after the run without a way to learn of an error, so
//! they are fetched before the run counts as successful.

use std::ops::Range;

/// Copies of ranges of a buffer.
#[derive(Debug, Default)]
pub(crate) struct Outputs(Vec<(Range<u64>, Vec<u8>)>);

impl Outputs {
    /// Keeps the bytes at a position.
    pub(crate) fn keep(&mut self, position: u64, bytes: Vec<u8>) {
        self.0.push((position..position + bytes.len() as u64, bytes));
    }

    /// Reads bytes that a copy has; false if none has all of them.
    pub(crate) fn read(&self, position: u64, bytes: &mut [u8]) -> bool {
        let end = position + bytes.len() as u64;
        let Some((range, copy)) = self.0.iter().find(|(range, _)| range.start <= position && end <= range.end) else {
            return false;
        };
        let start = (position - range.start) as usize;
        bytes.copy_from_slice(&copy[start..start + bytes.len()]);
        true
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_serve_reads_inside_them() {
        let mut outputs = Outputs::default();
        outputs.keep(100, vec![1, 2, 3, 4]);
        let mut bytes = [0; 2];
        assert!(outputs.read(101, &mut bytes) && bytes == [2, 3]);
        assert!(!outputs.read(99, &mut bytes) && !outputs.read(103, &mut bytes), "only in part");
        outputs.clear();
        assert!(!outputs.read(101, &mut bytes));
    }
}

//! Of the library's ops: the collectives, as far as groups use them.

/// The codes of collectives.
#[derive(Clone, Copy)]
pub enum OpCode {
    AllReduce,
    ReduceScatter,
    AllGather,
}

impl OpCode {
    pub(crate) fn to_wire(self) -> u32 {
        self as u32
    }

    pub(crate) fn from_extension_wire(code: u32) -> Option<OpCode> {
        [OpCode::AllReduce, OpCode::ReduceScatter, OpCode::AllGather].get(code as usize).copied()
    }
}

pub mod collective {
    use std::ops::Range;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum CollectiveKind {
        AllReduce,
        ReduceScatter { axis: u8 },
        AllGather { axis: u8 },
    }

    /// The range of `n` elements that rank `rank` of `ranks` has after a REDUCE_SCATTER.
    pub fn piece(n: usize, rank: usize, ranks: usize) -> Range<usize> {
        rank * n / ranks..(rank + 1) * n / ranks
    }
}

//! Op numbers of the versions that the server serves. Versions that add an op shift the numbers behind it, so a record is decoded
//! by the numbering of its sender.

use super::tensor::{TENSOR_RECORD, TensorRecord};
use crate::ops::OpCode;

/// The op numbers of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpNumbering {
    /// Of 8.0.1, in which [`OpCode`] is numbered.
    V8_0_1,
    /// Of 7.0 and 8.0.0, which lack TOP_K_MASK: every op behind it has the number before its own.
    V7_0,
}

/// Number of sources from which a node with the number of TOP_K_MASK is one: UNARY, whose number it is up to 8.0.0, has a single
/// source.
const TOP_K_MASK_SOURCES: usize = 2;

/// Number of sources of OPT_STEP_SGD. GLU, whose number it is up to 8.0.0, has at most two.
const OPT_STEP_SGD_SOURCES: usize = 3;

/// A number that no version gives to an op. Decoded records with an unknown op carry it.
const UNKNOWN_OP: u32 = u32::MAX;

impl OpNumbering {
    /// The numbering of [`OpCode`].
    pub(crate) const NEWEST: OpNumbering = OpNumbering::V8_0_1;

    /// Decodes a record, with the op number that [`OpCode::from_wire`] expects.
    pub(super) fn decode(self, bytes: &[u8; TENSOR_RECORD]) -> TensorRecord {
        let mut record = TensorRecord::decode(bytes);
        if self == OpNumbering::V7_0 && record.op >= OpCode::TopKMask.to_wire() {
            // The last op of the older numbering is one below the newest; numbers behind it belong to no op.
            record.op = record.op.checked_add(1).unwrap_or(UNKNOWN_OP);
        }
        record
    }

    /// Whether an 8.0 client counts as 8.0.0 or 8.0.1: the HELLO of both is the same, so the first record decides that can only
    /// be of one of them. `None` if no record decides.
    pub(crate) fn detect(records: impl Iterator<Item = TensorRecord>) -> Option<OpNumbering> {
        let unary_before = OpCode::TopKMask.to_wire();
        let glu_before = OpCode::Glu.to_wire() - 1;
        records.into_iter().find_map(|record| {
            let sources = record.src.iter().filter(|&&id| id != 0).count();
            match record.op {
                op if op == unary_before && sources < TOP_K_MASK_SOURCES => Some(OpNumbering::V7_0),
                op if op == glu_before && sources < OPT_STEP_SGD_SOURCES => Some(OpNumbering::V7_0),
                op if op == OpCode::Unary.to_wire() || op == OpCode::Glu.to_wire() || op == unary_before => {
                    Some(OpNumbering::V8_0_1)
                }
                _ => None,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(op: u32, sources: usize) -> TensorRecord {
        let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
        record.op = op;
        record.src[..sources].fill(7);
        record
    }

    #[test]
    fn the_first_deciding_record_tells_8_0_0_from_8_0_1() {
        use OpNumbering::{V7_0, V8_0_1};
        for (records, want) in [
            (&[][..], None),
            (&[(2, 2), (29, 2), (0, 0)], None),
            (&[(91, 1)], Some(V7_0)),
            (&[(91, 2)], Some(V8_0_1)),
            (&[(91, 5)], Some(V8_0_1)),
            (&[(92, 1)], Some(V8_0_1)),
            (&[(100, 1)], Some(V7_0)),
            (&[(100, 2)], Some(V7_0)),
            (&[(100, 3)], None),
            (&[(101, 1)], Some(V8_0_1)),
            (&[(29, 2), (101, 2), (91, 1)], Some(V8_0_1)),
            (&[(29, 2), (91, 1), (101, 2)], Some(V7_0)),
        ] {
            let got = OpNumbering::detect(records.iter().map(|&(op, sources)| record(op, sources)));
            assert_eq!(got, want, "{records:?}");
        }
    }

    #[test]
    fn older_numbers_map_to_the_newest() {
        for (number, want) in [
            (0, Some(OpCode::None)),
            (29, Some(OpCode::MulMat)),
            (90, Some(OpCode::Dsv4HcPost)),
            (91, Some(OpCode::Unary)),
            (100, Some(OpCode::Glu)),
            (101, None),
            (u32::MAX, None),
        ] {
            let decoded = OpNumbering::V7_0.decode(&record(number, 0).encode());
            assert_eq!(OpCode::from_wire(decoded.op), want, "{number}");
            assert_eq!(OpNumbering::V8_0_1.decode(&record(number, 0).encode()).op, number);
        }
    }
}

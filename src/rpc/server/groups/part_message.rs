//! The head of a PUBLISH_PART, from and to the part of a rank.

use crate::device::CollectivePart;
use crate::ops::OpCode;
use crate::ops::collective::CollectiveKind;
use crate::rpc::wire::ext::{ExtRequest, PublishPartHead, TensorShape};
use crate::tensor::{DType, TensorDesc};

/// The head of a message with `len` bytes of a part, whose dimensions fit the wire format, since the graph did.
pub(super) fn encode_head(rank: usize, round: u64, part: &CollectivePart, len: usize) -> ExtRequest<'static> {
    let (op, axis) = match part.kind() {
        CollectiveKind::AllReduce => (OpCode::AllReduce, 0),
        CollectiveKind::ReduceScatter { axis } => (OpCode::ReduceScatter, u32::from(axis)),
        CollectiveKind::AllGather { axis } => (OpCode::AllGather, u32::from(axis)),
    };
    let (dtype, ne) = part.whole();
    ExtRequest::PublishPartHead(PublishPartHead {
        rank: rank as u32,
        round,
        op: op.to_wire(),
        axis,
        whole: Some(TensorShape { dtype: dtype.to_wire(), ne: ne.map(|n| n as u32) }),
        extent: part.extent() as u32,
        len: len as u64,
    })
}

/// The part that a head describes; `None` if there is no such collective.
pub(in crate::rpc::server) fn decode_part(head: &PublishPartHead) -> Option<CollectivePart> {
    let kind = match OpCode::from_extension_wire(head.op)? {
        OpCode::AllReduce if head.axis == 0 => CollectiveKind::AllReduce,
        OpCode::ReduceScatter => CollectiveKind::ReduceScatter { axis: head.axis.try_into().ok()? },
        OpCode::AllGather => CollectiveKind::AllGather { axis: head.axis.try_into().ok()? },
        _ => return None,
    };
    let shape = head.whole?;
    let whole = TensorDesc::contiguous(DType::from_wire(shape.dtype)?, shape.ne.map(|n| n as usize)).ok()?;
    CollectivePart::from_message(kind, &whole, head.extent as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_describes_its_part() {
        let desc = |dtype, ne| TensorDesc::contiguous(dtype, ne).unwrap();
        let gather = |axis| CollectiveKind::AllGather { axis };
        for (kind, part, dst) in [
            (CollectiveKind::AllReduce, desc(DType::F32, [7, 5, 3, 2]), desc(DType::F32, [7, 5, 3, 2])),
            (gather(0), desc(DType::F16, [3, 5, 1, 1]), desc(DType::F16, [8, 5, 1, 1])),
            (gather(1), desc(DType::F32, [8, 1, 2, 1]), desc(DType::F32, [8, 9, 2, 1])),
            (CollectiveKind::AllReduce, desc(DType::BF16, [7, 5, 3, 2]), desc(DType::F32, [7, 5, 3, 2])),
            (
                CollectiveKind::ReduceScatter { axis: 1 },
                desc(DType::BF16, [7, 5, 1, 1]),
                desc(DType::F32, [7, 2, 1, 1]),
            ),
            (gather(3), desc(DType::I32, [8, 1, 2, 4]), desc(DType::I32, [8, 1, 2, 4])),
        ] {
            let part = CollectivePart::new(kind, &part, &dst);
            let ExtRequest::PublishPartHead(head) = encode_head(5, 9, &part, part.bytes()) else { unreachable!() };
            assert_eq!((head.rank, head.round, head.len), (5, 9, part.bytes() as u64));
            assert_eq!(decode_part(&head), Some(part));
        }
    }
}

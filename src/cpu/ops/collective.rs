//! ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER: each rank publishes its part, and combines the parts of all ranks once they are there.
//!
//! A node is two steps of the program: the leader copies the part into the group's exchange memory; then, after a wait in which
//! the run may end (see `CpuProgram::run`), the members write the destination. The second step reads no source, so it may
//! overwrite the part.

use super::{CHUNK, Kernel, RowPieces, unsupported, unsupported_types};
use crate::cpu::pool::KernelContext;
use crate::device::{CollectivePart, DeviceError, GroupMember, Unsupported};
use crate::ops::NodeView;
use crate::ops::collective::{Collective, CollectiveKind, piece};
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;

pub(super) fn select(op: Collective, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let part = node.srcs.get(0).ok_or_else(|| unsupported_types(node))?;
    let too_large = |_| unsupported(node.op.code(), "a tensor larger than the address space");
    let (part_bytes, dst_bytes) = (flat_bytes(part).map_err(too_large)?, flat_bytes(node.dst).map_err(too_large)?);
    let publish = Kernel::new(part.dense_bytes() / 16, move |ctx| publish(ctx, op, &part_bytes)).with_parts(1);
    let combine = match op.kind {
        CollectiveKind::AllReduce | CollectiveKind::ReduceScatter { .. } => {
            let floats = TensorDesc::contiguous(DType::F32, [node.dst.elements(), 1, 1, 1]).map_err(too_large)?;
            // Of REDUCE_SCATTER: the extent of the part along the axis, and the elements per step along it.
            let (extent, stride) = match op.kind {
                CollectiveKind::ReduceScatter { axis } => {
                    let extent = part.ne().get(usize::from(axis)).copied().unwrap_or(1);
                    (extent, part.elements() / extent.max(1))
                }
                _ => (0, 0),
            };
            let add = if part.dtype() == DType::BF16 { add_bf16 } else { add_f32 };
            Kernel::new(floats.elements(), move |ctx| {
                reduce(ctx, op, &floats, add, |rank, ranks| piece(extent, rank, ranks).start * stride);
            })
        }
        CollectiveKind::AllGather { axis } => {
            let inner =
                node.dst.ne().iter().take(usize::from(axis)).product::<usize>() * node.dst.dtype().block_bytes();
            let extent = node.dst.ne().get(usize::from(axis)).copied().unwrap_or(1);
            let row = inner.saturating_mul(extent);
            Kernel::new(node.dst.dense_bytes() / 16, move |ctx| all_gather(ctx, op, &dst_bytes, row))
        }
    };
    Ok(combine.after_publishing(op.group, publish))
}

/// The bytes of a contiguous tensor as one row.
fn flat_bytes(t: &TensorDesc) -> Result<TensorDesc, crate::tensor::DescError> {
    TensorDesc::contiguous(DType::I8, [t.dense_bytes(), 1, 1, 1])
}

/// Copies the part into the exchange memory.
fn publish(ctx: &mut KernelContext<'_>, op: Collective, bytes: &TensorDesc) {
    let src = ctx.src(0);
    let part = CollectivePart::new(op.kind, src.desc(), ctx.dst().desc());
    let copy = |out: &mut [u8]| src.with_desc(bytes).load_raw::<u8>([0; 4], out);
    if let Err(error) = ctx.member_of(op.group).and_then(|member| member.publish(&part, copy)) {
        ctx.fail(error);
    }
}

/// Adds elements of a part from `first` on to the sums, or sets them for the first rank. `None` if the part is too short.
type AddPart = fn(part: &[u8], first: usize, sum: &mut [f32], is_first: bool) -> Option<()>;

fn add_f32(part: &[u8], first: usize, sum: &mut [f32], is_first: bool) -> Option<()> {
    let floats = bytemuck::try_cast_slice::<u8, f32>(part).ok()?.get(first..first + sum.len())?;
    if is_first {
        sum.copy_from_slice(floats);
    } else {
        sum.iter_mut().zip(floats).for_each(|(sum, x)| *sum += x);
    }
    Some(())
}

fn add_bf16(part: &[u8], first: usize, sum: &mut [f32], is_first: bool) -> Option<()> {
    let halves = bytemuck::try_cast_slice::<u8, u16>(part).ok()?.get(first..first + sum.len())?;
    let float = |half: u16| f32::from_bits(u32::from(half) << 16);
    if is_first {
        sum.iter_mut().zip(halves).for_each(|(sum, &half)| *sum = float(half));
    } else {
        sum.iter_mut().zip(halves).for_each(|(sum, &half)| *sum += float(half));
    }
    Some(())
}

/// Writes the sums of the destination's elements, whose first one is element `first_of(rank, ranks)` of the part. The work
/// is cut into the same runs of elements on all ranks and for any number of workers: so each element is computed by the same
/// instructions, and even the bits of a NaN are equal.
fn reduce(
    ctx: &mut KernelContext<'_>,
    op: Collective,
    floats: &TensorDesc,
    add: AddPart,
    first_of: impl Fn(usize, usize) -> usize,
) {
    let member = match ctx.member_of(op.group) {
        Ok(member) => member,
        Err(error) => return ctx.fail(error),
    };
    let first = first_of(member.rank(), member.ranks());
    let (dst, mut sum) = (ctx.dst(), [0.0; CHUNK]);
    let dst = dst.with_desc(floats);
    RowPieces::new(floats).share(ctx, |i, n| {
        let sum = &mut sum[..n];
        match sum_parts(member, first + i[0], sum, add) {
            Ok(()) => dst.store(i, sum),
            Err(error) => ctx.fail(error),
        }
    });
}

/// The sum over the ranks, in their order, of `sum.len()` elements from `first` on.
fn sum_parts(member: &GroupMember, first: usize, sum: &mut [f32], add: AddPart) -> Result<(), DeviceError> {
    for rank in 0..member.ranks() {
        let part = member.part(rank)?;
        let too_short = || DeviceError::Bug(format!("the part of rank {rank} is too short"));
        add(&part, first, sum, rank == 0).ok_or_else(too_short)?;
    }
    Ok(())
}

/// Copies the parts. The destination is a sequence of rows of `row` bytes: each has a block of every rank.
fn all_gather(ctx: &mut KernelContext<'_>, op: Collective, bytes: &TensorDesc, row: usize) {
    let member = match ctx.member_of(op.group) {
        Ok(member) => member,
        Err(error) => return ctx.fail(error),
    };
    let dst = ctx.dst();
    let dst = dst.with_desc(bytes);
    let rows = bytes.elements() / row.max(1);
    RowPieces::with_len(bytes, 16 * CHUNK).share(ctx, |i, n| {
        let copy = |at: usize, block: &[u8]| dst.store_raw([at, 0, 0, 0], block);
        if let Err(error) = gather_parts(member, rows, row, i[0]..i[0] + n, copy) {
            ctx.fail(error);
        }
    });
}

/// Calls `copy` with the blocks, or parts of blocks, that lie in a range of the destination's bytes.
fn gather_parts(
    member: &GroupMember,
    rows: usize,
    row: usize,
    range: Range<usize>,
    copy: impl Fn(usize, &[u8]),
) -> Result<(), DeviceError> {
    // Where the rank's block begins in each row.
    let mut begin = 0;
    for rank in 0..member.ranks() {
        let part = member.part(rank)?;
        let block = part.len() / rows.max(1);
        for (r, bytes) in part.chunks_exact(block.max(1)).enumerate().skip(range.start / row.max(1)) {
            let at = r * row + begin;
            if at >= range.end {
                break;
            }
            let (from, to) = (at.max(range.start), (at + block).min(range.end));
            if let Some(bytes) = from.checked_sub(at).zip(to.checked_sub(at)).and_then(|(a, b)| bytes.get(a..b)) {
                copy(from, bytes);
            }
        }
        begin += block;
    }
    Ok(())
}

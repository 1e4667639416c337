//! Nodes for the attention of several sequences over one KV cache.
//!
//! Every device of the model has two vectors beside its part of the KV cache: for each cell the tag and the position of the token
//! that wrote it. A batch updates them with two numbers per token, and the device makes the mask from them, so that the client sends
//! the same few bytes per token however long the sequences are.
//!
//! A token sees a cell that has its own tag and no later position. For whole numbers, `h = (cell tag - token tag)^2 +
//! max(cell position - token position, 0)` is 0 for these and at least 1 for all others, so that `-1e30 h` is the mask: as F16 it is 0 or
//! minus infinity, and in F32 the exponential of a score that it is added to is 0. With a sliding window of w positions,
//! `max(token position - cell position - (w - 1), 0)` is added to `h`.

use crate::graph::{BuildError, TensorId};
use crate::ops::OutputSpec;
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::rows::Rows;
use crate::ops::unary::{Unary, UnaryKind};
use crate::sched::TaskBuilder;
use crate::tensor::{DType, TensorDesc};
use std::num::NonZeroU32;

/// The mask for `h = 1`. As tags are below 2^24, `h` is below 2^49, so that no product with it overflows F32.
const HIDDEN: f32 = -1e30 / (1u64 << 24) as f32;

/// The sequence and the position of the token that wrote each cell, on one device: stored tensors, zeroed with the cache, because no sequence has the tag 0.
#[derive(Clone, Copy, Debug)]
pub struct CellTensors {
    /// Tags, F32 `[1, cells]`.
    pub tags: TensorId,
    /// Positions, F32 `[1, cells]`.
    pub positions: TensorId,
}

/// The tokens of a batch: inputs.
#[derive(Clone, Copy, Debug)]
pub struct TokenInputs {
    /// Tags of their sequences, F32 `[1, tokens]`.
    pub tags: TensorId,
    /// Positions, F32 `[1, tokens]`.
    pub positions: TensorId,
    /// The cells that they write, I64 `[tokens]`.
    pub cells: TensorId,
}

/// Adds the nodes that record which tokens write the cells of a batch. Every device with a part of the cache needs them in every batch, also
/// where it makes no mask.
///
/// # Errors
/// Tensors of other types or shapes than documented.
pub fn record_cells(
    builder: &mut TaskBuilder,
    cells: CellTensors,
    tokens: TokenInputs,
    device: usize,
) -> Result<(), BuildError> {
    let noted = [("cell_tags", cells.tags, tokens.tags), ("cell_positions", cells.positions, tokens.positions)];
    for (name, noted, values) in noted {
        let node = builder.node_onto(Rows::SetRows, &[values, tokens.cells, noted].map(Some), noted);
        place(builder, node, name, device)?;
    }
    Ok(())
}

/// Adds the nodes that make the mask of a batch, for attention over the first `seen` cells: `[seen, tokens]` of `dtype`, F16 or F32. With
/// a `window`, a token sees only its own position and the `window - 1` before it. Call [`record_cells`] before.
///
/// # Errors
/// Tensors of other types or shapes than documented; more cells than there are.
pub fn mask(
    builder: &mut TaskBuilder,
    cells: CellTensors,
    tokens: TokenInputs,
    (seen, dtype): (usize, DType),
    window: Option<NonZeroU32>,
    device: usize,
) -> Result<TensorId, BuildError> {
    let count = builder.desc(tokens.tags)?.ne()[1];
    let out = OutputSpec { dtype: DType::F32, ne: [seen, count, 1, 1] };
    let row = TensorDesc::contiguous(DType::F32, [seen, 1, 1, 1])?;
    // The difference of each cell and each token. A binary op repeats its second source only.
    let difference = |builder: &mut TaskBuilder, of_cells, of_tokens| {
        let mut rows = builder.view(of_cells, row, 0)?;
        if count > 1 {
            let node = builder.node_as(Concat::Repeat, &[Some(rows)], out);
            rows = place(builder, node, "mask_cells", device)?;
        }
        let node = builder.node(Binary::Sub, &[Some(rows), Some(of_tokens)]);
        place(builder, node, "mask_difference", device)
    };
    let unary = |builder: &mut TaskBuilder, op: Unary, name, of| {
        let node = builder.node(op, &[Some(of)]);
        place(builder, node, name, device)
    };
    let distance = difference(builder, cells.positions, tokens.positions)?;
    let mut later = unary(builder, Unary::Kind(UnaryKind::Relu), "mask_later", distance)?;
    if let Some(window) = window {
        let before = Unary::Scale { scale: -1.0, bias: 1.0 - window.get() as f32 };
        let before = unary(builder, before, "mask_before", distance)?;
        let before = unary(builder, Unary::Kind(UnaryKind::Relu), "mask_outside", before)?;
        let outside = builder.node(Binary::Add, &[Some(later), Some(before)]);
        later = place(builder, outside, "mask_window", device)?;
    }
    let other = difference(builder, cells.tags, tokens.tags)?;
    let other = unary(builder, Unary::Sqr, "mask_other", other)?;
    let hidden = builder.node(Binary::Add, &[Some(later), Some(other)]);
    let hidden = place(builder, hidden, "mask_hidden", device)?;
    let mask = unary(builder, Unary::Scale { scale: HIDDEN, bias: 0.0 }, "mask", hidden)?;
    if dtype == DType::F32 {
        return Ok(mask);
    }
    let mask = builder.node_as(CopyOp::Cpy, &[Some(mask)], OutputSpec { dtype, ..out });
    place(builder, mask, "mask_f16", device)
}

/// Names the node that was just added and pins it to a device.
fn place(
    builder: &mut TaskBuilder,
    node: Result<TensorId, BuildError>,
    name: &str,
    device: usize,
) -> Result<TensorId, BuildError> {
    let node = node?;
    builder.name(node, name);
    builder.pin(device)?;
    Ok(node)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::super::KvCells;
    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::device::{Device, MemoryBudget};
    use crate::sched::{Options, Scheduler};
    use std::sync::Arc;

    const CELLS: usize = 40;

    /// The mask of random batches of random sequences, on a device, equals what the definition says.
    #[test]
    fn a_token_sees_its_own_sequence_up_to_itself_and_within_the_window() {
        let mut rng = fastrand::Rng::with_seed(8);
        let budget = MemoryBudget::new(1 << 20);
        let device: Arc<dyn Device> = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 20).unwrap();
        let memory = device.alloc(2 * 4 * CELLS as u64 + 256, &budget).unwrap();
        let mut scheduler = Scheduler::new(vec![device], Options::default(), &budget).unwrap();
        let mut cells = KvCells::new(CELLS, 1);
        let mut written = [None; CELLS];
        let mut sequences = Vec::new();
        for round in 0..60 {
            if round % 3 == 0 {
                sequences.extend(cells.join(rng.usize(1..12)));
            }
            if round % 7 == 6 {
                cells.leave(sequences.swap_remove(rng.usize(..sequences.len())));
            }
            let mut batch = Vec::new();
            for _ in 0..rng.usize(1..6) {
                let Some(&tag) = rng.choice(&sequences) else { break };
                if let Ok((position, cell)) = cells.append(tag) {
                    written[cell as usize] = Some((tag, position));
                    batch.push((tag, position, cell));
                }
            }
            if batch.is_empty() {
                continue;
            }
            let (seen, dtype) = (cells.seen().next_multiple_of(8), [DType::F16, DType::F32][round % 2]);
            let mut b = TaskBuilder::new();
            let desc = TensorDesc::contiguous(DType::F32, [1, CELLS, 1, 1]).unwrap();
            let stored = |b: &mut TaskBuilder, name, at| {
                let region = memory.region(at, desc.extent() as u64).unwrap();
                b.stored(name, desc, 0, Some(region)).unwrap()
            };
            let noted = CellTensors { tags: stored(&mut b, "tags", 0), positions: stored(&mut b, "positions", 256) };
            let ne = [1, batch.len(), 1, 1];
            let tokens = TokenInputs {
                tags: b.input("tags", DType::F32, ne).unwrap(),
                positions: b.input("positions", DType::F32, ne).unwrap(),
                cells: b.input("cells", DType::I64, [batch.len(), 1, 1, 1]).unwrap(),
            };
            record_cells(&mut b, noted, tokens, 0).unwrap();
            let window = [None, NonZeroU32::new(1), NonZeroU32::new(4)][round % 3];
            let mask = mask(&mut b, noted, tokens, (seen, dtype), window, 0).unwrap();
            b.output(mask).unwrap();
            let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
            let floats = |of: &dyn Fn(&(_, usize, u32)) -> f32| -> Vec<u8> {
                batch.iter().flat_map(|token| of(token).to_le_bytes()).collect()
            };
            let tags = floats(&|&(tag, ..): &(super::super::SequenceTag, usize, u32)| tag.number() as f32);
            let positions = floats(&|&(_, position, _)| position as f32);
            let rows: Vec<u8> = batch.iter().flat_map(|&(.., cell)| i64::from(cell).to_le_bytes()).collect();
            let inputs = [(tokens.tags, &*tags), (tokens.positions, &*positions), (tokens.cells, &*rows)];
            scheduler.run(&mut prepared, &inputs).unwrap();
            let bytes = scheduler.read(&prepared, mask).unwrap().wait(None).unwrap();
            let hidden: Vec<bool> = match dtype {
                DType::F16 => bytes.chunks(2).map(|b| [b[0], b[1]] == 0xfc00u16.to_le_bytes()).collect(),
                _ => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()) < -1e20).collect(),
            };
            let zeros = bytes.chunks(bytes.len() / hidden.len()).zip(&hidden).filter(|(_, hidden)| !**hidden);
            assert!(zeros.into_iter().all(|(bytes, _)| bytes.iter().all(|&b| b & 0x7f == 0)), "neither 0 nor hidden");
            for (row, &(tag, position, _)) in hidden.chunks(seen).zip(&batch) {
                for (cell, &hidden) in row.iter().enumerate() {
                    let own = written.get(cell).copied().flatten().is_some_and(|(of, at)| {
                        of == tag && at <= position && window.is_none_or(|window| position - at < window.get() as usize)
                    });
                    assert_eq!(hidden, !own, "round {round}, cell {cell} for position {position} of {tag:?}");
                }
            }
        }
    }
}

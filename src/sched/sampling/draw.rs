//! Draws by cumulative sums: nodes that pick an element of each row with a probability proportional to its weight.
//!
//! The element drawn for a number u is the first one whose cumulative sum is above `u * total`. Long rows are drawn in two
//! levels: a block of the row by the sums of the blocks, then an element of that block. An addition to a sum between 1/2 and 1 has an
//! error of up to 2^-25. In one level the errors of 128,000 additions could add up to 4e-3; about √n in each of two cannot exceed 2e-5,
//! and as they have either sign, 1e-6 is typical.

use super::nodes::Nodes;
use crate::graph::{BuildError, TensorId};

/// Rows up to this length are drawn in one level: their sums are within 1e-5 even if all errors add up.
const ONE_LEVEL: usize = 256;

/// The largest number that draws, 2^-20 below 1. Where a device adds in parallel, equal sums can have different last bits: those
/// after the last element with a weight can exceed that element's. The total times this number is below all of them.
pub(super) const MAX_UNIFORM: f32 = 1.0 - 8.0 * f32::EPSILON;

/// Division of a row into `count` blocks of `length` elements. The last block may have to be padded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Blocks {
    pub(super) length: usize,
    pub(super) count: usize,
}

impl Blocks {
    /// Blocks for a row of n elements, at least 1: one for a short row; else about √n, without padding if n has a divisor between a
    /// half and twice the root.
    pub(super) fn of_row(n: usize) -> Blocks {
        if n <= ONE_LEVEL {
            return Blocks { length: n, count: 1 };
        }
        let root = n.isqrt();
        let length = (root / 2..=2 * root).filter(|&length| n.is_multiple_of(length)).min_by_key(|l| l.abs_diff(root));
        let length = length.unwrap_or(root);
        Blocks { length, count: n.div_ceil(length) }
    }

    /// Elements of a row, padding included.
    pub(super) fn elements(self) -> usize {
        self.length * self.count
    }
}

/// An element of each of `a` rows of `s` sequences, drawn by weight.
pub(super) struct DrawnRows {
    /// `[a, s]`: the index of the element in its row, a whole number.
    pub(super) index: TensorId,
    /// I32 `[1, a, s]`: the same.
    pub(super) ids: TensorId,
    /// `[a, s]`: its weight.
    pub(super) weight: TensorId,
    /// `[a, s]`, a strided view: the sum of the row's weights.
    pub(super) total: TensorId,
    /// `[n, a, s]`: by how much each cumulative sum is above `u * total`.
    above: TensorId,
}

/// Draws an element of each row of `weights` `[n, a, s]` by `uniform` `[1, s]`, numbers from 0 to [`MAX_UNIFORM`] that the rows of a
/// sequence share. If the weights are not finite, any element is drawn.
pub(super) fn draw_rows(nodes: &mut Nodes<'_>, weights: TensorId, uniform: TensorId) -> Result<DrawnRows, BuildError> {
    let [n, a, s] = nodes.shape(weights)?;
    let sums = nodes.cumsum(weights)?;
    let total = nodes.last_of_rows(sums)?;
    let uniform = if a > 1 { nodes.repeat(uniform, [a, s])? } else { uniform };
    let target = nodes.mul(uniform, total)?;
    let target = nodes.reshape(target, [1, a, s])?;
    let above = nodes.sub(sums, target)?;
    // The number of sums above the target, rather than of those that are not: an element without weight, whose sum equals that of
    // the element before, is never the first one above. NaN counts as 0.
    let hits = nodes.step(above)?;
    let hits = nodes.row_sums(hits)?;
    let hits = nodes.clamp(hits, 1.0, n as f32)?;
    let index = nodes.scale(hits, -1.0, n as f32)?;
    let ids = nodes.as_i32(index, [1, a, s])?;
    let weight = nodes.elements(weights, ids)?;
    let weight = nodes.reshape(weight, [a, s, 1])?;
    Ok(DrawnRows { index, ids, weight, total, above })
}

/// `[a, s]`: how far the number that drew each element lies within the element's interval, from 0 to [`MAX_UNIFORM`]: a number to
/// draw within the element.
fn rest(nodes: &mut Nodes<'_>, drawn: &DrawnRows) -> Result<TensorId, BuildError> {
    let [_, a, s] = nodes.shape(drawn.ids)?;
    let above = nodes.elements(drawn.above, drawn.ids)?;
    let above = nodes.reshape(above, [a, s, 1])?;
    let part = nodes.div(above, drawn.weight)?;
    let rest = nodes.scale(part, -1.0, 1.0)?;
    nodes.clamp(rest, 0.0, MAX_UNIFORM)
}

/// An element of the row of each sequence, drawn by weight.
pub(super) struct Drawn {
    /// `[1, s]`: the index of the element in its row, a whole number.
    pub(super) index: TensorId,
    /// I32 `[1, 1, s]`: the same. Not a view.
    pub(super) ids: TensorId,
    /// `[1, s]`: its weight as a part of all weights. NaN if the weights have no finite sum above 0.
    pub(super) probability: TensorId,
    /// See [`rest`].
    last: DrawnRows,
}

impl Drawn {
    /// See [`rest`].
    pub(super) fn rest(&self, nodes: &mut Nodes<'_>) -> Result<TensorId, BuildError> {
        rest(nodes, &self.last)
    }
}

/// Draws an element of each row of `weights` `[n, s]` by `uniform` `[1, s]`, numbers from 0 to [`MAX_UNIFORM`]. `elements`: those
/// before the padding, if the weights are padded.
pub(super) fn draw(
    nodes: &mut Nodes<'_>,
    weights: TensorId,
    elements: usize,
    uniform: TensorId,
) -> Result<Drawn, BuildError> {
    let [n, s, _] = nodes.shape(weights)?;
    let blocks = Blocks::of_row(n);
    if blocks.count == 1 {
        let rows = nodes.reshape(weights, [n, 1, s])?;
        let drawn = draw_rows(nodes, rows, uniform)?;
        let probability = nodes.div(drawn.weight, drawn.total)?;
        return Ok(Drawn { index: drawn.index, ids: drawn.ids, probability, last: drawn });
    }
    let padded = nodes.pad(weights, blocks.elements())?;
    let rows = nodes.reshape(padded, [blocks.length, blocks.count, s])?;
    let sums = nodes.row_sums(rows)?;
    let sums = nodes.reshape(sums, [blocks.count, 1, s])?;
    let block = draw_rows(nodes, sums, uniform)?;
    let uniform = rest(nodes, &block)?;
    let block_ids = nodes.reshape(block.ids, [1, s, 1])?;
    let row = nodes.row(rows, block_ids)?;
    let row = nodes.reshape(row, [blocks.length, 1, s])?;
    let last = draw_rows(nodes, row, uniform)?;
    let first = nodes.scale(block.index, blocks.length as f32, 0.0)?;
    let mut index = nodes.add(first, last.index)?;
    if elements < blocks.elements() {
        // Without finite weights, padding may have been drawn.
        index = nodes.clamp(index, 0.0, (elements - 1) as f32)?;
    }
    let ids = nodes.as_i32(index, [1, 1, s])?;
    let probability = nodes.div(last.weight, block.total)?;
    Ok(Drawn { index, ids, probability, last })
}

/// Top-p: 1 for each of the first elements of each row of `probabilities` `[n, s]`, descending, up to the one with which their sum
/// reaches `top_p`; else 0. n is [`Blocks::elements`].
pub(super) fn nucleus(nodes: &mut Nodes<'_>, probabilities: TensorId, top_p: f32) -> Result<TensorId, BuildError> {
    let [n, s, _] = nodes.shape(probabilities)?;
    let blocks = Blocks::of_row(n);
    let rows = nodes.reshape(probabilities, [blocks.length, blocks.count, s])?;
    let sums = nodes.cumsum(rows)?;
    // The sum of the elements before each.
    let mut before = nodes.sub(sums, rows)?;
    if blocks.count > 1 {
        let sums = nodes.row_sums(rows)?;
        let upto = nodes.cumsum(sums)?;
        let first = nodes.sub(upto, sums)?;
        let first = nodes.reshape(first, [1, blocks.count, s])?;
        before = nodes.add(before, first)?;
    }
    // Above 0, so that the first element, before which the sum is 0, is kept.
    let left = nodes.scale(before, -1.0, top_p.max(f32::MIN_POSITIVE))?;
    let kept = nodes.step(left)?;
    nodes.reshape(kept, [n, s, 1])
}

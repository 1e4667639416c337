//! LIGHTNING_INDEXER: products of blocks of converted keys with the queries of some tokens, whose heads are columns. A sum over
//! heads then remains for each cell and token.

use super::super::Kernel;
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::attention_gemm::{AttentionGemm, COLUMN_MULTIPLE, GemmShape};
use crate::cpu::simd::multiversion;
use crate::ops::NodeView;
use crate::tensor::quant::dequantiser;

/// Floats of the queries in a tile, unless a group of [`COLUMN_MULTIPLE`] heads has more: they stay in the L2 cache.
const TILE_QUERIES: usize = 1 << 15;

/// Floats of a block of keys, unless one has more.
const BLOCK_KEYS: usize = 1 << 13;

/// Most keys of a block.
const MAX_BLOCK: usize = 64;

/// Most cells and products of a claim.
const CLAIM_CELLS: usize = 1024;
const CLAIM_PRODUCTS: usize = 1 << 25;

#[derive(Clone, Copy)]
struct Indexer {
    width: usize,
    heads: usize,
    tokens: usize,
    batches: usize,
    cells: usize,
    /// Heads of a tile, a multiple of [`COLUMN_MULTIPLE`]; several tokens only if these are all heads.
    tile_heads: usize,
    tile_tokens: usize,
    /// Cells of a block.
    block: usize,
}

pub(super) fn kernel(node: &NodeView<'_>) -> Option<Kernel> {
    let (q, k) = (node.srcs.get(0)?, node.srcs.get(1)?);
    dequantiser(k.dtype())?;
    let [width, heads, tokens, batches] = q.ne();
    let padded = heads.max(1).checked_next_multiple_of(COLUMN_MULTIPLE)?;
    let most_columns = (TILE_QUERIES / width.max(1)).max(COLUMN_MULTIPLE);
    let tile_heads = padded.min(most_columns / COLUMN_MULTIPLE * COLUMN_MULTIPLE);
    let tile_tokens = if tile_heads == padded { (most_columns / padded).clamp(1, tokens.max(1)) } else { 1 };
    let block = (BLOCK_KEYS / width.max(1)).clamp(1, MAX_BLOCK);
    let indexer = Indexer { width, heads, tokens, batches, cells: k.ne()[2], tile_heads, tile_tokens, block };
    let columns = tile_heads * tile_tokens;
    // Queries, keys, a query, products, weights, sums.
    let local = [width.saturating_mul(columns + block + 1), block * columns, columns, tile_tokens * CLAIM_CELLS];
    let local = local.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    let products = node.dst.elements().saturating_mul(heads).saturating_mul(width.saturating_add(2));
    Some(Kernel::new(products / 4, move |w| indexer.run(w)).with_local(local))
}

impl Indexer {
    fn run(&self, ctx: &mut KernelContext<'_>) {
        if ctx.dst().desc().is_empty() || self.width == 0 {
            return;
        }
        let columns = self.tile_heads * self.tile_tokens;
        let local = ctx.take_local_scratch();
        let (queries, local) = local.split_at_mut(self.width * columns);
        let (keys, local) = local.split_at_mut(self.width * self.block);
        let (query, local) = local.split_at_mut(self.width);
        let (products, local) = local.split_at_mut(self.block * columns);
        let (weights, sums) = local.split_at_mut(columns);
        let mut scratch = Scratch { queries, keys, query, products, weights, sums };
        let tiles = self.tokens.div_ceil(self.tile_tokens);
        // Cells of a claim: fewer if the workers would not have several claims each.
        let products_per_cell = self.width.saturating_mul(self.heads).saturating_mul(self.tile_tokens);
        let fair = self.cells.div_ceil(4 * ctx.dividing_workers().max(1)).next_multiple_of(self.block);
        let cells = fair.min(CLAIM_CELLS).min((CLAIM_PRODUCTS / products_per_cell.max(1)).max(self.block));
        let parts = self.cells.div_ceil(cells);
        for claim in ctx.chunks(parts.saturating_mul(tiles).saturating_mul(self.batches), 1).flatten() {
            let (part, tile, batch) = (claim % parts, claim / parts % tiles, claim / parts / tiles);
            let tokens = tile * self.tile_tokens..self.tokens.min((tile + 1) * self.tile_tokens);
            let range = part * cells..self.cells.min((part + 1) * cells);
            self.score(ctx, batch, tokens, range, &mut scratch);
        }
    }

    /// The scores of some cells for some tokens.
    fn score(
        &self,
        ctx: &KernelContext<'_>,
        batch: usize,
        tokens: std::ops::Range<usize>,
        cells: std::ops::Range<usize>,
        scratch: &mut Scratch<'_>,
    ) {
        let (dst, q, k, weights, mask) = (ctx.dst(), ctx.src(0), ctx.src(1), ctx.src(2), ctx.src(3));
        let (gemm, width, heads) = (AttentionGemm::get(), self.width, self.tile_heads);
        let columns = heads * tokens.len();
        let sums = &mut scratch.sums[..tokens.len() * cells.len()];
        sums.fill(0.0);
        for first_head in (0..self.heads).step_by(heads) {
            let real = heads.min(self.heads - first_head);
            let queries = &mut scratch.queries[..width * columns];
            let factors = &mut scratch.weights[..columns];
            queries.fill(0.0);
            factors.fill(0.0);
            for (i, t) in tokens.clone().enumerate() {
                weights.load([first_head, t, 0, batch], &mut factors[i * heads..i * heads + real]);
                for h in 0..real {
                    let query = q.fetch([0, first_head + h, t, batch], &mut scratch.query[..width]);
                    for (line, x) in queries.chunks_exact_mut(columns).zip(query) {
                        line[i * heads + h] = *x;
                    }
                }
            }
            for first in (0..cells.len()).step_by(self.block) {
                let count = self.block.min(cells.len() - first);
                let keys = &mut scratch.keys[..count * width];
                for (c, key) in keys.chunks_exact_mut(width).enumerate() {
                    k.load([0, 0, cells.start + first + c, batch], key);
                }
                let products = &mut scratch.products[..count * columns];
                let shape =
                    GemmShape { m: count, n: columns, k: width, row_stride: width, column_stride: 1, add: false };
                gemm.mul_columns(products, keys, queries, &shape);
                for i in 0..tokens.len() {
                    let out = &mut sums[i * cells.len() + first..][..count];
                    let factors = &factors[i * heads..][..heads];
                    add_heads(out, products, columns, i * heads, factors);
                }
            }
        }
        let mask_batch = batch % mask.ne()[3];
        for (t, sums) in tokens.zip(sums.chunks_exact_mut(cells.len())) {
            let masks = &mut scratch.products[..cells.len().min(self.block)];
            for (i, sums) in sums.chunks_mut(masks.len()).enumerate() {
                let (first, masks) = (cells.start + i * self.block, &mut masks[..sums.len()]);
                mask.load([first, t, 0, mask_batch], masks);
                sums.iter_mut().zip(masks).for_each(|(sum, mask)| *sum += *mask);
                dst.store([first, t, 0, batch], sums);
            }
        }
    }
}

/// The parts of a worker's scratch.
struct Scratch<'a> {
    /// `[columns, E]`.
    queries: &'a mut [f32],
    /// `[E, block]`.
    keys: &'a mut [f32],
    query: &'a mut [f32],
    /// `[columns, block]`.
    products: &'a mut [f32],
    weights: &'a mut [f32],
    /// A row for each token.
    sums: &'a mut [f32],
}

multiversion! {
    /// `out += Σ_h max(products[h], 0) factors[h]` for each row of products, from column `first` on.
    fn add_heads<'a>(out: &'a mut [f32], products: &'a [f32], columns: usize, first: usize, factors: &'a [f32]) {
        let factors = factors.as_chunks::<COLUMN_MULTIPLE>().0;
        for (out, row) in out.iter_mut().zip(products.chunks_exact(columns)) {
            let (row, mut sums) = (row[first..].as_chunks::<COLUMN_MULTIPLE>().0, [0.0; COLUMN_MULTIPLE]);
            for (products, factors) in row.iter().zip(factors) {
                for l in 0..COLUMN_MULTIPLE {
                    let product = if products[l] > 0.0 { products[l] } else { 0.0 };
                    sums[l] += product * factors[l];
                }
            }
            *out += sums.iter().sum::<f32>();
        }
    }
}

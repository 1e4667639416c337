//! Launches of fused products of packed weights, and of F16 and BF16: several MUL_MAT of the same columns (queries, keys and values), and
//! the two products of a GLU.

use super::mul_mat::products::{self, OtherProduct, Products};
use super::{NodeLaunches, NodeOnGpu, Ptr};
use crate::cuda::kernel::{PackedLaunches, QuantizingLaunch};
use crate::cuda::layout::PackedSpan;
use crate::graph::fuse::GatedProduct;
use crate::ops::MAX_SRC;
use crate::ops::glu::GluKind;
use crate::tensor::TensorDesc;

/// The launches of products of the same columns; see [`crate::graph::fuse::FusedOp::Products`] for the operands. `None` unless a kernel
/// can read all weights: packed ones, or dense ones of F16 and BF16.
pub(super) fn products(biased: bool, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let sources = (0..MAX_SRC).take_while(|&i| on.node.srcs.get(i).is_some()).count();
    let count = sources / if biased { 3 } else { 2 };
    let mut weights = vec![(0, matrix(on, 0)?)];
    let mut others = Vec::new();
    let mut results = vec![on.dst()];
    for source in (1..count).map(|other| 2 * other) {
        weights.push((source, matrix(on, source)?));
        others.push(OtherProduct {
            rows: on.node.srcs.get(source)?.ne()[1],
            weights: Ptr::Src(source as u8),
            result: Ptr::Src(source as u8 + 1),
        });
        results.push(on.node.srcs.get(source + 1)?);
    }
    if !results.iter().all(|dst| dst.is_contiguous()) {
        return None;
    }
    let biases =
        if biased { (2 * count..3 * count).map(|source| Ptr::Src(source as u8)).collect() } else { Vec::new() };
    let products = Products { others, biases, ..Products::default() };
    let kernel = products::products(on, &products).ok().flatten()?;
    Some(with_weights(kernel, weights))
}

/// The launches of two products and the GLU of their results; see [`crate::graph::fuse::FusedOp::GatedProduct`] for the operands.
pub(super) fn gated(op: &GatedProduct, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    if op.kind != GluKind::Swiglu || !on.dst().is_contiguous() {
        return None;
    }
    let span = |source| {
        if op.product.by_id { packed_span(on, source).map(FusableWeights::Packed) } else { matrix(on, source) }
    };
    let weights = vec![(0, span(0)?), (2, span(2)?)];
    let kernel = |quantized| {
        if op.product.by_id {
            return products::products_by_id(on, 3, Some(Ptr::Src(2)), quantized).ok();
        }
        let others = vec![OtherProduct { rows: 0, weights: Ptr::Src(2), result: Ptr::Null }];
        products::products(on, &Products { others, gated: true, quantized, ..Products::default() }).ok().flatten()
    };
    let first = on.node.srcs.get(0)?;
    let mut fused = with_weights(kernel(0)?, weights);
    // Converted columns are a copy in scratch memory, so the result may overlap source 1.
    fused.forbids_dst_on_source1 = fused.columns.is_none() && fused.packed.is_none();
    if !first.dtype().is_block() {
        return Some(fused);
    }
    if let Some((group, bytes)) = products::quantized_result_form(first, on.dst()) {
        let k = on.dst().ne()[0];
        fused.quantizing.extend(kernel(bytes)?.launches.into_iter().map(|launch| QuantizingLaunch {
            launch,
            k,
            group,
        }));
    }
    Some(fused)
}

/// Weights that a kernel for fused products can read.
enum FusableWeights {
    Packed(PackedSpan),
    /// Of F16 or BF16, dense.
    Dense,
}

/// The weights of one matrix.
fn matrix(on: &NodeOnGpu<'_>, source: usize) -> Option<FusableWeights> {
    let a: &TensorDesc = on.node.srcs.get(source)?;
    if a.ne()[2..] != [1, 1] {
        return None;
    }
    if a.dtype().is_block() {
        return packed_span(on, source).map(FusableWeights::Packed);
    }
    (on.node.aligned && a.is_contiguous()).then_some(FusableWeights::Dense)
}

fn packed_span(on: &NodeOnGpu<'_>, source: usize) -> Option<PackedSpan> {
    on.node.aligned.then(|| PackedSpan::of(on.node.srcs.get(source)?)).flatten()
}

/// Launches that run only while all packed weights are packed.
fn with_weights(kernel: NodeLaunches, weights: Vec<(usize, FusableWeights)>) -> NodeLaunches {
    let spans: Vec<_> = weights
        .into_iter()
        .filter_map(|(source, weights)| match weights {
            FusableWeights::Packed(span) => Some((source, span)),
            FusableWeights::Dense => None,
        })
        .collect();
    if spans.is_empty() {
        return kernel;
    }
    let NodeLaunches { launches, columns, .. } = kernel;
    let packed = Some(PackedLaunches { launches, columns, weights: spans, packs: true });
    NodeLaunches { packed, ..NodeLaunches::default() }
}

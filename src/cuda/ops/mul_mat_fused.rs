//! Launches of fused products of packed weights: several MUL_MAT of the same columns (queries, keys and values), and the two
//! products of a GLU.

use super::mul_mat::packed::{self, OtherProduct, PackedProducts};
use super::{NodeLaunches, NodeOnGpu, Ptr};
use crate::cuda::kernel::{PackedLaunches, QuantizingLaunch};
use crate::cuda::layout::PackedSpan;
use crate::graph::fuse::GatedProduct;
use crate::ops::MAX_SRC;
use crate::ops::glu::GluKind;
use crate::tensor::TensorDesc;

/// The launches of products of the same columns; see [`crate::graph::fuse::FusedOp::Products`] for the operands. `None` unless all
/// weights can be packed.
pub(super) fn products(biased: bool, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    let sources = (0..MAX_SRC).take_while(|&i| on.node.srcs.get(i).is_some()).count();
    let count = sources / if biased { 3 } else { 2 };
    let mut weights = vec![(0, packed_matrix(on, 0)?)];
    let mut others = Vec::new();
    let mut results = vec![on.dst()];
    for source in (1..count).map(|other| 2 * other) {
        weights.push((source, packed_matrix(on, source)?));
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
    let products = PackedProducts { others, biases, ..PackedProducts::default() };
    let kernel = packed::products(on, &products).ok().flatten()?;
    Some(with_weights(kernel, weights))
}

/// The launches of two products and the GLU of their results; see [`crate::graph::fuse::FusedOp::GatedProduct`] for the operands.
/// Since the columns are converted before, the result may lie on them.
pub(super) fn gated(op: &GatedProduct, on: &NodeOnGpu<'_>) -> Option<NodeLaunches> {
    if op.kind != GluKind::Swiglu || !on.dst().is_contiguous() {
        return None;
    }
    let weights = vec![(0, packed_span(on, 0)?), (2, packed_span(on, 2)?)];
    let kernel = |quantized| {
        if op.product.by_id {
            return packed::products_by_id(on, 3, Some(Ptr::Src(2)), quantized).ok();
        }
        packed_matrix(on, 0)?;
        let others = vec![OtherProduct { rows: 0, weights: Ptr::Src(2), result: Ptr::Null }];
        packed::products(on, &PackedProducts { others, gated: true, quantized, ..PackedProducts::default() })
            .ok()
            .flatten()
    };
    let mut fused = with_weights(kernel(0)?, weights);
    if let Some((group, bytes)) = packed::quantized_result_form(on.node.srcs.get(0)?, on.dst()) {
        let k = on.dst().ne()[0];
        fused.quantizing.extend(kernel(bytes)?.launches.into_iter().map(|launch| QuantizingLaunch {
            launch,
            k,
            group,
        }));
    }
    Some(fused)
}

fn packed_span(on: &NodeOnGpu<'_>, source: usize) -> Option<PackedSpan> {
    on.node.aligned.then(|| PackedSpan::of(on.node.srcs.get(source)?)).flatten()
}

/// The span of the weights of one matrix.
fn packed_matrix(on: &NodeOnGpu<'_>, source: usize) -> Option<PackedSpan> {
    let is_matrix = |a: &TensorDesc| a.ne()[2..] == [1, 1];
    on.node.srcs.get(source).is_some_and(is_matrix).then(|| packed_span(on, source)).flatten()
}

/// Launches that run only while all weights are packed.
fn with_weights(kernel: NodeLaunches, weights: Vec<(usize, PackedSpan)>) -> NodeLaunches {
    let NodeLaunches { launches, columns, .. } = kernel;
    let packed = Some(PackedLaunches { launches, columns, weights, packs: true });
    NodeLaunches { packed, ..NodeLaunches::default() }
}

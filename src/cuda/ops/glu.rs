//! Launches of GLU: kernels/glu.cu.

use super::elementwise::{ElementwiseAnyArgs, ElementwiseArgs, elementwise_arguments};
use super::{NodeLaunches, NodeOnGpu, Ptr, Unsupported, suffix};
use crate::ops::glu::{Glu, GluKind};
use crate::tensor::DType;
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

elementwise_arguments! {
    /// `struct GluArgs` of the file.
    GluArgs: ElementwiseArgs { params: GluParams }
    /// `struct GluAnyArgs` of the file.
    GluAnyArgs: ElementwiseAnyArgs { params: GluParams }
}

/// `struct GluParams` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GluParams {
    kind: u32,
    alpha: f32,
    limit: f32,
    padding: u32,
}

pub(super) fn select(op: Glu, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, d, second) = (on.src(0)?, on.dst(), on.node.srcs.get(1));
    let types = [a.dtype(), second.unwrap_or(a).dtype(), d.dtype()];
    if !types.into_iter().all(DType::is_float) {
        return Err(on.unsupported_types());
    }
    // Without a second source, the halves of the rows of the first are the two operands.
    let half = TensorDesc::strided(a.dtype(), d.ne(), a.nb()).map_err(|e| on.unsupported(e.to_string()))?;
    let middle = d.ne()[0] as u64 * a.nb()[0] as u64;
    let (x, g, at, gate) = match second {
        Some(b) => (*a, *b, [0, 0], Ptr::Src(1)),
        None if op.swapped => (half, half, [middle, 0], Ptr::Src(0)),
        None => (half, half, [0, middle], Ptr::Src(0)),
    };
    let (pointers, params) = ([Ptr::Src(0), gate, Ptr::Dst], params(op.kind));
    if types == [types[0]; 3]
        && let Some((elementwise, grid)) = ElementwiseArgs::new(&x, &g, d, at)
    {
        let name = format!("glu_{}", suffix(types[0]));
        return on.single_launch(("glu", &name), grid, &pointers, &GluArgs { elementwise, params });
    }
    let (elementwise, grid) = ElementwiseAnyArgs::new(on, [&x, &g, d], at)?;
    on.single_launch(("glu", "glu_any"), grid, &pointers, &GluAnyArgs { elementwise, params })
}

/// The parameters of a kind. The numbers of the kinds are those on the wire.
fn params(kind: GluKind) -> GluParams {
    let (kind, alpha, limit) = match kind {
        GluKind::Reglu => (0, 0.0, 0.0),
        GluKind::Geglu => (1, 0.0, 0.0),
        GluKind::Swiglu => (2, 0.0, 0.0),
        GluKind::SwigluOai { alpha, limit } => (3, alpha, limit),
        GluKind::GegluErf => (4, 0.0, 0.0),
        GluKind::GegluQuick => (5, 0.0, 0.0),
        GluKind::SwigluClamp { limit } => (6, 0.0, limit),
    };
    GluParams { kind, alpha, limit, padding: 0 }
}

//! GLU: kernels/glu.cu.

use super::zip::{Zip, ZipAny};
use super::{Kernel, On, Ptr, Unsupported, suffix};
use crate::ops::glu::{Glu, GluKind};
use crate::tensor::DType;
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// `struct Args` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Args {
    zip: Zip,
    unit: Unit,
}

/// `struct AnyArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AnyArgs {
    zip: ZipAny,
    unit: Unit,
}

/// `struct Unit` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Unit {
    kind: u32,
    alpha: f32,
    limit: f32,
    padding: u32,
}

pub(super) fn select(op: Glu, on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (a, d, second) = (on.src(0)?, on.dst(), on.node.srcs.get(1));
    let types = [a.dtype(), second.unwrap_or(a).dtype(), d.dtype()];
    if !types.into_iter().all(DType::is_float) {
        return Err(on.types());
    }
    // The halves of one source are two tensors of half its rows.
    let half = TensorDesc::strided(a.dtype(), d.ne(), a.nb()).map_err(|e| on.unsupported(e.to_string()))?;
    let middle = d.ne()[0] as u64 * a.nb()[0] as u64;
    let (x, g, at, gate) = match second {
        Some(b) => (*a, *b, [0, 0], Ptr::Src(1)),
        None if op.swapped => (half, half, [middle, 0], Ptr::Src(0)),
        None => (half, half, [0, middle], Ptr::Src(0)),
    };
    let (pointers, unit) = ([Ptr::Src(0), gate, Ptr::Dst], unit(op.kind));
    if types == [types[0]; 3]
        && let Some((zip, grid)) = Zip::new(&x, &g, d, at)
    {
        let name = format!("glu_{}", suffix(types[0]));
        return on.kernel(("glu", &name), grid, &pointers, &Args { zip, unit });
    }
    let (zip, grid) = ZipAny::new(on, [&x, &g, d], at)?;
    on.kernel(("glu", "glu_any"), grid, &pointers, &AnyArgs { zip, unit })
}

/// The kinds' numbers are those of the wire.
fn unit(kind: GluKind) -> Unit {
    let (kind, alpha, limit) = match kind {
        GluKind::Reglu => (0, 0.0, 0.0),
        GluKind::Geglu => (1, 0.0, 0.0),
        GluKind::Swiglu => (2, 0.0, 0.0),
        GluKind::SwigluOai { alpha, limit } => (3, alpha, limit),
        GluKind::GegluErf => (4, 0.0, 0.0),
        GluKind::GegluQuick => (5, 0.0, 0.0),
        GluKind::SwigluClamp { limit } => (6, 0.0, limit),
    };
    Unit { kind, alpha, limit, padding: 0 }
}

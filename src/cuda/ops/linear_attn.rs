//! Launches of RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET: kernels/linear_attn.cu.

use super::{
    Access, Grid, KernelArguments, KernelLaunch, Loops, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product,
};
use crate::ops::linear_attn::LinearAttn;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// Most tokens of a launch: about half a second.
const MAX_TOKENS: u32 = 1 << 20;
/// Threads of a block of kernels/recurrence.cuh.
const THREADS: u32 = 128;

/// The grid of kernels/recurrence.cuh for `heads` matrices of up to 256 keys and `columns` columns, and the number that ends the entry's
/// name: most keys of its matrices.
pub(super) fn recurrence(keys: u32, columns: u32, heads: &[u32]) -> Option<(Grid, u32)> {
    let (most, of_block) = match keys {
        0..=64 => (64, 32),
        65..=128 => (128, 32),
        129..=256 => (256, 16),
        _ => return None,
    };
    let blocks = saturating_product(&[heads, &[columns.div_ceil(of_block)]].concat());
    Some((Grid { blocks: [blocks, 1, 1], threads: [THREADS, 1, 1], shared: 0 }, most))
}

/// A launch whose threads process `tokens` one after the other. More than [`MAX_TOKENS`] are left to the CPU, as by
/// [`NodeOnGpu::looping_launch`]: a launch cannot be interrupted.
pub(super) fn in_sequence(on: &NodeOnGpu<'_>, tokens: u32, launch: KernelLaunch) -> Result<NodeLaunches, Unsupported> {
    if tokens > MAX_TOKENS {
        return Err(on.unsupported("a sequence of more than 2^20 tokens"));
    }
    Ok(NodeLaunches { loops: Loops { instructions: 0, chain: tokens.into() }, ..NodeLaunches::one(launch) })
}

/// `struct Vectors` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Vectors {
    head: u64,
    token: u64,
    sequence: u64,
    heads: u32,
    shared_by: u32,
}

/// `struct LinearAttnArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct LinearAttnArgs {
    q: Vectors,
    k: Vectors,
    v: Vectors,
    size: u32,
    heads: u32,
    tokens: u32,
    sequences: u32,
    snapshots: u32,
    scale: f32,
}

impl KernelArguments for LinearAttnArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let &LinearAttnArgs { size, heads, tokens, sequences, .. } = self;
        let vectors = |pointer, at: &Vectors| {
            if at.heads == 0 || at.shared_by == 0 {
                return Err("vectors without a head");
            }
            let heads = Access::run(pointer, &[size]).along(at.heads.min(heads), at.head);
            Ok(heads.along(tokens, at.token).along(sequences.div_ceil(at.shared_by), at.sequence))
        };
        let results = saturating_product(&[size, heads, tokens, sequences]);
        let states = saturating_product(&[size, size, heads, sequences, self.snapshots.min(tokens)]);
        // `select` adds those of the decay, a and b, which differ from rule to rule.
        Ok(vec![
            vectors(0, &self.q)?,
            vectors(1, &self.k)?,
            vectors(2, &self.v)?,
            Access::run(6, &[size, size, heads, sequences]),
            Access::elements(7, results.saturating_add(states)),
        ])
    }
}

/// The PTX file, whose name begins those of its entries, and the positions of q, k, v, decay, a and b.
fn operands(op: LinearAttn) -> (&'static str, [Option<u8>; 6]) {
    match op {
        LinearAttn::RwkvWkv6 => ("wkv6", [Some(2), Some(0), Some(1), Some(4), Some(3), None]),
        LinearAttn::RwkvWkv7 => ("wkv7", [Some(0), Some(2), Some(3), Some(1), Some(4), Some(5)]),
        LinearAttn::Gated { .. } => ("gated_linear_attn", [Some(2), Some(0), Some(1), Some(3), None, None]),
        LinearAttn::DeltaNet { .. } => ("gated_delta_net", [Some(0), Some(1), Some(2), Some(3), Some(4), None]),
    }
}

pub(super) fn select(op: LinearAttn, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    for i in 0..=op.state() {
        if on.src(i)?.dtype() != F32 {
            return Err(on.unsupported_types());
        }
    }
    if on.dst().dtype() != F32 {
        return Err(on.unsupported_types());
    }
    let [size, heads, all_tokens, batch] = on.shape(on.src(op.values())?)?.ne;
    let state = on.shape(on.src(op.state())?)?;
    // The tokens of all sequences lie one after another, except in GATED_DELTA_NET.
    let is_delta = matches!(op, LinearAttn::DeltaNet { .. });
    let (tokens, sequences) =
        if is_delta { (all_tokens, batch) } else { (all_tokens / state.ne[1].max(1), state.ne[1]) };
    if tokens == 0 {
        return Err(on.unsupported("no tokens"));
    }
    let (name, sources) = operands(op);
    let vectors = |source: Option<u8>| {
        let shape = on.shape(on.src(usize::from(source.unwrap_or_default()))?)?;
        let ([_, head, token, sequence], [_, heads, _, shared]) = (shape.nb, shape.ne);
        let vectors = if is_delta {
            Vectors { head, token, sequence, heads, shared_by: sequences / shared.max(1) }
        } else {
            // Contiguous; strides of dimensions of one element are arbitrary.
            let head = 4 * u64::from(size);
            let token = head * u64::from(heads);
            Vectors { head, token, sequence: token * u64::from(tokens), heads, shared_by: 1 }
        };
        Ok::<_, Unsupported>(vectors)
    };
    let decays = if is_delta { on.shape(on.src(3)?)?.ne[0] } else { size };
    let name = if is_delta && decays > 1 { "gated_delta_net_by_key" } else { name };
    let Some((grid, keys)) = recurrence(size, size, &[heads, sequences]) else {
        return Err(on.unsupported("heads of more than 256 elements"));
    };
    let entry = format!("{name}_{keys}");
    let args = LinearAttnArgs {
        q: vectors(sources[0])?,
        k: vectors(sources[1])?,
        v: vectors(sources[2])?,
        size,
        heads,
        tokens,
        sequences,
        snapshots: if let LinearAttn::DeltaNet { snapshots } = op { snapshots } else { 1 },
        scale: match op {
            LinearAttn::Gated { scale } => scale,
            LinearAttn::DeltaNet { .. } => 1.0 / (size as f32).sqrt(),
            _ => 1.0,
        },
    };
    let pointers: Vec<_> = sources
        .iter()
        .map(|source| source.map_or(Ptr::Null, Ptr::Src))
        .chain([Ptr::Src(op.state() as u8), Ptr::Dst])
        .collect();
    // The bonus of RWKV_WKV6, beta of GATED_DELTA_NET, a and b of RWKV_WKV7.
    let of_tokens = |pointer, n: u32| Access::run(pointer, &[n, heads, tokens, sequences]);
    let mut others = match op {
        LinearAttn::RwkvWkv6 => vec![Access::run(4, &[size, heads])],
        LinearAttn::RwkvWkv7 => vec![of_tokens(4, size), of_tokens(5, size)],
        LinearAttn::DeltaNet { .. } => vec![of_tokens(4, 1)],
        LinearAttn::Gated { .. } => Vec::new(),
    };
    others.push(of_tokens(3, decays));
    let launch = on.launch((name, &entry), grid, &pointers, &args)?;
    in_sequence(on, tokens, launch.with_accesses(others))
}

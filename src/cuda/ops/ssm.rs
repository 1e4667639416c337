//! Launches of SSM_CONV and SSM_SCAN: kernels/ssm.cu.

use super::linear_attn::{in_sequence, recurrence};
use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Unsupported, saturating_product};
use crate::ops::ssm::Ssm;
use crate::tensor::DType::F32;
use bytemuck::{Pod, Zeroable};

/// Channels and tokens of a block of ssm_conv.
const TILE_CHANNELS: usize = 32;
const TILE_TOKENS: usize = 64;
/// Longest window of which ssm_conv keeps a tile in shared memory.
const MAX_SHARED_WINDOW: usize = 64;
/// Warps of a block.
const WARPS: u32 = 4;

/// `struct ConvArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ConvArgs {
    x_sequence: u64,
    y_token: u64,
    y_sequence: u64,
    window: u32,
    d_conv: u32,
    channels: u32,
    tokens: u32,
}

impl KernelArguments for ConvArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let sequences = grid.blocks[2];
        let x = saturating_product(&[self.channels.saturating_sub(1), self.window])
            + u64::from(self.tokens)
            + u64::from(self.d_conv)
            - 1;
        let x = Access::elements(0, x).along(sequences, self.x_sequence);
        let y = Access::run(2, &[self.channels]).along(self.tokens, self.y_token).along(sequences, self.y_sequence);
        Ok(vec![x, Access::run(1, &[self.channels, self.d_conv]), y])
    }
}

/// `struct ScanArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ScanArgs {
    x: [u64; 2],
    b: [u64; 2],
    c: [u64; 2],
    ids_step: u64,
    n: u32,
    hd: u32,
    heads: u32,
    heads_per_group: u32,
    tokens: u32,
    sequences: u32,
    slots: u32,
    snapshots: u32,
}

impl KernelArguments for ScanArgs {
    /// `scan` adds those of a.
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let &ScanArgs { n, hd, heads, tokens, sequences, .. } = self;
        let groups = heads.checked_div(self.heads_per_group).ok_or("groups without heads")?;
        let of_tokens = |access: Access, steps: [u64; 2]| access.along(tokens, steps[0]).along(sequences, steps[1]);
        let results = saturating_product(&[hd, heads, tokens, sequences]);
        let states = saturating_product(&[hd, heads, n, sequences, self.snapshots.min(tokens)]);
        Ok(vec![
            Access::run(0, &[n, hd, heads, self.slots]),
            of_tokens(Access::run(1, &[hd, heads]), self.x),
            Access::run(2, &[heads, tokens, sequences]),
            of_tokens(Access::run(4, &[n, groups]), self.b),
            of_tokens(Access::run(5, &[n, groups]), self.c),
            Access::one(6).along(sequences, self.ids_step),
            Access::elements(7, results.saturating_add(states)),
        ])
    }
}

pub(super) fn select(op: Ssm, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let floats = if op == Ssm::Conv { 2 } else { Ssm::IDS };
    for i in 0..floats {
        if on.src(i)?.dtype() != F32 {
            return Err(on.unsupported_types());
        }
    }
    if on.dst().dtype() != F32 {
        return Err(on.unsupported_types());
    }
    match op {
        Ssm::Conv => conv(on),
        Ssm::Scan { snapshots } => scan(on, snapshots),
    }
}

fn conv(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, y) = (on.shape(on.src(0)?)?, on.shape(on.dst())?);
    let d_conv = on.shape(on.src(1)?)?.ne[0];
    if d_conv == 0 {
        return Err(on.unsupported("a window without elements"));
    }
    let [channels, tokens, sequences, _] = y.ne;
    let args = ConvArgs {
        x_sequence: x.nb[2],
        y_token: y.nb[1],
        y_sequence: y.nb[2],
        window: x.ne[0],
        d_conv,
        channels,
        tokens,
    };
    let shared = match d_conv as usize {
        window @ ..=MAX_SHARED_WINDOW => 4 * TILE_CHANNELS * (((TILE_TOKENS + window - 1) | 1) + (window | 1)),
        _ => 0,
    };
    let across = u64::from(channels).div_ceil(TILE_CHANNELS as u64);
    let along = u64::from(tokens).div_ceil(TILE_TOKENS as u64);
    let grid = Grid { blocks: [across, along, u64::from(sequences)], threads: [32, WARPS, 1], shared: shared as u32 };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst];
    let outputs = saturating_product(&[channels, tokens, sequences]);
    on.looping_launch(("ssm", "ssm_conv"), grid, (&pointers, &args), [outputs, d_conv.into(), 4])
}

fn scan(on: &NodeOnGpu<'_>, snapshots: u32) -> Result<NodeLaunches, Unsupported> {
    let [states, x, a, b, c, ids] = [Ssm::STATES, Ssm::X, Ssm::A, Ssm::B, Ssm::C, Ssm::IDS].map(|i| on.src(i));
    let (states, x, a, b, c, ids) = (on.shape(states?)?, on.shape(x?)?, a?, on.shape(b?)?, on.shape(c?)?, ids?);
    let ([n, hd, heads, slots], [_, _, tokens, sequences]) = (states.ne, x.ne);
    if tokens == 0 {
        return Err(on.unsupported("no tokens"));
    }
    let Some((head_grid, most)) = recurrence(n, hd, &[heads, sequences]) else {
        return Err(on.unsupported("states with rows of more than 256 elements"));
    };
    let rows = [hd, heads, sequences].iter().fold(1usize, |rows, &n| rows.saturating_mul(n as usize));
    let rows = i32::try_from(rows).map_err(|_| on.unsupported("2^31 or more rows of states"))? as u32;
    let args = ScanArgs {
        x: [x.nb[2], x.nb[3]],
        b: [b.nb[2], b.nb[3]],
        c: [c.nb[2], c.nb[3]],
        ids_step: ids.nb()[0] as u64,
        n,
        hd,
        heads,
        heads_per_group: heads / b.ne[1].max(1),
        tokens,
        sequences,
        slots,
        snapshots,
    };
    let pointers: [Ptr; 9] = std::array::from_fn(|i| match i {
        7 => Ptr::Dst,
        8 => Ptr::ErrorWord,
        source => Ptr::Src(source as u8),
    });
    let (entry, grid) = if a.ne()[0] == 1 {
        (format!("ssm_scan_head_{most}"), head_grid)
    } else {
        let (most, rows_of_warp) = if n <= 16 { (16, 8) } else { (256, 1) };
        let blocks = u64::from(rows.div_ceil(WARPS * rows_of_warp));
        (format!("ssm_scan_row_{most}"), Grid { blocks: [blocks, 1, 1], threads: [32, WARPS, 1], shared: 0 })
    };
    let decays = Access::run(3, &[heads, a.ne()[0] as u32]);
    in_sequence(on, tokens, on.launch(("ssm", &entry), grid, &pointers, &args)?.with_accesses(vec![decays]))
}

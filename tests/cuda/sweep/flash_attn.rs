//! Cases of FLASH_ATTN_EXT.

use super::Sweep;
use fanout::ops::flash_attn::FlashAttn;
use fanout::tensor::DType::{self, BF16, F16, F32, Q4_0, Q4_1, Q8_0};
use fanout::tensor::{Capability, TensorDesc};
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;
use std::cell::Cell;

const PLAIN: FlashAttn = FlashAttn { scale: 0.2, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };

/// Types of k and v: each type with a specialised entry, then all types in pairs, for the generic entry. The last type of an
/// odd number is paired with itself.
fn types() -> Vec<(DType, DType)> {
    let mut types: Vec<_> = DType::with_capability(Capability::Cache).map(|t| (t, t)).collect();
    let all: Vec<_> = DType::with_capability(Capability::Cuda).collect();
    types.extend(all.chunks(2).map(|pair| (pair[0], pair[pair.len() - 1])));
    types
}

/// Types with kernels for tensor cores.
const MMA_TYPES: [DType; 4] = [F16, BF16, Q8_0, Q4_0];

/// Layout of k and v.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Layout {
    Packed,
    /// A KV cache in which each position holds all heads, as runtimes store it.
    Cache,
    /// The same, with rows at odd addresses.
    Shifted,
}

/// Mask of the positions.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mask {
    None,
    /// Causal: the first query sees all but the last positions, the last query sees all.
    Causal,
    /// A window far from both ends, with biases; a separate mask for each head and batch.
    Window,
    /// All positions are hidden.
    All,
}

#[derive(Clone, Copy, Debug)]
struct Setting {
    op: FlashAttn,
    types: (DType, DType),
    dk: usize,
    dv: usize,
    n: usize,
    kv: usize,
    heads: usize,
    k_heads: usize,
    v_heads: usize,
    batches: usize,
    layout: Layout,
    mask: Mask,
    sinks: bool,
    /// Whether positions that [`Mask::Window`] hides from all queries have NaN and infinity.
    hides_bad: bool,
    /// Whether v is the first channels of k's rows, as in latent attention.
    is_latent: bool,
    /// Factor of the values of v.
    v_scale: f32,
}

impl Setting {
    /// Whether the kernel for prompts computes it, or that for latent attention, on a GPU with tensor cores: from 64 queries on, block types are converted.
    fn is_prompt(&self) -> bool {
        if self.is_latent && self.op.softcap == 0.0 && [(576, 512), (320, 256)].contains(&(self.dk, self.dv)) {
            return true;
        }
        let (per_k, per_v) = (self.heads / self.k_heads, self.heads / self.v_heads);
        let group = (1..=per_k).filter(|n| per_k.is_multiple_of(*n) && per_v.is_multiple_of(*n)).max().unwrap();
        let are_chunks = self.dk.is_multiple_of(8) && self.dv.is_multiple_of(8) && self.dv <= self.dk;
        let is_direct = self.types.0 == self.types.1 && [F16, BF16].contains(&self.types.0);
        let converts = |t: DType| t == F16 || t.is_block() && !matches!(t, DType::MXFP4 | DType::NVFP4);
        let has_type = is_direct || converts(self.types.0) && converts(self.types.1);
        has_type && are_chunks && self.dk <= 256 && self.n > 1 && self.n * group >= if is_direct { 16 } else { 64 }
    }
}

const USUAL: Setting = Setting {
    op: PLAIN,
    types: (F16, F16),
    dk: 64,
    dv: 64,
    n: 3,
    kv: 90,
    heads: 4,
    k_heads: 2,
    v_heads: 2,
    batches: 1,
    layout: Layout::Packed,
    mask: Mask::Causal,
    sinks: false,
    hides_bad: false,
    is_latent: false,
    v_scale: 1.0,
};

pub fn run(sweep: &Sweep) {
    for types in types() {
        let wide = if types.0.block_len().max(types.1.block_len()) == 256 { 256 } else { 96 };
        for layout in [Layout::Packed, Layout::Cache] {
            check_case(sweep, Setting { types, dk: wide, dv: wide, layout, ..USUAL });
        }
    }
    // Row sizes: whole octets or not, and sizes that give small and many tiles
    for (dk, dv) in
        [(1, 1), (8, 24), (33, 40), (40, 33), (80, 7), (128, 128), (192, 128), (256, 264), (576, 512), (3, 1030)]
    {
        for types in [(F16, F16), (F32, F32), (F16, BF16)] {
            check_case(sweep, Setting { dk, dv, types, ..USUAL });
        }
    }
    for layout in [Layout::Cache, Layout::Shifted] {
        check_case(sweep, Setting { dk: 72, dv: 40, layout, batches: 2, ..USUAL });
        check_case(sweep, Setting { dk: 32, dv: 96, layout, types: (Q4_1, Q4_1), ..USUAL });
    }
    // Groups of heads, numbers of queries, and positions with and without split-K
    for (heads, k_heads, v_heads) in [(1, 1, 1), (4, 4, 4), (8, 2, 2), (8, 1, 1), (12, 6, 2), (5, 1, 5)] {
        for (n, kv) in [(1, 1), (1, 64), (1, 300), (2, 700), (9, 65), (40, 130)] {
            let mask = if n == 2 { Mask::Window } else { Mask::Causal };
            check_case(sweep, Setting { heads, k_heads, v_heads, n, kv, mask, dk: 32, dv: 40, ..USUAL });
        }
    }
    check_tensor_cores(sweep);
    check_prompts(sweep);
    check_latent(sweep);
    // Split-K with more parts than a merging block has warps, up to the limit of parts
    check_case(sweep, Setting { dk: 8, dv: 8, n: 1, kv: 40_000, heads: 1, k_heads: 1, v_heads: 1, ..USUAL });
    // All modifiers of scores, with and without split-K
    for kv in [70, 520] {
        for mask in [Mask::None, Mask::Causal, Mask::Window, Mask::All] {
            for sinks in [false, true] {
                for (softcap, max_bias) in [(0.0, 0.0), (2.0, 0.0), (0.0, 8.0), (1.5, 4.0)] {
                    let max_bias = if mask == Mask::None { 0.0 } else { max_bias };
                    let op = FlashAttn { softcap, max_bias, ..PLAIN };
                    check_case(sweep, Setting { op, kv, mask, sinks, heads: 6, dk: 16, dv: 16, batches: 2, ..USUAL });
                }
            }
        }
    }
}

/// The kernels for tensor cores: tiles of 16 positions and 8 queries, spans of 128 channels, parts of positions.
fn check_tensor_cores(sweep: &Sweep) {
    for dtype in MMA_TYPES {
        let usual =
            Setting { types: (dtype, dtype), dk: 128, dv: 128, n: 1, heads: 8, k_heads: 2, v_heads: 2, ..USUAL };
        for kv in [1, 15, 17, 63, 64, 65, 512] {
            for (wide, layout) in [(64, Layout::Packed), (128, Layout::Cache)] {
                check_case(sweep, Setting { dk: wide, dv: wide, kv, layout, ..usual });
            }
        }
        // Groups of heads, and tiles of queries: one, two or four per block, and more
        for (heads, kv_heads) in [(2, 2), (7, 1), (16, 2), (33, 1)] {
            for (n, kv, mask) in
                [(1, 65, Mask::Causal), (2, 300, Mask::Window), (8, 200, Mask::None), (19, 70, Mask::Causal)]
            {
                check_case(
                    sweep,
                    Setting { heads, k_heads: kv_heads, v_heads: kv_heads, n, kv, mask, dv: 64, ..usual },
                );
            }
        }
        // Several groups of channels of k, spans of v, and different heads of k and v; sizes for the other kernels
        for (dk, dv) in [(64, 192), (192, 128), (256, 256), (576, 512), (960, 64), (1024, 64), (96, 96)] {
            check_case(sweep, Setting { dk, dv, kv: 100, k_heads: 4, v_heads: 1, batches: 2, ..usual });
        }
        check_case(sweep, Setting { n: 3, dk: 64, dv: 64, layout: Layout::Shifted, batches: 2, ..usual });
        // Blocks whose weights times scales would exceed the range of F16, or are far below it
        check_case(sweep, Setting { kv: 330, v_scale: 1e4, layout: Layout::Cache, ..usual });
        check_case(sweep, Setting { kv: 330, v_scale: 1e-3, mask: Mask::Window, ..usual });
        // A few positions with weights far above those of the rest
        check_scaled(sweep, Setting { kv: 700, v_scale: 0.02, layout: Layout::Cache, ..usual }, 6.0);
        for sinks in [false, true] {
            for (softcap, max_bias) in [(2.0, 0.0), (0.0, 8.0), (1.5, 4.0)] {
                let op = FlashAttn { softcap, max_bias, ..PLAIN };
                check_case(sweep, Setting { op, sinks, kv: 520, mask: Mask::Window, ..usual });
                check_case(sweep, Setting { op, sinks, mask: Mask::All, dk: 64, dv: 64, ..usual });
            }
        }
    }
    // More positions than one wave of blocks takes at a step each
    check_case(sweep, Setting { dk: 128, dv: 128, n: 1, kv: 4099, heads: 8, k_heads: 2, v_heads: 2, ..USUAL });
}

/// The kernel for prompts: blocks of 64 queries, tiles of 64 or 32 positions, 32 of which have their masks scanned at a time.
fn check_prompts(sweep: &Sweep) {
    for dtype in [F16, BF16] {
        let usual = Setting { types: (dtype, dtype), n: 17, kv: 200, heads: 4, k_heads: 2, v_heads: 2, ..USUAL };
        // Sizes of the variants, and padded ones
        for (i, wide) in [64, 80, 96, 112, 128, 192, 256].into_iter().enumerate() {
            let layout = if i % 2 == 0 { Layout::Cache } else { Layout::Packed };
            check_case(sweep, Setting { dk: wide, dv: wide, layout, ..usual });
            check_case(sweep, Setting { dk: wide - 8, dv: wide - 8, kv: 203, mask: Mask::None, ..usual });
            check_case(sweep, Setting { dk: wide, dv: wide / 2, n: 40, mask: Mask::Window, hides_bad: true, ..usual });
            check_case(sweep, Setting { dk: wide, dv: wide, kv: 77, layout: Layout::Shifted, batches: 2, ..usual });
        }
        check_case(sweep, Setting { dk: 8, dv: 8, kv: 1, n: 16, heads: 1, k_heads: 1, v_heads: 1, ..usual });
        for (dk, dv) in [(64, 64), (192, 128), (256, 256)] {
            // Groups of heads, with parts of positions, which are the more the fewer blocks there are
            for (heads, kv_heads, n, kv) in [(4, 4, 16, 520), (7, 1, 19, 1100), (16, 2, 2, 2600), (33, 1, 9, 70)] {
                check_case(sweep, Setting { dk, dv, heads, k_heads: kv_heads, v_heads: kv_heads, n, kv, ..usual });
            }
            for mask in [Mask::None, Mask::Window, Mask::All] {
                for (softcap, max_bias) in [(0.0, 8.0), (1.5, 4.0), (2.0, 0.0)] {
                    let max_bias = if mask == Mask::None { 0.0 } else { max_bias };
                    let op = FlashAttn { softcap, max_bias, scale: -0.2, ..PLAIN };
                    let heads = Setting { heads: 6, k_heads: 1, v_heads: 2, batches: 2, ..usual };
                    check_case(sweep, Setting { op, dk, dv, mask, sinks: true, kv: 328, ..heads });
                }
            }
        }
    }
    // Types that are converted, from 64 queries on
    for types in types().into_iter().chain([(F16, Q8_0), (Q8_0, F16), (BF16, F16), (F32, BF16)]) {
        let wide = if types.0.block_len().max(types.1.block_len()) == 256 { 256 } else { 96 };
        let of_types = Setting { types, dk: wide, dv: wide, n: 33, kv: 137, batches: 2, ..USUAL };
        check_case(sweep, Setting { layout: Layout::Cache, ..of_types });
        check_case(sweep, Setting { layout: Layout::Shifted, k_heads: 4, v_heads: 1, n: 64, kv: 40, ..of_types });
    }
    check_case(sweep, Setting { types: (Q8_0, Q8_0), n: 31, kv: 800, mask: Mask::Window, ..USUAL });
    // Rows of v that have less padding than those of k; a scale by which biases cannot be divided
    check_case(sweep, Setting { dk: 128, dv: 8, n: 20, ..USUAL });
    check_case(sweep, Setting { op: FlashAttn { scale: 1e-30, ..PLAIN }, mask: Mask::None, kv: 77, n: 20, ..USUAL });
    // Queries beyond the range of F16, and far below it
    for scale in [1e-6, 1e5] {
        let op = FlashAttn { scale: 0.2 / scale, ..PLAIN };
        check_scaled(sweep, Setting { op, n: 20, ..USUAL }, scale);
    }
}

/// The kernel for latent attention: blocks of 16 or 64 queries, tiles of 32 positions.
fn check_latent(sweep: &Sweep) {
    for (types, [dk, dv]) in [F16, BF16].into_iter().flat_map(|t| [[576, 512], [320, 256]].map(|wide| ((t, t), wide))) {
        let usual = Setting { types, dk, dv, heads: 16, k_heads: 1, v_heads: 1, n: 1, is_latent: true, ..USUAL };
        for (heads, n, kv) in [
            (1, 1, 70),
            (1, 3, 33),
            (1, 64, 31),
            (16, 1, 300),
            (16, 3, 90),
            (16, 17, 520),
            (20, 1, 200),
            (20, 3, 333),
            (128, 1, 1100),
            (128, 3, 77),
        ] {
            check_case(sweep, Setting { heads, n, kv, ..usual });
        }
        for n in [1, 5] {
            // Tiles that the mask hides, values that must not reach the results, and rows at any address
            check_case(sweep, Setting { n, kv: 328, mask: Mask::Window, hides_bad: true, batches: 2, ..usual });
            check_case(sweep, Setting { n, kv: 327, mask: Mask::Window, hides_bad: true, sinks: true, ..usual });
            check_case(sweep, Setting { n, kv: 77, mask: Mask::All, sinks: true, ..usual });
            let two = Setting { heads: 6, k_heads: 2, v_heads: 2, n: 3 * n, batches: 2, ..usual };
            check_case(sweep, Setting { mask: Mask::None, layout: Layout::Shifted, ..two });
            let op = FlashAttn { max_bias: 8.0, scale: -0.2, ..PLAIN };
            check_case(sweep, Setting { op, mask: Mask::Window, layout: Layout::Cache, ..two });
            // Other kernels
            check_case(sweep, Setting { op: FlashAttn { softcap: 2.0, ..PLAIN }, n, ..usual });
            check_case(sweep, Setting { dk: 128, dv: 64, n, ..usual });
        }
        for scale in [1e-6, 1e5] {
            check_scaled(sweep, Setting { op: FlashAttn { scale: 0.2 / scale, ..PLAIN }, n: 2, ..usual }, scale);
        }
    }
}

/// Parts of more positions than the kernels scan the mask for at a time, on a GPU with one multiprocessor.
pub fn check_long_parts(sweep: &Sweep) {
    for (heads, n, mask) in [(16, 1, Mask::Causal), (16, 3, Mask::Window), (64, 1, Mask::None), (5, 2, Mask::All)] {
        let (dk, dv, kv) = (320, 256, 2600);
        check_case(sweep, Setting { dk, dv, kv, heads, k_heads: 1, v_heads: 1, n, mask, is_latent: true, ..USUAL });
        check_case(sweep, Setting { kv, heads, k_heads: 1, v_heads: 1, n: 8 * n, mask, ..USUAL });
    }
}

/// The largest NMSE. Without tensor cores, sums and products are in f32. With them, products of few queries keep 22 bits with F16, 16 with
/// BF16. Of blocks, weights keep 11 bits. Queries and weights of prompts are rounded to the type of k and v.
fn bound(s: &Setting, has_mma: bool) -> f64 {
    let dtype = s.types.0;
    match () {
        () if has_mma && s.is_prompt() => {
            if dtype == BF16 {
                1e-4
            } else {
                1e-6
            }
        }
        () if dtype == s.types.1 && dtype == BF16 => 1e-9,
        () if dtype == s.types.1 && [Q8_0, Q4_0].contains(&dtype) => 1e-7,
        () => 1e-11,
    }
}

/// Runs a setting on both devices.
#[track_caller]
fn check_case(sweep: &Sweep, s: Setting) {
    check_scaled(sweep, s, 1.0);
}

/// As [`check_case`], with queries multiplied by a number.
#[track_caller]
fn check_scaled(sweep: &Sweep, s: Setting, scale: f32) {
    let mut case = Case::new();
    let mut q = TensorDesc::contiguous(F32, [s.dk, s.n, s.heads, s.batches]).unwrap();
    if s.layout != Layout::Packed {
        let row = q.nb()[1];
        // One extra element per token gives latent attention's rows a poor alignment.
        let token = s.heads * row + if s.is_latent && s.layout == Layout::Shifted { 4 } else { 0 };
        q = TensorDesc::strided(F32, q.ne(), [4, token, row, s.n * token]).unwrap();
    }
    let queries: Vec<f32> = normal(1, q.elements()).into_iter().map(|x| x * scale).collect();
    let q = case.leaf_with_desc(q, &queries);
    let k_nb = Cell::new([0; 4]);
    let [k, v] =
        [(s.types.0, s.dk, s.k_heads, 2), (s.types.1, s.dv, s.v_heads, 3)].map(|(dtype, wide, heads, seed)| {
            let ne = [wide, s.kv, heads, s.batches];
            let packed = TensorDesc::contiguous(dtype, ne).unwrap();
            let [nb0, row, ..] = packed.nb();
            // One extra block or element per position gives the rows a poor alignment.
            let position = heads * row + if s.layout == Layout::Shifted { nb0 } else { 0 };
            let cache = TensorDesc::strided(dtype, ne, [nb0, position, row, s.kv * position]).unwrap();
            let desc = if s.layout == Layout::Packed { packed } else { cache };
            let mut values = normal(seed, ne.iter().product());
            if seed == 3 {
                values.iter_mut().for_each(|x| *x *= s.v_scale);
            }
            if s.hides_bad {
                let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
                for (i, row) in values.chunks_mut(wide).enumerate() {
                    if (s.kv / 2).abs_diff(i % s.kv + 2) <= 1 {
                        row[i % wide] = bad[i % 3];
                    }
                }
            }
            if seed == 2 {
                k_nb.set(desc.nb());
            }
            case.leaf_with_desc(desc, &values)
        });
    let v = if s.is_latent {
        let desc = TensorDesc::strided(s.types.0, [s.dv, s.kv, s.k_heads, s.batches], k_nb.get()).unwrap();
        case.b.view(k, desc, 0).unwrap()
    } else {
        v
    };
    let ne = [
        s.kv,
        s.n,
        if s.mask == Mask::Window { s.heads } else { 1 },
        if s.mask == Mask::Window { s.batches } else { 1 },
    ];
    let bias = uniform(4, ne.iter().product(), -1.0, 0.0);
    let values: Vec<f32> = (0..bias.len())
        .map(|i| {
            let (c, token) = (i % s.kv, i / s.kv % s.n);
            let (seen, bias) = match s.mask {
                Mask::Causal => (c + s.n <= s.kv.max(s.n) + token, 0.0),
                Mask::Window => ((s.kv / 2..s.kv / 2 + 3 + token).contains(&c), bias[i]),
                Mask::None | Mask::All => (false, 0.0),
            };
            if seen { bias } else { f32::NEG_INFINITY }
        })
        .collect();
    let mask = (s.mask != Mask::None).then(|| case.leaf(F16, ne, &values));
    let sinks = s.sinks.then(|| case.leaf(F32, [s.heads, 1, 1, 1], &normal(5, s.heads)));
    let dst = case.b.node(s.op, &[Some(q), Some(k), Some(v), mask, sinks]).unwrap();
    sweep.check(&case.build(), &[dst], bound(&s, sweep.has_mma), &format!("{s:?}"));
}

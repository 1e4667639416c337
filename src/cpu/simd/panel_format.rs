//! Block types in panels (see [`crate::cpu::panel`]): the offsets and the decoding of their codes and scales.

use super::simd_ops::SimdOps;
use crate::cpu::panel::{Field, FieldTransform, field, transformed_field};
use crate::tensor::DType;
use crate::tensor::blocks::{BlockNvfp4, FP4_VALUES, IQ4_VALUES};

/// A block type in panels. Its elements are `scale * (code - zero) + bias`, with scale and bias per sub-block.
///
/// # Safety
/// All functions need the instructions of `L`, and `p` must point to a block of sixteen rows in a panel.
pub(super) trait PanelFormat {
    /// The type.
    const DTYPE: DType;

    /// The fields of a block, in the order of [`crate::tensor::blocks`].
    const FIELDS: &'static [Field];

    /// Bytes of a block of sixteen rows.
    const BYTES: usize = 16 * Self::DTYPE.block_bytes();

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// The largest code; the smallest is 0.
    const TOP: i32;

    /// The code of the value 0.
    const ZERO: i32;

    /// Whether each sub-block has a bias, which is multiplied by the sum of the column's values.
    const BIASED: bool;

    /// Sub-blocks whose codes are bit fields of the same bytes, selected by the `part` of [`PanelFormat::codes`]. A block has
    /// `block_len / (SUB * PARTS)` chunks of them.
    const PARTS: usize;

    /// Whether sub-blocks have f32 scales and [`super::expanded::blocks`] multiplies them.
    const EXPANDED: bool = false;

    /// The index of a part's sub-block in the block.
    fn sub(chunk: usize, part: usize) -> usize;

    /// The codes of elements `4 g` to `4 g + 3` of a sub-block.
    unsafe fn codes<L: SimdOps>(p: *const u8, chunk: usize, part: usize, g: usize) -> L::Int;

    /// The scales of a block.
    unsafe fn scales<L: SimdOps>(p: *const u8) -> Scales<L>;

    /// Scale and bias of a sub-block of a block with less than 256 elements.
    #[inline(always)]
    unsafe fn sub_scales<L: SimdOps>(p: *const u8, _sub: usize) -> (L::Float, L::Float) {
        // SAFETY: the caller meets this function's requirements.
        let scales = unsafe { Self::scales::<L>(p) };
        (scales.d, scales.m)
    }
}

/// Scales of a block. The scale of a sub-block is `d` times its byte in `scales`, its bias `m` times its byte in `mins`. Types
/// with one sub-block have no bytes: `d` and `m` are scale and bias.
pub(super) struct Scales<L: SimdOps> {
    pub(super) d: L::Float,
    pub(super) m: L::Float,
    /// Signed bytes, four sub-blocks per lane.
    pub(super) scales: [L::Int; 4],
    /// Unsigned bytes, four sub-blocks per lane.
    pub(super) mins: [L::Int; 4],
}

impl<L: SimdOps> Clone for Scales<L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: SimdOps> Copy for Scales<L> {}

impl<L: SimdOps> Scales<L> {
    #[inline(always)]
    pub(super) unsafe fn single(d: L::Float, m: L::Float) -> Scales<L> {
        // SAFETY: uses registers only; the caller guarantees that the processor has the instructions.
        unsafe { Scales { d, m, scales: [L::zero_int(); 4], mins: [L::zero_int(); 4] } }
    }
}

/// The low (`half` = 0) or high nibbles of 64 bytes.
#[inline(always)]
unsafe fn nibbles<L: SimdOps>(p: *const u8, half: usize) -> L::Int {
    // SAFETY: the caller guarantees that `p` points to 64 readable bytes, and that the processor has the instructions.
    unsafe {
        let bytes = L::load_bytes(p);
        if half == 0 { L::and(bytes, L::broadcast_u8(15)) } else { L::high_nibbles(bytes) }
    }
}

/// Bits from `from` on of each byte at `p`, as many as `mask` has.
#[inline(always)]
unsafe fn bits<L: SimdOps>(p: *const u8, from: usize, mask: u8) -> L::Int {
    // SAFETY: the caller guarantees that `p` points to 64 readable bytes, and that the processor has the instructions.
    unsafe { L::and(L::shift_right(L::load_bytes(p), from as u32), L::broadcast_u8(mask)) }
}

/// 16 in each byte whose element of group `g` has the fifth bit set; see [`crate::cpu::panel::FieldTransform`].
#[inline(always)]
unsafe fn fifth_bits<L: SimdOps>(p: *const u8, g: usize) -> L::Int {
    // SAFETY: the caller guarantees that `p` points to 64 readable bytes, and that the processor has the instructions.
    unsafe {
        let bits = L::load_bytes(p);
        let bits = if g < 4 { L::shift_left(bits, 4 - g as u32) } else { L::shift_right(bits, g as u32 - 4) };
        L::and(bits, L::broadcast_u8(16))
    }
}

/// A type of one bit, two bits or FP4 per element, with blocks of 64 or 128 elements; `$sub` elements are in a sub-block, `$scale` its
/// scale.
macro_rules! low_bit {
    ($name:ident, fields [$($field:expr),*], sub $sub:literal, top $top:expr, zero $zero:expr,
     |$p:ident, $chunk:ident, $g:ident| scale $scale:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl PanelFormat for $name {
            const DTYPE: DType = DType::$name;
            const FIELDS: &'static [Field] = &[$($field),*];
            const SUB: usize = $sub;
            const TOP: i32 = $top;
            const ZERO: i32 = $zero;
            const BIASED: bool = false;
            const PARTS: usize = 1;

            #[inline(always)]
            fn sub(chunk: usize, _: usize) -> usize {
                chunk
            }

            #[inline(always)]
            unsafe fn codes<L: SimdOps>($p: *const u8, $chunk: usize, _: usize, $g: usize) -> L::Int {
                // SAFETY: a block lies at `p`, and the offsets are of its fields, times sixteen rows.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales<L: SimdOps>(p: *const u8) -> Scales<L> {
                // SAFETY: as above.
                unsafe { Scales::single(Self::sub_scales::<L>(p, 0).0, L::zero_f32()) }
            }

            #[inline(always)]
            unsafe fn sub_scales<L: SimdOps>($p: *const u8, $chunk: usize) -> (L::Float, L::Float) {
                // SAFETY: as above.
                unsafe { ($scale, L::zero_f32()) }
            }
        }
    };
}

// Codes 0 and 2 for minus and plus. A word has the bits of 32 elements.
low_bit!(Q1_0, fields [field(2, 1), transformed_field(4, 4, FieldTransform::GatherFifthBits)], sub 32, top 2, zero 1,
|p, chunk, g|
scale {
    let _ = chunk;
    L::load_f16(p)
},
codes {
    let word = L::load_bytes(p.add(32 + 64 * chunk));
    let bit = if g == 0 { L::shift_left(word, 1) } else { L::shift_right(word, g as u32 - 1) };
    L::and(bit, L::broadcast_u8(2))
});
low_bit!(Q2_0, fields [field(2, 1), transformed_field(4, 4, FieldTransform::TransposePairs)], sub 32, top 3, zero 1,
    |p, chunk, g|
    scale {
        let _ = chunk;
        L::load_f16(p)
    },
    codes bits::<L>(p.add(32 + 64 * (2 * chunk + g / 4)), 2 * (g % 4), 3));
low_bit!(NVFP4, fields [field(4, 1), field(4, 8)], sub 16, top 24, zero 12, |p, chunk, g|
    scale {
        let mut units = [0f32; 16];
        for (r, unit) in units.iter_mut().enumerate() {
            let four = u32::from_le_bytes(p.add(4 * r).cast::<[u8; 4]>().read());
            *unit = BlockNvfp4::unit_of((four >> (8 * chunk)) as u8);
        }
        L::load_f32(units.as_ptr())
    },
    codes L::table_lookup(&FP4_CODES, nibbles::<L>(p.add(64 + 64 * (2 * chunk + g % 2)), g / 2)));

/// A legacy quant type with blocks of 32 elements and one scale per block; `$fields`, `$scales` and `$codes` are its layout.
macro_rules! legacy {
    ($name:ident, fields [$($field:expr),*], top $top:expr, zero $zero:expr, biased $biased:expr,
     |$p:ident, $g:ident| scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl PanelFormat for $name {
            const DTYPE: DType = DType::$name;
            const FIELDS: &'static [Field] = &[$($field),*];
            const SUB: usize = 32;
            const TOP: i32 = $top;
            const ZERO: i32 = $zero;
            const BIASED: bool = $biased;
            const PARTS: usize = 1;

            #[inline(always)]
            fn sub(_: usize, _: usize) -> usize {
                0
            }

            #[inline(always)]
            unsafe fn codes<L: SimdOps>($p: *const u8, _: usize, _: usize, $g: usize) -> L::Int {
                // SAFETY: a block lies at `p`, and the offsets are of its fields, times sixteen rows.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales<L: SimdOps>($p: *const u8) -> Scales<L> {
                // SAFETY: as above.
                unsafe { $scales }
            }
        }
    };
}

legacy!(Q4_0, fields [field(2, 1), field(4, 4)], top 15, zero 8, biased false, |p, g|
    scales Scales::single(L::load_f16(p), L::zero_f32()),
    codes nibbles::<L>(p.add(32 + 64 * (g % 4)), g / 4));
legacy!(Q4_1, fields [field(2, 2), field(4, 4)], top 15, zero 0, biased true, |p, g|
    scales Scales::single(L::load_f16(p), L::load_f16(p.add(32))),
    codes nibbles::<L>(p.add(64 + 64 * (g % 4)), g / 4));
legacy!(Q5_0, fields [field(2, 1), transformed_field(4, 1, FieldTransform::GatherFifthBits), field(4, 4)],
    top 31, zero 16, biased false, |p, g|
    scales Scales::single(L::load_f16(p), L::zero_f32()),
    codes L::or(nibbles::<L>(p.add(96 + 64 * (g % 4)), g / 4), fifth_bits::<L>(p.add(32), g)));
legacy!(Q5_1, fields [field(2, 2), transformed_field(4, 1, FieldTransform::GatherFifthBits), field(4, 4)],
    top 31, zero 0, biased true, |p, g|
    scales Scales::single(L::load_f16(p), L::load_f16(p.add(32))),
    codes L::or(nibbles::<L>(p.add(128 + 64 * (g % 4)), g / 4), fifth_bits::<L>(p.add(64), g)));
legacy!(Q8_0, fields [field(2, 1), transformed_field(4, 8, FieldTransform::AddOffset)], top 255, zero 128, biased false, |p, g|
    scales Scales::single(L::load_f16(p), L::zero_f32()),
    codes L::load_bytes(p.add(32 + 64 * g)));
legacy!(IQ4_NL, fields [field(2, 1), field(4, 4)], top 255, zero 128, biased false, |p, g|
    scales Scales::single(L::load_f16(p), L::zero_f32()),
    codes L::table_lookup(&IQ4_CODES, nibbles::<L>(p.add(32 + 64 * (g % 4)), g / 4)));
legacy!(MXFP4, fields [field(1, 1), field(4, 4)], top 24, zero 12, biased false, |p, g|
    scales {
        let mut units = [0f32; 16];
        for (r, unit) in units.iter_mut().enumerate() {
            *unit = unit_of(*p.add(r));
        }
        Scales::single(L::load_f32(units.as_ptr()), L::zero_f32())
    },
    codes L::table_lookup(&FP4_CODES, nibbles::<L>(p.add(16 + 64 * (g % 4)), g / 4)));

/// Adds an offset to values, so that they become unsigned codes.
const fn with_offset(values: [i8; 16], by: u8) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (values[i] as u8).wrapping_add(by);
        i += 1;
    }
    codes
}

const IQ4_CODES: [u8; 16] = with_offset(IQ4_VALUES, 128);
const FP4_CODES: [u8; 16] = with_offset(FP4_VALUES, 12);

/// Scale of an MXFP4 block by its exponent byte `e`: `2^(e - 128)`, half of the format's `2^(e - 127)`, because [`FP4_VALUES`]
/// has the values doubled.
///
/// Computed without a branch or a table, so that a loop over sixteen of them becomes vector instructions.
#[inline(always)]
pub(super) fn unit_of(e: u8) -> f32 {
    let e = u32::from(e);
    // Subnormal for 0 and 1, where the second number is the larger one.
    f32::from_bits((e.saturating_sub(1) << 23).max((e + 1) << 21))
}

/// A K-quant type with superblocks of 256 elements.
macro_rules! superblock {
    ($name:ident, fields [$($field:expr),*], sub $sub:literal, parts $parts:literal, top $top:literal,
     zero $zero:literal, biased $biased:literal,
     |$p:ident, $chunk:ident, $part:ident, $g:ident| number $number:expr, scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // ggml's name of the type
        pub(super) struct $name;

        impl PanelFormat for $name {
            const DTYPE: DType = DType::$name;
            const FIELDS: &'static [Field] = &[$($field),*];
            const SUB: usize = $sub;
            const TOP: i32 = $top;
            const ZERO: i32 = $zero;
            const BIASED: bool = $biased;
            const PARTS: usize = $parts;

            #[inline(always)]
            fn sub($chunk: usize, $part: usize) -> usize {
                $number
            }

            #[inline(always)]
            unsafe fn codes<L: SimdOps>($p: *const u8, $chunk: usize, $part: usize, $g: usize) -> L::Int {
                // SAFETY: a block lies at `p`, and the offsets are of its fields, times sixteen rows.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales<L: SimdOps>($p: *const u8) -> Scales<L> {
                // SAFETY: as above.
                unsafe { $scales }
            }
        }
    };
}

/// Eight 6-bit scales and minima from the 12 bytes of Q4_K and Q5_K at `p + 64`.
#[inline(always)]
unsafe fn k4_scales<L: SimdOps>(p: *const u8) -> Scales<L> {
    // SAFETY: the block starts with d, dmin and three groups of scales, each of sixteen rows.
    unsafe {
        let (a, b, c) = (L::load_bytes(p.add(64)), L::load_bytes(p.add(128)), L::load_bytes(p.add(192)));
        let (six, four, two) = (L::broadcast_u8(63), L::broadcast_u8(15), L::broadcast_u8(48));
        // The high two bits of the last four lie above the six bits of the first four.
        let scales = L::or(L::and(c, four), L::and(L::shift_right(a, 2), two));
        let mins = L::or(L::and(L::shift_right(c, 4), four), L::and(L::shift_right(b, 2), two));
        let none = L::zero_int();
        Scales {
            d: L::load_f16(p),
            m: L::load_f16(p.add(32)),
            scales: [L::and(a, six), scales, none, none],
            mins: [L::and(b, six), mins, none, none],
        }
    }
}

/// Sub-blocks of 16 in the order of [`PanelFormat::codes`] for Q2_K, Q3_K and Q6_K: chunk 2h + s holds half s of each 32
/// elements of half h of the block, part by part.
const fn sub_block_of_16(chunk: usize, part: usize) -> usize {
    8 * (chunk / 2) + 2 * part + chunk % 2
}

superblock!(Q2_K, fields [field(4, 4), field(4, 16), field(2, 2)],
    sub 16, parts 4, top 3, zero 0, biased true, |p, chunk, part, g|
    number sub_block_of_16(chunk, part),
    scales {
        let both = [L::load_bytes(p), L::load_bytes(p.add(64)), L::load_bytes(p.add(128)), L::load_bytes(p.add(192))];
        let (mut scales, mut mins) = (both, both);
        for i in 0..4 {
            scales[i] = L::and(both[i], L::broadcast_u8(15));
            mins[i] = L::and(L::shift_right(both[i], 4), L::broadcast_u8(15));
        }
        Scales { d: L::load_f16(p.add(1280)), m: L::load_f16(p.add(1312)), scales, mins }
    },
    codes bits::<L>(p.add(256 + 64 * (4 * chunk + g)), 2 * part, 3));

superblock!(Q3_K, fields [field(4, 8), field(4, 16), field(4, 3), field(2, 1)],
    sub 16, parts 4, top 7, zero 4, biased false, |p, chunk, part, g|
number sub_block_of_16(chunk, part),
scales {
    let (a, b, c) = (L::load_bytes(p.add(1536)), L::load_bytes(p.add(1600)), L::load_bytes(p.add(1664)));
    let (low, high) = (L::broadcast_u8(15), L::broadcast_u8(48));
    let mut scales = [
        L::or(L::and(a, low), L::and(L::shift_left(c, 4), high)),
        L::or(L::and(b, low), L::and(L::shift_left(c, 2), high)),
        L::or(L::and(L::shift_right(a, 4), low), L::and(c, high)),
        L::or(L::and(L::shift_right(b, 4), low), L::and(L::shift_right(c, 2), high)),
    ];
    for scale in &mut scales {
        *scale = L::sub_bytes(*scale, L::broadcast_u8(32));
    }
    Scales { d: L::load_f16(p.add(1728)), m: L::zero_f32(), scales, mins: [L::zero_int(); 4] }
},
codes {
    let high = bits::<L>(p.add(64 * (4 * (chunk % 2) + g)), 4 * (chunk / 2) + part, 1);
    L::or(bits::<L>(p.add(512 + 64 * (4 * chunk + g)), 2 * part, 3), L::shift_left(high, 2))
});

superblock!(Q4_K, fields [field(2, 2), field(4, 3), field(4, 32)],
    sub 32, parts 2, top 15, zero 0, biased true, |p, chunk, part, g|
    number 2 * chunk + part,
    scales k4_scales::<L>(p),
    codes nibbles::<L>(p.add(256 + 64 * (8 * chunk + g)), part));

superblock!(Q5_K, fields [field(2, 2), field(4, 3), field(4, 8), field(4, 32)],
    sub 32, parts 2, top 31, zero 0, biased true, |p, chunk, part, g|
number 2 * chunk + part,
scales k4_scales::<L>(p),
codes {
    let high = bits::<L>(p.add(256 + 64 * g), 2 * chunk + part, 1);
    L::or(nibbles::<L>(p.add(768 + 64 * (8 * chunk + g)), part), L::shift_left(high, 4))
});

// Chunk 4h + 2q + s holds half s of each 32 elements q and q + 2 of half h of the block, so that bytes are read in ascending
// order.
superblock!(Q6_K, fields [field(4, 32), field(4, 16), field(4, 4), field(2, 1)],
    sub 16, parts 2, top 63, zero 32, biased false, |p, chunk, part, g|
number sub_block_of_16(chunk / 4 * 2 + chunk % 2, chunk / 2 % 2 + 2 * part),
scales {
    let scales =
        [L::load_bytes(p.add(3072)), L::load_bytes(p.add(3136)), L::load_bytes(p.add(3200)), L::load_bytes(p.add(3264))];
    Scales { d: L::load_f16(p.add(3328)), m: L::zero_f32(), scales, mins: [L::zero_int(); 4] }
},
codes {
    let low = nibbles::<L>(p.add(64 * (4 * chunk + g)), part);
    let high = p.add(2048 + 64 * (8 * (chunk / 4) + 4 * (chunk % 2) + g));
    L::or(low, L::shift_left(bits::<L>(high, 4 * part + 2 * (chunk / 2 % 2), 3), 4))
});

superblock!(TQ2_0, fields [field(4, 16), field(2, 1)],
    sub 32, parts 4, top 3, zero 1, biased false, |p, chunk, part, g|
    number 4 * chunk + part,
    scales Scales {
        d: L::load_f16(p.add(1024)),
        m: L::zero_f32(),
        scales: [L::broadcast_u8(1); 4],
        mins: [L::zero_int(); 4],
    },
    codes bits::<L>(p.add(64 * (8 * chunk + g)), 2 * part, 3));

superblock!(IQ4_XS, fields [field(2, 2), field(4, 1), field(4, 32)],
sub 32, parts 1, top 255, zero 128, biased false, |p, chunk, part, g|
number chunk + part,
scales {
    let mut scales = [[0u32; 16]; 2];
    for r in 0..16 {
        let high = u32::from(u16::from_le_bytes(p.add(32 + 2 * r).cast::<[u8; 2]>().read()));
        let low = u32::from_le_bytes(p.add(64 + 4 * r).cast::<[u8; 4]>().read());
        scales[0][r] = spread_six_bits(low, high);
        scales[1][r] = spread_six_bits(low >> 16, high >> 8);
    }
    let (none, zero) = (L::zero_int(), L::broadcast_u8(32));
    let first = L::sub_bytes(L::load_bytes(scales[0].as_ptr().cast()), zero);
    let second = L::sub_bytes(L::load_bytes(scales[1].as_ptr().cast()), zero);
    Scales { d: L::load_f16(p), m: L::zero_f32(), scales: [first, second, none, none], mins: [none; 4] }
},
codes {
    let _ = part;
    L::table_lookup(&IQ4_CODES, nibbles::<L>(p.add(128 + 64 * (4 * chunk + g % 4)), g / 4))
});

/// Four numbers of six bits, one per byte, from four nibbles and four pairs of higher bits.
#[inline(always)]
fn spread_six_bits(low: u32, high: u32) -> u32 {
    let low = low & 0xf | (low & 0xf0) << 4 | (low & 0xf00) << 8 | (low & 0xf000) << 12;
    low | (high & 0x3) << 4 | (high & 0xc) << 10 | (high & 0x30) << 16 | (high & 0xc0) << 22
}

//! Block types as strips hold them (see [`crate::cpu::strip`]): where their codes and scales lie.

use super::lanes::Lanes;
use crate::cpu::strip::{Change, Field, changed, field};
use crate::tensor::DType;
use crate::tensor::blocks::{FP4_VALUES, IQ4_VALUES};

/// A type whose elements are `scale * (code - zero) + bias` by sub-block.
///
/// # Safety
/// All functions need the instructions of `L`, and `p` must point to a block of sixteen rows in a strip.
pub(super) trait Format {
    /// The type.
    const DTYPE: DType;

    /// The fields of a block, in the order in which [`crate::tensor::blocks`] declares them.
    const FIELDS: &'static [Field];

    /// Bytes of a block of sixteen rows.
    const BYTES: usize = 16 * Self::DTYPE.block_bytes();

    /// Elements of a sub-block: 16 or 32.
    const SUB: usize;

    /// The largest code; the least is 0.
    const TOP: i32;

    /// The code that stands for 0.
    const ZERO: i32;

    /// Whether there is a bias for each sub-block, which meets the sum of its columns.
    const BIASED: bool;

    /// Sub-blocks whose codes are fields of the same bytes, [`Format::codes`]' `part`. A block is
    /// `block_len / (SUB * PARTS)` chunks of them.
    const PARTS: usize;

    /// The number of a part's sub-block.
    fn sub(chunk: usize, part: usize) -> usize;

    /// The codes of elements `4 g` to `4 g + 3` of a sub-block.
    unsafe fn codes<L: Lanes>(p: *const u8, chunk: usize, part: usize, g: usize) -> L::Int;

    /// The scales of a block.
    unsafe fn scales<L: Lanes>(p: *const u8) -> Scales<L>;
}

/// Scales of a block: `d` times the byte of each sub-block, the bias `m` times that of the minima. Types with one
/// sub-block have no bytes: `d` and `m` are scale and bias.
pub(super) struct Scales<L: Lanes> {
    pub(super) d: L::Float,
    pub(super) m: L::Float,
    /// Signed bytes, four sub-blocks to a lane.
    pub(super) scales: [L::Int; 4],
    /// Unsigned bytes.
    pub(super) mins: [L::Int; 4],
}

impl<L: Lanes> Clone for Scales<L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: Lanes> Copy for Scales<L> {}

impl<L: Lanes> Scales<L> {
    #[inline(always)]
    unsafe fn single(d: L::Float, m: L::Float) -> Scales<L> {
        // SAFETY: registers only; the caller vouches for the instructions.
        unsafe { Scales { d, m, scales: [L::zero(); 4], mins: [L::zero(); 4] } }
    }
}

/// Low (`half` 0) or high nibbles of 64 bytes.
#[inline(always)]
unsafe fn nibbles<L: Lanes>(p: *const u8, half: usize) -> L::Int {
    // SAFETY: the caller vouches for 64 bytes and the instructions.
    unsafe {
        let bytes = L::load(p);
        if half == 0 { L::and(bytes, L::bytes(15)) } else { L::high_nibbles(bytes) }
    }
}

/// Bits `from` and on of the bytes at `p`, as many as `mask` has.
#[inline(always)]
unsafe fn bits<L: Lanes>(p: *const u8, from: usize, mask: u8) -> L::Int {
    // SAFETY: the caller vouches for 64 bytes and the instructions.
    unsafe { L::and(L::right(L::load(p), from as u32), L::bytes(mask)) }
}

/// 16 where the fifth bit of an element of group `g` is set; see [`crate::cpu::strip`].
#[inline(always)]
unsafe fn fifths<L: Lanes>(p: *const u8, g: usize) -> L::Int {
    // SAFETY: the caller vouches for 64 bytes and the instructions.
    unsafe {
        let bits = L::load(p);
        let bits = if g < 4 { L::left(bits, 4 - g as u32) } else { L::right(bits, g as u32 - 4) };
        L::and(bits, L::bytes(16))
    }
}

/// A type with blocks of 32 elements: one scale, codes whose low four bits are nibbles or bytes at `$qs` times 16.
macro_rules! legacy {
    ($name:ident, fields [$($field:expr),*], top $top:expr, zero $zero:expr, biased $biased:expr,
     |$p:ident, $g:ident| scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // the field's own name
        pub(super) struct $name;

        impl Format for $name {
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
            unsafe fn codes<L: Lanes>($p: *const u8, _: usize, _: usize, $g: usize) -> L::Int {
                // SAFETY: a block lies at `p`; offsets are those of its fields, times sixteen rows.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales<L: Lanes>($p: *const u8) -> Scales<L> {
                // SAFETY: as above.
                unsafe { $scales }
            }
        }
    };
}

legacy!(Q4_0, fields [field(2, 1), field(4, 4)], top 15, zero 8, biased false, |p, g|
    scales Scales::single(L::load_halves(p), L::zeros()),
    codes nibbles::<L>(p.add(32 + 64 * (g % 4)), g / 4));
legacy!(Q4_1, fields [field(2, 2), field(4, 4)], top 15, zero 0, biased true, |p, g|
    scales Scales::single(L::load_halves(p), L::load_halves(p.add(32))),
    codes nibbles::<L>(p.add(64 + 64 * (g % 4)), g / 4));
legacy!(Q5_0, fields [field(2, 1), changed(4, 1, Change::Fifths), field(4, 4)], top 31, zero 16, biased false, |p, g|
    scales Scales::single(L::load_halves(p), L::zeros()),
    codes L::or(nibbles::<L>(p.add(96 + 64 * (g % 4)), g / 4), fifths::<L>(p.add(32), g)));
legacy!(Q5_1, fields [field(2, 2), changed(4, 1, Change::Fifths), field(4, 4)], top 31, zero 0, biased true, |p, g|
    scales Scales::single(L::load_halves(p), L::load_halves(p.add(32))),
    codes L::or(nibbles::<L>(p.add(128 + 64 * (g % 4)), g / 4), fifths::<L>(p.add(64), g)));
legacy!(Q8_0, fields [field(2, 1), changed(4, 8, Change::Raise)], top 255, zero 128, biased false, |p, g|
    scales Scales::single(L::load_halves(p), L::zeros()),
    codes L::load(p.add(32 + 64 * g)));
legacy!(IQ4_NL, fields [field(2, 1), field(4, 4)], top 255, zero 128, biased false, |p, g|
    scales Scales::single(L::load_halves(p), L::zeros()),
    codes L::look_up(&IQ4_CODES, nibbles::<L>(p.add(32 + 64 * (g % 4)), g / 4)));
legacy!(MXFP4, fields [field(1, 1), field(4, 4)], top 24, zero 12, biased false, |p, g|
    scales {
        let mut units = [0f32; 16];
        for (r, unit) in units.iter_mut().enumerate() {
            *unit = UNITS[usize::from(*p.add(r))];
        }
        Scales::single(L::load_floats(units.as_ptr()), L::zeros())
    },
    codes L::look_up(&FP4_CODES, nibbles::<L>(p.add(16 + 64 * (g % 4)), g / 4)));

/// Values raised to be unsigned.
const fn raised(values: [i8; 16], by: u8) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (values[i] as u8).wrapping_add(by);
        i += 1;
    }
    codes
}

const IQ4_CODES: [u8; 16] = raised(IQ4_VALUES, 128);
const FP4_CODES: [u8; 16] = raised(FP4_VALUES, 12);

/// `2^(e - 128)` of an MXFP4 block.
pub(super) static UNITS: [f32; 256] = {
    let mut units = [0.0; 256];
    let mut e = 0;
    while e < 256 {
        // Subnormal for 0 and 1.
        units[e] = f32::from_bits(if e < 2 { 1 << (21 + e) } else { (e as u32 - 1) << 23 });
        e += 1;
    }
    units
};

/// A type with blocks of 256 elements.
macro_rules! superblock {
    ($name:ident, fields [$($field:expr),*], sub $sub:literal, parts $parts:literal, top $top:literal, zero $zero:literal, biased $biased:literal,
     |$p:ident, $chunk:ident, $part:ident, $g:ident| number $number:expr, scales $scales:expr, codes $codes:expr) => {
        #[allow(non_camel_case_types)] // the field's own name
        pub(super) struct $name;

        impl Format for $name {
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
            unsafe fn codes<L: Lanes>($p: *const u8, $chunk: usize, $part: usize, $g: usize) -> L::Int {
                // SAFETY: a block lies at `p`; offsets are those of its fields, times sixteen rows.
                unsafe { $codes }
            }

            #[inline(always)]
            unsafe fn scales<L: Lanes>($p: *const u8) -> Scales<L> {
                // SAFETY: as above.
                unsafe { $scales }
            }
        }
    };
}

/// Eight scales and minima of 6 bits, from the 12 bytes of Q4_K and Q5_K at `p + 64`.
#[inline(always)]
unsafe fn eight<L: Lanes>(p: *const u8) -> Scales<L> {
    // SAFETY: d, dmin and three groups of scales of sixteen rows start the block.
    unsafe {
        let (a, b, c) = (L::load(p.add(64)), L::load(p.add(128)), L::load(p.add(192)));
        let (six, four, two) = (L::bytes(63), L::bytes(15), L::bytes(48));
        // The high two bits of the last four lie on top of the first four.
        let scales = L::or(L::and(c, four), L::and(L::right(a, 2), two));
        let mins = L::or(L::and(L::right(c, 4), four), L::and(L::right(b, 2), two));
        let none = L::zero();
        Scales {
            d: L::load_halves(p),
            m: L::load_halves(p.add(32)),
            scales: [L::and(a, six), scales, none, none],
            mins: [L::and(b, six), mins, none, none],
        }
    }
}

/// Sub-blocks of 16 in the order of [`Format::codes`] of Q2_K, Q3_K and Q6_K: chunk 2h + s holds half s of each 32 elements of
/// half h of the block, part by part.
const fn sixteenth(chunk: usize, part: usize) -> usize {
    8 * (chunk / 2) + 2 * part + chunk % 2
}

superblock!(Q2_K, fields [field(4, 4), field(4, 16), field(2, 2)], sub 16, parts 4, top 3, zero 0, biased true, |p, chunk, part, g|
    number sixteenth(chunk, part),
    scales {
        let both = [L::load(p), L::load(p.add(64)), L::load(p.add(128)), L::load(p.add(192))];
        let (mut scales, mut mins) = (both, both);
        for i in 0..4 {
            scales[i] = L::and(both[i], L::bytes(15));
            mins[i] = L::and(L::right(both[i], 4), L::bytes(15));
        }
        Scales { d: L::load_halves(p.add(1280)), m: L::load_halves(p.add(1312)), scales, mins }
    },
    codes bits::<L>(p.add(256 + 64 * (4 * chunk + g)), 2 * part, 3));

superblock!(Q3_K, fields [field(4, 8), field(4, 16), field(4, 3), field(2, 1)], sub 16, parts 4, top 7, zero 4, biased false, |p, chunk, part, g|
number sixteenth(chunk, part),
scales {
    let (a, b, c) = (L::load(p.add(1536)), L::load(p.add(1600)), L::load(p.add(1664)));
    let (low, high) = (L::bytes(15), L::bytes(48));
    let mut scales = [
        L::or(L::and(a, low), L::and(L::left(c, 4), high)),
        L::or(L::and(b, low), L::and(L::left(c, 2), high)),
        L::or(L::and(L::right(a, 4), low), L::and(c, high)),
        L::or(L::and(L::right(b, 4), low), L::and(L::right(c, 2), high)),
    ];
    for scale in &mut scales {
        *scale = L::subtract_bytes(*scale, L::bytes(32));
    }
    Scales { d: L::load_halves(p.add(1728)), m: L::zeros(), scales, mins: [L::zero(); 4] }
},
codes {
    let high = bits::<L>(p.add(64 * (4 * (chunk % 2) + g)), 4 * (chunk / 2) + part, 1);
    L::or(bits::<L>(p.add(512 + 64 * (4 * chunk + g)), 2 * part, 3), L::left(high, 2))
});

superblock!(Q4_K, fields [field(2, 2), field(4, 3), field(4, 32)], sub 32, parts 2, top 15, zero 0, biased true, |p, chunk, part, g|
    number 2 * chunk + part,
    scales eight::<L>(p),
    codes nibbles::<L>(p.add(256 + 64 * (8 * chunk + g)), part));

superblock!(Q5_K, fields [field(2, 2), field(4, 3), field(4, 8), field(4, 32)], sub 32, parts 2, top 31, zero 0, biased true, |p, chunk, part, g|
number 2 * chunk + part,
scales eight::<L>(p),
codes {
    let high = bits::<L>(p.add(256 + 64 * g), 2 * chunk + part, 1);
    L::or(nibbles::<L>(p.add(768 + 64 * (8 * chunk + g)), part), L::left(high, 4))
});

// Chunk 4h + 2q + s holds half s of each 32 elements q and q + 2 of half h of the block: so bytes are read in their order.
superblock!(Q6_K, fields [field(4, 32), field(4, 16), field(4, 4), field(2, 1)], sub 16, parts 2, top 63, zero 32, biased false, |p, chunk, part, g|
number sixteenth(chunk / 4 * 2 + chunk % 2, chunk / 2 % 2 + 2 * part),
scales {
    let scales = [L::load(p.add(3072)), L::load(p.add(3136)), L::load(p.add(3200)), L::load(p.add(3264))];
    Scales { d: L::load_halves(p.add(3328)), m: L::zeros(), scales, mins: [L::zero(); 4] }
},
codes {
    let low = nibbles::<L>(p.add(64 * (4 * chunk + g)), part);
    let high = p.add(2048 + 64 * (8 * (chunk / 4) + 4 * (chunk % 2) + g));
    L::or(low, L::left(bits::<L>(high, 4 * part + 2 * (chunk / 2 % 2), 3), 4))
});

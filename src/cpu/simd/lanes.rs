//! Sixteen lanes of 32 bits, one for each row of a strip: the few operations that products need, by instruction set.
//!
//! Kernels are written once over [`Lanes`] and compiled for each set. There are no closures around these operations: one
//! that is not inlined would be compiled without the instructions, and call each.

/// An instruction set's sixteen lanes.
///
/// # Safety
/// All functions need the instructions that the type stands for; those with a pointer, as many readable bytes as they say.
pub(super) trait Lanes {
    /// Sixteen 32-bit lanes of bytes or whole numbers.
    type Int: Copy;
    /// Sixteen f32.
    type Float: Copy;
    /// Four codes of a column, in every lane.
    type Four: Copy;
    /// A number of a column, in every lane.
    type Factor: Copy;

    /// Whether [`Lanes::multiply`] sums products of any codes in 32 bits. If not, it sums those of codes 0 and 1 of each lane's
    /// four, and those of 2 and 3, in 16 bits each, which wrap (see [`super::pairs`]).
    const EXACT: bool;

    /// Whether [`Lanes::multiply`] takes codes as signed numbers.
    const SIGNED: bool;

    /// Most sums for which registers hold twice as many.
    const TWICE: usize;

    /// Whether floats meet columns two elements at a time: for sets that take a factor out of two, or have registers enough.
    const BY_TWO: bool;

    unsafe fn zero() -> Self::Int;
    /// 64 bytes.
    unsafe fn load(p: *const u8) -> Self::Int;
    /// 4 bytes in every lane.
    unsafe fn spread(p: *const u8) -> Self::Int;
    /// Every byte.
    unsafe fn bytes(value: u8) -> Self::Int;
    /// Both i16 of every lane.
    #[inline(always)]
    unsafe fn words(value: u8) -> Self::Int {
        // SAFETY: as the caller vouches.
        unsafe {
            let low = Self::right(Self::bytes(value), 24);
            Self::or(low, Self::left(low, 16))
        }
    }
    unsafe fn and(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn or(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Lanes shifted; bits that cross from byte to byte are the caller's to mask.
    unsafe fn left(a: Self::Int, by: u32) -> Self::Int;
    unsafe fn right(a: Self::Int, by: u32) -> Self::Int;
    /// The high four bits of every byte.
    #[inline(always)]
    unsafe fn high_nibbles(a: Self::Int) -> Self::Int {
        // SAFETY: as the caller vouches.
        unsafe { Self::and(Self::right(a, 4), Self::bytes(15)) }
    }
    /// Byte `b` of each lane, as a signed number.
    unsafe fn signed_byte(a: Self::Int, b: u32) -> Self::Int;
    /// Byte `b` of each lane, as a signed number in each of two i16.
    #[inline(always)]
    unsafe fn signed_pair(a: Self::Int, b: u32) -> Self::Int {
        // SAFETY: as the caller vouches.
        unsafe {
            let number = Self::signed_byte(a, b);
            let low = Self::right(Self::bytes(255), 16);
            Self::or(Self::and(number, low), Self::left(number, 16))
        }
    }
    unsafe fn subtract_bytes(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Entries of a table that bytes below 16 choose.
    unsafe fn look_up(table: &[u8; 16], codes: Self::Int) -> Self::Int;

    /// Codes `4 g` to `4 g + 3` of a column at `p`, which has whole groups of sixteen.
    unsafe fn four(p: *const u8, g: usize) -> Self::Four;
    /// `sums` and the products of four codes of each lane, unsigned unless [`Lanes::SIGNED`], with four signed ones.
    unsafe fn multiply(sums: Self::Int, codes: Self::Int, y: Self::Four) -> Self::Int;
    /// As [`Lanes::multiply`], in 32 bits, of codes of a type that has some beyond 127; if not EXACT, or SIGNED, they come lowered by
    /// 128, which is their zero, as signed numbers.
    #[inline(always)]
    unsafe fn multiply_large(sums: Self::Int, codes: Self::Int, y: Self::Four) -> Self::Int {
        // SAFETY: as the caller vouches.
        unsafe { Self::multiply(sums, codes, y) }
    }
    /// `sums` and the products of two i16 of each lane.
    unsafe fn multiply_pairs(sums: Self::Int, a: Self::Int, b: Self::Int) -> Self::Int;

    unsafe fn zeros() -> Self::Float;
    unsafe fn to_float(a: Self::Int) -> Self::Float;
    /// The bits of an f32 in every lane.
    unsafe fn as_float(a: Self::Int) -> Self::Float;
    /// 16 f32.
    unsafe fn load_floats(p: *const f32) -> Self::Float;
    /// 16 halves.
    unsafe fn load_halves(p: *const u8) -> Self::Float;
    /// One f32 in every lane.
    unsafe fn spread_float(p: *const f32) -> Self::Float;
    /// The first (`i` 0) or the second of two f32.
    unsafe fn factor(p: *const f32, i: usize) -> Self::Factor;
    unsafe fn times(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b + c`.
    unsafe fn fused(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// As [`Lanes::fused`].
    unsafe fn fused_factor(a: Self::Float, b: Self::Factor, c: Self::Float) -> Self::Float;
    unsafe fn sum(a: Self::Float, b: Self::Float) -> Self::Float;
    /// Writes 16 f32.
    unsafe fn store(p: *mut f32, a: Self::Float);

    /// Asks for the cache line at `p`, which need not exist.
    unsafe fn prefetch(p: *const u8);
}

/// Lanes with the products of bf16.
///
/// # Safety
/// As [`Lanes`].
pub(super) trait Bf16Lanes: Lanes {
    /// `sums` and the products of two bf16 of each lane. Subnormal numbers may count as zeros.
    unsafe fn multiply_bf16(sums: Self::Float, a: Self::Int, b: Self::Int) -> Self::Float;
}

/// Lanes of plain Rust: what the other sets are tested against. Products are summed as AVX2 does with `EXACT` false.
#[cfg(test)]
pub(super) struct Portable<const EXACT: bool, const SIGNED: bool = false>;

#[cfg(test)]
#[allow(clippy::missing_safety_doc)]
impl<const EXACT: bool, const SIGNED: bool> Lanes for Portable<EXACT, SIGNED> {
    type Int = [u32; 16];
    type Float = [f32; 16];
    type Four = [u32; 16];
    type Factor = [f32; 16];
    const EXACT: bool = EXACT;
    const SIGNED: bool = SIGNED;
    const TWICE: usize = 4;
    const BY_TWO: bool = EXACT;

    unsafe fn zero() -> [u32; 16] {
        [0; 16]
    }
    unsafe fn load(p: *const u8) -> [u32; 16] {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { p.cast::<[u32; 16]>().read_unaligned() }
    }
    unsafe fn spread(p: *const u8) -> [u32; 16] {
        // SAFETY: the caller vouches for 4 bytes.
        [unsafe { p.cast::<u32>().read_unaligned() }; 16]
    }
    unsafe fn bytes(value: u8) -> [u32; 16] {
        [u32::from_le_bytes([value; 4]); 16]
    }
    unsafe fn and(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| a[l] & b[l])
    }
    unsafe fn or(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| a[l] | b[l])
    }
    unsafe fn left(a: [u32; 16], by: u32) -> [u32; 16] {
        a.map(|a| a << by)
    }
    unsafe fn right(a: [u32; 16], by: u32) -> [u32; 16] {
        a.map(|a| a >> by)
    }
    unsafe fn signed_byte(a: [u32; 16], b: u32) -> [u32; 16] {
        a.map(|a| ((a << (24 - 8 * b)) as i32 >> 24) as u32)
    }
    unsafe fn subtract_bytes(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let (a, b) = (a[l].to_le_bytes(), b[l].to_le_bytes());
            u32::from_le_bytes(std::array::from_fn(|i| a[i].wrapping_sub(b[i])))
        })
    }
    unsafe fn look_up(table: &[u8; 16], codes: [u32; 16]) -> [u32; 16] {
        codes.map(|c| u32::from_le_bytes(c.to_le_bytes().map(|c| table[usize::from(c)])))
    }
    unsafe fn four(p: *const u8, g: usize) -> [u32; 16] {
        // SAFETY: the caller vouches for the group's 4 bytes.
        unsafe { Self::spread(p.add(4 * g)) }
    }
    unsafe fn multiply(sums: [u32; 16], codes: [u32; 16], y: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let (u, s) = (codes[l].to_le_bytes(), y[l].to_le_bytes());
            let code = |u: u8| if SIGNED { i32::from(u as i8) } else { i32::from(u) };
            let p: [i32; 4] = std::array::from_fn(|i| code(u[i]) * i32::from(s[i] as i8));
            if EXACT {
                return sums[l].wrapping_add(p.iter().sum::<i32>() as u32);
            }
            let half = |h: u32| {
                let sum = (sums[l] >> (16 * h)) as i16;
                let pair = p[2 * h as usize] + p[2 * h as usize + 1];
                let pair = i16::try_from(pair).expect("a pair of products fits");
                u32::from(sum.wrapping_add(pair) as u16) << (16 * h)
            };
            half(0) | half(1)
        })
    }
    unsafe fn multiply_large(sums: [u32; 16], codes: [u32; 16], y: [u32; 16]) -> [u32; 16] {
        if EXACT {
            // SAFETY: no instructions are needed.
            return unsafe { Self::multiply(sums, codes, y) };
        }
        std::array::from_fn(|l| {
            let products = codes[l].to_le_bytes().into_iter().zip(y[l].to_le_bytes());
            let sum: i32 = products.map(|(c, y)| i32::from(c as i8) * i32::from(y as i8)).sum();
            sums[l].wrapping_add(sum as u32)
        })
    }
    unsafe fn multiply_pairs(sums: [u32; 16], a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let half = |h: u32| i32::from((a[l] >> (16 * h)) as i16) * i32::from((b[l] >> (16 * h)) as i16);
            sums[l].wrapping_add((half(0) + half(1)) as u32)
        })
    }
    unsafe fn zeros() -> [f32; 16] {
        [0.0; 16]
    }
    unsafe fn to_float(a: [u32; 16]) -> [f32; 16] {
        a.map(|a| a as i32 as f32)
    }
    unsafe fn as_float(a: [u32; 16]) -> [f32; 16] {
        a.map(f32::from_bits)
    }
    unsafe fn load_floats(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    unsafe fn load_halves(p: *const u8) -> [f32; 16] {
        // SAFETY: the caller vouches for 32 bytes.
        unsafe { p.cast::<[u16; 16]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    unsafe fn spread_float(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller vouches for 4 bytes.
        [unsafe { p.read_unaligned() }; 16]
    }
    unsafe fn times(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l] * b[l])
    }
    unsafe fn fused(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l].mul_add(b[l], c[l]))
    }
    unsafe fn factor(p: *const f32, i: usize) -> [f32; 16] {
        // SAFETY: the caller vouches for both.
        unsafe { Self::spread_float(p.add(i)) }
    }
    unsafe fn fused_factor(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        // SAFETY: no instructions are needed.
        unsafe { Self::fused(a, b, c) }
    }
    unsafe fn sum(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l] + b[l])
    }
    unsafe fn store(p: *mut f32, a: [f32; 16]) {
        // SAFETY: the caller vouches for room for 64 bytes.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(a) }
    }
    unsafe fn prefetch(_: *const u8) {}
}

#[cfg(test)]
impl<const EXACT: bool, const SIGNED: bool> Bf16Lanes for Portable<EXACT, SIGNED> {
    unsafe fn multiply_bf16(sums: [f32; 16], a: [u32; 16], b: [u32; 16]) -> [f32; 16] {
        let halves = |a: u32| [f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000)];
        std::array::from_fn(|l| {
            let ([a0, a1], [b0, b1]) = (halves(a[l]), halves(b[l]));
            a1.mul_add(b1, a0.mul_add(b0, sums[l]))
        })
    }
}

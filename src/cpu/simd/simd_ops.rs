//! The operations that micro-kernels need from an instruction set: vectors of sixteen 32-bit lanes, one lane for each row of a
//! panel.
//!
//! Micro-kernels are written once over [`SimdOps`] and compiled for each instruction set. They use no closures: a closure that
//! is not inlined is compiled without the instruction set, and then calls a function for each of its instructions.

/// Sixteen 32-bit lanes of an instruction set.
///
/// # Safety
/// All functions need the instructions of the implementing type. Functions with a pointer need as many readable bytes as
/// documented.
pub(super) trait SimdOps {
    /// Sixteen 32-bit lanes of bytes or integers.
    type Int: Copy;
    /// Sixteen f32.
    type Float: Copy;
    /// Four codes of a column, broadcast to every lane.
    type QuantX4: Copy;
    /// A number of a column, broadcast to every lane.
    type ScaleVec: Copy;

    /// Whether [`SimdOps::dot4`] accumulates products of any codes in 32 bits. If not, each lane has two 16-bit accumulators
    /// that wrap: for codes 0 and 1 of the lane's four, and for codes 2 and 3 (see [`super::i16_accumulate`]).
    const I32_DOT: bool;

    /// Whether [`SimdOps::dot4`] takes codes as signed numbers.
    const SIGNED_CODES: bool;

    /// Most sums of a register tile for which the registers hold two accumulators each.
    const MAX_DOUBLE_ACC: usize;

    /// Whether float micro-kernels take two steps along k at once: for sets that multiply by one lane of a loaded pair, or
    /// have registers enough.
    const FLOAT_STEPS_BY_TWO: bool;

    unsafe fn zero_int() -> Self::Int;
    /// Loads 64 bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::Int;
    /// Broadcasts 4 bytes to every lane.
    unsafe fn broadcast_u32(p: *const u8) -> Self::Int;
    /// Broadcasts a byte to every byte.
    unsafe fn broadcast_u8(value: u8) -> Self::Int;
    /// Broadcasts a number to both i16 of every lane.
    #[inline(always)]
    unsafe fn broadcast_u8_as_i16(value: u8) -> Self::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let low = Self::shift_right(Self::broadcast_u8(value), 24);
            Self::or(low, Self::shift_left(low, 16))
        }
    }
    unsafe fn and(a: Self::Int, b: Self::Int) -> Self::Int;
    unsafe fn or(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Shifts each lane. The caller masks bits that cross from byte to byte.
    unsafe fn shift_left(a: Self::Int, by: u32) -> Self::Int;
    unsafe fn shift_right(a: Self::Int, by: u32) -> Self::Int;
    /// The high nibble of every byte.
    #[inline(always)]
    unsafe fn high_nibbles(a: Self::Int) -> Self::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::and(Self::shift_right(a, 4), Self::broadcast_u8(15)) }
    }
    /// Byte `b` of each lane, sign-extended to 32 bits.
    unsafe fn sign_extend_byte(a: Self::Int, b: u32) -> Self::Int;
    /// Byte `b` of each lane, sign-extended to both i16 of the lane.
    #[inline(always)]
    unsafe fn sign_extend_byte_x2(a: Self::Int, b: u32) -> Self::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe {
            let number = Self::sign_extend_byte(a, b);
            let low = Self::shift_right(Self::broadcast_u8(255), 16);
            Self::or(Self::and(number, low), Self::shift_left(number, 16))
        }
    }
    unsafe fn sub_bytes(a: Self::Int, b: Self::Int) -> Self::Int;
    /// Table lookup: the entries for codes below 16.
    unsafe fn table_lookup(table: &[u8; 16], codes: Self::Int) -> Self::Int;

    /// Loads codes `4 g` to `4 g + 3` of a column at `p`, which has whole groups of sixteen.
    unsafe fn load_x4(p: *const u8, g: usize) -> Self::QuantX4;
    /// `sums` plus the dot product of four codes of each lane (unsigned unless [`SimdOps::SIGNED_CODES`]) with four signed
    /// codes.
    unsafe fn dot4(sums: Self::Int, codes: Self::Int, y: Self::QuantX4) -> Self::Int;
    /// As [`SimdOps::dot4`], accumulated in 32 bits, for types with codes above 127. Without `I32_DOT`, or with
    /// `SIGNED_CODES`, the codes are passed less 128, their zero, as signed numbers.
    #[inline(always)]
    unsafe fn dot4_large(sums: Self::Int, codes: Self::Int, y: Self::QuantX4) -> Self::Int {
        // SAFETY: the caller meets this function's requirements.
        unsafe { Self::dot4(sums, codes, y) }
    }
    /// `sums` plus the dot product of two i16 of each lane.
    unsafe fn dot2_i16(sums: Self::Int, a: Self::Int, b: Self::Int) -> Self::Int;

    unsafe fn zero_f32() -> Self::Float;
    unsafe fn int_to_f32(a: Self::Int) -> Self::Float;
    /// Reinterprets the bits of every lane as f32.
    unsafe fn bitcast_f32(a: Self::Int) -> Self::Float;
    /// Loads 16 f32.
    unsafe fn load_f32(p: *const f32) -> Self::Float;
    /// Loads 16 f16 as f32.
    unsafe fn load_f16(p: *const u8) -> Self::Float;
    /// Broadcasts one f32.
    unsafe fn broadcast_f32(p: *const f32) -> Self::Float;
    /// Loads the first (`i` = 0) or the second of two f32.
    unsafe fn load_scale(p: *const f32, i: usize) -> Self::ScaleVec;
    unsafe fn mul(a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b + c`.
    unsafe fn fma(a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// As [`SimdOps::fma`] with a broadcast factor.
    unsafe fn fma_scale(a: Self::Float, b: Self::ScaleVec, c: Self::Float) -> Self::Float;
    unsafe fn add(a: Self::Float, b: Self::Float) -> Self::Float;
    /// Stores 16 f32.
    unsafe fn store_f32(p: *mut f32, a: Self::Float);

    /// Software prefetch of the cache line at `p`; any address is allowed.
    unsafe fn prefetch(p: *const u8);
}

/// Instruction sets with dot products of bf16.
///
/// # Safety
/// As [`SimdOps`].
pub(super) trait SimdBf16Ops: SimdOps {
    /// `sums` plus the dot product of two bf16 of each lane. Subnormal numbers may count as zero.
    unsafe fn dot2_bf16(sums: Self::Float, a: Self::Int, b: Self::Int) -> Self::Float;
}

/// Reference in plain Rust, which the tests run as one more instruction set. With `I32_DOT` false it accumulates as AVX2 does.
#[cfg(test)]
pub(super) struct Portable<const I32_DOT: bool, const SIGNED_CODES: bool = false>;

#[cfg(test)]
#[allow(clippy::missing_safety_doc)]
impl<const I32_DOT: bool, const SIGNED_CODES: bool> SimdOps for Portable<I32_DOT, SIGNED_CODES> {
    type Int = [u32; 16];
    type Float = [f32; 16];
    type QuantX4 = [u32; 16];
    type ScaleVec = [f32; 16];
    const I32_DOT: bool = I32_DOT;
    const SIGNED_CODES: bool = SIGNED_CODES;
    const MAX_DOUBLE_ACC: usize = 4;
    const FLOAT_STEPS_BY_TWO: bool = I32_DOT;

    unsafe fn zero_int() -> [u32; 16] {
        [0; 16]
    }
    unsafe fn load_bytes(p: *const u8) -> [u32; 16] {
        // SAFETY: the caller guarantees that `p` points to 64 readable bytes.
        unsafe { p.cast::<[u32; 16]>().read_unaligned() }
    }
    unsafe fn broadcast_u32(p: *const u8) -> [u32; 16] {
        // SAFETY: the caller guarantees that `p` points to 4 readable bytes.
        [unsafe { p.cast::<u32>().read_unaligned() }; 16]
    }
    unsafe fn broadcast_u8(value: u8) -> [u32; 16] {
        [u32::from_le_bytes([value; 4]); 16]
    }
    unsafe fn and(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| a[l] & b[l])
    }
    unsafe fn or(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| a[l] | b[l])
    }
    unsafe fn shift_left(a: [u32; 16], by: u32) -> [u32; 16] {
        a.map(|a| a << by)
    }
    unsafe fn shift_right(a: [u32; 16], by: u32) -> [u32; 16] {
        a.map(|a| a >> by)
    }
    unsafe fn sign_extend_byte(a: [u32; 16], b: u32) -> [u32; 16] {
        a.map(|a| ((a << (24 - 8 * b)) as i32 >> 24) as u32)
    }
    unsafe fn sub_bytes(a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let (a, b) = (a[l].to_le_bytes(), b[l].to_le_bytes());
            u32::from_le_bytes(std::array::from_fn(|i| a[i].wrapping_sub(b[i])))
        })
    }
    unsafe fn table_lookup(table: &[u8; 16], codes: [u32; 16]) -> [u32; 16] {
        codes.map(|c| u32::from_le_bytes(c.to_le_bytes().map(|c| table[usize::from(c)])))
    }
    unsafe fn load_x4(p: *const u8, g: usize) -> [u32; 16] {
        // SAFETY: the caller guarantees that `p` points to the 4 bytes of the group.
        unsafe { Self::broadcast_u32(p.add(4 * g)) }
    }
    unsafe fn dot4(sums: [u32; 16], codes: [u32; 16], y: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let (u, s) = (codes[l].to_le_bytes(), y[l].to_le_bytes());
            let code = |u: u8| if SIGNED_CODES { i32::from(u as i8) } else { i32::from(u) };
            let p: [i32; 4] = std::array::from_fn(|i| code(u[i]) * i32::from(s[i] as i8));
            if I32_DOT {
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
    unsafe fn dot4_large(sums: [u32; 16], codes: [u32; 16], y: [u32; 16]) -> [u32; 16] {
        if I32_DOT {
            // SAFETY: no instructions are needed.
            return unsafe { Self::dot4(sums, codes, y) };
        }
        std::array::from_fn(|l| {
            let products = codes[l].to_le_bytes().into_iter().zip(y[l].to_le_bytes());
            let sum: i32 = products.map(|(c, y)| i32::from(c as i8) * i32::from(y as i8)).sum();
            sums[l].wrapping_add(sum as u32)
        })
    }
    unsafe fn dot2_i16(sums: [u32; 16], a: [u32; 16], b: [u32; 16]) -> [u32; 16] {
        std::array::from_fn(|l| {
            let half = |h: u32| i32::from((a[l] >> (16 * h)) as i16) * i32::from((b[l] >> (16 * h)) as i16);
            sums[l].wrapping_add((half(0) + half(1)) as u32)
        })
    }
    unsafe fn zero_f32() -> [f32; 16] {
        [0.0; 16]
    }
    unsafe fn int_to_f32(a: [u32; 16]) -> [f32; 16] {
        a.map(|a| a as i32 as f32)
    }
    unsafe fn bitcast_f32(a: [u32; 16]) -> [f32; 16] {
        a.map(f32::from_bits)
    }
    unsafe fn load_f32(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller guarantees that `p` points to 64 readable bytes.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    unsafe fn load_f16(p: *const u8) -> [f32; 16] {
        // SAFETY: the caller guarantees that `p` points to 32 readable bytes.
        unsafe { p.cast::<[u16; 16]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    unsafe fn broadcast_f32(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller guarantees that `p` points to 4 readable bytes.
        [unsafe { p.read_unaligned() }; 16]
    }
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l] * b[l])
    }
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l].mul_add(b[l], c[l]))
    }
    unsafe fn load_scale(p: *const f32, i: usize) -> [f32; 16] {
        // SAFETY: the caller guarantees that `p` points to number `i`.
        unsafe { Self::broadcast_f32(p.add(i)) }
    }
    unsafe fn fma_scale(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        // SAFETY: no instructions are needed.
        unsafe { Self::fma(a, b, c) }
    }
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|l| a[l] + b[l])
    }
    unsafe fn store_f32(p: *mut f32, a: [f32; 16]) {
        // SAFETY: the caller guarantees that `p` points to room for 64 bytes.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(a) }
    }
    unsafe fn prefetch(_: *const u8) {}
}

#[cfg(test)]
impl<const I32_DOT: bool, const SIGNED_CODES: bool> SimdBf16Ops for Portable<I32_DOT, SIGNED_CODES> {
    unsafe fn dot2_bf16(sums: [f32; 16], a: [u32; 16], b: [u32; 16]) -> [f32; 16] {
        let halves = |a: u32| [f32::from_bits(a << 16), f32::from_bits(a & 0xffff_0000)];
        std::array::from_fn(|l| {
            let ([a0, a1], [b0, b1]) = (halves(a[l]), halves(b[l]));
            a1.mul_add(b1, a0.mul_add(b0, sums[l]))
        })
    }
}

//! Fragments: the distribution of a matrix over the lanes of a warp.
//!
//! In `mma` the lanes form eight groups of four threads. Group and thread in the group determine row and column, so that each
//! register's elements are at index `base + group · g + thread · t + element · e` of the matrix: a [`RegisterLayout`].

use super::matrix_spec::{Accumulator, Element};
use crate::exec_context::{Lanes, Registers};
use crate::isa::lanes;
use crate::numeric::half::{bf16_to_f32, f16_to_f32, f64_to_f16};
use crate::operands::Slot;

/// Indices of a register's elements in a row-major matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisterLayout {
    base: usize,
    group: usize,
    thread: usize,
    element: usize,
}

impl RegisterLayout {
    #[inline(always)]
    fn at(self, lane: usize, element: usize) -> usize {
        self.base + lane / 4 * self.group + lane % 4 * self.thread + element * self.element
    }
}

/// A of 16 × `k`: groups are rows. Registers cover the two halves of 16 rows first, then continue along k.
pub(super) fn layout_a(register: usize, packed: usize, k: usize) -> RegisterLayout {
    let (half, step) = (register % 2, register / 2);
    RegisterLayout { base: half * 8 * k + step * 4 * packed, group: k, thread: packed, element: 1 }
}

/// B of k × 8: groups are columns. Registers continue along k.
pub(super) fn layout_b(register: usize, packed: usize) -> RegisterLayout {
    RegisterLayout { base: register * 4 * packed * 8, group: 1, thread: packed * 8, element: 8 }
}

/// C or D of m × 8: a thread has two adjacent columns, in two registers or packed in one.
pub(super) fn layout_c(register: usize, packed: usize) -> RegisterLayout {
    let base = if packed == 2 { register * 64 } else { register / 2 * 64 + register % 2 };
    RegisterLayout { base, group: 8, thread: 2, element: 1 }
}

/// Decodes a fragment's elements into a matrix.
#[inline(always)]
pub(super) fn gather(
    regs: &Registers,
    slots: &[Slot],
    element: Element,
    matrix: &mut [f32],
    place: impl Fn(usize) -> RegisterLayout,
) {
    for (register, &slot) in slots.iter().enumerate() {
        let (words, place) = (regs.get::<u32>(slot), place(register));
        decode(&words, element, |lane, at, value| matrix[place.at(lane, at)] = value);
    }
}

/// Calls `put(lane, element, value)` for each element of a register.
#[inline(always)]
pub(super) fn decode(words: &Lanes<u32>, element: Element, mut put: impl FnMut(usize, usize, f32)) {
    // One loop per type, so that the compiler vectorises over the lanes.
    macro_rules! each {
        ($packed:literal, $f:expr) => {
            for at in 0..$packed {
                let f: fn(u32, u32) -> f32 = $f;
                let values = lanes(|lane| f(words[lane], at));
                for lane in 0..32 {
                    put(lane, at as usize, values[lane]);
                }
            }
        };
    }
    match element {
        Element::F16 => each!(2, |word, at| f16_to_f32((word >> (16 * at)) as u16)),
        Element::Bf16 => each!(2, |word, at| bf16_to_f32((word >> (16 * at)) as u16)),
        // The tensor core reads sign, exponent and ten fraction bits of the 32.
        Element::Tf32 => each!(1, |word, _| f32::from_bits(word & 0xffff_e000)),
        Element::S8 => each!(4, |word, at| ((word << (24 - 8 * at)) as i32 >> 24) as f32),
        Element::U8 => each!(4, |word, at| (word >> (8 * at) & 0xff) as i32 as f32),
    }
}

/// Decodes the accumulator C of a floating-point product.
#[inline(always)]
pub(super) fn gather_c(
    regs: &Registers,
    slots: &[Slot],
    accumulator: Accumulator,
    matrix: &mut [f64],
    place: impl Fn(usize) -> RegisterLayout,
) {
    for (register, &slot) in slots.iter().enumerate() {
        let (words, place) = (regs.get::<u32>(slot), place(register));
        for at in 0..accumulator.packed() {
            let values: Lanes<f32> = match accumulator {
                Accumulator::F16 => lanes(|lane| f16_to_f32((words[lane] >> (16 * at)) as u16)),
                _ => words.map(f32::from_bits),
            };
            for lane in 0..32 {
                matrix[place.at(lane, at)] = f64::from(values[lane]);
            }
        }
    }
}

/// Writes each lane's elements of D, which are values of its type.
#[inline(always)]
pub(super) fn scatter_d(
    regs: &mut Registers,
    slots: &[Slot],
    accumulator: Accumulator,
    matrix: &[f64],
    mask: u32,
    place: impl Fn(usize) -> RegisterLayout,
) {
    for (register, &slot) in slots.iter().enumerate() {
        let place = place(register);
        let element = |at: usize| lanes(|lane| matrix[place.at(lane, at)]);
        let words: Lanes<u32> = if accumulator == Accumulator::F16 {
            let (low, high) = (element(0), element(1));
            lanes(|lane| u32::from(f64_to_f16(low[lane])) | u32::from(f64_to_f16(high[lane])) << 16)
        } else {
            let values = element(0);
            lanes(|lane| {
                let value = values[lane] as f32;
                if value.is_nan() { 0x7fff_ffff } else { value.to_bits() }
            })
        };
        regs.set(slot, &words, mask);
    }
}

/// Reads a fragment of 32-bit words: integers of C.
#[inline(always)]
pub(super) fn gather_words(
    regs: &Registers,
    slots: &[Slot],
    matrix: &mut [u32],
    place: impl Fn(usize) -> RegisterLayout,
) {
    for (register, &slot) in slots.iter().enumerate() {
        let (words, place) = (regs.get::<u32>(slot), place(register));
        for lane in 0..32 {
            matrix[place.at(lane, 0)] = words[lane];
        }
    }
}

/// Writes each lane's words of D.
#[inline(always)]
pub(super) fn scatter_words(
    regs: &mut Registers,
    slots: &[Slot],
    matrix: &[u32],
    mask: u32,
    place: impl Fn(usize) -> RegisterLayout,
) {
    for (register, &slot) in slots.iter().enumerate() {
        let place = place(register);
        let words: Lanes<u32> = lanes(|lane| matrix[place.at(lane, 0)]);
        regs.set(slot, &words, mask);
    }
}

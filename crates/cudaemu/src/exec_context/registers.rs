//! Register file of a warp: each register is an array of 32 lanes, so that an instruction is a loop over arrays that the
//! compiler can vectorise.

use crate::operands::{Args, Class, RegisterCounts, Slot};

/// Lanes of a warp.
pub const LANES: usize = 32;

/// One value per lane.
pub type Lanes<T> = [T; LANES];

/// Applies `f` to each lane. Always inlined, so that the caller's loop is vectorised; `array::map` is not.
#[inline(always)]
pub fn each<A: Copy, D: Copy + Default>(lanes: &Lanes<A>, f: impl Fn(A) -> D) -> Lanes<D> {
    let mut out = [D::default(); LANES];
    for lane in 0..LANES {
        out[lane] = f(lanes[lane]);
    }
    out
}

/// Registers, constants and special registers of one warp. Predicates are masks with one bit per lane.
#[derive(Clone, Debug, Default)]
pub struct Registers {
    preds: Vec<u32>,
    r16: Vec<Lanes<u16>>,
    r32: Vec<Lanes<u32>>,
    r64: Vec<Lanes<u64>>,
}

/// A scalar type that a register class holds, so that handlers work on values instead of bits.
pub trait Lane: Copy + Default {
    /// Reads all lanes of a register.
    fn read(registers: &Registers, slot: Slot) -> Lanes<Self>;
    /// Writes the lanes in the mask.
    fn write(registers: &mut Registers, slot: Slot, values: &Lanes<Self>, mask: u32);
}

macro_rules! lane {
    ($($file:ident, $bits:ty: $($ty:ty, $from:expr, $to:expr);+)*) => { $($(
        impl Lane for $ty {
            #[inline(always)]
            fn read(registers: &Registers, slot: Slot) -> Lanes<Self> {
                each(&registers.$file[slot.index()], $from)
            }
            #[inline(always)]
            fn write(registers: &mut Registers, slot: Slot, values: &Lanes<Self>, mask: u32) {
                if slot.is_none() {
                    return;
                }
                let target = &mut registers.$file[slot.index()];
                let bits: Lanes<$bits> = each(values, $to);
                if mask == u32::MAX {
                    *target = bits;
                } else {
                    for lane in 0..LANES {
                        target[lane] = if mask >> lane & 1 != 0 { bits[lane] } else { target[lane] };
                    }
                }
            }
        }
    )+)* };
}

lane! {
    r16, u16: u16, |v| v, |v| v; i16, |v| v as i16, |v| v as u16
    r32, u32: u32, |v| v, |v| v; i32, |v| v as i32, |v| v as u32; f32, f32::from_bits, f32::to_bits
    r64, u64: u64, |v| v, |v| v; i64, |v| v as i64, |v| v as u64; f64, f64::from_bits, f64::to_bits
}

impl Registers {
    /// A register file with these counts. Registers start with the pattern `0xdead_beef`, so that a read of an unset register
    /// is noticed.
    pub fn new(counts: &RegisterCounts) -> Self {
        Self {
            preds: vec![0; counts.pred],
            r16: vec![[0xbeef; LANES]; counts.b16],
            r32: vec![[0xdead_beef; LANES]; counts.b32],
            r64: vec![[0xdead_beef_dead_beef; LANES]; counts.b64],
        }
    }

    /// Reads a predicate as a mask of lanes, negated if the slot is.
    #[inline]
    pub fn pred(&self, slot: Slot) -> u32 {
        let mask = self.preds[slot.index()];
        if slot.negated() { !mask } else { mask }
    }

    /// Writes the lanes in `mask` of a predicate.
    #[inline]
    pub fn set_pred(&mut self, slot: Slot, value: u32, mask: u32) {
        if !slot.is_none() {
            let target = &mut self.preds[slot.index()];
            *target = *target & !mask | value & mask;
        }
    }

    /// Reads all lanes of a register.
    #[inline(always)]
    pub fn get<T: Lane>(&self, slot: Slot) -> Lanes<T> {
        T::read(self, slot)
    }

    /// Writes the lanes in the mask; does nothing for [`Slot::NONE`].
    #[inline(always)]
    pub fn set<T: Lane>(&mut self, slot: Slot, values: &Lanes<T>, mask: u32) {
        T::write(self, slot, values, mask);
    }

    /// Lane 0 of a B32 slot, for constants and operands that must be equal in all lanes.
    pub fn scalar(&self, slot: Slot) -> u32 {
        self.r32[slot.index()][0]
    }

    /// Reads a register of any class as 64-bit lanes, zero-extended (predicates as 0 and 1).
    pub fn get_any(&self, slot: Slot) -> Lanes<u64> {
        match slot.class() {
            Class::Pred => std::array::from_fn(|lane| u64::from(self.pred(slot) >> lane & 1)),
            Class::B16 => each(&self.get::<u16>(slot), u64::from),
            Class::B32 => each(&self.get::<u32>(slot), u64::from),
            Class::B64 => self.get(slot),
        }
    }

    /// Writes 64-bit lanes to a register of any class, truncated to its width.
    pub fn set_any(&mut self, slot: Slot, values: &Lanes<u64>, mask: u32) {
        if slot.is_none() {
            return;
        }
        match slot.class() {
            Class::Pred => {
                let bits = (0..LANES).fold(0, |bits, lane| bits | u32::from(values[lane] != 0) << lane);
                self.set_pred(slot, bits, mask);
            }
            Class::B16 => self.set(slot, &each(values, |v| v as u16), mask),
            Class::B32 => self.set(slot, &each(values, |v| v as u32), mask),
            Class::B64 => self.set(slot, values, mask),
        }
    }

    /// `d = f(a)`: operands `s[0] = d`, `s[1] = a`.
    #[inline(always)]
    pub fn map1<A: Lane, D: Lane>(&mut self, args: &Args, mask: u32, f: impl Fn(A) -> D) {
        let a = self.get::<A>(args.s[1]);
        let d: Lanes<D> = each(&a, f);
        self.set(args.s[0], &d, mask);
    }

    /// `d = f(a, b)`: operands `s[0] = d`, `s[1] = a`, `s[2] = b`.
    #[inline(always)]
    pub fn map2<A: Lane, B: Lane, D: Lane>(&mut self, args: &Args, mask: u32, f: impl Fn(A, B) -> D) {
        let (a, b) = (self.get::<A>(args.s[1]), self.get::<B>(args.s[2]));
        let mut d = [D::default(); LANES];
        for lane in 0..LANES {
            d[lane] = f(a[lane], b[lane]);
        }
        self.set(args.s[0], &d, mask);
    }

    /// `d = f(a, b, c)`: operands `s[0] = d`, `s[1] = a`, `s[2] = b`, `s[3] = c`.
    #[inline(always)]
    pub fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(&mut self, args: &Args, mask: u32, f: impl Fn(A, B, C) -> D) {
        let (a, b, c) = (self.get::<A>(args.s[1]), self.get::<B>(args.s[2]), self.get::<C>(args.s[3]));
        let mut d = [D::default(); LANES];
        for lane in 0..LANES {
            d[lane] = f(a[lane], b[lane], c[lane]);
        }
        self.set(args.s[0], &d, mask);
    }

    /// `p = f(a, b)` as a mask: operands `s[0] = p`, sources in `a` and `b`.
    #[inline(always)]
    pub fn test2<A: Lane>(&self, a: Slot, b: Slot, f: impl Fn(A, A) -> bool) -> u32 {
        let (a, b) = (self.get::<A>(a), self.get::<A>(b));
        let mut bits = 0;
        for lane in 0..LANES {
            bits |= u32::from(f(a[lane], b[lane])) << lane;
        }
        bits
    }
}

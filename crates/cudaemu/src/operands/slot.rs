//! Slot: the place of a register in a warp's register file.

use std::fmt;

/// Class of a register, by width.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    Pred,
    B16,
    B32,
    B64,
}

/// Number of registers of each class.
#[allow(missing_docs, reason = "the names are the classes'")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegisterCounts {
    pub pred: usize,
    pub b16: usize,
    pub b32: usize,
    pub b64: usize,
}

impl RegisterCounts {
    /// The count of a class.
    pub fn of(&self, class: Class) -> usize {
        match class {
            Class::Pred => self.pred,
            Class::B16 => self.b16,
            Class::B32 => self.b32,
            Class::B64 => self.b64,
        }
    }

    /// The count of a class, mutable.
    pub fn of_mut(&mut self, class: Class) -> &mut usize {
        match class {
            Class::Pred => &mut self.pred,
            Class::B16 => &mut self.b16,
            Class::B32 => &mut self.b32,
            Class::B64 => &mut self.b64,
        }
    }
}

/// A register, a constant or a special register. All of them are in the register file, so that every operand is an index. Bits
/// 0–27: index within its class; 28: negated (predicates); 29–31: class.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u32);

impl Slot {
    /// No operand.
    pub const NONE: Self = Self(u32::MAX);

    /// The `index`-th register of a class; `None` past 2^28.
    pub fn new(class: Class, index: usize) -> Option<Self> {
        let index = u32::try_from(index).ok().filter(|&i| i < 1 << 28)?;
        Some(Self(index | (class as u32) << 29))
    }

    /// Index within the class.
    #[inline]
    pub fn index(self) -> usize {
        (self.0 & 0x0fff_ffff) as usize
    }

    /// Its class; meaningless for [`Slot::NONE`].
    #[inline]
    pub fn class(self) -> Class {
        match self.0 >> 29 {
            0 => Class::Pred,
            1 => Class::B16,
            2 => Class::B32,
            _ => Class::B64,
        }
    }

    /// The same predicate, negated.
    pub fn negate(self) -> Self {
        Self(self.0 ^ (1 << 28))
    }

    /// Whether the predicate is negated.
    #[inline]
    pub fn negated(self) -> bool {
        self.0 & (1 << 28) != 0
    }

    /// Whether this is [`Slot::NONE`].
    #[inline]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self::NONE
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return write!(f, "-");
        }
        let not = if self.negated() { "!" } else { "" };
        write!(f, "{not}{:?}[{}]", self.class(), self.index())
    }
}

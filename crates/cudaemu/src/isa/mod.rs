//! The instruction table: one file per family, each a list of rows. A row is one full opcode with its modifiers in canonical
//! order, the kinds of its operands, and what it does. What is no row is no instruction: the module is refused.

#[macro_use]
mod macros;

mod approx;
mod async_copy;
mod atomics;
mod bits;
mod carry;
mod compare;
mod compare_float;
mod control;
mod convert;
mod dot;
mod float;
mod half;
#[cfg(test)]
mod harness;
mod integer;
mod logic;
mod matrix;
mod memory;
mod mma;
pub(crate) mod moves;
mod shuffle;
mod special;
mod table;
#[cfg(test)]
mod tests;
mod vector;
mod video;
mod video_scalar;

pub use table::{InstructionTable, table};

use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes};
use crate::operands::Class;

/// The value of an operand, which says how an immediate is read and which registers fit.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    Pred,
    B16,
    B32,
    B64,
    B128,
    F32,
    F64,
}

impl Value {
    /// The register class that holds it.
    pub fn class(self) -> Class {
        match self {
            Self::Pred => Class::Pred,
            Self::B16 => Class::B16,
            Self::B32 | Self::F32 => Class::B32,
            Self::B64 | Self::F64 => Class::B64,
            Self::B128 => Class::B128,
        }
    }
}

/// What an operand may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A destination register of exactly this class; `_` where the text allows a sink.
    Out(Value),
    /// A destination of any of the integer classes, at least as wide as the value (ld, cvt: "wider than the type").
    OutWide(Value),
    /// `d` or `d|p`: flattened to two slots, the second [`crate::operands::Slot::NONE`] if absent.
    OutPair(Value, Value),
    /// A source register of exactly this class, or an immediate.
    In(Value),
    /// A source register of at least this width (st, cvt), or an immediate.
    InWide(Value),
    /// A destination that may name a part of it, `d.b0` to `d.b3`, `d.h0` or `d.h1`, as video instructions do. Parts are
    /// numbered 1 to 6 in that order, the whole is 0; four bits for each operand of such a kind, from the lowest, are in `imm[0]`.
    OutPart(Value),
    /// A source that may name a part of it; see [`Operand::OutPart`].
    InPart(Value),
    /// A source predicate that may be negated.
    InPred,
    /// A source that may be absent (trailing operands only): its slot is then [`crate::operands::Slot::NONE`].
    OptIn(Value),
    /// An immediate, or a named constant of a module: lands in [`crate::operands::Args::imm`].
    Imm,
    /// An immediate that may be absent: its place in `imm` is then this.
    OptImm(i64),
    /// `{a, b, …}` of exactly this many destinations (1: braces may be absent).
    OutVector(u8, Value),
    /// The same with destinations at least this wide (ld.v2.u8).
    OutWideVector(u8, Value),
    /// `{a, b, …}` of exactly this many sources (1: braces may be absent).
    InVector(u8, Value),
    /// The same with sources at least this wide (st.v2.u8).
    InWideVector(u8, Value),
    /// `[base+offset]`
    Address,
    /// The second address of an instruction that has two (cp.async): the base's slot (B64 or B32, [`crate::operands::Slot::NONE`]
    /// for an absolute one) takes a place in `s`, its constant offset one in [`crate::operands::Args::imm`].
    SecondAddress,
    /// A label: the decoder makes the control action itself (see [`Decode::Branch`]).
    Label,
}

/// How a row is decoded.
#[derive(Clone, Debug)]
pub enum Decode {
    /// Operands are bound by their kinds; this is what it does.
    Plain(Action),
    /// `bra`: one label.
    Branch,
    /// `brx.idx`: an index register and a label of `.branchtargets`.
    BranchIndexed,
    /// `call`: forms of its own.
    Call,
    /// `mov` of a register, immediate, special register, variable's address or function's address.
    Move(Value),
}

/// What an instruction is counted as.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    Integer,
    Float,
    Half,
    Double,
    Convert,
    Move,
    Predicate,
    Load,
    Store,
    Atomic,
    Shuffle,
    Matrix,
    Barrier,
    Control,
    Other,
}

/// One row of the instruction table. Rows may share a name if their operands tell them apart (`bar.red` with and without a
/// count): the first one that fits counts.
#[derive(Clone, Debug)]
pub struct Row {
    /// Opcode with modifiers in canonical order: `add.rn.ftz.sat.f32`. Modifiers without effect here (cache hints, `.uni`,
    /// `.relaxed.gpu`, …) are taken off before the table is asked: see [`Family::hints`].
    pub name: String,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// How it is decoded.
    pub decode: Decode,
    /// A constant for its action, in [`crate::operands::Args::k`].
    pub k: u32,
    /// What it is counted as.
    pub category: Category,
}

/// The rows of one file.
#[derive(Debug)]
pub struct Family {
    /// Heading in the generated table: "Integer arithmetic".
    pub title: &'static str,
    /// The rows.
    pub rows: Vec<Row>,
    /// Modifiers that change nothing here, by opcode: `("ld", &["L1::evict_first", "L2::128B"])`. They are removed wherever they
    /// stand. A modifier that changes what is computed must never be one.
    pub hints: Vec<(&'static str, &'static [&'static str])>,
}

/// A row with plain operands.
pub fn row(name: impl Into<String>, operands: &[Operand], category: Category, k: u32, action: Action) -> Row {
    Row { name: name.into(), operands: operands.to_vec(), decode: Decode::Plain(action), k, category }
}

/// The value that all lanes hold, if it is one: an immediate, most often.
#[inline(always)]
fn uniform(values: &Lanes<u32>) -> Option<u32> {
    let mut different = 0;
    for lane in 0..LANES {
        different |= values[lane] ^ values[0];
    }
    (different == 0).then_some(values[0])
}

/// `f` of each lane. Unlike `array::from_fn`, which is unrolled before it is looked at, this loop becomes vector code for long
/// bodies too.
#[inline(always)]
fn lanes<T: Lane>(f: impl Fn(usize) -> T) -> Lanes<T> {
    let mut values = [T::default(); LANES];
    for lane in 0..LANES {
        values[lane] = f(lane);
    }
    values
}

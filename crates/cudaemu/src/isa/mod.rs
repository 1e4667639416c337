//! Instruction table: one file per instruction family, each with a list of rows. A row is an opcode with its modifiers in
//! canonical order, the kinds of its operands, and its handler. Loading a module with an opcode that has no row fails. Open
//! `table.rs` for the lookup and `macros.rs` for the short forms of rows.

#[macro_use]
mod macros;

mod approx;
mod async_copy;
mod atomics;
mod bits;
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

pub use table::{InstructionTable, table};

use crate::bytecode::Action;
use crate::exec_context::{LANES, Lane, Lanes};
use crate::operands::Class;

/// Type of an operand: determines how an immediate is parsed and which registers are allowed.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    Pred,
    B16,
    B32,
    B64,
    F32,
    F64,
}

impl Value {
    /// The class of the registers that hold values of this type.
    pub fn class(self) -> Class {
        match self {
            Self::Pred => Class::Pred,
            Self::B16 => Class::B16,
            Self::B32 | Self::F32 => Class::B32,
            Self::B64 | Self::F64 => Class::B64,
        }
    }
}

/// Kind of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A destination register of exactly this class; `_` where PTX allows a sink.
    Out(Value),
    /// A destination register of any integer class that is at least as wide as the type (`ld`, `cvt`).
    OutWide(Value),
    /// `d` or `d|p`: flattened to two slots; an absent second one is [`crate::operands::Slot::NONE`].
    OutPair(Value, Value),
    /// A source register of exactly this class, or an immediate.
    In(Value),
    /// A source register of at least this width (st, cvt), or an immediate.
    InWide(Value),
    /// A source predicate, which may be negated.
    InPred,
    /// An optional source (trailing operands only); if absent, its slot is [`crate::operands::Slot::NONE`].
    OptIn(Value),
    /// An immediate or a named constant of the module, stored in [`crate::operands::Args::imm`].
    Imm,
    /// An optional immediate with this default.
    OptImm(i64),
    /// `{a, b, …}` of exactly this many destinations; the braces are optional for one.
    OutVector(u8, Value),
    /// As `OutVector`, with destinations at least this wide (ld.v2.u8).
    OutWideVector(u8, Value),
    /// `{a, b, …}` of exactly this many sources; the braces are optional for one.
    InVector(u8, Value),
    /// As `InVector`, with sources at least this wide (st.v2.u8).
    InWideVector(u8, Value),
    /// `[base+offset]`
    Address,
    /// The second address of an instruction with two (cp.async): the base's slot (B64 or B32; [`crate::operands::Slot::NONE`]
    /// for an absolute address) is in `s`, its constant offset in [`crate::operands::Args::imm`].
    SecondAddress,
    /// A label: the decoder creates the control action (see [`Decode::Branch`]).
    Label,
}

/// How a row's operands are decoded.
#[derive(Clone, Debug)]
pub enum Decode {
    /// The operands are bound by their kinds; the action is the handler.
    Plain(Action),
    /// `bra`: one label.
    Branch,
    /// `call`: results, function and arguments, in parentheses or absent.
    Call,
    /// `mov` of a register, immediate, special register, or address of a variable or function.
    Move(Value),
}

/// Category of an instruction in the counts.
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

/// A row of the instruction table. Rows may share a name if their operands differ (`bar.red` with and without a count): the
/// first matching one applies.
#[derive(Clone, Debug)]
pub struct Row {
    /// Opcode with modifiers in canonical order: `add.rn.ftz.sat.f32`. Modifiers without effect in the emulator (cache hints,
    /// `.uni`, `.relaxed.gpu`, …) are removed before the lookup: see [`Family::hints`].
    pub name: String,
    /// Kinds of its operands.
    pub operands: Vec<Operand>,
    /// How its operands are decoded.
    pub decode: Decode,
    /// A constant for its handler, in [`crate::operands::Args::k`].
    pub k: u32,
    /// Its category in the counts.
    pub category: Category,
}

/// The rows of one file.
#[derive(Debug)]
pub struct Family {
    /// Heading in the generated list: "Integer arithmetic".
    pub title: &'static str,
    /// The rows.
    pub rows: Vec<Row>,
    /// Modifiers without effect, by opcode: `("ld", &["L1::evict_first", "L2::128B"])`. They are removed at any position in the
    /// opcode. A modifier that changes the result must never be listed here.
    pub hints: Vec<(&'static str, &'static [&'static str])>,
}

/// A row whose operands are decoded by their kinds.
pub fn row(name: impl Into<String>, operands: &[Operand], category: Category, k: u32, action: Action) -> Row {
    Row { name: name.into(), operands: operands.to_vec(), decode: Decode::Plain(action), k, category }
}

/// The common value of all lanes, if they are equal, as for an immediate.
#[inline(always)]
fn uniform(values: &Lanes<u32>) -> Option<u32> {
    let mut different = 0;
    for lane in 0..LANES {
        different |= values[lane] ^ values[0];
    }
    (different == 0).then_some(values[0])
}

/// Applies `f` to each lane. Unlike `array::from_fn`, which is unrolled before vectorisation, this loop is vectorised for long
/// bodies too.
#[inline(always)]
fn lanes<T: Lane>(f: impl Fn(usize) -> T) -> Lanes<T> {
    let mut values = [T::default(); LANES];
    for lane in 0..LANES {
        values[lane] = f(lane);
    }
    values
}

//! Descriptions of operands and registers for error messages.

use super::Error;
use super::names::bits;
use crate::isa::{Operand as Kind, Row, Value};
use crate::operands::Class;
use crate::ptx::ast::{Operand, Space};

/// The name of a state space in PTX.
pub(super) fn space_name(space: Space) -> &'static str {
    match space {
        Space::Reg => ".reg",
        Space::Const => ".const",
        Space::Global => ".global",
        Space::Local => ".local",
        Space::Param => ".param",
        Space::Shared => ".shared",
    }
}

/// The error for an instruction with too few or too many operands for its row.
pub(super) fn wrong_count(opcode: &str, line: u32, row: &Row, came: usize) -> Error {
    let kinds: Vec<String> = row.operands.iter().map(shape).collect();
    let count = kinds.len();
    let plural = if count == 1 { "" } else { "s" };
    Error::new(line, format!("`{opcode}` takes {count} operand{plural} ({}), {came} came", kinds.join(", ")))
}

/// A description of a register class.
pub(super) fn register(class: Class) -> String {
    match class {
        Class::Pred => "a predicate register".into(),
        _ => format!("a {}-bit register", bits(class)),
    }
}

pub(super) fn register_from(value: Value) -> String {
    format!("a register of at least {} bits", bits(value.class()))
}

pub(super) fn source_kind(value: Value, wide: bool) -> String {
    let register = if wide { register_from(value) } else { register(value.class()) };
    match value {
        Value::Pred => format!("{register}, 0, 1 or -1"),
        Value::F32 | Value::F64 => format!("{register} or a floating-point literal"),
        _ => format!("{register} or a number"),
    }
}

fn shape(kind: &Kind) -> String {
    match *kind {
        Kind::Out(value) => register(value.class()),
        Kind::OutWide(value) => register_from(value),
        Kind::OutPair(first, second) => format!("{}|{}", register(first.class()), register(second.class())),
        Kind::In(value) => source_kind(value, false),
        Kind::InWide(value) => source_kind(value, true),
        Kind::InPred => "a predicate".into(),
        Kind::OptIn(value) => format!("{}, or nothing", source_kind(value, false)),
        Kind::Imm => "a number".into(),
        Kind::OptImm(_) => "a number or nothing".into(),
        Kind::OutVector(count, _) | Kind::OutWideVector(count, _) => format!("a vector of {count} registers"),
        Kind::InVector(count, _) | Kind::InWideVector(count, _) => format!("a vector of {count}"),
        Kind::Address | Kind::SecondAddress => "an address".into(),
        Kind::Label => "a label".into(),
    }
}

/// A description of an operand.
pub(super) fn describe(operand: &Operand) -> String {
    match operand {
        Operand::Name(name) => format!("`{name}`"),
        Operand::Not(name) => format!("`!{name}`"),
        Operand::Sink => "`_`".into(),
        Operand::Int(value) => format!("the number {value}"),
        Operand::F32(_) | Operand::F64(_) => "a floating-point literal".into(),
        Operand::Vector(elements) => format!("a vector of {}", elements.len()),
        Operand::Address { .. } => "an address in brackets".into(),
        Operand::Pair(..) => "a pair `a|b`".into(),
        Operand::Offset(name, offset) => format!("`{name}{offset:+}`"),
        Operand::List(_) => "a list in parentheses".into(),
    }
}

//! Special registers that change while a warp runs, and addresses in the function's frame. The decoder turns each `mov` that
//! reads one into a row of this file (PTX ISA, "Special Registers").

use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::exec_context::ExecContext;
use crate::fault::Fault;
use crate::operands::Args;

/// Bit of a row's constant: the upper half of the counter.
const UPPER: u32 = 1;

fn clock(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let clock = cx.clock() >> if args.k & UPPER != 0 { 32 } else { 0 };
    cx.regs.set_any(args.s[0], &[clock; 32], mask);
    Ok(())
}

/// The address of a frame variable: an offset into local memory, to which `cvta.local` adds the window.
fn frame(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let addresses = cx.addresses(args);
    cx.regs.set_any(args.s[0], &addresses, mask);
    Ok(())
}

pub(crate) fn family() -> Family {
    use Operand::{Address, Out};
    let mut rows: Vec<Row> = Vec::new();
    // A clock counts instructions; the global timer counts an instruction as a nanosecond.
    for (name, value, k) in [
        ("u32.%clock", Value::B32, 0),
        ("u32.%clock_hi", Value::B32, UPPER),
        ("u64.%clock64", Value::B64, 0),
        ("u32.%globaltimer_lo", Value::B32, 0),
        ("u32.%globaltimer_hi", Value::B32, UPPER),
        ("u64.%globaltimer", Value::B64, 0),
    ] {
        rows.push(row(format!("mov.{name}"), &[Out(value)], Category::Move, k, Action::Access(clock)));
    }
    for (name, value) in [("u32", Value::B32), ("u64", Value::B64)] {
        rows.push(row(format!("mov.{name}.frame"), &[Out(value), Address], Category::Move, 0, Action::Access(frame)));
    }
    Family { title: "Special registers", rows, hints: Vec::new() }
}

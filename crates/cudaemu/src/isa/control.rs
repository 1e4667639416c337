//! Control flow: branches, calls, barriers, exits (PTX ISA, "Control Flow Instructions", "Parallel Synchronization and
//! Communication Instructions"). The warp's interpreter loop in `exec`
//! executes them; this file has their rows, and the handler of `trap`.

use super::{Category, Decode, Family, Operand, Row, Value, row};
use crate::bytecode::{Action, Barrier, BarrierKind, Control};
use crate::exec_context::{ExecContext, Registers};
use crate::fault::{Fault, FaultKind};
use crate::operands::Args;

fn trap(_: &mut ExecContext<'_>, _: &Args, mask: u32) -> Result<(), Box<Fault>> {
    match mask {
        0 => Ok(()),
        _ => Err(Fault::new(FaultKind::Trap("the kernel executed a trap".into()), mask.trailing_zeros() as usize)),
    }
}

fn nothing(_: &mut Registers, _: &Args, _: u32) {}

fn control(name: &str, operands: &[Operand], category: Category, control: Control) -> Row {
    row(name, operands, category, 0, Action::Control(control))
}

/// A row whose operands the decoder reads by a rule of its own.
fn with_own_decoding(name: &str, operands: &[Operand], decode: Decode) -> Row {
    Row { name: name.into(), operands: operands.to_vec(), decode, k: 0, category: Category::Control }
}

/// `bar` (always aligned) and `barrier`, with and without `.aligned`.
fn barriers(rows: &mut Vec<Row>) {
    use Operand::{In, InPred, Out};
    let number = In(Value::B32);
    for (opcode, suffix, aligned) in [("bar", "", true), ("barrier", "", false), ("barrier", ".aligned", true)] {
        // `counted`: an operand gives the number of threads that take part; otherwise the whole block does.
        let mut barrier = |name: &str, operands: &[Operand], kind, counted| {
            let barrier = Control::Barrier(Barrier { kind, aligned, counted });
            rows.push(control(&format!("{opcode}.{name}"), operands, Category::Barrier, barrier));
        };
        barrier(&format!("sync{suffix}"), &[number], BarrierKind::Sync, false);
        barrier(&format!("sync{suffix}"), &[number, number], BarrierKind::Sync, true);
        barrier(&format!("arrive{suffix}"), &[number, number], BarrierKind::Arrive, true);
        for (op, ty, kind) in [
            ("popc", Value::B32, BarrierKind::RedPopc),
            ("and", Value::Pred, BarrierKind::RedAnd),
            ("or", Value::Pred, BarrierKind::RedOr),
        ] {
            let name = if ty == Value::Pred { "pred" } else { "u32" };
            let mut spellings = vec![format!("red.{op}{suffix}.{name}")];
            if !suffix.is_empty() {
                spellings.push(format!("red{suffix}.{op}.{name}"));
            }
            for name in spellings {
                barrier(&name, &[Out(ty), number, InPred], kind, false);
                barrier(&name, &[Out(ty), number, number, InPred], kind, true);
            }
        }
    }
    rows.push(control("bar.warp.sync", &[number], Category::Barrier, Control::WarpSync));
    // The emulator supports only clusters of one block. A cluster's barrier has no number; separate instructions arrive and
    // wait.
    for (aligned, suffix) in [(false, ""), (true, ".aligned")] {
        for (op, order, kind) in [
            ("arrive", "", BarrierKind::Arrive),
            ("arrive", ".release", BarrierKind::Arrive),
            ("arrive", ".relaxed", BarrierKind::Arrive),
            ("wait", "", BarrierKind::Sync),
            ("wait", ".acquire", BarrierKind::Sync),
        ] {
            let barrier = Control::Barrier(Barrier { kind, aligned, counted: false });
            let name = format!("barrier.cluster.{op}{order}{suffix}");
            rows.push(control(&name, &[], Category::Barrier, barrier));
        }
    }
}

pub(crate) fn family() -> Family {
    use Operand::{Imm, In, Label};
    let mut rows = vec![
        with_own_decoding("bra", &[Label], Decode::Branch),
        with_own_decoding("call", &[], Decode::Call),
        control("ret", &[], Category::Control, Control::Return),
        control("exit", &[], Category::Control, Control::Exit),
        control("nanosleep.u32", &[In(Value::B32)], Category::Control, Control::Yield),
        row("trap", &[], Category::Control, 0, Action::Access(trap)),
    ];
    barriers(&mut rows);
    // Without effect: registers need not be reallocated, and dependent grids start only when the previous one has ended.
    for (name, operands) in [
        ("setmaxnreg.inc.sync.aligned.u32", &[Imm][..]),
        ("setmaxnreg.dec.sync.aligned.u32", &[Imm]),
        ("griddepcontrol.launch_dependents", &[]),
        ("griddepcontrol.wait", &[]),
    ] {
        rows.push(row(name, operands, Category::Control, 0, Action::Compute(nothing)));
    }
    Family {
        title: "Control flow and barriers",
        rows,
        hints: vec![("bra", &["uni"]), ("call", &["uni"]), ("ret", &["uni"]), ("bar", &["cta"]), ("barrier", &["cta"])],
    }
}

//! `cp.async`: asynchronous copies from global to shared memory (PTX ISA, "Data Movement and Conversion Instructions:
//! Asynchronous copy"). A copy executes when it is waited for, which is as late as PTX allows.

use super::memory::CACHE_POLICY;
use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::Action;
use crate::exec_context::{Addresses, ExecContext};
use crate::fault::{Fault, FaultKind};
use crate::operands::{Args, Class, Slot};

/// Bit of a row's constant: `s[1]` is the source size; the rest of the destination becomes zero.
const SOURCE_SIZE: u32 = 1;
/// Bit of a row's constant: `s[1]` is a predicate; if true, the whole destination becomes zero.
const IGNORE_SOURCE: u32 = 2;
/// Bit of a row's constant: `.cg`, which only copies 16 bytes.
const L2_ONLY: u32 = 4;

/// Addresses of an [`Operand::SecondAddress`]: base in a slot, constant offset.
fn second_address(cx: &ExecContext<'_>, base: Slot, offset: i64) -> Addresses {
    let offset = offset as u64;
    if base.is_none() {
        [offset; 32]
    } else if base.class() == Class::B32 {
        cx.regs.get::<u32>(base).map(|a| u64::from(a.wrapping_add(offset as u32)))
    } else {
        cx.regs.get::<u64>(base).map(|a| a.wrapping_add(offset))
    }
}

fn copy(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let lane = mask.trailing_zeros().min(31) as usize;
    let size = match args.imm[1] {
        16 => 16,
        4 if args.k & L2_ONLY == 0 => 4,
        8 if args.k & L2_ONLY == 0 => 8,
        other => {
            let allowed = if args.k & L2_ONLY == 0 { "4, 8 or 16" } else { "16" };
            let text = format!("cp.async: expected a size of {allowed} bytes, found {other}");
            return Err(Fault::new(FaultKind::InvalidValue(text), lane));
        }
    };
    let to = cx.addresses(args);
    let from = second_address(cx, args.s[0], args.imm[0]);
    let bytes = if args.k & SOURCE_SIZE != 0 {
        cx.regs.get::<u32>(args.s[1])
    } else if args.k & IGNORE_SOURCE != 0 {
        let ignored = cx.regs.pred(args.s[1]);
        std::array::from_fn(|lane| if ignored >> lane & 1 != 0 { 0 } else { size })
    } else {
        [size; 32]
    };
    if let Some(lane) = (0..32).find(|&lane| mask >> lane & 1 != 0 && bytes[lane] > size) {
        let text = format!("cp.async of {size} bytes has a source of {}", bytes[lane]);
        return Err(Fault::new(FaultKind::InvalidValue(text), lane));
    }
    cx.copy_async(&to, &from, size, &bytes, mask)
}

fn commit(cx: &mut ExecContext<'_>, _: &Args, mask: u32) -> Result<(), Box<Fault>> {
    cx.commit_async(mask);
    Ok(())
}

fn wait_group(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    // A count above `u32::MAX` exceeds any number of pending groups.
    cx.wait_async(Some(u32::try_from(args.imm[0]).unwrap_or(u32::MAX)), mask)
}

fn wait_all(cx: &mut ExecContext<'_>, _: &Args, mask: u32) -> Result<(), Box<Fault>> {
    cx.wait_async(None, mask)
}

pub(crate) fn family() -> Family {
    use Operand::{Address, Imm, In, InPred, SecondAddress};
    let mut rows: Vec<Row> = Vec::new();
    for space in ["shared", "shared::cta"] {
        for (cache, k) in [("ca", 0), ("cg", L2_ONLY)] {
            let name = format!("cp.async.{cache}.{space}.global");
            let mut form = |operands: &[Operand], kind: u32| {
                rows.push(row(&name, operands, Category::Load, k | kind, Action::Access(copy)));
            };
            // The form with an immediate size comes first, because an immediate would also match the cache policy.
            form(&[Address, SecondAddress, Imm, In(Value::B32), CACHE_POLICY], SOURCE_SIZE);
            form(&[Address, SecondAddress, Imm, InPred, CACHE_POLICY], IGNORE_SOURCE);
            form(&[Address, SecondAddress, Imm, CACHE_POLICY], 0);
        }
    }
    rows.push(row("cp.async.commit_group", &[], Category::Load, 0, Action::Access(commit)));
    rows.push(row("cp.async.wait_group", &[Imm], Category::Load, 0, Action::Access(wait_group)));
    rows.push(row("cp.async.wait_all", &[], Category::Load, 0, Action::Access(wait_all)));
    Family {
        title: "Asynchronous copies",
        rows,
        hints: vec![("cp", &["L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"])],
    }
}

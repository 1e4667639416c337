//! Built-in device functions: printf, assertions and the device heap's entry points.

use crate::bytecode::{CallSite, Callee};
use crate::fault::{Fault, FaultKind};

use super::block::thread_at;
use super::calls::{ArgPlace, load, store};
use super::printf;
use crate::exec_context::lanes;
use crate::exec_context::{ExecContext, LANES, Lanes};

/// Maximum bytes of a string that is read from device memory.
const LONGEST: usize = 1 << 16;

/// Calls a built-in function for the lanes in the mask; `frame` is the caller's frame.
pub(super) fn call(
    callee: &Callee,
    site: &CallSite,
    frame: u32,
    mask: u32,
    cx: &mut ExecContext<'_>,
) -> Result<(), Box<Fault>> {
    let mut args = Vec::with_capacity(site.args.len());
    for passed in &site.args {
        let lanes = match ArgPlace::passed(passed, frame) {
            ArgPlace::Register(slot) => cx.regs.get_any(slot),
            ArgPlace::Frame { at, bytes } => load(at, bytes.min(8), mask, cx)?.map(|v| v as u64),
        };
        args.push(lanes);
    }
    let arg = |index: usize| args.get(index).copied().unwrap_or([0; LANES]);
    let result: Lanes<u64> = match callee {
        Callee::Printf => print(cx, &arg(0), &arg(1), mask)?,
        Callee::AssertFail => return Err(assertion(cx, &[arg(0), arg(1), arg(2), arg(3)], mask)),
        Callee::Malloc | Callee::Free => {
            let text = "malloc and free on the device are not emulated; allocate on the host".into();
            return Err(Fault::new(FaultKind::InvalidValue(text), mask.trailing_zeros() as usize & 31));
        }
        Callee::Function(_) | Callee::Indirect(_) => [0; LANES],
    };
    if let Some(to) = site.returns.first() {
        match ArgPlace::passed(to, frame) {
            ArgPlace::Register(slot) => cx.regs.set_any(slot, &result, mask),
            ArgPlace::Frame { at, bytes } => store(&result.map(u128::from), at, bytes, mask, cx)?,
        }
    }
    Ok(())
}

/// Prints the text of each lane in ascending order; the result is the number of arguments, as in CUDA.
fn print(
    cx: &mut ExecContext<'_>,
    format: &Lanes<u64>,
    values: &Lanes<u64>,
    mask: u32,
) -> Result<Lanes<u64>, Box<Fault>> {
    let mut counts = [0; LANES];
    for lane in lanes(mask) {
        let Some(text) = string(cx, format[lane], lane) else {
            let kind =
                FaultKind::InvalidValue(format!("printf with a format at {:#x}, which cannot be read", format[lane]));
            return Err(Fault::new(kind, lane));
        };
        let parsed = printf::Format::parse(&text);
        let mut bytes = vec![0; parsed.argument_bytes()];
        for (offset, byte) in bytes.iter_mut().enumerate() {
            let at = [values[lane].wrapping_add(offset as u64); LANES];
            // Compilers never write the padding between arguments, so unwritten bytes read as 0.
            *byte = cx.peek(&at, lane).unwrap_or(0);
        }
        let line = parsed.render(&bytes, &mut |address| string(cx, address, lane));
        cx.print(&line);
        counts[lane] = parsed.arguments().len() as u64;
    }
    Ok(counts)
}

/// A zero-terminated string in one lane's generic address space; `None` if it cannot be read.
fn string(cx: &mut ExecContext<'_>, address: u64, lane: usize) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    while text.len() < LONGEST {
        match cx.peek(&[address.wrapping_add(text.len() as u64); LANES], lane)? {
            0 => break,
            byte => text.push(byte),
        }
    }
    Some(text)
}

fn assertion(cx: &mut ExecContext<'_>, args: &[Lanes<u64>; 4], mask: u32) -> Box<Fault> {
    let lane = mask.trailing_zeros() as usize & 31;
    let mut text = |index: usize| string(cx, args[index][lane], lane).unwrap_or_default();
    let (message, file, function) = (text(0), text(1), text(3));
    let thread = thread_at(cx.warp * LANES as u32 + lane as u32, cx.shape);
    let text = printf::assertion(&message, &file, args[2][lane] as u32, &function, cx.block, thread);
    Fault::new(FaultKind::Trap(text), lane)
}

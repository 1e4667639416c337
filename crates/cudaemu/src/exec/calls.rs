//! Calls of device functions: call stack, passing of arguments and results.

use std::rc::Rc;

use crate::bytecode::{ArgLocation, Param};
use crate::fault::Fault;
use crate::operands::Slot;

use crate::exec_context::lanes;
use crate::exec_context::{ExecContext, Lanes, Registers, StateSpace};

/// A call that has not returned, on a lane group's call stack.
#[derive(Debug)]
pub(super) struct CallFrame {
    /// Index of the call instruction.
    pub(super) pc: u32,
    /// Offset of the caller's frame in local memory.
    pub(super) frame: u32,
    /// Index of the calling function.
    pub(super) function: u32,
    /// The caller's registers, if it may be called recursively before this call returns.
    pub(super) saved: Vec<(Slot, Lanes<u64>)>,
    /// The enclosing call.
    pub(super) parent: Option<Rc<CallFrame>>,
}

impl Drop for CallFrame {
    /// Iterative drop: dropping a deep recursion's parents recursively would overflow the host's stack.
    fn drop(&mut self) {
        let mut parent = self.parent.take();
        while let Some(call) = parent {
            parent = Rc::into_inner(call).and_then(|mut call| call.parent.take());
        }
    }
}

/// Location of an argument or result on one side of a call; offsets in local memory are absolute.
#[derive(Clone, Copy)]
pub(super) enum ArgPlace {
    Register(Slot),
    Frame { at: u32, bytes: u32 },
}

impl ArgPlace {
    pub(super) fn passed(passed: &ArgLocation, frame: u32) -> Self {
        match *passed {
            ArgLocation::Register(slot) => Self::Register(slot),
            ArgLocation::Param { offset, bytes } => Self::Frame { at: frame + offset, bytes },
        }
    }

    fn param(param: &Param, frame: u32) -> Self {
        match param.register {
            Some(slot) => Self::Register(slot),
            None => Self::Frame { at: frame + param.offset, bytes: param.bytes },
        }
    }
}

/// A value to pass. All values are read before any is written, because both sides may use the same registers.
pub(super) enum ArgValue {
    Lanes(Box<Lanes<u64>>),
    Frame { at: u32, bytes: u32 },
}

fn read(from: ArgPlace, cx: &ExecContext<'_>) -> ArgValue {
    match from {
        ArgPlace::Register(slot) => ArgValue::Lanes(Box::new(cx.regs.get_any(slot))),
        ArgPlace::Frame { at, bytes } => ArgValue::Frame { at, bytes },
    }
}

fn write(value: &ArgValue, to: ArgPlace, mask: u32, cx: &mut ExecContext<'_>) -> Result<(), Box<Fault>> {
    match (value, to) {
        (ArgValue::Lanes(lanes), ArgPlace::Register(slot)) => {
            cx.regs.set_any(slot, lanes, mask);
            Ok(())
        }
        (ArgValue::Lanes(lanes), ArgPlace::Frame { at, bytes }) => store(lanes, at, bytes, mask, cx),
        (&ArgValue::Frame { at, bytes }, ArgPlace::Register(slot)) => {
            let lanes = load(at, bytes, mask, cx)?;
            cx.regs.set_any(slot, &lanes, mask);
            Ok(())
        }
        (&ArgValue::Frame { at: from, bytes }, ArgPlace::Frame { at: to, bytes: room }) => {
            for lane in lanes(mask) {
                cx.local.copy_param(lane, u64::from(from), u64::from(to), bytes.min(room) as usize)?;
            }
            Ok(())
        }
    }
}

/// Passes arguments from the caller to the callee.
pub(super) fn pass_args(
    args: &[ArgLocation],
    caller: u32,
    params: &[Param],
    callee: u32,
    mask: u32,
    cx: &mut ExecContext<'_>,
) -> Result<(), Box<Fault>> {
    let values: Vec<ArgValue> = args.iter().map(|from| read(ArgPlace::passed(from, caller), cx)).collect();
    for (value, to) in values.iter().zip(params) {
        write(value, ArgPlace::param(to, callee), mask, cx)?;
    }
    Ok(())
}

/// Reads the results of a function, before the caller's registers are restored.
pub(super) fn results(returns: &[Param], frame: u32, cx: &ExecContext<'_>) -> Vec<ArgValue> {
    returns.iter().map(|param| read(ArgPlace::param(param, frame), cx)).collect()
}

/// Passes results from the callee to the caller. The callee's frame lies above the caller's and is still intact.
pub(super) fn write_results(
    wanted: &[ArgLocation],
    caller: u32,
    results: &[ArgValue],
    mask: u32,
    cx: &mut ExecContext<'_>,
) -> Result<(), Box<Fault>> {
    for (to, value) in wanted.iter().zip(results) {
        write(value, ArgPlace::passed(to, caller), mask, cx)?;
    }
    Ok(())
}

/// Loads a value from local memory.
pub(super) fn load(at: u32, bytes: u32, mask: u32, cx: &mut ExecContext<'_>) -> Result<Lanes<u64>, Box<Fault>> {
    let at = [u64::from(at); 32];
    Ok(match bytes {
        1 => cx.load::<1>(StateSpace::Local, &at, mask)?.map(|v| u64::from(v[0])),
        2 => cx.load::<2>(StateSpace::Local, &at, mask)?.map(|v| u64::from(u16::from_le_bytes(v))),
        4 => cx.load::<4>(StateSpace::Local, &at, mask)?.map(|v| u64::from(u32::from_le_bytes(v))),
        _ => cx.load::<8>(StateSpace::Local, &at, mask)?.map(u64::from_le_bytes),
    })
}

/// Stores register lanes to local memory.
pub(super) fn store(
    lanes: &Lanes<u64>,
    at: u32,
    bytes: u32,
    mask: u32,
    cx: &mut ExecContext<'_>,
) -> Result<(), Box<Fault>> {
    let at = [u64::from(at); 32];
    match bytes {
        1 => cx.store::<1>(StateSpace::Local, &at, &lanes.map(|v| [v as u8]), mask),
        2 => cx.store::<2>(StateSpace::Local, &at, &lanes.map(|v| (v as u16).to_le_bytes()), mask),
        4 => cx.store::<4>(StateSpace::Local, &at, &lanes.map(|v| (v as u32).to_le_bytes()), mask),
        _ => cx.store::<8>(StateSpace::Local, &at, &lanes.map(u64::to_le_bytes), mask),
    }
}

/// Saves the registers of a function that may be entered again before it continues.
pub(super) fn save(regs: &Registers, own: &[Slot]) -> Vec<(Slot, Lanes<u64>)> {
    own.iter().map(|&slot| (slot, regs.get_any(slot))).collect()
}

/// Restores saved registers.
pub(super) fn restore(regs: &mut Registers, saved: &[(Slot, Lanes<u64>)], mask: u32) {
    for (slot, lanes) in saved {
        regs.set_any(*slot, lanes, mask);
    }
}

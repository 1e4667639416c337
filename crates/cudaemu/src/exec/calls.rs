//! Calls of device functions: whom, with what, and what comes back.

use std::rc::Rc;

use crate::bytecode::{ArgLocation, DecodedModule, FUNCTION_ADDRESS, Param, Prototype};
use crate::fault::{Fault, FaultKind};
use crate::operands::Slot;

use crate::exec_context::lanes;
use crate::exec_context::{ExecContext, Lanes, Registers, StateSpace};

/// A call that has not returned.
#[derive(Debug)]
pub(super) struct CallFrame {
    /// The call instruction.
    pub(super) pc: u32,
    /// The caller's frame.
    pub(super) frame: u32,
    /// The caller.
    pub(super) function: u32,
    /// The caller's registers, if it may be called again before this returns.
    pub(super) saved: Vec<(Slot, Lanes<u128>)>,
    /// The calls around it.
    pub(super) parent: Option<Rc<CallFrame>>,
}

impl Drop for CallFrame {
    /// A deep recursion is given up call by call: dropping parents inside of their children would use up our own stack.
    fn drop(&mut self) {
        let mut parent = self.parent.take();
        while let Some(call) = parent {
            parent = Rc::into_inner(call).and_then(|mut call| call.parent.take());
        }
    }
}

/// An argument or result at one side of a call, its place in local memory absolute.
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

/// What is passed, read before anything is written: the registers of both sides may be the same ones.
pub(super) enum ArgValue {
    Lanes(Box<Lanes<u128>>),
    Frame { at: u32, bytes: u32 },
}

fn read(from: ArgPlace, cx: &ExecContext<'_>) -> ArgValue {
    match from {
        ArgPlace::Register(slot) => ArgValue::Lanes(Box::new(cx.regs.get_widest(slot))),
        ArgPlace::Frame { at, bytes } => ArgValue::Frame { at, bytes },
    }
}

fn write(value: &ArgValue, to: ArgPlace, mask: u32, cx: &mut ExecContext<'_>) -> Result<(), Box<Fault>> {
    match (value, to) {
        (ArgValue::Lanes(lanes), ArgPlace::Register(slot)) => {
            cx.regs.set_widest(slot, lanes, mask);
            Ok(())
        }
        (ArgValue::Lanes(lanes), ArgPlace::Frame { at, bytes }) => store(lanes, at, bytes, mask, cx),
        (&ArgValue::Frame { at, bytes }, ArgPlace::Register(slot)) => {
            let lanes = load(at, bytes, mask, cx)?;
            cx.regs.set_widest(slot, &lanes, mask);
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

/// Arguments from the caller to the callee.
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

/// Reads the results of a function, before its caller's registers are restored.
pub(super) fn results(returns: &[Param], frame: u32, cx: &ExecContext<'_>) -> Vec<ArgValue> {
    returns.iter().map(|param| read(ArgPlace::param(param, frame), cx)).collect()
}

/// Results from the callee to the caller. The callee's frame lies beyond the caller's and is still whole.
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

/// Reads a place in the frame.
pub(super) fn load(at: u32, bytes: u32, mask: u32, cx: &mut ExecContext<'_>) -> Result<Lanes<u128>, Box<Fault>> {
    let at = [u64::from(at); 32];
    Ok(match bytes {
        1 => cx.load::<1>(StateSpace::Local, &at, mask)?.map(|v| u128::from(v[0])),
        2 => cx.load::<2>(StateSpace::Local, &at, mask)?.map(|v| u128::from(u16::from_le_bytes(v))),
        4 => cx.load::<4>(StateSpace::Local, &at, mask)?.map(|v| u128::from(u32::from_le_bytes(v))),
        8 => cx.load::<8>(StateSpace::Local, &at, mask)?.map(|v| u128::from(u64::from_le_bytes(v))),
        _ => cx.load::<16>(StateSpace::Local, &at, mask)?.map(u128::from_le_bytes),
    })
}

/// Stores register lanes at a place in the frame.
pub(super) fn store(
    lanes: &Lanes<u128>,
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
        8 => cx.store::<8>(StateSpace::Local, &at, &lanes.map(|v| (v as u64).to_le_bytes()), mask),
        _ => cx.store::<16>(StateSpace::Local, &at, &lanes.map(u128::to_le_bytes), mask),
    }
}

/// Registers of a function that may be entered again before it goes on.
pub(super) fn save(regs: &Registers, own: &[Slot]) -> Vec<(Slot, Lanes<u128>)> {
    own.iter().map(|&slot| (slot, regs.get_widest(slot))).collect()
}

/// Puts them back.
pub(super) fn restore(regs: &mut Registers, saved: &[(Slot, Lanes<u128>)], mask: u32) {
    for (slot, lanes) in saved {
        regs.set_widest(*slot, lanes, mask);
    }
}

/// The function that the first lane calls, and the lanes that call the same one. It must have the prototype's parameters.
pub(super) fn resolve(
    regs: &Registers,
    slot: Slot,
    prototype: Option<&Prototype>,
    mask: u32,
    code: &DecodedModule,
) -> Result<(u32, u32), Box<Fault>> {
    let lanes = regs.get::<u64>(slot);
    let first = mask.trailing_zeros() as usize & 31;
    let same = (0..32).filter(|&lane| lanes[lane] == lanes[first]).fold(0, |m, lane| m | 1 << lane) & mask;
    let found = lanes[first].checked_sub(FUNCTION_ADDRESS).and_then(|index| {
        let function = code.functions.get(usize::try_from(index).ok()?)?;
        // A number that is no function's address must not become one.
        function.address_taken.then_some((index as u32, function))
    });
    let Some((index, function)) = found else {
        let text = format!("a call of {:#x}, where no function of this module lies", lanes[first]);
        return Err(Fault::new(FaultKind::InvalidValue(text), first));
    };
    if prototype.is_some_and(|prototype| !prototype.fits(function)) {
        let text = format!("a call of {} through a prototype with other parameters", function.name);
        return Err(Fault::new(FaultKind::InvalidValue(text), first));
    }
    Ok((index, same))
}

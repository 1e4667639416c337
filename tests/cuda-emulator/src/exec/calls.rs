//! Calls of device functions: whom, with what, and what comes back.

use std::rc::Rc;

use crate::code::{Code, FUNCTION_ADDRESS, Param, Passed, Slot};
use crate::fault::{Fault, Kind};

use super::cx::lanes;
use super::{Cx, Lanes, Registers, Window};

/// A call that has not returned.
#[derive(Debug)]
pub(super) struct Call {
    /// The call instruction.
    pub(super) pc: u32,
    /// The caller's frame.
    pub(super) frame: u32,
    /// The caller.
    pub(super) function: u32,
    /// The caller's registers, if it may be called again before this returns.
    pub(super) saved: Vec<(Slot, Lanes<u64>)>,
    /// The calls around it.
    pub(super) parent: Option<Rc<Call>>,
}

/// An argument or result at one side of a call, its place in local memory absolute.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Register(Slot),
    Frame { at: u32, bytes: u32 },
}

impl Place {
    pub(super) fn passed(passed: &Passed, frame: u32) -> Self {
        match *passed {
            Passed::Register(slot) => Self::Register(slot),
            Passed::Param { offset, bytes } => Self::Frame { at: frame + offset, bytes },
        }
    }

    fn param(param: &Param, frame: u32) -> Self {
        match param.register {
            Some(slot) => Self::Register(slot),
            None => Self::Frame { at: frame + param.offset, bytes: param.bytes },
        }
    }
}

/// Arguments from the caller to the callee.
pub(super) fn pass(
    args: &[Passed],
    caller: u32,
    params: &[Param],
    callee: u32,
    mask: u32,
    cx: &mut Cx<'_>,
) -> Result<(), Box<Fault>> {
    for (from, to) in args.iter().zip(params) {
        transfer(Place::passed(from, caller), Place::param(to, callee), mask, cx)?;
    }
    Ok(())
}

/// What a callee returns, read before its caller's registers are restored: they may be the same ones.
pub(super) enum Returned {
    Value(Box<Lanes<u64>>),
    Frame { at: u32, bytes: u32 },
}

/// Reads the results of a function.
pub(super) fn results(returns: &[Param], frame: u32, cx: &Cx<'_>) -> Vec<Returned> {
    let read = |param: &Param| match Place::param(param, frame) {
        Place::Register(slot) => Returned::Value(Box::new(cx.regs.get_any(slot))),
        Place::Frame { at, bytes } => Returned::Frame { at, bytes },
    };
    returns.iter().map(read).collect()
}

/// Results from the callee to the caller. The callee's frame lies beyond the caller's and is still whole.
pub(super) fn take(
    wanted: &[Passed],
    caller: u32,
    results: &[Returned],
    mask: u32,
    cx: &mut Cx<'_>,
) -> Result<(), Box<Fault>> {
    for (to, from) in wanted.iter().zip(results) {
        match (from, Place::passed(to, caller)) {
            (Returned::Value(lanes), Place::Register(slot)) => cx.regs.set_any(slot, lanes, mask),
            (Returned::Value(lanes), Place::Frame { at, bytes }) => store(lanes, at, bytes, mask, cx)?,
            (&Returned::Frame { at, bytes }, to) => transfer(Place::Frame { at, bytes }, to, mask, cx)?,
        }
    }
    Ok(())
}

fn transfer(from: Place, to: Place, mask: u32, cx: &mut Cx<'_>) -> Result<(), Box<Fault>> {
    match (from, to) {
        (Place::Register(from), Place::Register(to)) => {
            let lanes = cx.regs.get_any(from);
            cx.regs.set_any(to, &lanes, mask);
            Ok(())
        }
        (Place::Register(from), Place::Frame { at, bytes }) => {
            let lanes = cx.regs.get_any(from);
            store(&lanes, at, bytes, mask, cx)
        }
        (Place::Frame { at, bytes }, Place::Register(to)) => {
            let at = [u64::from(at); 32];
            let lanes = match bytes {
                1 => cx.load::<1>(Window::Local, &at, mask)?.map(|v| u64::from(v[0])),
                2 => cx.load::<2>(Window::Local, &at, mask)?.map(|v| u64::from(u16::from_le_bytes(v))),
                4 => cx.load::<4>(Window::Local, &at, mask)?.map(|v| u64::from(u32::from_le_bytes(v))),
                _ => cx.load::<8>(Window::Local, &at, mask)?.map(u64::from_le_bytes),
            };
            cx.regs.set_any(to, &lanes, mask);
            Ok(())
        }
        (Place::Frame { at: from, bytes }, Place::Frame { at: to, bytes: room }) => {
            for lane in lanes(mask) {
                cx.local.pass(lane, u64::from(from), u64::from(to), bytes.min(room) as usize)?;
            }
            Ok(())
        }
    }
}

/// Stores register lanes at a place in the frame.
pub(super) fn store(lanes: &Lanes<u64>, at: u32, bytes: u32, mask: u32, cx: &mut Cx<'_>) -> Result<(), Box<Fault>> {
    let at = [u64::from(at); 32];
    match bytes {
        1 => cx.store::<1>(Window::Local, &at, &lanes.map(|v| [v as u8]), mask),
        2 => cx.store::<2>(Window::Local, &at, &lanes.map(|v| (v as u16).to_le_bytes()), mask),
        4 => cx.store::<4>(Window::Local, &at, &lanes.map(|v| (v as u32).to_le_bytes()), mask),
        _ => cx.store::<8>(Window::Local, &at, &lanes.map(u64::to_le_bytes), mask),
    }
}

/// Registers of a function that may be entered again before it goes on.
pub(super) fn save(regs: &Registers, own: &[Slot]) -> Vec<(Slot, Lanes<u64>)> {
    own.iter().map(|&slot| (slot, regs.get_any(slot))).collect()
}

/// Puts them back.
pub(super) fn restore(regs: &mut Registers, saved: &[(Slot, Lanes<u64>)], mask: u32) {
    for (slot, lanes) in saved {
        regs.set_any(*slot, lanes, mask);
    }
}

/// The function that the first lane calls, and the lanes that call the same one.
pub(super) fn resolve(regs: &Registers, slot: Slot, mask: u32, code: &Code) -> Result<(u32, u32), Box<Fault>> {
    let lanes = regs.get::<u64>(slot);
    let first = mask.trailing_zeros() as usize & 31;
    let same = (0..32).filter(|&lane| lanes[lane] == lanes[first]).fold(0, |m, lane| m | 1 << lane) & mask;
    let index = lanes[first].checked_sub(FUNCTION_ADDRESS).filter(|&i| i < code.functions.len() as u64);
    match index {
        Some(index) => Ok((index as u32, same)),
        None => {
            let text = format!("a call of {:#x}, where no function of this module lies", lanes[first]);
            Err(Fault::new(Kind::InvalidValue(text), first))
        }
    }
}

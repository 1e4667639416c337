//! The built-in device function: failed assertions.

use super::block::thread_at;
use super::calls::{ArgPlace, load};
use crate::bytecode::CallSite;
use crate::exec_context::{ExecContext, LANES};
use crate::fault::{Fault, FaultKind};

/// Maximum bytes of a string that is read from device memory.
const LONGEST: usize = 1 << 16;

/// The fault of `__assertfail(message, file, line, function, char size)`, in CUDA's wording, for the first lane in the mask;
/// `frame` is the caller's frame.
pub(super) fn assertion(
    site: &CallSite,
    frame: u32,
    mask: u32,
    cx: &mut ExecContext<'_>,
) -> Result<Box<Fault>, Box<Fault>> {
    let lane = mask.trailing_zeros() as usize & 31;
    let mut args = [0; 4];
    for (arg, passed) in args.iter_mut().zip(&site.args) {
        *arg = match ArgPlace::passed(passed, frame) {
            ArgPlace::Register(slot) => cx.regs.get_any(slot)[lane],
            ArgPlace::Frame { at, bytes } => load(at, bytes.min(8), mask, cx)?[lane],
        };
    }
    let [message, file, function] = [args[0], args[1], args[3]].map(|address| string(cx, address, lane));
    let (line, [bx, by, bz]) = (args[2] as u32, cx.block);
    let [tx, ty, tz] = thread_at(cx.warp * LANES as u32 + lane as u32, cx.shape);
    let text = format!(
        "{file}:{line}: {function}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] Assertion `{message}` failed."
    );
    Ok(Fault::new(FaultKind::Trap(text), lane))
}

/// A zero-terminated string in one lane's generic address space, as far as it can be read.
fn string(cx: &mut ExecContext<'_>, address: u64, lane: usize) -> String {
    let mut text = Vec::new();
    while text.len() < LONGEST {
        match cx.peek(&[address.wrapping_add(text.len() as u64); LANES], lane) {
            None | Some(0) => break,
            Some(byte) => text.push(byte),
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

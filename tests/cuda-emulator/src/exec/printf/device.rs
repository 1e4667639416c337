//! `vprintf` and `__assertfail` as the device calls them: format, arguments and strings lie in its memory.

use super::{Format, assertion_text};
use crate::exec::{Cx, LANES, Lanes, Window};
use crate::fault::{Fault, Kind};

/// Bytes after which a string without an end is cut off.
const LONGEST_STRING: u64 = 1 << 16;

/// `vprintf(format, arguments)` of the lanes in the mask, lowest first; gives the number of arguments, as CUDA's does.
pub(in crate::exec) fn print(
    cx: &mut Cx<'_>,
    formats: &Lanes<u64>,
    arguments: &Lanes<u64>,
    mask: u32,
) -> Result<Lanes<u64>, Box<Fault>> {
    let mut result = [0; LANES];
    let mut known: Option<(u64, Format)> = None;
    for lane in (0..LANES).filter(|&lane| mask >> lane & 1 != 0) {
        // Nearly always all lanes print the same format.
        let format = match known.take() {
            Some((address, format)) if address == formats[lane] => format,
            _ => Format::parse(&string(cx, formats[lane], lane)?),
        };
        let mut bytes = vec![0; format.argument_bytes()];
        for (offset, size) in format.arguments() {
            let at = [arguments[lane].wrapping_add(offset as u64); LANES];
            // Each by itself: what is between them was never written.
            if size == 8 {
                bytes[offset..offset + 8].copy_from_slice(&cx.load::<8>(Window::Generic, &at, 1 << lane)?[lane]);
            } else {
                bytes[offset..offset + 4].copy_from_slice(&cx.load::<4>(Window::Generic, &at, 1 << lane)?[lane]);
            }
        }
        let mut fault = None;
        let text = format.render(&bytes, &mut |address| match string(cx, address, lane) {
            Ok(text) => Some(text),
            Err(bad) => {
                fault.get_or_insert(bad);
                None
            }
        });
        if let Some(fault) = fault {
            return Err(fault);
        }
        cx.print(&text);
        result[lane] = format.arguments().count() as u64;
        known = Some((formats[lane], format));
    }
    Ok(result)
}

/// `__assertfail(message, file, line, function, character size)`: the fault of the mask's lowest lane.
pub(in crate::exec) fn assertion(cx: &mut Cx<'_>, args: &[Lanes<u64>; 4], mask: u32) -> Box<Fault> {
    let lane = mask.trailing_zeros() as usize % LANES;
    let [message, file, line, function] = args;
    // A text that cannot be read must not hide that the assertion failed.
    let mut text = |at: &Lanes<u64>| string(cx, at[lane], lane).unwrap_or_else(|_| b"?".to_vec());
    let (message, file, function) = (text(message), text(file), text(function));
    Fault::new(Kind::Trap(assertion_text(&message, &file, line[lane] as u32, &function)), lane)
}

/// The string at a generic address, without its terminating zero.
fn string(cx: &mut Cx<'_>, address: u64, lane: usize) -> Result<Vec<u8>, Box<Fault>> {
    let mut text = Vec::new();
    for offset in 0..LONGEST_STRING {
        let at = [address.wrapping_add(offset); LANES];
        match cx.load::<1>(Window::Generic, &at, 1 << lane)?[lane] {
            [0] => break,
            [byte] => text.push(byte),
        }
    }
    Ok(text)
}

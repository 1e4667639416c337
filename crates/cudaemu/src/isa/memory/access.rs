//! `ld`, `ld.global.nc`, `st`: every state space, type and vector (PTX ISA, "Data Movement and Conversion
//! Instructions").
//!
//! Registers may be wider than the type: a load then sign-extends signed types and zero-extends all others, and a store takes
//! the low bits.

use super::{CACHE_HINTS, CACHE_POLICY, ORDERING_HINTS, SPACES, encode, window};
use crate::bytecode::{AccessFn, Action};
use crate::exec_context::{ExecContext, Registers, StateSpace, each};
use crate::fault::Fault;
use crate::isa::{Category, Family, Operand, Row, Value, row};
use crate::operands::{Args, Class, Slot};

/// Bit of a row's constant: the loaded type is signed.
const SIGNED: u32 = 8;

/// A type of loads and stores.
struct Type {
    name: &'static str,
    bytes: usize,
    value: Value,
}

const TYPES: [Type; 14] = [
    Type { name: "b8", bytes: 1, value: Value::B16 },
    Type { name: "u8", bytes: 1, value: Value::B16 },
    Type { name: "s8", bytes: 1, value: Value::B16 },
    Type { name: "b16", bytes: 2, value: Value::B16 },
    Type { name: "u16", bytes: 2, value: Value::B16 },
    Type { name: "s16", bytes: 2, value: Value::B16 },
    Type { name: "b32", bytes: 4, value: Value::B32 },
    Type { name: "u32", bytes: 4, value: Value::B32 },
    Type { name: "s32", bytes: 4, value: Value::B32 },
    Type { name: "f32", bytes: 4, value: Value::F32 },
    Type { name: "b64", bytes: 8, value: Value::B64 },
    Type { name: "u64", bytes: 8, value: Value::B64 },
    Type { name: "s64", bytes: 8, value: Value::B64 },
    Type { name: "f64", bytes: 8, value: Value::F64 },
];

/// Handlers by bytes per element and number of elements. The first of the three constants is their product.
const HANDLERS: [(usize, u8, AccessFn, AccessFn); 11] = [
    (1, 1, load::<1, 1, 1>, store::<1, 1, 1>),
    (1, 2, load::<2, 1, 2>, store::<2, 1, 2>),
    (1, 4, load::<4, 1, 4>, store::<4, 1, 4>),
    (2, 1, load::<2, 2, 1>, store::<2, 2, 1>),
    (2, 2, load::<4, 2, 2>, store::<4, 2, 2>),
    (2, 4, load::<8, 2, 4>, store::<8, 2, 4>),
    (4, 1, load::<4, 4, 1>, store::<4, 4, 1>),
    (4, 2, load::<8, 4, 2>, store::<8, 4, 2>),
    (4, 4, load::<16, 4, 4>, store::<16, 4, 4>),
    (8, 1, load::<8, 8, 1>, store::<8, 8, 1>),
    (8, 2, load::<16, 8, 2>, store::<16, 8, 2>),
];

/// Element `index` of `bytes`, with `E` bytes per element.
#[inline(always)]
fn element<const N: usize, const E: usize>(bytes: &[u8; N], index: usize) -> [u8; E] {
    bytes.as_chunks::<E>().0[index]
}

/// `[u8; E]` as an integer, zero-extended.
#[inline(always)]
fn widen<const E: usize>(bytes: [u8; E]) -> u64 {
    let mut wide = [0; 8];
    let count = E.min(8);
    wide[..count].copy_from_slice(&bytes[..count]);
    u64::from_le_bytes(wide)
}

fn load<const N: usize, const E: usize, const V: usize>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let bytes = cx.load::<N>(window(args), &at, mask)?;
    for index in 0..V {
        let slot = args.s[index];
        if slot.is_none() {
            continue;
        }
        // Fast path: registers of the type's own width receive the bytes unchanged, in a loop that the compiler vectorises.
        match (E, slot.class()) {
            (2, Class::B16) => {
                cx.regs.set(slot, &each(&bytes, |b| u16::from_le_bytes(element::<N, 2>(&b, index))), mask)
            }
            (4, Class::B32) => {
                cx.regs.set(slot, &each(&bytes, |b| u32::from_le_bytes(element::<N, 4>(&b, index))), mask)
            }
            (8, Class::B64) => {
                cx.regs.set(slot, &each(&bytes, |b| u64::from_le_bytes(element::<N, 8>(&b, index))), mask)
            }
            _ => {
                let shift = if args.k & SIGNED != 0 { 64 - 8 * E.min(8) } else { 0 };
                let extend = |b: [u8; N]| {
                    let value = widen(element::<N, E>(&b, index));
                    if shift == 0 { value } else { ((value << shift) as i64 >> shift) as u64 }
                };
                cx.regs.set_any(slot, &each(&bytes, extend), mask);
            }
        }
    }
    Ok(())
}

fn store<const N: usize, const E: usize, const V: usize>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
) -> Result<(), Box<Fault>> {
    let at = cx.addresses(args);
    let mut bytes = [[0; N]; 32];
    for index in 0..V {
        gather::<N, E>(cx.regs, args.s[index], index, &mut bytes);
    }
    cx.store::<N>(window(args), &at, &bytes, mask)
}

/// Writes the low `E` bytes of a register as element `index` of a store.
#[inline(always)]
fn gather<const N: usize, const E: usize>(regs: &Registers, slot: Slot, index: usize, bytes: &mut [[u8; N]; 32]) {
    let place = |lane: &mut [u8; N], value: &[u8]| {
        for (target, &byte) in lane[index * E..(index + 1) * E].iter_mut().zip(value) {
            *target = byte;
        }
    };
    match (E, slot.class()) {
        (4, Class::B32) => bytes.iter_mut().zip(regs.get::<u32>(slot)).for_each(|(l, v)| place(l, &v.to_le_bytes())),
        _ => bytes.iter_mut().zip(regs.get_any(slot)).for_each(|(l, v)| place(l, &v.to_le_bytes())),
    }
}

/// Adds the rows of one opcode in one state space.
fn rows(opcode: &str, space: &str, window: StateSpace, rows: &mut Vec<Row>) {
    // Only accesses that may reach global memory accept a cache policy.
    let shown = if space.is_empty() || space.starts_with(".global") { 3 } else { 2 };
    for ty in &TYPES {
        for (bytes, count, load, store) in HANDLERS {
            if bytes != ty.bytes {
                continue;
            }
            let vector = if count == 1 { String::new() } else { format!(".v{count}") };
            let name = format!("{opcode}{space}{vector}.{}", ty.name);
            rows.push(if opcode == "st" {
                let source = match count {
                    1 => Operand::InWide(ty.value),
                    _ => Operand::InWideVector(count, ty.value),
                };
                let operands = [Operand::Address, source, CACHE_POLICY];
                row(name, &operands[..shown], Category::Store, encode(window), Action::Access(store))
            } else {
                let target = match count {
                    1 => Operand::OutWide(ty.value),
                    _ => Operand::OutWideVector(count, ty.value),
                };
                let k = encode(window) | if ty.name.starts_with('s') { SIGNED } else { 0 };
                let operands = [target, Operand::Address, CACHE_POLICY];
                row(name, &operands[..shown], Category::Load, k, Action::Access(load))
            });
        }
    }
}

pub(crate) fn family() -> Family {
    let mut list = Vec::new();
    for (space, window) in SPACES {
        rows("ld", space, window, &mut list);
        if ![".const", ".param::entry"].contains(&space) {
            rows("st", space, window, &mut list);
        }
    }
    // Read-only data uses the same checked access.
    rows("ld", ".global.nc", StateSpace::Global, &mut list);
    Family {
        title: "Loads and stores",
        rows: list,
        hints: vec![("ld", &ORDERING_HINTS), ("ld", &CACHE_HINTS), ("st", &ORDERING_HINTS), ("st", &CACHE_HINTS)],
    }
}

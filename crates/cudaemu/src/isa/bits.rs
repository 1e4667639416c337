//! Bit counting, bit fields and byte permutation (PTX ISA, "Integer Arithmetic Instructions" and `prmt`).

use super::{Category, Family, Operand, Row, Value, lanes, row, uniform};
use crate::bytecode::{Action, ComputeFn};
use crate::exec_context::{LANES, Lane, Lanes, Registers};
use crate::numeric::bits;
use crate::operands::Args;

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    counts(&mut rows);
    fields(&mut rows);
    permutations(&mut rows);
    Family { title: "Bit fields", rows, hints: vec![] }
}

fn counts(rows: &mut Vec<Row>) {
    map!(rows, Integer, "popc.b32", b32 => u32, |x| x.count_ones());
    map!(rows, Integer, "popc.b64", b64 => u32, |x| x.count_ones());
    map!(rows, Integer, "clz.b32", b32 => u32, |x| x.leading_zeros());
    map!(rows, Integer, "clz.b64", b64 => u32, |x| x.leading_zeros());
    map!(rows, Integer, "brev.b32", b32 => b32, |x| x.reverse_bits());
    map!(rows, Integer, "brev.b64", b64 => b64, |x| x.reverse_bits());
    map!(rows, Integer, "bfind.u32", u32 => u32, |x| bits::bfind_u32(x, false));
    map!(rows, Integer, "bfind.s32", s32 => u32, |x| bits::bfind_s32(x, false));
    map!(rows, Integer, "bfind.u64", u64 => u32, |x| bits::bfind_u64(x, false));
    map!(rows, Integer, "bfind.s64", s64 => u32, |x| bits::bfind_s64(x, false));
    map!(rows, Integer, "bfind.shiftamt.u32", u32 => u32, |x| bits::bfind_u32(x, true));
    map!(rows, Integer, "bfind.shiftamt.s32", s32 => u32, |x| bits::bfind_s32(x, true));
    map!(rows, Integer, "bfind.shiftamt.u64", u64 => u32, |x| bits::bfind_u64(x, true));
    map!(rows, Integer, "bfind.shiftamt.s64", s64 => u32, |x| bits::bfind_s64(x, true));
}

fn fields(rows: &mut Vec<Row>) {
    map!(rows, Integer, "bfe.u32", u32, u32, u32 => u32, bits::bfe_u32);
    map!(rows, Integer, "bfe.s32", u32, u32, u32 => u32, bits::bfe_s32);
    map!(rows, Integer, "bfe.u64", u64, u32, u32 => u64, bits::bfe_u64);
    map!(rows, Integer, "bfe.s64", u64, u32, u32 => u64, bits::bfe_s64);
    insert(rows, "bfi.b32", Value::B32, kernel!(|r, a, m| bfi(r, a, m, bits::bfi_b32)));
    insert(rows, "bfi.b64", Value::B64, kernel!(|r, a, m| bfi(r, a, m, bits::bfi_b64)));
}

fn insert(rows: &mut Vec<Row>, name: &str, value: Value, action: ComputeFn) {
    let position = Operand::In(Value::B32);
    let operands = [Operand::Out(value), Operand::In(value), Operand::In(value), position, position];
    rows.push(row(name, &operands, Category::Integer, 0, Action::Compute(action)));
}

#[inline(always)]
fn bfi<T: Lane>(r: &mut Registers, a: &Args, mask: u32, f: impl Fn(T, T, u32, u32) -> T) {
    let (x, y) = (r.get::<T>(a.s[1]), r.get::<T>(a.s[2]));
    let (position, length) = (r.get::<u32>(a.s[3]), r.get::<u32>(a.s[4]));
    let result: Lanes<T> = lanes(|lane| f(x[lane], y[lane], position[lane], length[lane]));
    r.set(a.s[0], &result, mask);
}

fn permutations(rows: &mut Vec<Row>) {
    let value = Operand::In(Value::B32);
    let operands = [Operand::Out(Value::B32), value, value, value];
    rows.push(row("prmt.b32", &operands, Category::Integer, 0, Action::Compute(kernel!(|r, a, m| permute(r, a, m)))));
}

/// `prmt`. The selectors are usually an immediate: then each result byte is the same shift in all lanes.
#[inline(always)]
fn permute(r: &mut Registers, a: &Args, mask: u32) {
    let (x, y) = (r.get::<u32>(a.s[1]), r.get::<u32>(a.s[2]));
    let selectors = r.get::<u32>(a.s[3]);
    let Some(selectors) = uniform(&selectors) else {
        return r.map3(a, mask, bits::prmt);
    };
    let mut result = [0u32; LANES];
    for byte in 0..4 {
        let selector = selectors >> (4 * byte);
        let (word, left) = (if selector & 4 == 0 { &x } else { &y }, 24 - 8 * (selector & 3));
        // The byte is shifted to the top, from where an arithmetic shift replicates its sign and a logical one moves its value
        // down.
        for lane in 0..LANES {
            let top = word[lane] << left;
            let value = if selector & 8 != 0 { (top as i32 >> 31) as u32 } else { top };
            result[lane] |= value >> 24 << (8 * byte);
        }
    }
    r.set(a.s[0], &result, mask);
}

//! `atom` and `red`: every operation and type in every space.

use super::{LANES, bytes_of, header};
use crate::bare_device::{Device, Params};

/// Operands and the expected value in memory, as bits.
struct Case {
    old: u128,
    b: u128,
    /// The third operand of cas.
    c: u128,
    new: u128,
}

/// The parts of a row's name.
struct Row<'a> {
    name: &'a str,
    space: &'a str,
    op: &'a str,
    ty: &'a str,
}

const OPS: [&str; 10] = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
const TYPES: [&str; 8] = ["b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"];

impl<'a> Row<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let words: Vec<&str> = name.split('.').collect();
        let word = |among: &[&str]| words.iter().copied().find(|word| among.contains(word));
        ["atom", "red"].contains(&words[0]).then(|| Self {
            name,
            space: words.iter().copied().find(|w| w.starts_with("global") || w.starts_with("shared")).unwrap_or(""),
            op: word(&OPS).unwrap(),
            ty: word(&TYPES).unwrap(),
        })
    }
}

/// A second implementation of the integer operations.
fn integer(op: &str, ty: &str, old: u128, b: u128, c: u128) -> u128 {
    let bits = 8 * bytes_of(ty) as u32;
    let signed = |v: u128| (v << (128 - bits)) as i128 >> (128 - bits);
    let less = if ty.starts_with('s') { signed(old) < signed(b) } else { old < b };
    let result = match op {
        "add" => old.wrapping_add(b),
        "min" => {
            if less {
                old
            } else {
                b
            }
        }
        "max" => {
            if less {
                b
            } else {
                old
            }
        }
        "and" => old & b,
        "or" => old | b,
        "xor" => old ^ b,
        "exch" => b,
        "cas" => {
            if old == b {
                c
            } else {
                old
            }
        }
        "inc" => {
            if old >= b {
                0
            } else {
                old + 1
            }
        }
        "dec" => {
            if old == 0 || old > b {
                b
            } else {
                old - 1
            }
        }
        _ => panic!("{op}"),
    };
    result & ((1 << bits) - 1)
}

/// Old value, operand, sum, as bits.
const F32: [(u128, u128, u128); 7] = [
    (0x3f80_0000, 0x4000_0000, 0x4040_0000),
    (0x4b80_0000, 0x3f80_0000, 0x4b80_0000), // 2^24 + 1: a tie, to even
    (0x4b80_0001, 0x3f80_0000, 0x4b80_0002),
    (0x7f7f_ffff, 0x7f7f_ffff, 0x7f80_0000),
    (0x8000_0000, 0x8000_0000, 0x8000_0000),
    (0x7f80_0000, 0xff80_0000, 0x7fff_ffff),
    (0x7fc0_1234, 0x3f80_0000, 0x7fff_ffff),
];

/// Sums with f32 subnormals, which the adder of shared memory keeps and that of global memory flushes: old value, operand, sum
/// in shared memory, sum in global memory.
const F32_SUBNORMAL: [(u128, u128, u128, u128); 4] = [
    (0x0000_0001, 0x0000_0001, 0x0000_0002, 0x0000_0000),
    (0x8000_0001, 0x8000_0000, 0x8000_0001, 0x8000_0000),
    (0x0080_0001, 0x8080_0000, 0x0000_0001, 0x0000_0000), // the result is subnormal
    (0x0080_0000, 0x0000_0001, 0x0080_0001, 0x0080_0000), // an operand is subnormal
];

const F64: [(u128, u128, u128); 5] = [
    (0x3ff0_0000_0000_0000, 0x4000_0000_0000_0000, 0x4008_0000_0000_0000),
    (0x4340_0000_0000_0000, 0x3ff0_0000_0000_0000, 0x4340_0000_0000_0000), // 2^53 + 1
    (0x7fef_ffff_ffff_ffff, 0x7fef_ffff_ffff_ffff, 0x7ff0_0000_0000_0000),
    (0x0000_0000_0000_0001, 0x0000_0000_0000_0001, 0x0000_0000_0000_0002),
    (0x8000_0000_0000_0000, 0x8000_0000_0000_0000, 0x8000_0000_0000_0000),
];

/// Cases of an operation on a type, in shared memory if `shared`.
fn cases(op: &str, ty: &str, shared: bool) -> Vec<Case> {
    let case = |(old, b, new)| Case { old, b, c: 0, new };
    match ty {
        "f32" => {
            let subnormal =
                F32_SUBNORMAL.iter().map(|&(old, b, kept, flushed)| (old, b, if shared { kept } else { flushed }));
            F32.iter().copied().chain(subnormal).map(case).collect()
        }
        "f64" => F64.iter().copied().map(case).collect(),
        _ => {
            let top = 1u128 << (8 * bytes_of(ty) - 1);
            let all = top | (top - 1);
            let values = [0, 1, 5, all, top, top - 1, all - 4];
            let pairs = values.iter().flat_map(|&old| values.iter().map(move |&b| (old, b)));
            let case = |(old, b)| Case { old, b, c: all ^ 0x55, new: integer(op, ty, old, b, all ^ 0x55) };
            pairs.map(case).collect()
        }
    }
}

/// Bytes of a thread's input (operand b, and c at 16) and of its output.
const BLOCK: usize = 32;

/// A register of the type's width.
fn register(ty: &str, index: usize) -> String {
    format!("%{}{index}", if bytes_of(ty) == 4 { "r" } else { "d" })
}

/// A kernel that executes the row on each thread's 16 bytes, in global memory or in a copy in shared memory.
fn kernel(row: &Row<'_>, shared: bool, number: usize) -> String {
    let (bits, ty) = (8 * bytes_of(row.ty), row.ty);
    let mut body = String::from(
        "
        .reg .b32 %r<3>; .reg .b64 %d<3>; .reg .b32 %w<4>;
        .reg .b32 %t, %s; .reg .b64 %cell, %in, %out, %o, %a;
        .shared .align 16 .b8 shared[512];
        ld.param.u64 %out, [out]; ld.param.u64 %in, [in]; ld.param.u64 %cell, [cells];
        mov.u32 %t, %tid.x;
        mul.wide.u32 %o, %t, 32; add.s64 %in, %in, %o; add.s64 %out, %out, %o;
        mul.wide.u32 %o, %t, 16; add.s64 %cell, %cell, %o;
        shl.b32 %t, %t, 4; mov.u32 %s, shared; add.s32 %s, %s, %t;
        ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%cell];
        st.shared.v4.u32 [%s], {%w0, %w1, %w2, %w3};
        mul.wide.u32 %a, %s, 1; cvta.shared.u64 %a, %a;
",
    );
    let [b, c, old] = [0, 1, 2].map(|index| register(ty, index));
    body += &format!("ld.global.b{bits} {b}, [%in];\nld.global.b{bits} {c}, [%in+16];\n");
    let base = match (row.space, shared) {
        ("", true) => "%a",
        (_, true) => "%s",
        _ => "%cell",
    };
    let third = if row.op == "cas" { format!(", {c}") } else { String::new() };
    if row.name.starts_with("red") {
        body += &format!("{} [{base}], {b};\n", row.name);
    } else {
        body += &format!("{} {old}, [{base}], {b}{third};\nst.global.b{bits} [%out], {old};\n", row.name);
    }
    if shared {
        body += "ld.shared.v4.u32 {%w0, %w1, %w2, %w3}, [%s]; st.global.v4.u32 [%cell], {%w0, %w1, %w2, %w3};\n";
    }
    format!(".visible .entry k{number}(.param .u64 out, .param .u64 in, .param .u64 cells) {{ {body} ret; }}\n")
}

fn params(out: u64, input: u64, cells: u64) -> Params {
    Params::default().pointer(out).pointer(input).pointer(cells)
}

/// Runs one row with one case per lane, and compares memory and old values.
fn check(device: &mut Device, module: &crate::bare_device::Module, row: &Row<'_>, shared: bool, number: usize) {
    let cases = cases(row.op, row.ty, shared);
    let size = bytes_of(row.ty);
    for first in (0..cases.len()).step_by(LANES) {
        let case = |lane: usize| &cases[(first + lane) % cases.len()];
        let (mut input, mut cells) = (vec![0; BLOCK * LANES], vec![0xa5; 16 * LANES]);
        for lane in 0..LANES {
            let Case { old, b, c, .. } = case(lane);
            input[BLOCK * lane..][..size].copy_from_slice(&b.to_le_bytes()[..size]);
            input[BLOCK * lane + 16..][..size].copy_from_slice(&c.to_le_bytes()[..size]);
            cells[16 * lane..][..size].copy_from_slice(&old.to_le_bytes()[..size]);
        }
        let (input, memory) = (device.upload(&input), device.upload(&cells));
        let out = device.upload(&vec![0; BLOCK * LANES]);
        device.run(module, &format!("k{number}"), 1, LANES as u32, params(out, input, memory));
        let (olds, got) = (device.download(out, BLOCK * LANES), device.download(memory, 16 * LANES));
        for lane in 0..LANES {
            let Case { old, b, new, .. } = case(lane);
            if row.name.starts_with("atom") {
                assert_eq!(olds[BLOCK * lane..][..size], old.to_le_bytes()[..size], "{}: old value", row.name);
            }
            let mut want = [0xa5; 16];
            want[..size].copy_from_slice(&new.to_le_bytes()[..size]);
            let shown = |bytes: &[u8]| bytes.iter().rev().map(|b| format!("{b:02x}")).collect::<String>();
            assert_eq!(
                shown(&got[16 * lane..][..16]),
                shown(&want),
                "{} (shared: {shared}) of {old:#x} and {b:#x}",
                row.name
            );
        }
    }
}

#[test]
fn every_operation_in_every_space_gives_the_expected_value() {
    let mut device = Device::new();
    let mut variants = Vec::new();
    for row in cudaemu::isa::table().rows().iter().filter_map(|row| Row::parse(&row.name)) {
        // A generic address may be in either memory.
        let both: &[bool] = match row.space {
            "" => &[false, true],
            "global" => &[false],
            _ => &[true],
        };
        variants.extend(both.iter().map(|&shared| (Row { ..row }, shared)));
    }
    for chunk in variants.chunks(200) {
        let mut text = header();
        for (number, (row, shared)) in chunk.iter().enumerate() {
            text += &kernel(row, *shared, number);
        }
        let module = device.load(&text);
        for (number, (row, shared)) in chunk.iter().enumerate() {
            check(&mut device, &module, row, *shared, number);
        }
    }
    device.assert_executed_all(&["atom", "red"]);
}

#[test]
fn concurrent_updates_of_one_word_are_not_lost() {
    let mut device = Device::new();
    let module = device.load(
        &(header()
            + "
        .visible .entry k(.param .u64 out, .param .u64 counters) {
            .reg .b32 %t, %r<4>; .reg .b64 %out, %c, %o; .reg .pred %p;
            .shared .align 4 .b8 sum[4];
            ld.param.u64 %out, [out]; ld.param.u64 %c, [counters];
            mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.s64 %out, %out, %o;
            setp.ne.u32 %p, %t, 0;
            @!%p st.shared.u32 [sum], 0;
            bar.sync 0;
            red.shared.add.u32 [sum], %t;
            atom.global.relaxed.gpu.add.u32 %r0, [%c], 1;
            red.global.inc.u32 [%c+4], 9;
            red.global.max.u32 [%c+8], %t;
            atom.global.exch.b32 %r1, [%c+12], %t;
            atom.acq_rel.sys.global.add.u32 _, [%c+16], 3;
            st.global.u32 [%out], %r0;
            bar.sync 0;
            ld.shared.u32 %r2, [sum];
            @!%p st.global.u32 [%c+20], %r2;
            ret;
        }"),
    );
    let (out, counters) = (device.upload(&[0; 4 * 128]), device.upload(&[0; 24]));
    device.run(&module, "k", 1, 128, Params::default().pointer(out).pointer(counters));
    let words = |address, n: usize| -> Vec<u32> {
        let bytes = device.download(address, 4 * n);
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let mut tickets = words(out, 128);
    tickets.sort_unstable();
    assert_eq!(tickets, (0..128).collect::<Vec<u32>>(), "each thread gets a number of its own");
    let last = words(counters, 6);
    // 128 steps of a counter from 0 to 9.
    assert_eq!([last[0], last[1], last[2], last[4], last[5]], [128, 8, 127, 384, 127 * 64]);
    assert!(last[3] < 128);
}

//! `mma.sync.aligned` in all shapes except Volta's (PTX ISA, "mma").

use super::fragment::{
    gather, gather_c, gather_f64, gather_words, layout_a, layout_b, layout_c, scatter_d, scatter_f64, scatter_words,
};
use super::matrix_spec::{Accumulator, Element, MatrixSpec};
use super::{product, require_whole_warp};
use crate::bytecode::Action;
use crate::exec_context::ExecContext;
use crate::fault::Fault;
use crate::isa::{Category, Row, row};
use crate::numeric::Rounding;
use crate::operands::{Args, Slot};

/// Maximum elements of C and D.
const RESULT: usize = 16 * 8;

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    float_rows(&mut rows);
    integer_rows(&mut rows);
    for k in [4, 8, 16] {
        for m in [8, 16] {
            if m == 8 && k != 4 {
                continue;
            }
            let kind = kind(Element::F64, Element::F64, Accumulator::F64, m, k);
            let name = format!("mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64");
            push(&mut rows, name, kind, Action::Access(work!(doubles)));
            for (option, mode) in ROUNDINGS.iter().enumerate() {
                let name = format!("mma.sync.aligned.m{m}n8k{k}.row.col.{}.f64.f64.f64.f64", mode.0);
                push(&mut rows, name, MatrixSpec { option: option as u32, ..kind }, Action::Access(work!(doubles)));
            }
        }
    }
    rows
}

/// Rounding modes of `.f64`, by [`MatrixSpec::option`].
pub(super) const ROUNDINGS: [(&str, Rounding); 4] =
    [("rn", Rounding::Rn), ("rz", Rounding::Rz), ("rm", Rounding::Rm), ("rp", Rounding::Rp)];

fn kind(a: Element, b: Element, d: Accumulator, m: usize, k: usize) -> MatrixSpec {
    MatrixSpec { a, b, d, c: d, m, n: 8, k, flag: false, option: 0 }
}

fn push(rows: &mut Vec<Row>, name: String, kind: MatrixSpec, action: Action) {
    rows.push(row(name, &kind.operands(), Category::Matrix, kind.pack(), action));
}

fn float_rows(rows: &mut Vec<Row>) {
    use Accumulator::{F16, F32};
    let mut add = |a: Element, b: Element, d: Accumulator, k: usize| {
        let (kind, d) = (kind(a, b, d, 16, k), d.name());
        let name = format!("mma.sync.aligned.m16n8k{k}.row.col.{d}.{}.{}.{d}", a.name(), b.name());
        push(rows, name, kind, Action::Access(work!(floats)));
    };
    for k in [8, 16] {
        add(Element::F16, Element::F16, F16, k);
        add(Element::F16, Element::F16, F32, k);
        add(Element::Bf16, Element::Bf16, F32, k);
        add(Element::Tf32, Element::Tf32, F32, k / 2);
        for a in [Element::E4m3, Element::E5m2] {
            for b in [Element::E4m3, Element::E5m2] {
                add(a, b, F16, 2 * k);
                add(a, b, F32, 2 * k);
            }
        }
    }
}

fn integer_rows(rows: &mut Vec<Row>) {
    for (types, k) in [([Element::S8, Element::U8], 16), ([Element::S4, Element::U4], 32)] {
        for (m, k) in [(8, k), (16, k), (16, 2 * k)] {
            for (a, b) in types.iter().flat_map(|&a| types.iter().map(move |&b| (a, b))) {
                for (saturate, flag) in [("", false), (".satfinite", true)] {
                    let kind = MatrixSpec { flag, ..kind(a, b, Accumulator::S32, m, k) };
                    let types = format!("s32.{}.{}.s32", a.name(), b.name());
                    let name = format!("mma.sync.aligned.m{m}n8k{k}.row.col{saturate}.{types}");
                    push(rows, name, kind, Action::Access(work!(integers)));
                }
            }
        }
    }
    for (m, k) in [(8, 128), (16, 128), (16, 256)] {
        for (op, flag) in [("xor", false), ("and", true)] {
            let kind = MatrixSpec { flag, ..kind(Element::B1, Element::B1, Accumulator::S32, m, k) };
            let name = format!("mma.sync.aligned.m{m}n8k{k}.row.col.s32.b1.b1.s32.{op}.popc");
            push(rows, name, kind, Action::Access(bits));
        }
    }
}

/// Splits the slots into D, A, B and C.
fn split(args: &Args, kind: MatrixSpec) -> [&[Slot]; 4] {
    let mut rest: &[Slot] = &args.all;
    kind.registers().map(|count| {
        let (these, others) = rest.split_at(count.min(rest.len()));
        rest = others;
        these
    })
}

#[inline(always)]
fn floats(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let kind = MatrixSpec::unpack(args.k);
    // Two sizes of buffers: zeroing the larger matrices would take longer than some of the products.
    if kind.k <= 16 { floats_of::<256, 128>(cx, args, mask, kind) } else { floats_of::<512, 256>(cx, args, mask, kind) }
}

#[inline(always)]
fn floats_of<const A: usize, const B: usize>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
    kind: MatrixSpec,
) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right, mut sums) = ([0.0; A], [0.0; B], [0.0; RESULT]);
    gather(cx.regs, a, kind.a, &mut left, |register| layout_a(register, kind.a.packed(), kind.m, kind.k));
    gather(cx.regs, b, kind.b, &mut right, |register| layout_b(register, kind.b.packed()));
    gather_c(cx.regs, c, kind.c, &mut sums, |register| layout_c(register, kind.c.packed()));
    product::floats(&left[..kind.m * kind.k], &right, &mut sums, 8, kind.k);
    scatter_d(cx.regs, d, kind.d, &sums, mask, |register| layout_c(register, kind.d.packed()));
    Ok(())
}

#[inline(always)]
fn integers(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let kind = MatrixSpec::unpack(args.k);
    if kind.k <= 32 {
        integers_of::<512, 256>(cx, args, mask, kind)
    } else {
        integers_of::<1024, 512>(cx, args, mask, kind)
    }
}

#[inline(always)]
fn integers_of<const A: usize, const B: usize>(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
    kind: MatrixSpec,
) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right, mut sums, mut result) = ([0.0; A], [0.0; B], [0.0; RESULT], [0; RESULT]);
    gather(cx.regs, a, kind.a, &mut left, |register| layout_a(register, kind.a.packed(), kind.m, kind.k));
    gather(cx.regs, b, kind.b, &mut right, |register| layout_b(register, kind.b.packed()));
    gather_words(cx.regs, c, &mut result, |register| layout_c(register, 1));
    product::integers(&left[..kind.m * kind.k], &right, &mut sums, 8, kind.k);
    for (result, sum) in result.iter_mut().zip(sums) {
        *result = product::add_s32(*result, sum, kind.flag);
    }
    scatter_words(cx.regs, d, &result, mask, |register| layout_c(register, 1));
    Ok(())
}

fn bits(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    // Bits are multiplied as matrices of words.
    let words = kind.k / 32;
    let (mut left, mut right, mut sums) = ([0; 16 * 8], [0; 8 * 8], [0; RESULT]);
    gather_words(cx.regs, a, &mut left, |register| layout_a(register, 1, kind.m, words));
    gather_words(cx.regs, b, &mut right, |register| layout_b(register, 1));
    gather_words(cx.regs, c, &mut sums, |register| layout_c(register, 1));
    let left = &left[..kind.m * words];
    if kind.flag {
        product::bits(left, &right, &mut sums, 8, words, |x, y| x & y);
    } else {
        product::bits(left, &right, &mut sums, 8, words, |x, y| x ^ y);
    }
    scatter_words(cx.regs, d, &sums, mask, |register| layout_c(register, 1));
    Ok(())
}

#[inline(always)]
fn doubles(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right, mut sums) = ([0.0; 256], [0.0; 128], [0.0; RESULT]);
    gather_f64(cx.regs, a, &mut left, |register| layout_a(register, 1, kind.m, kind.k));
    gather_f64(cx.regs, b, &mut right, |register| layout_b(register, 1));
    gather_f64(cx.regs, c, &mut sums, |register| layout_c(register, 1));
    let round = ROUNDINGS[kind.option as usize].1;
    product::doubles(&left[..kind.m * kind.k], &right, &mut sums[..kind.m * 8], 8, kind.k, round);
    scatter_f64(cx.regs, d, &sums, mask, |register| layout_c(register, 1));
    Ok(())
}

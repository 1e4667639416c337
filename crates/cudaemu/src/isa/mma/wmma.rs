//! `wmma.mma` (PTX ISA, "wmma.mma"). PTX leaves the layout of its fragments open. The emulator stores the rows of A, C and D
//! and the columns of B one after another, see [`layout_linear`].

use super::dense::ROUNDINGS;
use super::fragment::{
    gather, gather_c, gather_f64, gather_words, layout_linear, scatter_d, scatter_f64, scatter_words,
};
use super::matrix_spec::{Accumulator, Element, MatrixSpec};
use super::{product, require_whole_warp};
use crate::bytecode::Action;
use crate::exec_context::ExecContext;
use crate::fault::Fault;
use crate::isa::{Category, Operand, Row, row};
use crate::operands::{Args, Slot};

/// Maximum elements of A or B; `RESULT` is the maximum of C and D.
const FACTOR: usize = 512;
const RESULT: usize = 256;

/// Shapes (m, n, k) for 16-bit and 8-bit elements.
pub(super) const SHAPES: [(usize, usize, usize); 3] = [(16, 16, 16), (32, 8, 16), (8, 32, 16)];

/// Registers per lane of A or B. A `.f16` fragment has eight in every shape; superfluous registers repeat the others.
pub(super) fn factor_registers(element: Element, elements: usize) -> usize {
    if element == Element::F16 { 8 } else { elements / 32 / element.packed() }
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for layouts in LAYOUTS {
        for (m, n, k) in SHAPES {
            let kind = |a: Element, d: Accumulator, c: Accumulator| MatrixSpec {
                a,
                b: a,
                d,
                c,
                m,
                n,
                k,
                flag: false,
                option: 0,
            };
            let start = format!("wmma.mma.sync.aligned.{layouts}.m{m}n{n}k{k}");
            for d in [Accumulator::F16, Accumulator::F32] {
                for c in [Accumulator::F16, Accumulator::F32] {
                    let name = format!("{start}.{}.{}", d.name(), c.name());
                    push(&mut rows, name, kind(Element::F16, d, c), Action::Access(work!(floats)));
                }
            }
            let f32 = Accumulator::F32;
            let name = format!("{start}.f32.bf16.bf16.f32");
            push(&mut rows, name, kind(Element::Bf16, f32, f32), Action::Access(work!(floats)));
            for element in [Element::S8, Element::U8] {
                integer_rows(&mut rows, &start, kind(element, Accumulator::S32, Accumulator::S32));
            }
        }
        let start = format!("wmma.mma.sync.aligned.{layouts}");
        let kind = |element: Element, d: Accumulator, m: usize, n: usize, k: usize| MatrixSpec {
            a: element,
            b: element,
            d,
            c: d,
            m,
            n,
            k,
            flag: false,
            option: 0,
        };
        let tf32 = kind(Element::Tf32, Accumulator::F32, 16, 16, 8);
        push(&mut rows, format!("{start}.m16n16k8.f32.tf32.tf32.f32"), tf32, Action::Access(work!(floats)));
        let f64 = kind(Element::F64, Accumulator::F64, 8, 8, 4);
        let double = format!("{start}.m8n8k4");
        push(&mut rows, format!("{double}.f64.f64.f64.f64"), f64, Action::Access(work!(doubles)));
        for (option, (mode, _)) in ROUNDINGS.iter().enumerate() {
            let kind = MatrixSpec { option: option as u32, ..f64 };
            // The manual writes the mode before the types, CUDA's compiler writes it after them.
            push(&mut rows, format!("{double}.{mode}.f64.f64.f64.f64"), kind, Action::Access(work!(doubles)));
            push(&mut rows, format!("{double}.f64.f64.f64.f64.{mode}"), kind, Action::Access(work!(doubles)));
        }
    }
    for element in [Element::S4, Element::U4] {
        let s32 = Accumulator::S32;
        let kind = MatrixSpec { a: element, b: element, d: s32, c: s32, m: 8, n: 8, k: 32, flag: false, option: 0 };
        integer_rows(&mut rows, "wmma.mma.sync.aligned.row.col.m8n8k32", kind);
    }
    for (op, flag) in [("xor", false), ("and", true)] {
        let (b1, s32) = (Element::B1, Accumulator::S32);
        let kind = MatrixSpec { a: b1, b: b1, d: s32, c: s32, m: 8, n: 8, k: 128, flag, option: 0 };
        let name = format!("wmma.mma.{op}.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32");
        push(&mut rows, name, kind, Action::Access(bits));
    }
    rows
}

/// Layouts in which A and B were loaded. Their fragments are the same, so only the opcode differs.
const LAYOUTS: [&str; 4] = ["row.row", "row.col", "col.row", "col.col"];

fn integer_rows(rows: &mut Vec<Row>, start: &str, kind: MatrixSpec) {
    for (saturate, flag) in [("", false), (".satfinite", true)] {
        let name = format!("{start}.s32.{0}.{0}.s32{saturate}", kind.a.name());
        push(rows, name, MatrixSpec { flag, ..kind }, Action::Access(work!(integers)));
    }
}

/// Number of registers of D, A, B and C.
fn registers(kind: MatrixSpec) -> [usize; 4] {
    [
        kind.m * kind.n / 32 / kind.d.packed(),
        factor_registers(kind.a, kind.m * kind.k),
        factor_registers(kind.b, kind.k * kind.n),
        kind.m * kind.n / 32 / kind.c.packed(),
    ]
}

fn push(rows: &mut Vec<Row>, name: String, kind: MatrixSpec, action: Action) {
    let [d, a, b, c] = registers(kind).map(|count| count as u8);
    let operands = [
        Operand::OutVector(d, kind.d.value()),
        Operand::InVector(a, kind.a.value()),
        Operand::InVector(b, kind.b.value()),
        Operand::InVector(c, kind.c.value()),
    ];
    rows.push(row(name, &operands, Category::Matrix, kind.pack(), action));
}

/// Splits the slots into D, A, B and C, without the superfluous registers of A and B.
fn split(args: &Args, kind: MatrixSpec) -> [&[Slot]; 4] {
    let mut rest: &[Slot] = &args.all;
    let [d, a, b, c] = registers(kind).map(|count| {
        let (these, others) = rest.split_at(count.min(rest.len()));
        rest = others;
        these
    });
    let needed = |elements: usize, element: Element| elements / 32 / element.packed();
    let first = |slots: &'_ [Slot], count: usize| count.min(slots.len());
    let (a_count, b_count) = (first(a, needed(kind.m * kind.k, kind.a)), first(b, needed(kind.k * kind.n, kind.b)));
    [d, &a[..a_count], &b[..b_count], c]
}

/// Transposes B from its columns to rows of k × n.
#[inline(always)]
fn rows_of<T: Copy + Default, const N: usize>(columns: &[T; N], n: usize, k: usize) -> [T; N] {
    let mut rows = [T::default(); N];
    for column in 0..n {
        for step in 0..k {
            rows[step * n + column] = columns[column * k + step];
        }
    }
    rows
}

#[inline(always)]
fn floats(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right, mut sums) = ([0.0; FACTOR], [0.0; FACTOR], [0.0; RESULT]);
    let factor = |register| layout_linear(register, kind.a.packed());
    gather(cx.regs, a, kind.a, &mut left, factor);
    gather(cx.regs, b, kind.b, &mut right, factor);
    gather_c(cx.regs, c, kind.c, &mut sums, |register| layout_linear(register, kind.c.packed()));
    let right = rows_of(&right, kind.n, kind.k);
    product::floats(&left[..kind.m * kind.k], &right, &mut sums, kind.n, kind.k);
    scatter_d(cx.regs, d, kind.d, &sums, mask, |register| layout_linear(register, kind.d.packed()));
    Ok(())
}

#[inline(always)]
fn integers(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right) = ([0.0; FACTOR], [0.0; FACTOR]);
    let (mut sums, mut result) = ([0.0; RESULT], [0; RESULT]);
    let factor = |register| layout_linear(register, kind.a.packed());
    gather(cx.regs, a, kind.a, &mut left, factor);
    gather(cx.regs, b, kind.b, &mut right, factor);
    gather_words(cx.regs, c, &mut result, |register| layout_linear(register, 1));
    let right = rows_of(&right, kind.n, kind.k);
    product::integers(&left[..kind.m * kind.k], &right, &mut sums, kind.n, kind.k);
    for (result, sum) in result.iter_mut().zip(sums) {
        *result = product::add_s32(*result, sum, kind.flag);
    }
    scatter_words(cx.regs, d, &result, mask, |register| layout_linear(register, 1));
    Ok(())
}

fn bits(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    let words = kind.k / 32;
    let (mut left, mut right, mut sums) = ([0; 32], [0; 32], [0; 64]);
    let place = |register| layout_linear(register, 1);
    gather_words(cx.regs, a, &mut left, place);
    gather_words(cx.regs, b, &mut right, place);
    gather_words(cx.regs, c, &mut sums, place);
    let right = rows_of(&right, kind.n, words);
    if kind.flag {
        product::bits(&left, &right, &mut sums, kind.n, words, |x, y| x & y);
    } else {
        product::bits(&left, &right, &mut sums, kind.n, words, |x, y| x ^ y);
    }
    scatter_words(cx.regs, d, &sums, mask, place);
    Ok(())
}

#[inline(always)]
fn doubles(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, kind);
    let (mut left, mut right, mut sums) = ([0.0; 32], [0.0; 32], [0.0; 64]);
    let place = |register| layout_linear(register, 1);
    gather_f64(cx.regs, a, &mut left, place);
    gather_f64(cx.regs, b, &mut right, place);
    gather_f64(cx.regs, c, &mut sums, place);
    let right = rows_of(&right, kind.n, kind.k);
    product::doubles(&left, &right, &mut sums, kind.n, kind.k, ROUNDINGS[kind.option as usize].1);
    scatter_f64(cx.regs, d, &sums, mask, place);
    Ok(())
}

//! `mma.sync.aligned` (PTX ISA, "mma").

use super::fragment::{gather, gather_c, gather_words, layout_a, layout_b, layout_c, scatter_d, scatter_words};
use super::matrix_spec::{Accumulator, Element, M, MatrixSpec, N};
use super::{product, require_whole_warp};
use crate::bytecode::Action;
use crate::exec_context::ExecContext;
use crate::fault::Fault;
use crate::isa::{Category, Row, row};
use crate::operands::{Args, Slot};

/// Elements of C and D.
const RESULT: usize = M * N;

pub(super) fn rows() -> Vec<Row> {
    use Accumulator::{F16, F32, S32};
    let mut rows = Vec::new();
    let mut add = |a: Element, b: Element, d: Accumulator, k: usize, action: Action| {
        let spec = MatrixSpec { a, b, d, k };
        let name = format!("mma.sync.aligned.m16n8k{k}.row.col.{0}.{1}.{2}.{0}", d.name(), a.name(), b.name());
        rows.push(row(name, &spec.operands(), Category::Matrix, spec.pack(), action));
    };
    for k in [8, 16] {
        add(Element::F16, Element::F16, F16, k, Action::Access(work!(floats)));
        add(Element::F16, Element::F16, F32, k, Action::Access(work!(floats)));
        add(Element::Bf16, Element::Bf16, F32, k, Action::Access(work!(floats)));
        add(Element::Tf32, Element::Tf32, F32, k / 2, Action::Access(work!(floats)));
        for a in [Element::S8, Element::U8] {
            for b in [Element::S8, Element::U8] {
                add(a, b, S32, 2 * k, Action::Access(work!(integers)));
            }
        }
    }
    rows
}

/// Splits the slots into D, A, B and C.
fn split(args: &Args, spec: MatrixSpec) -> [&[Slot]; 4] {
    let mut rest: &[Slot] = &args.all;
    spec.registers().map(|count| {
        let (these, others) = rest.split_at(count.min(rest.len()));
        rest = others;
        these
    })
}

#[inline(always)]
fn floats(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let spec = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, spec);
    let (mut left, mut right, mut sums) = ([0.0; 16 * M], [0.0; 16 * N], [0.0; RESULT]);
    gather(cx.regs, a, spec.a, &mut left, |register| layout_a(register, spec.a.packed(), spec.k));
    gather(cx.regs, b, spec.b, &mut right, |register| layout_b(register, spec.b.packed()));
    gather_c(cx.regs, c, spec.d, &mut sums, |register| layout_c(register, spec.d.packed()));
    product::floats(&left, &right, &mut sums, spec.k, spec.a, spec.d);
    scatter_d(cx.regs, d, spec.d, &sums, mask, |register| layout_c(register, spec.d.packed()));
    Ok(())
}

#[inline(always)]
fn integers(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let spec = MatrixSpec::unpack(args.k);
    let [d, a, b, c] = split(args, spec);
    let (mut left, mut right, mut sums, mut result) = ([0.0; 32 * M], [0.0; 32 * N], [0.0; RESULT], [0; RESULT]);
    gather(cx.regs, a, spec.a, &mut left, |register| layout_a(register, spec.a.packed(), spec.k));
    gather(cx.regs, b, spec.b, &mut right, |register| layout_b(register, spec.b.packed()));
    gather_words(cx.regs, c, &mut result, |register| layout_c(register, 1));
    product::integers(&left[..M * spec.k], &right, &mut sums, spec.k);
    for (result, sum) in result.iter_mut().zip(sums) {
        *result = result.wrapping_add(sum as i32 as u32);
    }
    scatter_words(cx.regs, d, &result, mask, |register| layout_c(register, 1));
    Ok(())
}

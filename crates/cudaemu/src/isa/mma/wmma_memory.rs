//! `wmma.load` and `wmma.store` (PTX ISA, "wmma.load", "wmma.store"): moves between memory and the fragments of
//! [`super::wmma`].

use super::matrix_spec::{Accumulator, Element, MatrixSpec};
use super::require_whole_warp;
use super::wmma::{SHAPES, factor_registers};
use crate::bytecode::Action;
use crate::exec_context::{Addresses, ExecContext, Lanes, StateSpace};
use crate::fault::Fault;
use crate::isa::{Category, Operand, Row, Value, lanes, row};
use crate::operands::{Args, Slot};

/// State spaces, by [`MatrixSpec::option`]; the last two names are synonyms.
const SPACES: [(&str, StateSpace, u32); 4] = [
    ("", StateSpace::Generic, 0),
    (".global", StateSpace::Global, 1),
    (".shared", StateSpace::Shared, 2),
    (".shared::cta", StateSpace::Shared, 2),
];

/// A matrix as its fragment stores it: lines (rows of A, C and D, columns of B) one after another.
#[derive(Clone, Copy, Debug)]
struct Lines {
    /// Elements per line.
    length: usize,
    /// Number of lines.
    count: usize,
    /// Bits per element.
    bits: usize,
    /// Whether memory stores the lines one after another too, a stride apart; otherwise it stores the matrix transposed.
    contiguous: bool,
    /// Registers per lane of the fragment.
    registers: usize,
}

/// Selects one of the matrices of a [`MatrixSpec`].
type MatrixSelector = fn(MatrixSpec) -> Lines;

fn lines_of_a(kind: MatrixSpec) -> Lines {
    let registers = factor_registers(kind.a, kind.m * kind.k);
    Lines { length: kind.k, count: kind.m, bits: kind.a.bits(), contiguous: !kind.flag, registers }
}

fn lines_of_b(kind: MatrixSpec) -> Lines {
    let registers = factor_registers(kind.b, kind.k * kind.n);
    Lines { length: kind.k, count: kind.n, bits: kind.b.bits(), contiguous: kind.flag, registers }
}

fn lines_of_c(kind: MatrixSpec) -> Lines {
    let (bits, registers) = match kind.c {
        Accumulator::F16 => (16, kind.m * kind.n / 64),
        Accumulator::F64 => (64, kind.m * kind.n / 32),
        _ => (32, kind.m * kind.n / 32),
    };
    Lines { length: kind.n, count: kind.m, bits, contiguous: !kind.flag, registers }
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (m, n, k) in SHAPES {
        let kind = |element: Element, c: Accumulator| MatrixSpec {
            a: element,
            b: element,
            d: c,
            c,
            m,
            n,
            k,
            flag: false,
            option: 0,
        };
        for element in [Element::F16, Element::Bf16, Element::S8, Element::U8] {
            factors(&mut rows, kind(element, Accumulator::F32), &["row", "col"], &["row", "col"]);
        }
        for c in [Accumulator::F16, Accumulator::F32, Accumulator::S32] {
            results(&mut rows, kind(Element::F16, c));
        }
    }
    let (row, col, both) = (["row"], ["col"], ["row", "col"]);
    for (element, c, (m, n, k), a_layouts, b_layouts) in [
        (Element::Tf32, Accumulator::F32, (16, 16, 8), &both[..], &both[..]),
        (Element::F64, Accumulator::F64, (8, 8, 4), &both, &both),
        (Element::S4, Accumulator::S32, (8, 8, 32), &row, &col),
        (Element::U4, Accumulator::S32, (8, 8, 32), &row, &col),
        (Element::B1, Accumulator::S32, (8, 8, 128), &row, &col),
    ] {
        let kind = MatrixSpec { a: element, b: element, d: c, c, m, n, k, flag: false, option: 0 };
        factors(&mut rows, kind, a_layouts, b_layouts);
        if element != Element::U4 {
            results(&mut rows, kind);
        }
    }
    rows
}

fn factors(rows: &mut Vec<Row>, kind: MatrixSpec, a_layouts: &[&str], b_layouts: &[&str]) {
    for layout in a_layouts {
        push(rows, "load.a", layout, kind.a.name(), kind.a.value(), kind, lines_of_a, Action::Access(load_a));
    }
    for layout in b_layouts {
        push(rows, "load.b", layout, kind.b.name(), kind.b.value(), kind, lines_of_b, Action::Access(load_b));
    }
}

fn results(rows: &mut Vec<Row>, kind: MatrixSpec) {
    for layout in ["row", "col"] {
        push(rows, "load.c", layout, kind.c.name(), kind.c.value(), kind, lines_of_c, Action::Access(load_c));
        push(rows, "store.d", layout, kind.c.name(), kind.c.value(), kind, lines_of_c, Action::Access(store_d));
    }
}

fn push(
    rows: &mut Vec<Row>,
    op: &str,
    layout: &str,
    ty: &str,
    value: Value,
    kind: MatrixSpec,
    which: MatrixSelector,
    action: Action,
) {
    let MatrixSpec { m, n, k, .. } = kind;
    for (space, _, option) in SPACES {
        let kind = MatrixSpec { flag: layout == "col", option, ..kind };
        let registers = which(kind).registers as u8;
        let name = format!("wmma.{op}.sync.aligned.{layout}.m{m}n{n}k{k}{space}.{ty}");
        let (address, stride) = (Operand::Address, Operand::OptIn(Value::B32));
        let operands = match op {
            "store.d" => [address, Operand::InVector(registers, value), stride],
            _ => [Operand::OutVector(registers, value), address, stride],
        };
        rows.push(row(name, &operands, Category::Matrix, kind.pack(), action.clone()));
    }
}

/// Splits the slots into the fragment and the stride.
fn split(args: &Args, registers: usize) -> (&[Slot], Slot) {
    let slots = if args.all.is_empty() { &args.s } else { &*args.all };
    (&slots[..registers], slots.get(registers).copied().unwrap_or_default())
}

/// Per-lane addresses of elements, given by their linear index; the stride is in elements.
struct MatrixAddresses {
    lines: Lines,
    base: Addresses,
    stride: Lanes<u64>,
}

impl MatrixAddresses {
    fn new(cx: &ExecContext<'_>, args: &Args, lines: Lines, stride: Slot) -> Self {
        let least = if lines.contiguous { lines.length } else { lines.count } as u64;
        let stride = if stride.is_none() { [least; 32] } else { cx.regs.get::<u32>(stride).map(u64::from) };
        Self { lines, base: cx.addresses(args), stride }
    }

    fn addresses(&self, element: impl Fn(usize) -> usize) -> Addresses {
        lanes(|lane| {
            let (line, at) = (element(lane) / self.lines.length, element(lane) % self.lines.length);
            let (outer, inner) = if self.lines.contiguous { (line, at) } else { (at, line) };
            let index = (outer as u64).wrapping_mul(self.stride[lane]).wrapping_add(inner as u64);
            self.base[lane].wrapping_add(index.wrapping_mul(self.lines.bits as u64) / 8)
        })
    }

    /// Elements per access: all of a register's if they are adjacent in memory, otherwise one.
    fn elements_per_access(&self) -> usize {
        if self.lines.contiguous { (32 / self.lines.bits).max(1) } else { 1 }
    }
}

fn load_a(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    load(cx, args, mask, lines_of_a)
}

fn load_b(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    load(cx, args, mask, lines_of_b)
}

fn load_c(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    load(cx, args, mask, lines_of_c)
}

fn load(cx: &mut ExecContext<'_>, args: &Args, mask: u32, which: MatrixSelector) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let lines = which(kind);
    let (slots, stride) = split(args, lines.registers);
    let place = MatrixAddresses::new(cx, args, lines, stride);
    let window = SPACES[kind.option as usize].1;
    let packed = (32 / lines.bits).max(1);
    let needed = lines.length * lines.count / 32 / packed;
    for (register, &slot) in slots.iter().enumerate() {
        let first = |lane: usize| (register % needed * 32 + lane) * packed;
        if lines.bits == 64 {
            let bytes = cx.load::<8>(window, &place.addresses(first), mask)?;
            cx.regs.set(slot, &bytes.map(u64::from_le_bytes), mask);
            continue;
        }
        let mut words = [0u32; 32];
        for at in (0..packed).step_by(place.elements_per_access()) {
            let addresses = place.addresses(|lane| first(lane) + at);
            let part: Lanes<u32> = match place.elements_per_access() * lines.bits {
                8 => cx.load::<1>(window, &addresses, mask)?.map(|byte| u32::from(byte[0])),
                16 => cx.load::<2>(window, &addresses, mask)?.map(|bytes| u32::from(u16::from_le_bytes(bytes))),
                _ => cx.load::<4>(window, &addresses, mask)?.map(u32::from_le_bytes),
            };
            for lane in 0..32 {
                words[lane] |= part[lane] << (at * lines.bits);
            }
        }
        cx.regs.set(slot, &words, mask);
    }
    Ok(())
}

fn store_d(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    require_whole_warp(cx, mask)?;
    let kind = MatrixSpec::unpack(args.k);
    let lines = lines_of_c(kind);
    let (slots, stride) = split(args, lines.registers);
    let place = MatrixAddresses::new(cx, args, lines, stride);
    let window = SPACES[kind.option as usize].1;
    let packed = (32 / lines.bits).max(1);
    for (register, &slot) in slots.iter().enumerate() {
        let first = |lane: usize| (register * 32 + lane) * packed;
        if lines.bits == 64 {
            let values = cx.regs.get::<u64>(slot).map(u64::to_le_bytes);
            cx.store(window, &place.addresses(first), &values, mask)?;
            continue;
        }
        let words = cx.regs.get::<u32>(slot);
        for at in (0..packed).step_by(place.elements_per_access()) {
            let addresses = place.addresses(|lane| first(lane) + at);
            if place.elements_per_access() * lines.bits == 16 {
                let values = words.map(|word| ((word >> (at * lines.bits)) as u16).to_le_bytes());
                cx.store(window, &addresses, &values, mask)?;
            } else {
                cx.store(window, &addresses, &words.map(u32::to_le_bytes), mask)?;
            }
        }
    }
    Ok(())
}

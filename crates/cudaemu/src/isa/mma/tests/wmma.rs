//! `wmma` round trip: load matrices from memory, multiply, store; the result must be the product of the matrices in memory.

use super::super::family;
use super::super::matrix_spec::{Element, MatrixSpec};
use super::shapes::{accumulator_bits, random_accumulator, rounded_bits};
use super::{Spec, accumulator_value, element_value, parse_spec, random_element};
use crate::bytecode::Action;
use crate::exec_context::fixture::Fixture;
use crate::exec_context::{Registers, StateSpace, window};
use crate::isa::{Decode, Operand, Row, Value};
use crate::operands::{Args, Base, RegisterCounts, Slot};

/// First register of D, A, B and C, in the classes B32 and B64. [`STRIDE`] is the B32 register with the stride.
const FRAGMENTS: [usize; 4] = [0, 8, 16, 24];
const STRIDE: usize = 32;

/// A matrix in memory, with its layout.
struct MatrixMemory {
    rows: usize,
    columns: usize,
    bits: usize,
    by_rows: bool,
    stride: usize,
}

impl MatrixMemory {
    fn index(&self, row: usize, column: usize) -> usize {
        if self.by_rows { row * self.stride + column } else { column * self.stride + row }
    }

    fn bytes(&self, elements: impl Fn(usize, usize) -> u64) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        for (row, column) in self.places() {
            let (at, value) = (self.index(row, column) * self.bits, elements(row, column));
            let count = self.bits.div_ceil(8);
            for (byte, part) in bytes[at / 8..].iter_mut().zip(&value.to_le_bytes()[..count]) {
                *byte |= part << (at % 8);
            }
        }
        bytes
    }

    fn element(&self, bytes: &[u8], row: usize, column: usize) -> u64 {
        let (at, count) = (self.index(row, column) * self.bits / 8, self.bits / 8);
        bytes[at..at + count].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let columns = self.columns;
        (0..self.rows * columns).map(move |at| (at / columns, at % columns))
    }
}

/// A warp with shared and global memory that runs rows by name.
struct WarpFixture<'a> {
    rows: &'a [Row],
    fixture: Fixture,
    /// Start of global memory.
    global: u64,
    /// Names of the rows that were run.
    seen: &'a mut Vec<String>,
}

fn slot(value: Value, index: usize) -> Slot {
    Slot::new(value.class(), index).unwrap_or_default()
}

impl WarpFixture<'_> {
    /// Runs a row with the given fragments as vectors, in order, and the address `at`.
    fn run(&mut self, name: &str, fragments: &[usize], at: u64, strided: bool) {
        let row = self.rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row is called {name}"));
        self.seen.push(name.to_string());
        let mut flat = Vec::new();
        let mut next = fragments.iter();
        for operand in &row.operands {
            match *operand {
                Operand::OutVector(count, value) | Operand::InVector(count, value) => {
                    let first = next.next().unwrap_or(&0);
                    flat.extend((0..usize::from(count)).map(|index| slot(value, first + index)));
                }
                Operand::OptIn(value) => flat.push(if strided { slot(value, STRIDE) } else { Slot::NONE }),
                _ => {}
            }
        }
        let mut args = Args { k: row.k, base: Base::None, offset: at as i64, ..Args::default() };
        for (place, &slot) in args.s.iter_mut().zip(&flat) {
            *place = slot;
        }
        if flat.len() > args.s.len() {
            args.all = flat.into();
        }
        let Decode::Plain(Action::Access(access)) = row.decode else { unreachable!() };
        access(&mut self.fixture.context(0, 1), &args, u32::MAX)
            .unwrap_or_else(|fault| panic!("{name}: {}", fault.kind));
    }

    /// With `bytes`: writes them to memory and loads the fragment from there. Without: stores the fragment and returns the
    /// memory's bytes.
    fn transfer(
        &mut self,
        name: &str,
        fragment: usize,
        memory: &MatrixMemory,
        space: &str,
        bytes: Option<&[u8]>,
    ) -> Vec<u8> {
        // Offsets in global memory count from the allocation's start, in shared memory from 0.
        let global = self.global;
        let (window, start, at) = match space {
            ".global" => (StateSpace::Global, global, global),
            "" => (StateSpace::Shared, 0, window::SHARED),
            _ => (StateSpace::Shared, 0, 0),
        };
        let least = if memory.by_rows { memory.columns } else { memory.rows };
        self.fixture.regs.set(slot(Value::B32, STRIDE), &[memory.stride as u32; 32], u32::MAX);
        let pieces = |lane: usize, part: usize| start + (part * 32 + lane) as u64 * 16;
        self.fixture.shared.warp_sync(0, u32::MAX, u32::MAX);
        if let Some(bytes) = bytes {
            for part in 0..8 {
                let at = std::array::from_fn(|lane| pieces(lane, part));
                let values =
                    std::array::from_fn(|lane| std::array::from_fn(|byte| bytes[(part * 32 + lane) * 16 + byte]));
                self.fixture.context(0, 1).store::<16>(window, &at, &values, u32::MAX).unwrap();
            }
            self.fixture.shared.warp_sync(0, u32::MAX, u32::MAX);
        }
        self.run(name, &[fragment], at, memory.stride != least);
        self.fixture.shared.warp_sync(0, u32::MAX, u32::MAX);
        let mut out = vec![0; 4096];
        if bytes.is_none() {
            for (row, column) in memory.places() {
                let place = memory.index(row, column) * memory.bits / 8;
                let at = [start + place as u64; 32];
                let mut cx = self.fixture.context(0, 1);
                let count = memory.bits / 8;
                let value = match count {
                    2 => u64::from(u16::from_le_bytes(cx.load::<2>(window, &at, 1).unwrap()[0])),
                    4 => u64::from(u32::from_le_bytes(cx.load::<4>(window, &at, 1).unwrap()[0])),
                    _ => u64::from_le_bytes(cx.load::<8>(window, &at, 1).unwrap()[0]),
                };
                out[place..place + count].copy_from_slice(&value.to_le_bytes()[..count]);
            }
        }
        out
    }
}

#[test]
fn load_multiply_and_store_give_the_product_in_memory() {
    let all = family().rows;
    let rows: Vec<Row> = all.into_iter().filter(|row| row.name.starts_with("wmma")).collect();
    let mut seen = Vec::new();
    let mut random = fastrand::Rng::with_seed(5);
    for (turn, row) in rows.iter().filter(|row| row.name.starts_with("wmma.mma")).enumerate() {
        for space in [".global", "", ".shared", ".shared::cta"] {
            for layouts in [("row", "col"), ("col", "row")] {
                check_product(&rows, &mut seen, &mut random, row, space, layouts, turn % 3 != 0);
            }
        }
    }
    let missing: Vec<&str> = rows.iter().map(|row| &*row.name).filter(|name| !seen.iter().any(|s| s == name)).collect();
    assert!(missing.is_empty(), "{} rows without a test: {missing:?}", missing.len());
}

/// Checks one row of `wmma.mma`: loads A, B and C from memory, multiplies, stores D, and compares it with the exact product. C
/// and D have the given layouts in memory; `padded` adds 16 bytes between the lines.
fn check_product(
    rows: &[Row],
    seen: &mut Vec<String>,
    random: &mut fastrand::Rng,
    row: &Row,
    space: &str,
    (c_layout, d_layout): (&str, &str),
    padded: bool,
) {
    let name = &*row.name;
    let Spec { shape, a, b, d, c } = parse_spec(name);
    let kind = MatrixSpec::unpack(row.k);
    assert_eq!((kind.m, kind.n, kind.k, kind.a, kind.d, kind.c), (shape.m, shape.n, shape.k, a, d, c), "{name}");
    let layouts: Vec<&str> = name.split('.').filter(|&part| part == "row" || part == "col").collect();
    let memory = |rows: usize, columns: usize, bits: usize, layout: &str, padded: bool| {
        let by_rows = layout == "row";
        let least = if by_rows { columns } else { rows };
        // A stride is a multiple of 16 bytes.
        let stride = if padded { least + 128 / bits } else { least };
        MatrixMemory { rows, columns, bits, by_rows, stride }
    };
    let a_memory = memory(shape.m, shape.k, a.bits(), layouts[0], padded);
    let b_memory = memory(shape.k, shape.n, b.bits(), layouts[1], padded);
    let c_memory = memory(shape.m, shape.n, accumulator_bits(c), c_layout, padded);
    let d_memory = memory(shape.m, shape.n, accumulator_bits(d), d_layout, padded);
    let mut matrix = |memory: &MatrixMemory, bits: &mut dyn FnMut(&mut fastrand::Rng) -> u64| -> Vec<u64> {
        memory.places().map(|_| bits(random)).collect()
    };
    let a_bits = matrix(&a_memory, &mut |random| random_element(random, a));
    let b_bits = matrix(&b_memory, &mut |random| random_element(random, b));
    let c_bits = matrix(&c_memory, &mut |random| random_accumulator(random, c));

    let counts = RegisterCounts { b32: STRIDE + 1, b64: STRIDE, ..RegisterCounts::default() };
    let (mut fixture, global) = Fixture::new(4096, 1, |space| space.alloc(0, 8192, "test").expect("memory").base());
    fixture.regs = Registers::new(&counts);
    let mut warp = WarpFixture { rows, fixture, global, seen };
    let extents = format!("m{}n{}k{}", shape.m, shape.n, shape.k);
    let load =
        |which: &str, layout: &str, ty: &str| format!("wmma.load.{which}.sync.aligned.{layout}.{extents}{space}.{ty}");
    for (at, memory, name, bits) in [
        (1, &a_memory, load("a", layouts[0], a.name()), &a_bits),
        (2, &b_memory, load("b", layouts[1], b.name()), &b_bits),
        (3, &c_memory, load("c", c_layout, c.name()), &c_bits),
    ] {
        let bytes = memory.bytes(|row, column| bits[row * memory.columns + column]);
        warp.transfer(&name, FRAGMENTS[at], memory, space, Some(&bytes));
    }
    warp.run(name, &FRAGMENTS, 0, false);
    let store = format!("wmma.store.d.sync.aligned.{d_layout}.{extents}{space}.{}", d.name());
    let bytes = warp.transfer(&store, FRAGMENTS[0], &d_memory, space, None);

    for (row, column) in d_memory.places() {
        let products = (0..shape.k).map(|k| {
            let (x, y) = (element_value(a, a_bits[row * shape.k + k]), element_value(b, b_bits[k * shape.n + column]));
            match a {
                Element::B1 if name.contains(".and.") => f64::from(x == 1.0 && y == 1.0),
                Element::B1 => f64::from(x != y),
                _ => x * y,
            }
        });
        let sum = accumulator_value(c, c_bits[row * shape.n + column]) + products.sum::<f64>();
        let expected = rounded_bits(d, sum, name.contains("satfinite"));
        let got = d_memory.element(&bytes, row, column);
        assert_eq!(got, expected, "{name}{space}: element ({row}, {column}) of {}", d.name());
    }
}

//! Test harness: runs rows of the instruction table on known values, without PTX text or an executor.
//!
//! ```ignore
//! let mut table = Harness::new(family());
//! table.check("add.s32", &[(&[1, 2], &[3]), (&[-1, 1], &[0])]);
//! table.finish(); // every row was checked
//! ```
//!
//! Values are bits: an operand takes the low bits of an `i128`, so `-1` and `0xffff_ffff` are the same 32-bit value. Inputs are
//! flattened in the order of the text, immediates and addresses included; outputs likewise.
//!
//! Inputs are assigned to the lanes in order, 32 at a time. For an instruction of a whole warp, each input is the value of one
//! lane.

use std::collections::HashSet;

use super::{Decode, Family, Operand, Row, Value, moves};
use crate::bytecode::Action;
use crate::exec_context::fixture::Fixture;
use crate::exec_context::{LANES, Lanes, Registers};
use crate::operands::{Args, Base, Class, RegisterCounts, Slot};

/// Marks an optional source that is absent.
pub(crate) const ABSENT: i128 = i128::MIN;

/// Inputs and expected outputs.
pub(crate) type Case<'a> = (&'a [i128], &'a [i128]);

/// Active lanes in the masked variant.
const MASK: u32 = 0x9c35_5a6e;

/// An instruction family under test.
pub(crate) struct Harness {
    rows: Vec<Row>,
    /// Names of the rows that were run.
    tested: HashSet<String>,
    /// Class of the registers for [`Operand::OutWide`] and [`Operand::InWide`] (and their vectors); `None`: the value's own
    /// class.
    pub(crate) wide: Option<Class>,
}

/// Variants of a run. All must give the same results, except [`Variant::Discarded`], which has none.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Variant {
    /// No variation.
    Plain,
    /// Some lanes are masked off: they hold garbage, and their destinations must stay unchanged.
    Masked,
    /// Destinations are the registers of sources if the classes allow it.
    InPlace,
    /// Predicates are read negated (and hold the opposite value).
    Negated,
    /// Every destination is `_`: the row must not panic and must not write any other register.
    Discarded,
}

/// An input or output after flattening: vectors, pairs and addresses of the text become one entry per register or immediate.
#[derive(Clone, Copy, PartialEq)]
enum FlatOperand {
    Out(Class),
    In(Class),
    InPred,
    Imm,
    Address,
}

impl Harness {
    pub(crate) fn new(family: Family) -> Self {
        let mut names = HashSet::new();
        for row in &family.rows {
            assert!(names.insert(row.name.clone()), "two rows are called {}", row.name);
        }
        Self { rows: family.rows, tested: HashSet::new(), wide: None }
    }

    /// Runs a row on the inputs of all cases and compares its outputs bit by bit.
    #[track_caller]
    pub(crate) fn check(&mut self, name: &str, cases: &[Case<'_>]) {
        let inputs: Vec<Vec<i128>> = cases.iter().map(|case| case.0.to_vec()).collect();
        let outputs = self.run(name, &inputs);
        let classes = self.output_classes(name);
        for (case, got) in cases.iter().zip(outputs) {
            assert_eq!(case.1.len(), got.len(), "{name}: number of outputs");
            let want: Vec<u128> = case.1.iter().zip(&classes).map(|(&v, &class)| truncate(v as u128, class)).collect();
            assert_eq!(want, got, "{name} of {:x?}: expected {want:x?}, got {got:x?}", case.0);
        }
    }

    /// Runs each input in its own lane and returns its outputs, zero-extended. Fails if a variant other than
    /// [`Variant::Discarded`] gives another result.
    #[track_caller]
    pub(crate) fn run(&mut self, name: &str, inputs: &[Vec<i128>]) -> Vec<Vec<u128>> {
        self.tested.insert(name.to_string());
        let row = self.find_row(name).clone();
        let pieces = self.flatten_operands(&row);
        let mut outputs = vec![Vec::new(); inputs.len()];
        let mut remaining: Vec<usize> = (0..inputs.len()).collect();
        while let Some(&first) = remaining.first() {
            // Cases with the same immediates and absent operands share a run: these are part of the instruction and so equal
            // for all lanes.
            let fixed = |case: usize| instruction_constants(&pieces, &inputs[case]);
            let group: Vec<usize> =
                remaining.iter().copied().filter(|&case| fixed(case) == fixed(first)).take(LANES).collect();
            remaining.retain(|case| !group.contains(case));
            let lanes: [&[i128]; LANES] = std::array::from_fn(|lane| &*inputs[group[lane % group.len()]]);
            let plain = execute_variant(&row, &pieces, lanes, Variant::Plain);
            for variant in [Variant::Masked, Variant::InPlace, Variant::Negated, Variant::Discarded] {
                if variant == Variant::Masked && name.contains(".sync.aligned") {
                    continue; // the instruction needs the whole warp
                }
                let other = execute_variant(&row, &pieces, lanes, variant);
                assert!(
                    variant == Variant::Discarded || plain == other,
                    "{name}: the variant {variant:?} gives another result"
                );
            }
            for (lane, &case) in group.iter().enumerate() {
                outputs[case] = plain.iter().map(|values| values[lane]).collect();
            }
        }
        outputs
    }

    /// Fails if a row was never run.
    #[track_caller]
    pub(crate) fn finish(self) {
        let missing: Vec<&str> =
            self.rows.iter().map(|row| &*row.name).filter(|name| !self.tested.contains(*name)).collect();
        assert!(missing.is_empty(), "{} rows were never run on known values: {missing:?}", missing.len());
    }

    #[track_caller]
    fn find_row(&self, name: &str) -> &Row {
        self.rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row is called {name}"))
    }

    /// Register classes of a row's outputs.
    fn output_classes(&self, name: &str) -> Vec<Class> {
        let pieces = self.flatten_operands(self.find_row(name));
        let class = |piece| match piece {
            FlatOperand::Out(class) => Some(class),
            _ => None,
        };
        pieces.into_iter().filter_map(class).collect()
    }

    /// The inputs and outputs of a row, in the order of the text.
    fn flatten_operands(&self, row: &Row) -> Vec<FlatOperand> {
        let wide = |value: Value| self.wide.unwrap_or(value.class());
        let several = |count: u8, piece: FlatOperand| vec![piece; usize::from(count)];
        let flat = |operand: &Operand| match *operand {
            Operand::Out(value) => vec![FlatOperand::Out(value.class())],
            Operand::OutWide(value) => vec![FlatOperand::Out(wide(value))],
            Operand::OutPair(first, second) => vec![FlatOperand::Out(first.class()), FlatOperand::Out(second.class())],
            Operand::In(Value::Pred) | Operand::InPred | Operand::OptIn(Value::Pred) => vec![FlatOperand::InPred],
            Operand::In(value) | Operand::OptIn(value) => vec![FlatOperand::In(value.class())],
            Operand::InWide(value) => vec![FlatOperand::In(wide(value))],
            Operand::OutVector(count, value) => several(count, FlatOperand::Out(value.class())),
            Operand::OutWideVector(count, value) => several(count, FlatOperand::Out(wide(value))),
            Operand::InVector(count, value) => several(count, FlatOperand::In(value.class())),
            Operand::InWideVector(count, value) => several(count, FlatOperand::In(wide(value))),
            Operand::Imm | Operand::OptImm(_) => vec![FlatOperand::Imm],
            Operand::Address => vec![FlatOperand::Address],
            Operand::SecondAddress => vec![FlatOperand::In(Class::B64), FlatOperand::Imm],
            Operand::Label => panic!("{}: control flow needs a warp", row.name),
        };
        row.operands.iter().flat_map(flat).collect()
    }
}

/// The low bits of `value` that fit into a register of the class.
fn truncate(value: u128, class: Class) -> u128 {
    match class {
        Class::Pred => value & 1,
        Class::B16 => value & 0xffff,
        Class::B32 => value & 0xffff_ffff,
        Class::B64 => value & u128::from(u64::MAX),
    }
}

/// The inputs that are part of the instruction, and so equal in all lanes: immediates and absent operands.
fn instruction_constants(pieces: &[FlatOperand], inputs: &[i128]) -> Vec<Option<i128>> {
    let sources = pieces.iter().filter(|piece| !matches!(piece, FlatOperand::Out(_)));
    sources
        .zip(inputs)
        .map(|(&piece, &value)| (piece == FlatOperand::Imm || value == ABSENT).then_some(value))
        .collect()
}

/// Allocates registers: the next reusable index of each class.
#[derive(Default)]
struct Allocator([usize; 4]);

impl Allocator {
    fn allocate(&mut self, class: Class) -> Slot {
        let next = &mut self.0[class as usize];
        *next += 1;
        Slot::new(class, *next - 1).unwrap_or_default()
    }

    fn registers(&self) -> Registers {
        let [pred, b16, b32, b64] = self.0;
        Registers::new(&RegisterCounts { pred, b16, b32, b64 })
    }
}

fn write(registers: &mut Registers, slot: Slot, values: &Lanes<u128>) {
    match slot.class() {
        Class::Pred => registers.set_any(slot, &values.map(|v| v as u64 & 1), u32::MAX),
        _ => registers.set_any(slot, &values.map(|v| v as u64), u32::MAX),
    }
}

fn read(registers: &Registers, slot: Slot) -> Lanes<u128> {
    registers.get_any(slot).map(u128::from)
}

/// Executes the row in a variant. The masked variant runs it twice, with complementary masks, and merges the active lanes of
/// both runs.
fn execute_variant(row: &Row, pieces: &[FlatOperand], lanes: [&[i128]; LANES], variant: Variant) -> Vec<Lanes<u128>> {
    if variant == Variant::Masked {
        let (on, off) =
            (execute_masked(row, pieces, lanes, MASK, variant), execute_masked(row, pieces, lanes, !MASK, variant));
        let merge = |(on, off): (Lanes<u128>, Lanes<u128>)| -> Lanes<u128> {
            std::array::from_fn(|lane| if MASK >> lane & 1 != 0 { on[lane] } else { off[lane] })
        };
        return on.into_iter().zip(off).map(merge).collect();
    }
    execute_masked(row, pieces, lanes, u32::MAX, variant)
}

/// Executes the row in the lanes of `mask`. Fails if an inactive lane of a destination changes.
fn execute_masked(
    row: &Row,
    pieces: &[FlatOperand],
    lanes: [&[i128]; LANES],
    mask: u32,
    variant: Variant,
) -> Vec<Lanes<u128>> {
    let mut allocator = Allocator::default();
    let mut slots = vec![Slot::NONE; pieces.len()];
    let mut args = Args { k: row.k, ..Args::default() };
    let (mut sources, mut imms) = (Vec::new(), 0);
    for (slot, &piece) in slots.iter_mut().zip(pieces) {
        let class = match piece {
            FlatOperand::Out(_) => continue,
            FlatOperand::In(class) => class,
            FlatOperand::InPred => Class::Pred,
            FlatOperand::Imm | FlatOperand::Address => Class::B64,
        };
        let input = sources.len();
        assert!(input < lanes[0].len(), "{}: {} inputs, which are too few", row.name, lanes[0].len());
        if piece == FlatOperand::Imm {
            args.imm[imms] = lanes[0][input] as i64;
            imms += 1;
        } else if lanes[0][input] != ABSENT {
            *slot = allocator.allocate(class);
        }
        sources.push(*slot);
    }
    assert_eq!(sources.len(), lanes[0].len(), "{}: number of inputs", row.name);
    let mut reusable: Vec<Slot> = sources.iter().copied().filter(|slot| !slot.is_none()).collect();
    let mut destinations = Vec::new();
    for (slot, &piece) in slots.iter_mut().zip(pieces) {
        let FlatOperand::Out(class) = piece else { continue };
        let of_same_class = reusable.iter().position(|slot| slot.class() == class);
        *slot = match (variant, of_same_class) {
            (Variant::InPlace, Some(at)) => reusable.remove(at),
            (Variant::Discarded, _) => Slot::NONE,
            _ => allocator.allocate(class),
        };
        destinations.push(*slot);
    }

    let mut registers = allocator.registers();
    for (input, &slot) in sources.iter().enumerate().filter(|(_, slot)| !slot.is_none()) {
        let values = std::array::from_fn(|lane| {
            let value = if mask >> lane & 1 != 0 { lanes[lane][input] as u128 } else { garbage(lane + input) };
            truncate(
                if variant == Variant::Negated && slot.class() == Class::Pred { !value } else { value },
                slot.class(),
            )
        });
        write(&mut registers, slot, &values);
    }
    let before: Vec<Lanes<u128>> =
        destinations.iter().map(|&slot| if slot.is_none() { [0; LANES] } else { read(&registers, slot) }).collect();

    let mut operand_slots = Vec::new();
    for (&slot, &piece) in slots.iter().zip(pieces) {
        match piece {
            FlatOperand::Imm => {}
            FlatOperand::Address => args.base = Base::Wide(slot),
            FlatOperand::InPred if variant == Variant::Negated && !slot.is_none() => operand_slots.push(slot.negate()),
            _ => operand_slots.push(slot),
        }
    }
    for (place, &slot) in args.s.iter_mut().zip(&operand_slots) {
        *place = slot;
    }
    if operand_slots.len() > args.s.len() {
        args.all = operand_slots.into();
    }
    let vector = |operand: &Operand| match *operand {
        Operand::OutVector(count, _) | Operand::OutWideVector(count, _) => Some(count),
        Operand::InVector(count, _) | Operand::InWideVector(count, _) => Some(count),
        _ => None,
    };
    args.vector = row.operands.iter().find_map(vector).unwrap_or(0);

    match action(row) {
        Action::Compute(compute) => compute(&mut registers, &args, mask),
        Action::Access(access) => {
            let (mut fixture, ()) = Fixture::new(4096, 1, |_| ());
            std::mem::swap(&mut fixture.regs, &mut registers);
            let mut cx = fixture.context(0, 1);
            cx.active = mask;
            access(&mut cx, &args, mask).unwrap_or_else(|fault| panic!("{}: {}", row.name, fault.kind));
            std::mem::swap(&mut fixture.regs, &mut registers);
        }
        Action::Control(_) => panic!("{}: control flow needs a warp", row.name),
    }

    let mut outputs = Vec::new();
    for (&slot, before) in destinations.iter().zip(before) {
        let after = if slot.is_none() { before } else { read(&registers, slot) };
        for lane in (0..LANES).filter(|lane| mask >> lane & 1 == 0) {
            assert_eq!(after[lane], before[lane], "{}: lane {lane} is masked off, but was written", row.name);
        }
        outputs.push(after);
    }
    outputs
}

/// Values that expose handlers which read or write inactive lanes.
fn garbage(seed: usize) -> u128 {
    [0, u128::MAX, 0x8000_8000_8000_8000_8000_8000_8000_8000, 0x7fff_ffff_7fff_ffff_7fff_ffff_7fff_ffff][seed % 4]
}

/// The row's handler.
fn action(row: &Row) -> Action {
    match &row.decode {
        Decode::Plain(action) => action.clone(),
        Decode::Move(value) => moves::copy(*value),
        _ => panic!("{}: the decoder creates its action, so the harness cannot run it", row.name),
    }
}

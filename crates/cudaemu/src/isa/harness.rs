//! Test harness: runs rows of the instruction table on known values, without PTX text or an executor.
//!
//! ```ignore
//! let mut table = Harness::new(family());
//! table.check("add.s32", &[(&[1, 2], &[3]), (&[-1, 1], &[0])]);
//! table.finish(); // every row was checked
//! ```
//!
//! Values are bits: an operand takes the low bits of an `i128`, so `-1` and `0xffff_ffff` are the same 32-bit value. Inputs are
//! flattened in the order of the text, immediates and addresses included; outputs likewise. The carry flag is the last input of
//! rows that read it (`addc`, `subc`, `madc`) and the last output of rows that write it (`.cc`). The register parts of video
//! instructions are their first input.
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

/// A family under test.
pub(crate) struct Harness {
    rows: Vec<Row>,
    seen: HashSet<String>,
    /// Class of the registers for [`Operand::OutWide`] and [`Operand::InWide`] (and their vectors); `None`: the value's own class.
    pub(crate) wide: Option<Class>,
}

/// Variants of a run; all must give the same results.
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
    /// Every destination is `_`.
    Sunk,
}

/// One flattened operand.
#[derive(Clone, Copy, PartialEq)]
enum Piece {
    Out(Class),
    In(Class),
    InPred,
    Imm,
    Address,
    CarryIn,
    CarryOut,
}

impl Harness {
    pub(crate) fn new(family: Family) -> Self {
        let mut names = HashSet::new();
        for row in &family.rows {
            assert!(names.insert(row.name.clone()), "two rows are called {}", row.name);
        }
        Self { rows: family.rows, seen: HashSet::new(), wide: None }
    }

    /// Runs the cases and compares bit by bit.
    #[track_caller]
    pub(crate) fn check(&mut self, name: &str, cases: &[Case<'_>]) {
        let inputs: Vec<Vec<i128>> = cases.iter().map(|case| case.0.to_vec()).collect();
        let outputs = self.run(name, &inputs);
        let classes = self.outputs(name);
        for (case, got) in cases.iter().zip(outputs) {
            assert_eq!(case.1.len(), got.len(), "{name}: number of outputs");
            let want: Vec<u128> = case.1.iter().zip(&classes).map(|(&v, &class)| truncate(v as u128, class)).collect();
            assert_eq!(want, got, "{name} of {:x?}: expected {want:x?}, got {got:x?}", case.0);
        }
    }

    /// Runs each input in its own lane and returns its outputs, zero-extended. All variants must agree.
    #[track_caller]
    pub(crate) fn run(&mut self, name: &str, inputs: &[Vec<i128>]) -> Vec<Vec<u128>> {
        self.seen.insert(name.to_string());
        let row = self.row(name).clone();
        let pieces = self.pieces(&row);
        let mut outputs = vec![Vec::new(); inputs.len()];
        let mut left: Vec<usize> = (0..inputs.len()).collect();
        while let Some(&first) = left.first() {
            // Cases with the same immediates and absent operands share a run: these are part of the instruction and so equal for
            // all lanes.
            let fixed = |case: usize| constants(&pieces, &inputs[case]);
            let group: Vec<usize> =
                left.iter().copied().filter(|&case| fixed(case) == fixed(first)).take(LANES).collect();
            left.retain(|case| !group.contains(case));
            let lanes: [&[i128]; LANES] = std::array::from_fn(|lane| &*inputs[group[lane % group.len()]]);
            let plain = execute(&row, &pieces, lanes, Variant::Plain);
            for variant in [Variant::Masked, Variant::InPlace, Variant::Negated, Variant::Sunk] {
                if variant == Variant::Masked && name.contains(".sync.aligned") {
                    continue; // needs the whole warp
                }
                let other = execute(&row, &pieces, lanes, variant);
                assert!(variant == Variant::Sunk || plain == other, "{name}: {variant:?} gives another result");
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
            self.rows.iter().map(|row| &*row.name).filter(|name| !self.seen.contains(*name)).collect();
        assert!(missing.is_empty(), "{} rows without a known value: {missing:?}", missing.len());
    }

    #[track_caller]
    fn row(&self, name: &str) -> &Row {
        self.rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row is called {name}"))
    }

    fn outputs(&self, name: &str) -> Vec<Class> {
        let pieces = self.pieces(self.row(name));
        let class = |piece| match piece {
            Piece::Out(class) => Some(class),
            Piece::CarryOut => Some(Class::Pred),
            _ => None,
        };
        pieces.into_iter().filter_map(class).collect()
    }

    fn pieces(&self, row: &Row) -> Vec<Piece> {
        let wide = |value: Value| self.wide.unwrap_or(value.class());
        let several = |count: u8, piece: Piece| vec![piece; usize::from(count)];
        let flat = |operand: &Operand| match *operand {
            Operand::Out(value) => vec![Piece::Out(value.class())],
            // The parts of all operands are one immediate.
            Operand::OutPart(value) => vec![Piece::Imm, Piece::Out(value.class())],
            Operand::OutWide(value) => vec![Piece::Out(wide(value))],
            Operand::OutPair(first, second) => vec![Piece::Out(first.class()), Piece::Out(second.class())],
            Operand::In(Value::Pred) | Operand::InPred | Operand::OptIn(Value::Pred) => vec![Piece::InPred],
            Operand::In(value) | Operand::OptIn(value) | Operand::InPart(value) => vec![Piece::In(value.class())],
            Operand::InWide(value) => vec![Piece::In(wide(value))],
            Operand::OutVector(count, value) => several(count, Piece::Out(value.class())),
            Operand::OutWideVector(count, value) => several(count, Piece::Out(wide(value))),
            Operand::InVector(count, value) => several(count, Piece::In(value.class())),
            Operand::InWideVector(count, value) => several(count, Piece::In(wide(value))),
            Operand::Imm | Operand::OptImm(_) => vec![Piece::Imm],
            Operand::Address => vec![Piece::Address],
            Operand::SecondAddress => vec![Piece::In(Class::B64), Piece::Imm],
            Operand::Label => panic!("{}: control flow needs a warp", row.name),
        };
        let mut pieces: Vec<Piece> = row.operands.iter().flat_map(flat).collect();
        if ["addc", "subc", "madc"].contains(&row.name.split('.').next().unwrap_or_default()) {
            pieces.push(Piece::CarryIn);
        }
        if row.name.split('.').any(|part| part == "cc") {
            pieces.push(Piece::CarryOut);
        }
        pieces
    }
}

/// The low bits that fit into a register of the class.
fn truncate(value: u128, class: Class) -> u128 {
    match class {
        Class::Pred => value & 1,
        Class::B16 => value & 0xffff,
        Class::B32 => value & 0xffff_ffff,
        Class::B64 => value & u128::from(u64::MAX),
        Class::B128 => value,
    }
}

/// The inputs that are part of the instruction.
fn constants(pieces: &[Piece], inputs: &[i128]) -> Vec<Option<i128>> {
    let sources = pieces.iter().filter(|piece| !matches!(piece, Piece::Out(_) | Piece::CarryOut));
    sources.zip(inputs).map(|(&piece, &value)| (piece == Piece::Imm || value == ABSENT).then_some(value)).collect()
}

/// Allocates registers.
#[derive(Default)]
struct Allocator([usize; 5]);

impl Allocator {
    fn take(&mut self, class: Class) -> Slot {
        let next = &mut self.0[class as usize];
        *next += 1;
        Slot::new(class, *next - 1).unwrap_or_default()
    }

    fn registers(&self) -> Registers {
        let [pred, b16, b32, b64, b128] = self.0;
        Registers::new(&RegisterCounts { pred, b16, b32, b64, b128 })
    }
}

fn write(registers: &mut Registers, slot: Slot, values: &Lanes<u128>) {
    match slot.class() {
        Class::B128 => registers.set(slot, values, u32::MAX),
        Class::Pred => registers.set_any(slot, &values.map(|v| v as u64 & 1), u32::MAX),
        _ => registers.set_any(slot, &values.map(|v| v as u64), u32::MAX),
    }
}

fn read(registers: &Registers, slot: Slot) -> Lanes<u128> {
    match slot.class() {
        Class::B128 => registers.get(slot),
        _ => registers.get_any(slot).map(u128::from),
    }
}

/// Executes the row once. In the masked variant, checks that inactive lanes are unchanged and fills them in by a second run.
fn execute(row: &Row, pieces: &[Piece], lanes: [&[i128]; LANES], variant: Variant) -> Vec<Lanes<u128>> {
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

fn execute_masked(
    row: &Row,
    pieces: &[Piece],
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
            Piece::Out(_) | Piece::CarryOut => continue,
            Piece::In(class) => class,
            Piece::InPred => Class::Pred,
            Piece::Imm | Piece::Address => Class::B64,
            Piece::CarryIn => Class::Pred,
        };
        let input = sources.len();
        assert!(input < lanes[0].len(), "{}: {} inputs are too few", row.name, lanes[0].len());
        if piece == Piece::Imm {
            args.imm[imms] = lanes[0][input] as i64;
            imms += 1;
        } else if lanes[0][input] != ABSENT {
            *slot = allocator.take(class);
        }
        sources.push(*slot);
    }
    assert_eq!(sources.len(), lanes[0].len(), "{}: number of inputs", row.name);
    // The input flag is in a predicate of the harness that no handler accesses.
    let carry = pieces.contains(&Piece::CarryIn).then(|| sources.pop().unwrap_or_default());
    let mut free: Vec<Slot> = sources.iter().copied().filter(|slot| !slot.is_none()).collect();
    let mut destinations = Vec::new();
    for (slot, &piece) in slots.iter_mut().zip(pieces) {
        let Piece::Out(class) = piece else { continue };
        let same = free.iter().position(|slot| slot.class() == class);
        *slot = match (variant, same) {
            (Variant::InPlace, Some(at)) => free.remove(at),
            (Variant::Sunk, _) => Slot::NONE,
            _ => allocator.take(class),
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
    if carry.is_some() {
        let bits = |lane: usize| if mask >> lane & 1 != 0 { lanes[lane][sources.len()] as u32 } else { lane as u32 };
        registers.set_carry((0..LANES).fold(0, |flags, lane| flags | (bits(lane) & 1) << lane), u32::MAX);
    }
    let carry_before = registers.carry();
    let before: Vec<Lanes<u128>> =
        destinations.iter().map(|&slot| if slot.is_none() { [0; LANES] } else { read(&registers, slot) }).collect();

    let mut flat = Vec::new();
    for (&slot, &piece) in slots.iter().zip(pieces) {
        match piece {
            Piece::Imm | Piece::CarryIn | Piece::CarryOut => {}
            Piece::Address => args.base = Base::Wide(slot),
            Piece::InPred if variant == Variant::Negated && !slot.is_none() => flat.push(slot.negate()),
            _ => flat.push(slot),
        }
    }
    for (place, &slot) in args.s.iter_mut().zip(&flat) {
        *place = slot;
    }
    if flat.len() > args.s.len() {
        args.all = flat.into();
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
            let (mut rig, ()) = Fixture::new(4096, 1, |_| ());
            std::mem::swap(&mut rig.regs, &mut registers);
            let mut cx = rig.context(0, 1);
            cx.active = mask;
            access(&mut cx, &args, mask).unwrap_or_else(|fault| panic!("{}: {}", row.name, fault.kind));
            std::mem::swap(&mut rig.regs, &mut registers);
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
    let carry_after = registers.carry();
    if pieces.contains(&Piece::CarryOut) {
        assert_eq!(carry_after & !mask, carry_before & !mask, "{}: the carry of a lane that is masked off", row.name);
        outputs.push(std::array::from_fn(|lane| u128::from(carry_after >> lane & 1)));
    } else {
        assert_eq!(carry_after, carry_before, "{}: the carry flag was written", row.name);
    }
    outputs
}

/// Values that expose handlers which read or write inactive lanes.
fn garbage(seed: usize) -> u128 {
    [0, u128::MAX, 0x8000_8000_8000_8000_8000_8000_8000_8000, 0x7fff_ffff_7fff_ffff_7fff_ffff_7fff_ffff][seed % 4]
}

fn action(row: &Row) -> Action {
    match &row.decode {
        Decode::Plain(action) => action.clone(),
        Decode::Move(value) => moves::copy(*value),
        _ => panic!("{}: the decoder makes its action", row.name),
    }
}

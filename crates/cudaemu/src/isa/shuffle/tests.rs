//! Warp communication: every row against its definition, and the faults of lanes that are missing.

use std::collections::HashSet;

use super::*;
use crate::exec_context::Registers;
use crate::exec_context::fixture::Fixture;
use crate::isa::Decode;
use crate::operands::{Class, RegisterCounts};

const ALL: u32 = u32::MAX;

/// Test harness for one warp: executes rows by name, with operands given as values.
struct WarpHarness {
    rows: Vec<Row>,
    tested: HashSet<String>,
    /// Lanes that execute the instruction.
    active: u32,
    /// Lanes that have not exited.
    live: u32,
}

/// An operand's value in each lane.
#[derive(Clone)]
enum LaneValues {
    Word(Lanes<u32>),
    Pred(u32),
}

use LaneValues::{Pred, Word};

fn word(value: u32) -> LaneValues {
    Word([value; LANES])
}

fn each<T>(f: impl Fn(u32) -> T) -> Lanes<T> {
    std::array::from_fn(|lane| f(lane as u32))
}

fn mask(f: impl Fn(u32) -> bool) -> u32 {
    (0..32).fold(0, |bits, lane| bits | u32::from(f(lane)) << lane)
}

/// Initial content of destinations.
const OLD: u32 = 0x0bad_cafe;

impl WarpHarness {
    fn new() -> Self {
        Self { rows: family().rows, tested: HashSet::new(), active: ALL, live: ALL }
    }

    /// Sets the active lanes and the lanes that have not exited.
    fn set_lanes(&mut self, active: u32, live: u32) -> &mut Self {
        (self.active, self.live) = (active, live);
        self
    }

    /// Runs a row; returns its B32 and predicate destinations, or the text of the fault.
    fn try_run(&mut self, name: &str, inputs: &[LaneValues]) -> Result<(Lanes<u32>, u32), String> {
        let row = self.rows.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name}"));
        self.tested.insert(name.into());
        let mut regs = Registers::new(&RegisterCounts { pred: 8, b16: 0, b32: 8, b64: 0 });
        let slot = |class, index| Slot::new(class, index).unwrap_or_default();
        let (d, p) = (slot(Class::B32, 0), slot(Class::Pred, 0));
        regs.set(d, &[OLD; LANES], ALL);
        let mut slots = match row.operands[0] {
            Operand::OutPair(..) => vec![d, p],
            Operand::Out(Value::Pred) => vec![p],
            _ => vec![d],
        };
        for (index, input) in inputs.iter().enumerate() {
            let class = match input {
                Word(_) => Class::B32,
                Pred(_) => Class::Pred,
            };
            let slot = slot(class, index + 1);
            match input {
                Word(values) => regs.set(slot, values, ALL),
                Pred(values) => regs.set_pred(slot, *values, ALL),
            }
            slots.push(slot);
        }
        let mut args = Args { k: row.k, ..Args::default() };
        for (place, &slot) in args.s.iter_mut().zip(&slots) {
            *place = slot;
        }
        if slots.len() > args.s.len() {
            args.all = slots.into();
        }
        let Decode::Plain(Action::Access(action)) = row.decode else { panic!("{name} is not an `Action::Access`") };
        let (mut fixture, ()) = Fixture::new(0, 1, |_| ());
        fixture.regs = regs;
        let mut cx = fixture.context(0, 1);
        cx.active = self.active;
        cx.live = self.live;
        action(&mut cx, &args, self.active).map_err(|fault| fault.kind.to_string())?;
        let regs = fixture.regs;
        let d = regs.get::<u32>(d);
        for lane in (0..LANES).filter(|&lane| !contains_lane(self.active, lane)) {
            assert_eq!(d[lane], OLD, "{name} wrote lane {lane}, which is inactive");
        }
        Ok((d, regs.pred(p)))
    }

    #[track_caller]
    fn run(&mut self, name: &str, inputs: &[LaneValues]) -> (Lanes<u32>, u32) {
        self.try_run(name, inputs).unwrap_or_else(|report| panic!("{name}: {report}"))
    }

    #[track_caller]
    fn assert_fault(&mut self, name: &str, inputs: &[LaneValues], part: &str) {
        match self.try_run(name, inputs) {
            Err(report) => assert!(report.contains(part), "{name}: {report}"),
            Ok(_) => panic!("{name} did not fault"),
        }
    }
}

/// Value of lane `lane`, which differs from every lane number.
fn distinct_value(lane: u32) -> u32 {
    lane.wrapping_mul(0x9e37_79b9) ^ 0x1234_5678
}

/// Operand c as CUDA's `__shfl_…_sync` computes it for a width.
fn clamp(mode: &str, width: u32) -> u32 {
    (32 - width) << 8 | if mode == "up" { 0 } else { 31 }
}

fn shuffles_follow_cudas_definition(harness: &mut WarpHarness) {
    harness.set_lanes(ALL, ALL);
    for mode in ["up", "down", "bfly", "idx"] {
        for width in [1, 2, 4, 8, 16, 32] {
            for x in 0..32 {
                // The lane to read if it is in range. A butterfly may reach into lower segments.
                let source = |lane: u32| {
                    let (start, at) = (lane - lane % width, lane % width);
                    match mode {
                        "up" => (at >= x).then(|| lane - x),
                        "down" => (at + x < width).then(|| lane + x),
                        "bfly" => Some(lane ^ x).filter(|&other| other < start + width),
                        _ => Some(start + x % width),
                    }
                };
                let inputs = [Word(each(distinct_value)), word(x), word(clamp(mode, width)), word(ALL)];
                let name = format!("shfl.sync.{mode}.b32");
                let (d, p) = harness.run(&name, &inputs);
                let read = each(|lane| distinct_value(source(lane).unwrap_or(lane)));
                assert_eq!(d, read, "{name} {x} width {width}");
                assert_eq!(p, mask(|lane| source(lane).is_some()), "{name} {x} width {width}: predicate");
            }
        }
    }
}

fn shuffle_operands_differ_between_lanes(harness: &mut WarpHarness) {
    harness.set_lanes(ALL, ALL);
    // Reverses the warp; bits above the fifth are ignored.
    let inputs = [Word(each(distinct_value)), Word(each(|lane| 31 - lane + 0xe0)), word(0xffff_e01f), word(ALL)];
    assert_eq!(harness.run("shfl.sync.idx.b32", &inputs), (each(|lane| distinct_value(31 - lane)), ALL));
    // With a clamp below 31, lanes only read up to it.
    let inputs = [Word(each(distinct_value)), word(4), word(9), word(ALL)];
    let (d, p) = harness.run("shfl.sync.down.b32", &inputs);
    assert_eq!(d, each(|lane| distinct_value(if lane + 4 <= 9 { lane + 4 } else { lane })));
    assert_eq!(p, mask(|lane| lane + 4 <= 9));
}

fn each_half_of_a_warp_shuffles_among_its_own_lanes(harness: &mut WarpHarness) {
    harness.set_lanes(ALL, ALL);
    let members = Word(each(|lane| if lane < 16 { 0xffff } else { 0xffff_0000 }));
    let inputs = [Word(each(distinct_value)), word(1), word(clamp("bfly", 16)), members];
    assert_eq!(harness.run("shfl.sync.bfly.b32", &inputs).0, each(|lane| distinct_value(lane ^ 1)));
}

#[test]
fn lanes_that_are_missing_are_reported() {
    let mut harness = WarpHarness::new();
    let inputs = |members: u32, x: u32| [Word(each(distinct_value)), word(x), word(0x1f), word(members)];
    let down = "shfl.sync.down.b32";
    harness.set_lanes(0xffff, ALL).assert_fault(
        down,
        &inputs(ALL, 1),
        "names lanes 0xffff0000, which do not execute it",
    );
    harness.set_lanes(0xffff, ALL).assert_fault(down, &inputs(0xfff, 1), "does not name lane 12");
    harness.set_lanes(0xffff, 0xffff).assert_fault(
        down,
        &inputs(ALL, 1),
        "lane 15 reads from lane 16, which has exited",
    );
    harness.set_lanes(0xffff, ALL).assert_fault(
        down,
        &inputs(0xffff, 1),
        "lane 15 reads from lane 16, which does not execute",
    );
    let halves = Word(each(|lane| if lane < 16 { 0xffff } else { 0xffff_0000 }));
    harness.set_lanes(ALL, ALL).assert_fault(
        down,
        &[Word(each(distinct_value)), word(1), word(0x1f), halves],
        "lane 15 reads from lane 16, which is no member",
    );
    let mixed = Word(each(|lane| if lane == 3 { 0xffff } else { ALL }));
    harness.assert_fault(
        "redux.sync.add.u32",
        &[word(1), mixed],
        "lane 0 has the member mask 0xffffffff, lane 3 0x0000ffff",
    );
    // Members that have exited are ignored. With a width of 16, lane 15 reads itself and not the exited lane 16: its predicate
    // is false.
    let inputs = [Word(each(distinct_value)), word(1), word(clamp("down", 16)), word(ALL)];
    assert_eq!(harness.set_lanes(0xffff, 0xffff).run(down, &inputs).1, 0x7fff);
}

fn votes_count_members_only(harness: &mut WarpHarness) {
    harness.set_lanes(ALL, ALL);
    let halves = Word(each(|lane| if lane < 16 { 0xffff } else { 0xffff_0000 }));
    // (source, all, any, uni) for each half.
    for (source, all, any, uni) in [
        (0, 0, 0, ALL),
        (ALL, ALL, ALL, ALL),
        (0x0000_ffff, 0xffff, 0xffff, ALL),
        (0x0001_0000, 0, 0xffff_0000, 0xffff),
        (0xffff_0001, 0xffff_0000, ALL, 0xffff_0000),
    ] {
        let inputs = [Pred(source), halves.clone()];
        assert_eq!(harness.run("vote.sync.all.pred", &inputs).1, all, "all of {source:#x}");
        assert_eq!(harness.run("vote.sync.any.pred", &inputs).1, any, "any of {source:#x}");
        assert_eq!(harness.run("vote.sync.uni.pred", &inputs).1, uni, "uni of {source:#x}");
        let ballot = each(|lane| source & if lane < 16 { 0xffff } else { 0xffff_0000 });
        assert_eq!(harness.run("vote.sync.ballot.b32", &inputs).0, ballot);
    }
    harness.set_lanes(0x00ff_00f0, ALL);
    harness.assert_fault("vote.sync.any.pred", &[Pred(0), word(ALL)], "which do not execute it");
}

fn redux_combines_the_values_of_the_members(harness: &mut WarpHarness) {
    harness.set_lanes(ALL, ALL);
    let halves = |low: u32, high: u32| each(|lane| if lane < 16 { low } else { high });
    let members = Word(halves(0xffff, 0xffff_0000));
    // Lane 3 holds -7, lane 20 0x8000_0000, all others their number plus 1.
    let values = each(|lane| match lane {
        3 => -7i32 as u32,
        20 => 0x8000_0000,
        _ => lane + 1,
    });
    let sum = |range: std::ops::Range<usize>| values[range].iter().fold(0u32, |a, &b| a.wrapping_add(b));
    for (op, low, high) in [
        ("add.u32", sum(0..16), sum(16..32)),
        ("add.s32", sum(0..16), sum(16..32)),
        ("min.u32", 1, 17),
        ("max.u32", -7i32 as u32, 0x8000_0000),
        ("min.s32", -7i32 as u32, 0x8000_0000),
        ("max.s32", 16, 32),
        ("and.b32", 0, 0),
        ("or.b32", ALL, 0x8000_003f),
        ("xor.b32", values[..16].iter().fold(0, |a, b| a ^ b), values[16..].iter().fold(0, |a, b| a ^ b)),
    ] {
        let (d, _) = harness.run(&format!("redux.sync.{op}"), &[Word(values), members.clone()]);
        assert_eq!(d, halves(low, high), "{op}");
    }
    assert_eq!(sum(0..16), 136 - 4 - 7);
}

fn activemask_and_elect_name_the_active_lanes_and_their_leader(harness: &mut WarpHarness) {
    harness.set_lanes(0xf0, 0xffff);
    let here = |value: u32| each(|lane| if (4..8).contains(&lane) { value } else { OLD });
    assert_eq!(harness.run("activemask.b32", &[]).0, here(0xf0));
    assert_eq!(harness.run("elect.sync", &[word(0xf0)]), (here(4), 0x10));
    harness.assert_fault("elect.sync", &[word(ALL)], "which do not execute it");
}

#[test]
fn every_row_gives_known_values() {
    let mut harness = WarpHarness::new();
    for check in [
        shuffles_follow_cudas_definition,
        shuffle_operands_differ_between_lanes,
        each_half_of_a_warp_shuffles_among_its_own_lanes,
        votes_count_members_only,
        redux_combines_the_values_of_the_members,
        activemask_and_elect_name_the_active_lanes_and_their_leader,
    ] {
        check(&mut harness);
    }
    let missing: Vec<&str> =
        harness.rows.iter().map(|row| &*row.name).filter(|name| !harness.tested.contains(*name)).collect();
    assert!(missing.is_empty(), "rows without a test: {missing:?}");
}

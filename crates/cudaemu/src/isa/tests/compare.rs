//! Integer comparison, and selection: every comparison on every type, with every Boolean operator.

use std::cmp::Ordering;

use super::{TYPES, Type, ty};
use crate::isa::compare;
use crate::isa::harness::Harness;

const BITS: [Type; 3] = [ty("b16", 16, false), ty("b32", 32, false), ty("b64", 64, false)];

/// Whether a comparison operator is true for this order of its operands.
fn holds(op: &str, order: Ordering) -> bool {
    match op {
        "eq" => order == Ordering::Equal,
        "ne" => order != Ordering::Equal,
        "lt" | "lo" => order == Ordering::Less,
        "le" | "ls" => order != Ordering::Greater,
        "gt" | "hi" => order == Ordering::Greater,
        _ => order != Ordering::Less,
    }
}

/// The comparison operators of a type.
fn operators(t: Type) -> Vec<&'static str> {
    let mut all = vec!["eq", "ne"];
    if !t.name.starts_with('b') {
        all.extend(["lt", "le", "gt", "ge"]);
    }
    if t.name.starts_with('u') {
        all.extend(["lo", "ls", "hi", "hs"]);
    }
    all
}

#[test]
fn every_comparison_and_selection_gives_the_expected_result() {
    let mut harness = Harness::new(compare::family());
    for t in TYPES.into_iter().chain(BITS) {
        let values = [t.min(), t.max(), 0, 1, 1 << (t.bits - 2), t.wrap(-1), t.wrap(-5)];
        for op in operators(t) {
            for (boolean, combine) in BOOLEANS {
                for c in if boolean.is_empty() { 0..1 } else { 0..2 } {
                    check_comparison(&mut harness, t, op, (boolean, combine), c == 1, &values);
                }
            }
        }
    }
    check_selections(&mut harness);
    harness.finish();
}

/// A Boolean operator: its name in the opcode, and its function.
type Boolean = (&'static str, fn(bool, bool) -> bool);

const BOOLEANS: [Boolean; 4] =
    [("", |test, _| test), (".and", |test, c| test & c), (".or", |test, c| test | c), (".xor", |test, c| test ^ c)];

fn check_comparison(harness: &mut Harness, t: Type, op: &str, boolean: Boolean, c: bool, values: &[i128]) {
    let (suffix, combine) = boolean;
    let mut inputs = Vec::new();
    let mut tests = Vec::new();
    for &a in values {
        for &b in values {
            let mut input = vec![a, b];
            if !suffix.is_empty() {
                input.push(i128::from(c));
            }
            inputs.push(input);
            tests.push(holds(op, a.cmp(&b)));
        }
    }
    let got = harness.run(&format!("setp.{op}{suffix}.{}", t.name), &inputs);
    for (at, test) in tests.into_iter().enumerate() {
        let (p, q) = (combine(test, c), combine(!test, c));
        assert_eq!(got[at], [u128::from(p), u128::from(q)], "setp.{op}{suffix}.{} of {:x?}", t.name, inputs[at]);
    }
}

fn check_selections(harness: &mut Harness) {
    let (a, b) = (0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00_u64 as i128);
    for ty in ["b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"] {
        harness.check(&format!("selp.{ty}"), &[(&[a, b, 1], &[a]), (&[a, b, 0], &[b])]);
    }
}

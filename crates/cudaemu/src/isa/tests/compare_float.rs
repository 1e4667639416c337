//! `setp` and `set` of floating-point values, scalar and packed, and `set` with a half-precision result of integers.

use super::formats::{BF16, F16, F32, F64, Format, row_names};
use super::{TYPES, Type, ty};
use crate::isa::compare_float;
use crate::isa::harness::Harness;

/// Pairs of values (see [`Format::value`]) and their order, without and with `.ftz`; `?` means unordered.
const PAIRS: [(&str, &str, [char; 2]); 16] = [
    ("1", "2", ['<', '<']),
    ("2", "1", ['>', '>']),
    ("1", "1", ['=', '=']),
    ("-1", "1", ['<', '<']),
    ("-1", "-2", ['>', '>']),
    ("0", "-0", ['=', '=']),
    ("sub", "0", ['>', '=']),
    ("-sub", "sub", ['<', '=']),
    ("sub", "1", ['<', '<']),
    ("inf", "inf", ['=', '=']),
    ("-inf", "inf", ['<', '<']),
    ("inf", "big", ['>', '>']),
    ("nan", "1", ['?', '?']),
    ("1", "-nan", ['?', '?']),
    ("nan", "nan", ['?', '?']),
    ("-inf", "nan", ['?', '?']),
];

/// Comparison operators and the orders for which they are true.
const COMPARISONS: [(&str, &str); 14] = [
    ("eq", "="),
    ("ne", "<>"),
    ("lt", "<"),
    ("le", "<="),
    ("gt", ">"),
    ("ge", ">="),
    ("equ", "=?"),
    ("neu", "<>?"),
    ("ltu", "<?"),
    ("leu", "<=?"),
    ("gtu", ">?"),
    ("geu", ">=?"),
    ("num", "<=>"),
    ("nan", "?"),
];

/// A Boolean operator: its name in the opcode, and its function.
type Boolean = (&'static str, fn(bool, bool) -> bool);

const BOOLEANS: [Boolean; 4] =
    [("", |test, _| test), (".and", |test, c| test & c), (".or", |test, c| test | c), (".xor", |test, c| test ^ c)];

/// Result types of `set`, and the bits that mean true.
const RESULTS: [(&str, i128); 7] = [
    ("u32", 0xffff_ffff),
    ("s32", 0xffff_ffff),
    ("f32", 0x3f80_0000),
    ("u16", 0xffff),
    ("s16", 0xffff),
    ("f16", 0x3c00),
    ("bf16", 0x3f80),
];

/// Values of the predicate operand; it is absent if the opcode has no Boolean operator.
fn predicates(boolean: &str) -> &'static [Option<bool>] {
    if boolean.is_empty() { &[None] } else { &[Some(false), Some(true)] }
}

/// Cases of a row (inputs, outputs), collected so that one call checks them all.
type Cases = Vec<(Vec<i128>, Vec<i128>)>;

fn check_cases(table: &mut Harness, name: &str, cases: &Cases) {
    let cases: Vec<(&[i128], &[i128])> = cases.iter().map(|(inputs, outputs)| (&inputs[..], &outputs[..])).collect();
    table.check(name, &cases);
}

/// The operands, followed by the predicate if there is one.
fn append_predicate(operands: &[i128], c: Option<bool>) -> Vec<i128> {
    operands.iter().copied().chain(c.map(i128::from)).collect()
}

#[test]
fn every_comparison_of_every_pair_gives_the_expected_result() {
    let family = compare_float::family();
    let names = row_names(&family.rows);
    let mut table = Harness::new(family);
    for (format, ftz) in [(F32, 0), (F32, 1), (F64, 0), (F16, 0), (F16, 1), (BF16, 0)] {
        for (op, orders) in COMPARISONS {
            for (boolean, combine) in BOOLEANS {
                let head = format!("{op}{boolean}{}", ["", ".ftz"][ftz]);
                let (mut setp, mut tests): (Cases, Vec<(Vec<i128>, bool)>) = (vec![], vec![]);
                for (a, b, order) in PAIRS {
                    for &c in predicates(boolean) {
                        let test = orders.contains(order[ftz]);
                        let inputs = append_predicate(&[format.value(a), format.value(b)], c);
                        let (p, q) = (combine(test, c.unwrap_or(false)), combine(!test, c.unwrap_or(false)));
                        setp.push((inputs.clone(), vec![p.into(), q.into()]));
                        tests.push((inputs, p));
                    }
                }
                check_cases(&mut table, &format!("setp.{head}.{}", format.name), &setp);
                for (result, yes) in RESULTS {
                    let name = format!("set.{head}.{result}.{}", format.name);
                    if names.contains(&name) {
                        let cases = tests.iter().map(|(i, p)| (i.clone(), vec![if *p { yes } else { 0 }])).collect();
                        check_cases(&mut table, &name, &cases);
                    }
                }
                if ["f16", "bf16"].contains(&format.name) {
                    check_packed_pairs(&mut table, format, ftz, (op, orders), (boolean, combine), &head);
                }
            }
        }
    }
    check_half_results_of_integers(&mut table);
    table.finish();
}

/// Checks a comparison of packed pairs: the lower elements run through [`PAIRS`] in order, the upper ones in another order.
fn check_packed_pairs(
    table: &mut Harness,
    format: Format,
    ftz: usize,
    (_, orders): (&str, &str),
    (boolean, combine): Boolean,
    head: &str,
) {
    let (mut setp, mut tests): (Cases, Vec<(Vec<i128>, bool, bool)>) = (vec![], vec![]);
    for (at, low) in PAIRS.iter().enumerate() {
        let high = &PAIRS[(at * 5 + 3) % PAIRS.len()];
        let pack = |low: &str, high: &str| format.value(high) << 16 | format.value(low);
        for &c in predicates(boolean) {
            let inputs = append_predicate(&[pack(low.0, high.0), pack(low.1, high.1)], c);
            let [p, q] = [low, high].map(|pair| combine(orders.contains(pair.2[ftz]), c.unwrap_or(false)));
            setp.push((inputs.clone(), vec![p.into(), q.into()]));
            tests.push((inputs, p, q));
        }
    }
    let source = format!("{}x2", format.name);
    check_cases(table, &format!("setp.{head}.{source}"), &setp);
    for (result, yes) in [(&*source, format.one), ("u32", 0xffff), ("s32", 0xffff)] {
        let element = |test: bool| if test { yes } else { 0 };
        let cases = tests.iter().map(|(i, p, q)| (i.clone(), vec![element(*q) << 16 | element(*p)])).collect();
        check_cases(table, &format!("set.{head}.{result}.{source}"), &cases);
    }
}

/// `set` with a half-precision result and integer sources.
fn check_half_results_of_integers(table: &mut Harness) {
    const BITS: [Type; 3] = [ty("b16", 16, false), ty("b32", 32, false), ty("b64", 64, false)];
    for t in TYPES.into_iter().chain(BITS) {
        let mut ops = vec![("eq", "="), ("ne", "<>")];
        if !t.name.starts_with('b') {
            ops.extend([("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")]);
        }
        if t.name.starts_with('u') {
            ops.extend([("lo", "<"), ("ls", "<="), ("hi", ">"), ("hs", ">=")]);
        }
        for (op, orders) in ops {
            for (boolean, combine) in BOOLEANS {
                for (result, yes) in [("f16", F16.one), ("bf16", BF16.one)] {
                    let mut cases = vec![];
                    for (a, b) in [(0, 0), (1, 0), (t.wrap(-1), 1), (t.min(), t.max()), (t.max(), t.max())] {
                        for &c in predicates(boolean) {
                            let test = orders.contains(["<", "=", ">"][(a.cmp(&b) as i8 + 1) as usize]);
                            let holds = combine(test, c.unwrap_or(false));
                            cases.push((append_predicate(&[a, b], c), vec![if holds { yes } else { 0 }]));
                        }
                    }
                    check_cases(table, &format!("set.{op}{boolean}.{result}.{}", t.name), &cases);
                }
            }
        }
    }
}

//! `setp` of floating-point values.

use super::formats::{F32, F64};
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
    let mut table = Harness::new(compare_float::family());
    for (format, ftz) in [(F32, 0), (F32, 1), (F64, 0)] {
        for (op, orders) in COMPARISONS {
            for (boolean, combine) in BOOLEANS {
                let head = format!("{op}{boolean}{}", ["", ".ftz"][ftz]);
                let mut setp: Cases = vec![];
                for (a, b, order) in PAIRS {
                    for &c in predicates(boolean) {
                        let test = orders.contains(order[ftz]);
                        let inputs = append_predicate(&[format.value(a), format.value(b)], c);
                        let (p, q) = (combine(test, c.unwrap_or(false)), combine(!test, c.unwrap_or(false)));
                        setp.push((inputs, vec![p.into(), q.into()]));
                    }
                }
                check_cases(&mut table, &format!("setp.{head}.{}", format.name), &setp);
            }
        }
    }
    table.finish();
}

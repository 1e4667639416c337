//! Multiversioned lane loops: the portable version and the version for the host processor give the same bits.

use super::formats::family_of;
use crate::isa::harness::Harness;
use crate::isa::vector::Host;
use crate::isa::{Operand, Row, Value, compare_float, convert, float, half};

/// Random bits of a type; in half of the cases most bits are equal, which gives special values of floats.
fn random_bits(random: &mut fastrand::Rng, value: Value) -> i128 {
    let narrow = match value {
        Value::Pred => return i128::from(random.bool()),
        Value::B16 => 16,
        Value::B32 | Value::F32 => 32,
        _ => 64,
    };
    // Mostly zeros, mostly ones, or evenly distributed.
    let word = match random.u8(0..4) {
        0 => random.u64(..) & random.u64(..) & random.u64(..),
        1 => random.u64(..) | random.u64(..) | random.u64(..),
        _ => random.u64(..),
    };
    i128::from(word >> (64 - narrow))
}

#[test]
fn portable_and_detected_simd_give_the_same_bits() {
    let mut random = fastrand::Rng::with_seed(5);
    for rows in [float::rows, half::rows, convert::rows, compare_float::rows] as [fn(Host) -> Vec<Row>; 4] {
        let (portable, detected) = (rows(Host::portable()), rows(Host::detect()));
        let names: Vec<String> = portable.iter().map(|row| row.name.clone()).collect();
        assert_eq!(names, detected.iter().map(|row| row.name.clone()).collect::<Vec<_>>());
        let operands: Vec<Vec<Operand>> = portable.iter().map(|row| row.operands.clone()).collect();
        let mut tables = [portable, detected].map(|rows| Harness::new(family_of(rows)));
        for (name, operands) in names.iter().zip(operands) {
            let source = |operand: &Operand| match *operand {
                Operand::In(value) | Operand::InWide(value) => Some(value),
                Operand::InPred => Some(Value::Pred),
                _ => None,
            };
            let sources: Vec<Value> = operands.iter().filter_map(source).collect();
            let inputs: Vec<Vec<i128>> =
                (0..64).map(|_| sources.iter().map(|&value| random_bits(&mut random, value)).collect()).collect();
            let [portable, detected] = &mut tables;
            assert_eq!(portable.run(name, &inputs), detected.run(name, &inputs), "{name}");
        }
    }
}

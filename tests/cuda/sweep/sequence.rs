//! Cases of ARANGE and TIMESTEP_EMBEDDING.

use super::Sweep;
use fanout::ops::sequence::Sequence;
use fanout::tensor::DType::F32;
use fanout_testing::op_case::Case;

/// Sequences and rows longer and shorter than a block of threads; odd rows; a row without a frequency.
pub fn run(sweep: &Sweep) {
    for (start, stop, step) in [(0.0, 7.0, 1.0), (-1.5, 900.0, 0.75), (3.0, 3.1, 5.0)] {
        let mut case = Case::new();
        let y = case.b.node(Sequence::Arange { start, stop, step }, &fanout::graph::NO_SOURCES).unwrap();
        sweep.check_bytes(&case.build(), &[y], &format!("from {start} to {stop} by {step}"));
    }
    for dim in [1, 2, 7, 320, 1025] {
        let mut case = Case::new();
        let x = case.leaf(F32, [3, 1, 1, 1], &[0.0, 1.0, 977.0]);
        let y = case.b.node(Sequence::TimestepEmbedding { dim, max_period: 10_000 }, &[Some(x)]).unwrap();
        // Angles up to 977 are rounded to 6e-5.
        sweep.check(&case.build(), &[y], 1e-8, &format!("{dim} elements for each time"));
    }
}

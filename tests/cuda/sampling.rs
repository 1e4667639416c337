//! Sampling on an emulated GPU, whose cumulative sums are added in another order than those of the CPU.

use crate::fixture::CudaFixture;
use fanout::device::Device;
use fanout::sched::sampling::LogitsLayout;
use fanout_testing::sampling::{HostLogits, Reference, Settings, UNIFORM, logits};
use std::sync::Arc;

#[test]
fn tokens_are_those_of_the_reference() {
    let fixture = CudaFixture::new("");
    for settings in &Settings::ALL {
        for layout in [LogitsLayout::Whole, LogitsLayout::SplitByVocabulary] {
            let (tokens, sequences) = (300, UNIFORM.len());
            let device = Arc::clone(&fixture.devices[0]) as Arc<dyn Device>;
            let mut sampler = HostLogits::new(device, &fixture.budget, [tokens, sequences], settings, layout);
            let rows: Vec<Vec<f32>> = (0..sequences).map(|s| logits(s % 6, tokens, s as u64 + 9)).collect();
            for (s, drawn) in sampler.run(&rows.concat(), &UNIFORM).into_iter().enumerate() {
                let what = format!("{settings:?}, {layout:?}, sequence {s}");
                Reference::new(&rows[s], settings).check(UNIFORM[s], drawn, &what);
            }
            let mut invalid = rows.clone();
            (invalid[1][200], invalid[4][299]) = (f32::NAN, f32::INFINITY);
            invalid[5].fill(f32::NEG_INFINITY);
            let drawn = sampler.run(&invalid.concat(), &UNIFORM);
            let nan: Vec<usize> = (0..sequences).filter(|&s| drawn[s].1.is_nan()).collect();
            assert_eq!(nan, [1, 4, 5], "{settings:?}, {layout:?}");
        }
    }
}

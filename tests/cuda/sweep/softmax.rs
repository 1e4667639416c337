//! Cases of SOFT_MAX.

use super::Sweep;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::DType::{F16, F32};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// Row lengths at which the kernel or the number of threads changes, also with rows that do not start at multiples of 16 bytes;
/// with and without masks of each type, slopes and sinks.
pub fn run(sweep: &Sweep) {
    for n in [1, 5, 32, 255, 256, 260, 511, 512, 1023, 4096, 8192, 9001, 16_384, 16_385, 40_000] {
        let ne = if n < 600 { [n, 3, 6, 2] } else { [n, 1, 2, 1] };
        for (mask, max_bias, sinks, apart) in [
            (None, 0.0, false, 0),
            (Some(F32), 0.0, true, 0),
            (Some(F16), 4.0, false, 0),
            (Some(F16), 0.0, true, 4),
            (Some(F32), 8.0, false, 4),
        ] {
            check_case(sweep, ne, mask, max_bias, sinks, apart);
        }
    }
    // F16 masks with lengths and alignments that do not permit vector loads.
    check_case(sweep, [12, 7, 3, 2], Some(F16), 2.0, true, 0);
    check_case(sweep, [1028, 2, 2, 1], Some(F16), 0.0, false, 8);
}

/// `apart`: offset in bytes of the first elements from a multiple of 128.
#[track_caller]
fn check_case(sweep: &Sweep, ne: [usize; 4], mask: Option<DType>, max_bias: f32, sinks: bool, apart: usize) {
    let [n, m, heads, _] = ne;
    let count = ne.iter().product::<usize>();
    let mut case = Case::new();
    // A tensor at an offset is a view of a longer tensor.
    let leaf = |case: &mut Case, dtype: DType, ne: [usize; 4], mut values: Vec<f32>| {
        let before = apart / dtype.block_bytes();
        values.splice(0..0, std::iter::repeat_n(0.5, before));
        let whole = case.leaf(dtype, [values.len(), 1, 1, 1], &values);
        case.b.view(whole, TensorDesc::contiguous(dtype, ne).unwrap(), apart).unwrap()
    };
    let x = leaf(&mut case, F32, ne, normal(1, count));
    let mask_ne = [n, m + 1, heads / 2, 1];
    let mask = mask.map(|t| {
        let mut values = uniform(2, mask_ne.iter().product(), -3.0, 1.0);
        if n > 3 {
            values.iter_mut().skip(1).step_by(3).for_each(|m| *m = f32::NEG_INFINITY);
        }
        leaf(&mut case, t, mask_ne, values)
    });
    let sinks = sinks.then(|| case.leaf(F32, [heads, 1, 1, 1], &normal(3, heads)));
    let y = case.b.node(SoftMax { scale: 0.7, max_bias }, &[Some(x), mask, sinks]).unwrap();
    let what = format!("{ne:?} bias {max_bias} apart {apart}");
    sweep.check(&case.build(), &[y], 1e-10, &what);
}

//! Cases of SSM_CONV and SSM_SCAN.

use super::Sweep;
use fanout::ops::ssm::Ssm;
use fanout::tensor::DType::{F32, I32};
use fanout::tensor::TensorDesc;
use fanout_testing::inputs::{normal, uniform};
use fanout_testing::op_case::Case;

/// Channels and tokens around the sizes of a tile, and rows of states around the limits of each entry.
pub fn run(sweep: &Sweep) {
    for [d_conv, channels, tokens, sequences] in
        [[4, 31, 1, 2], [4, 33, 65, 1], [1, 32, 64, 2], [64, 5, 70, 1], [65, 33, 66, 1], [3, 70, 9, 3], [2, 1, 130, 1]]
    {
        let window = d_conv - 1 + tokens;
        let mut case = Case::new();
        let gap = 4 * window * channels + 8;
        let desc = TensorDesc::strided(F32, [window, channels, sequences, 1], [4, 4 * window, gap, gap * sequences]);
        let x = case.leaf_with_desc(desc.unwrap(), &normal(1, window * channels * sequences));
        let w = case.leaf(F32, [d_conv, channels, 1, 1], &normal(2, d_conv * channels));
        let y = case.b.node(Ssm::Conv, &[Some(x), Some(w)]).unwrap();
        let what = format!("convolution {d_conv} {channels} {tokens} {sequences}");
        sweep.check(&case.build(), &[y], 1e-10, &what);
    }
    for [n, hd, heads, groups] in
        [[16, 1, 9, 1], [32, 3, 4, 2], [33, 2, 3, 3], [64, 33, 2, 1], [128, 4, 2, 1], [129, 1, 2, 2], [256, 17, 1, 1]]
    {
        for (by_element, snapshots, tokens) in [(false, 1, 1), (false, 3, 2), (false, 2, 37), (true, 1, 4)] {
            check_scan(sweep, [n, hd, heads, groups], tokens, by_element, snapshots);
        }
    }
}

#[track_caller]
fn check_scan(sweep: &Sweep, [n, hd, heads, groups]: [usize; 4], tokens: usize, by_element: bool, snapshots: u32) {
    let (sequences, slots) = (2, 3);
    let mut case = Case::new();
    let spread = |case: &mut Case, ne: [usize; 4], seed| {
        let nb2 = 4 * ne[0] * ne[1] + 12;
        let desc = TensorDesc::strided(F32, ne, [4, 4 * ne[0], nb2, nb2 * ne[2] + 4]).unwrap();
        Some(case.leaf_with_desc(desc, &normal(seed, ne.iter().product())))
    };
    let states = Some(case.leaf(F32, [n, hd, heads, slots], &normal(1, n * hd * heads * slots)));
    let x = spread(&mut case, [hd, heads, tokens, sequences], 2);
    let mut steps = uniform(3, heads * tokens * sequences, -3.0, 1.0);
    steps[0] = 20.5;
    let dt = Some(case.leaf(F32, [heads, tokens, sequences, 1], &steps));
    let of_head = if by_element { n } else { 1 };
    let a = Some(case.leaf(F32, [of_head, heads, 1, 1], &uniform(4, of_head * heads, -1.5, -0.05)));
    let b = spread(&mut case, [n, groups, tokens, sequences], 5);
    let c = spread(&mut case, [n, groups, tokens, sequences], 6);
    let ids = Some(case.indices(I32, [sequences, 1, 1, 1], &[2, 0]));
    let y = case.b.node(Ssm::Scan { snapshots }, &[states, x, dt, a, b, c, ids]).unwrap();
    let what = format!("scan {n} {hd} {heads} {groups} {tokens} {by_element} {snapshots}");
    sweep.check(&case.build(), &[y], 1e-10, &what);
}

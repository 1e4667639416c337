//! Cases of LIGHTNING_INDEXER, DSV4_HC_COMB, DSV4_HC_PRE and DSV4_HC_POST.

use super::Sweep;
use super::layouts::{LAYOUTS, Layout, leaf, onto};
use fanout::ops::dsv4::Dsv4;
use fanout::tensor::DType::{BF16, F16, F32};
use fanout_testing::op_case::Case;

/// Bound of the NMSE: f32 sums in another order, and exponentials that differ in the last bits.
const BOUND: f64 = 1e-11;

pub fn run(sweep: &Sweep) {
    for (k, layout) in LAYOUTS.into_iter().enumerate() {
        for (n, streams, tokens) in [(1, 1, 1), (70, 4, 5), (300, 3, 2)] {
            connections(sweep, layout, n, streams, tokens + k);
        }
    }
    for (width, heads, tokens, cells, batches, mask_batches) in [
        (128, 64, 1, 100, 1, 1),
        (64, 8, 3, 33, 2, 1),
        (1, 1, 1, 1, 1, 1),
        (256, 5, 2, 64, 4, 2),
        (80, 37, 2, 31, 1, 1),
    ] {
        for (dtype, layout) in [(F32, Layout::Packed), (F16, Layout::Gaps), (BF16, Layout::Packed)] {
            let mut case = Case::new();
            let srcs = [
                Some(leaf(&mut case, F32, [width, heads, tokens, batches], layout, 1)),
                Some(leaf(&mut case, dtype, [width, 1, cells, batches], layout, 2)),
                Some(leaf(&mut case, F32, [heads, tokens, 1, batches], layout, 3)),
                Some(leaf(&mut case, F16, [cells, tokens, 1, mask_batches], layout, 4)),
            ];
            let dst = onto(&mut case, F32, [cells, tokens, 1, batches], layout);
            let dst = case.b.node_into(Dsv4::LightningIndexer, &srcs, dst).unwrap();
            let what = format!("indexer of {width} {heads} {tokens} {cells} {batches}, keys of {dtype}");
            sweep.check(&case.build(), &[dst], BOUND, &what);
        }
    }
}

#[track_caller]
fn connections(sweep: &Sweep, layout: Layout, n: usize, streams: usize, tokens: usize) {
    let mut case = Case::new();
    let mut source = |ne, seed| Some(leaf(&mut case, F32, ne, layout, seed));
    let (mixes, scale, base) = (source([24, tokens, 1, 1], 1), source([5, 1, 1, 1], 2), source([24, 1, 1, 1], 3));
    let (x, gates) = (source([n, streams, tokens, 1], 4), source([n, streams, tokens, 1], 5));
    let (weights, layer) = (source([streams, tokens, 1, 1], 6), source([n, tokens, 1, 1], 7));
    let comb = source([streams, streams, tokens, 1], 8);
    let mut dsts = Vec::new();
    let mut node = |op: Dsv4, srcs: &[_], ne| {
        let dst = onto(&mut case, F32, ne, layout);
        dsts.push(case.b.node_into(op, srcs, dst).unwrap());
    };
    for iterations in [1, 20] {
        node(Dsv4::HcComb { eps: 1e-6, iterations }, &[mixes, scale, base], [4, 4, tokens, 1]);
    }
    node(Dsv4::HcPre { scale: 0.5, gated: false }, &[x, weights], [n, tokens, 1, 1]);
    node(Dsv4::HcPre { scale: 2.0, gated: true }, &[x, gates], [n, tokens, 1, 1]);
    node(Dsv4::HcPost, &[layer, x, weights], [n, streams, tokens, 1]);
    node(Dsv4::HcPost, &[layer, x, weights, comb], [n, streams, tokens, 1]);
    sweep.check(&case.build(), &dsts, BOUND, &format!("hyper-connections of {n} {streams} {tokens} {layout:?}"));
}

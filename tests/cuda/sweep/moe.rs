//! Cases of a mixture of experts, fused: the router, and the weighted sum of the experts' results.

use super::Sweep;
use fanout::graph::TensorId;
use fanout::ops::binary::Binary;
use fanout::ops::reduce::Reduce;
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::ops::unary::Unary;
use fanout::tensor::DType::{F16, F32, I32};
use fanout::tensor::TensorDesc;
use fanout_testing::compare;
use fanout_testing::inputs::normal;
use fanout_testing::op_case::{BuiltCase, Case};

const SOFT_MAX: SoftMax = SoftMax { scale: 1.5, max_bias: 0.0 };

/// Bounds of the sums of weights. Sums of some tokens are below the first one, of others above the second one.
const BOUNDS: [[f32; 2]; 2] = [[0.5, f32::INFINITY], [0.25, 0.5]];

pub fn run(sweep: &Sweep) {
    for sizes in [[128, 8, 1], [8, 2, 5], [200, 32, 3], [256, 6, 9], [1, 1, 1]] {
        for bounds in [None, Some(BOUNDS[0]), Some(BOUNDS[1])] {
            for in_place in [false, true] {
                route(sweep, &Router { bounds, in_place, ..Router::new(sizes) }, true);
            }
        }
        ties(sweep, sizes);
        nan(sweep, sizes);
    }
    // More experts than a warp sorts, and more used ones than it has lanes.
    for sizes in [[300, 8, 2], [64, 33, 2]] {
        route(sweep, &Router::new(sizes), false);
    }
    // The kernel has neither masks nor the order of scales that are not positive.
    let usual = Router::new([64, 8, 3]);
    for (scale, max_bias, mask) in [(-1.5, 0.0, false), (0.0, 0.0, false), (1.5, 0.0, true), (1.5, 4.0, true)] {
        route(sweep, &Router { op: SoftMax { scale, max_bias }, mask, ..usual.clone() }, false);
    }
    for used in [2, 4, 6, 8] {
        for (n, tokens) in [(2048, 1), (77, 3)] {
            weighted_sum(sweep, [n, used, tokens]);
        }
    }
}

#[derive(Clone, Debug)]
struct Router {
    /// Experts, used experts, tokens.
    sizes: [usize; 3],
    op: SoftMax,
    mask: bool,
    bounds: Option<[f32; 2]>,
    in_place: bool,
}

/// The graph of a router.
struct RouterCase {
    case: BuiltCase,
    sorted: TensorId,
    /// The results of the other nodes that can be read after the run: no later node writes onto them.
    results: Vec<TensorId>,
    nodes: u64,
}

impl Router {
    fn new(sizes: [usize; 3]) -> Router {
        Router { sizes, op: SOFT_MAX, mask: false, bounds: None, in_place: false }
    }

    fn random_logits(&self) -> Vec<f32> {
        normal(1, self.sizes[0] * self.sizes[2])
    }

    fn build(&self, logits: &[f32]) -> RouterCase {
        let ([experts, used, tokens], mut case) = (self.sizes, Case::new());
        let shape = |ne| TensorDesc::contiguous(F32, ne).unwrap();
        let [rows, list, one] = [[experts, tokens, 1, 1], [used, tokens, 1, 1], [1, tokens, 1, 1]];
        let logits = case.leaf(F32, rows, logits);
        let mask = self.mask.then(|| case.leaf(F16, rows, &normal(2, experts * tokens)));
        let on = |case: &mut Case, of, ne| {
            if self.in_place { case.b.view(of, shape(ne), 0) } else { case.b.leaf(F32, ne) }.unwrap()
        };
        let p = on(&mut case, logits, rows);
        let p = case.b.node_into(self.op, &[Some(logits), mask], p).unwrap();
        let sorted = case.b.node(Sort::Argsort { descending: true }, &[Some(p)]).unwrap();
        let nb = [4, 4 * experts, 4 * experts * tokens, 4 * experts * tokens];
        let ids = case.b.view(sorted, TensorDesc::strided(I32, list, nb).unwrap(), 0).unwrap();
        let table = case.b.view(p, shape([1, experts, tokens, 1]), 0).unwrap();
        let w = case.b.node(Rows::GetRows, &[Some(table), Some(ids)]).unwrap();
        let w = case.b.view(w, shape(list), 0).unwrap();
        let sum = case.b.node(Reduce::SumRows, &[Some(w)]).unwrap();
        let mut divisor = sum;
        if let Some([min, max]) = self.bounds {
            let onto = on(&mut case, sum, one);
            divisor = case.b.node_into(Unary::Clamp { min, max }, &[Some(sum)], onto).unwrap();
        }
        let y = on(&mut case, w, list);
        let y = case.b.node_into(Binary::Div, &[Some(w), Some(divisor)], y).unwrap();
        let mut results = vec![p, divisor, y];
        if !self.in_place {
            results.extend([w, sum]);
        }
        RouterCase { case: case.build(), sorted, results, nodes: 5 + u64::from(self.bounds.is_some()) }
    }
}

/// Runs a router, which is one launch if it is `fused`.
#[track_caller]
fn route(sweep: &Sweep, router: &Router, fused: bool) {
    let what = format!("{router:?}");
    let RouterCase { case, sorted, results, nodes } = router.build(&router.random_logits());
    sweep.check(&case, &results, 1e-12, &what);
    sweep.check_bytes(&case, &[sorted], &what);
    sweep.check_launches(if fused { 1 } else { nodes }, &what, || case.run(&sweep.gpu));
}

/// Equal logits, and logits of minus infinity, are sorted by index.
#[track_caller]
fn ties(sweep: &Sweep, sizes: [usize; 3]) {
    let (router, what) = (Router::new(sizes), format!("ties of {sizes:?}"));
    let rounded = |(i, v): (usize, f32)| if i % 5 == 3 { f32::NEG_INFINITY } else { v.round() };
    let logits: Vec<f32> = router.random_logits().into_iter().enumerate().map(rounded).collect();
    let RouterCase { case, sorted, results, .. } = router.build(&logits);
    sweep.check(&case, &results, 1e-12, &what);
    sweep.check_bytes(&case, &[sorted], &what);
    sweep.check_launches(1, &what, || case.run(&sweep.gpu));
}

/// A NaN, or infinity, makes all probabilities of its token NaN: experts are sorted by index, and CLAMP gives its upper bound.
#[track_caller]
fn nan(sweep: &Sweep, sizes: [usize; 3]) {
    for (value, bounds) in [(f32::NAN, None), (f32::NAN, Some(BOUNDS[1])), (f32::INFINITY, Some(BOUNDS[1]))] {
        let router = Router { bounds, ..Router::new(sizes) };
        let mut logits = router.random_logits();
        // In the first and the last token.
        let last = logits.len() - 1;
        [0, last].into_iter().for_each(|at| logits[at] = value);
        let RouterCase { case, sorted, results, .. } = router.build(&logits);
        let what = format!("a logit of {value} for {router:?}");
        sweep.check_bytes(&case, &[sorted], &what);
        let got = sweep.check_launches(1, &what, || case.run(&sweep.gpu));
        let want = case.run(&sweep.cpu);
        for &result in &results {
            compare::assert_close(&got.values(result), &want.values(result), 1e-5, 1e-30, &what);
        }
    }
}

/// The sum must have the bytes of separate nodes, which the CPU's exact path has.
#[track_caller]
fn weighted_sum(sweep: &Sweep, [n, used, tokens]: [usize; 3]) {
    let mut case = Case::new();
    let x = case.leaf(F32, [n, used, tokens, 1], &normal(1, n * used * tokens));
    let w = case.leaf(F32, [1, used, tokens, 1], &normal(2, used * tokens));
    let product = case.b.node(Binary::Mul, &[Some(x), Some(w)]).unwrap();
    case.b.set_use_count(product, used as u32).unwrap();
    let mut sum = None;
    for expert in 0..used {
        let nb = [4, 4 * n * used, 4 * n * used * tokens, 4 * n * used * tokens];
        let part =
            case.b.view(product, TensorDesc::strided(F32, [n, tokens, 1, 1], nb).unwrap(), 4 * n * expert).unwrap();
        case.b.set_use_count(part, 1).unwrap();
        sum = Some(match sum {
            None => part,
            Some(before) => {
                let sum = case.b.node(Binary::Add, &[Some(before), Some(part)]).unwrap();
                if expert + 1 < used {
                    case.b.set_use_count(sum, 1).unwrap();
                }
                sum
            }
        });
    }
    let case = case.build();
    let what = format!("the weighted sum of [n, used, tokens] {:?}", [n, used, tokens]);
    sweep.check_bytes(&case, &[sum.unwrap()], &what);
    sweep.check_launches(1, &what, || case.run(&sweep.gpu));
}

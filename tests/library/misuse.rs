//! Mistakes of authors of runtimes while they build a task: each is an error of the call that is wrong, which names the node and its
//! sources. A permutation, a reshape and the start of a view never split the blocks of a type.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::Device;
use fanout::graph::{BuildError, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::concat::Concat;
use fanout::ops::copy::CopyOp;
use fanout::ops::flash_attn::FlashAttn;
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::reduce::Reduce;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::Unary;
use fanout::ops::{Op, OpCode, OutputSpec};
use fanout::sched::{Options, Plan, SchedError, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;

const ATTENTION: FlashAttn =
    FlashAttn { scale: 0.25, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };

type Input = (DType, [usize; 4]);

/// A task with inputs of these types and shapes, which are named a, b, c and so on.
fn task(inputs: &[Input]) -> (TaskBuilder, Vec<Option<TensorId>>) {
    let mut task = TaskBuilder::new();
    let names = ["a", "b", "c", "d", "e", "f"];
    let ids = inputs.iter().zip(names).map(|(&(dtype, ne), name)| task.input(name, dtype, ne).ok()).collect();
    (task, ids)
}

#[test]
fn wrong_nodes_are_refused_with_their_sources() {
    use DType::{F16, F32, I32, Q8_0};
    let (x, w) = ((F32, [32, 4, 1, 1]), (Q8_0, [32, 8, 1, 1]));
    let (q, kv) = ((F32, [16, 4, 2, 1]), (F16, [16, 32, 2, 1]));
    let rope = |change: fn(&mut Rope)| {
        let mut rope = Rope::new(RopeMode::Neox, 32);
        change(&mut rope);
        Op::from(rope)
    };
    let positions = (I32, [1, 1, 1, 1]);
    let rows = (F32, [32, 2, 1, 1]);
    let glu = |kind| Op::from(Glu { kind, swapped: false });
    let cases: Vec<(Op, Vec<Input>, &str)> = vec![
        (Norm::RmsNorm { eps: -1.0 }.into(), vec![x], "eps"),
        (Norm::RmsNorm { eps: f32::NAN }.into(), vec![x], "eps"),
        (Norm::Norm { eps: f32::NEG_INFINITY }.into(), vec![x], "eps"),
        (Norm::RmsNorm { eps: 1e-6 }.into(), vec![], "source 0 is missing"),
        (Norm::RmsNorm { eps: 1e-6 }.into(), vec![x, x], "source 1 is given"),
        (MulMat::PLAIN.into(), vec![w, x, x], "source 2 is given"),
        (MulMat::PLAIN.into(), vec![w], "source 1 is missing"),
        (MulMat::PLAIN.into(), vec![w, (F32, [64, 4, 1, 1])], "got dst="),
        (MulMat::PLAIN.into(), vec![w, (F32, [32, 4, 3, 1]), x], "source 2 is given"),
        (MulMat::BY_ID.into(), vec![w, x], "source 2 is missing"),
        (glu(GluKind::Swiglu), vec![(F32, [7, 4, 1, 1])], "got"),
        (glu(GluKind::Swiglu), vec![x, (F32, [16, 4, 1, 1])], "got"),
        (Binary::Add.into(), vec![x, (F32, [32, 3, 1, 1])], "got"),
        (Binary::Mul.into(), vec![x, (F32, [5, 4, 1, 1])], "got"),
        (Binary::Add.into(), vec![x], "source 1 is missing"),
        (rope(|_| ()), vec![rows, (I32, [2, 1, 1, 1])], "got"),
        (rope(|_| ()), vec![(F32, [32, 1, 1, 1])], "source 1 is missing"),
        (rope(|_| ()), vec![(F32, [32, 1, 1, 1]), (F32, [1; 4])], "got"),
        (rope(|rope| rope.n_dims = 0), vec![(F32, [32, 1, 1, 1]), positions], "n_dims"),
        (rope(|rope| rope.n_dims = 64), vec![(F32, [32, 1, 1, 1]), positions], "got"),
        (SoftMax { scale: 1.0, max_bias: 0.0 }.into(), vec![x, (F16, [31, 4, 1, 1])], "got"),
        (SoftMax { scale: 1.0, max_bias: 1.0 }.into(), vec![x], "got"),
        (ATTENTION.into(), vec![q, kv], "source 2 is missing"),
        (ATTENTION.into(), vec![q, (F16, [8, 32, 2, 1]), kv], "equally long"),
        (ATTENTION.into(), vec![q, kv, (F16, [16, 31, 2, 1])], "positions"),
        (ATTENTION.into(), vec![q, kv, kv, (F32, [32, 4, 1, 1])], "the mask is F16"),
        (ATTENTION.into(), vec![q, kv, kv, (F16, [32, 3, 1, 1])], "got"),
        (ATTENTION.into(), vec![q, (F16, [16, 32, 3, 1]), kv], "multiple"),
        (Rows::GetRows.into(), vec![w], "source 1 is missing"),
        (Rows::GetRows.into(), vec![w, x], "got"),
        (Concat::Concat { dim: 9 }.into(), vec![x, x], "dim"),
        (Concat::Concat { dim: 0 }.into(), vec![x, (F32, [32, 5, 1, 1])], "got"),
        (Unary::Sqr.into(), vec![], "source 0 is missing"),
        (Concat::Repeat.into(), vec![x, x], "source 1 is given"),
    ];
    for (op, inputs, text) in cases {
        let (mut task, ids) = task(&inputs);
        task.input("unused", F32, [1; 4]).unwrap();
        let first = task_input(&mut task);
        let before = task.node(Unary::Sqr, &[Some(first)]).unwrap();
        let what = format!("{op:?} of {inputs:?}");
        let error = task.node(op.clone(), &ids).expect_err(&what);
        let BuildError::Node(node) = &error else { panic!("{what}: {error:?}") };
        assert_eq!((node.index, node.op, node.sources.len()), (1, op.code(), ids.len()), "{what}");
        let shown = error.to_string();
        assert!(shown.contains(text), "{what}: {shown}");
        for name in ["\"a\"", "\"b\"", "\"c\""].iter().take(ids.len()) {
            assert!(shown.contains(name), "{what}: {shown}");
        }
        // The refused node has left nothing behind.
        let after = task.node(Unary::Sqr, &[Some(before)]).unwrap();
        let task = task.build().unwrap();
        let nodes = task.graph().nodes();
        assert_eq!(nodes.iter().map(|node| node.dst).collect::<Vec<_>>(), [before, after], "{what}");
        assert_eq!(task.graph().slot_sizes().len(), inputs.len() + 4, "{what}");
    }
}

/// A node that is right, and what makes it wrong.
struct Valid {
    op: Op,
    inputs: Vec<Input>,
    /// Dimensions of a source that other sources determine: a longer one is wrong.
    tied: &'static [(usize, usize)],
    /// Types that a source never has.
    never: &'static [(usize, DType)],
}

fn valid_nodes(rng: &mut fastrand::Rng) -> Vec<Valid> {
    use DType::{BF16, F16, F32, I32, Q4_K, Q8_0};
    let weights = [F32, F16, BF16, Q8_0, Q4_K][rng.usize(..5)];
    let (k, m, n) = (256 * rng.usize(1..3), rng.usize(1..9), rng.usize(1..9));
    let (heads, positions, width) = (rng.usize(1..4), rng.usize(1..50), 8 * rng.usize(1..5));
    let cache = [F16, BF16][rng.usize(..2)];
    let kv = (cache, [width, positions, heads, 1]);
    let attention =
        vec![(F32, [width, n, 2 * heads, 1]), kv, kv, (F16, [positions, n, 1, 1]), (F32, [2 * heads, 1, 1, 1])];
    let x = (F32, [2 * width, n, 3, 1]);
    let of = |op: Op, inputs: Vec<Input>, tied, never| Valid { op, inputs, tied, never };
    vec![
        of(
            MulMat::PLAIN.into(),
            vec![(weights, [k, m, 1, 1]), (F32, [k, n, 3, 1])],
            &[(0, 0), (0, 2), (0, 3), (1, 0)],
            &[(0, I32), (1, I32)],
        ),
        of(
            MulMat::BY_ID.into(),
            vec![(weights, [k, m, 4, 1]), (F32, [k, 2, n, 1]), (I32, [2, n, 1, 1])],
            &[(0, 0), (0, 3), (1, 0), (1, 2), (2, 1)],
            &[(0, I32), (1, I32), (2, F32)],
        ),
        of(Binary::Add.into(), vec![x, x], &[(1, 0), (1, 1), (1, 2), (1, 3)], &[(0, I32), (1, I32), (1, Q8_0)]),
        of(
            Rope::new(RopeMode::Neox, 2 * width as u32).into(),
            vec![x, (I32, [3, 1, 1, 1])],
            &[(1, 0), (1, 1)],
            &[(0, I32), (1, F32)],
        ),
        of(
            SoftMax { scale: 1.0, max_bias: 0.0 }.into(),
            vec![x, (F16, [2 * width, n, 1, 1])],
            &[(1, 0), (1, 2), (1, 3)],
            &[(0, F16), (1, I32)],
        ),
        of(
            ATTENTION.into(),
            attention,
            &[(1, 0), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 0), (3, 3), (4, 0), (4, 1)],
            &[(0, I32), (1, I32), (2, I32), (3, F32), (4, F16)],
        ),
        of(Rows::GetRows.into(), vec![(weights, [k, m, 1, 1]), (I32, [n, 1, 1, 1])], &[(1, 1), (1, 2)], &[(1, F32)]),
        of(
            Glu { kind: GluKind::Swiglu, swapped: false }.into(),
            vec![x, x],
            &[(1, 0), (1, 1), (1, 2)],
            &[(0, I32), (1, I32)],
        ),
        of(Concat::Concat { dim: 0 }.into(), vec![x, x], &[(1, 1), (1, 2), (1, 3)], &[(1, F16)]),
        of(Norm::RmsNorm { eps: 1e-6 }.into(), vec![x], &[], &[(0, I32), (0, Q8_0)]),
    ]
}

/// Nodes of random shapes that are right become wrong by one change. A source that is missing, one too many or a dimension is refused at
/// once; a type by the devices, since they have different ones, before anything runs.
#[test]
fn a_wrong_source_is_refused_at_its_node() {
    let devices = [CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>];
    let mut types = 0;
    for seed in 0..400 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut nodes = valid_nodes(&mut rng);
        let Valid { op, mut inputs, tied, never } = nodes.swap_remove(rng.usize(..nodes.len()));
        let (mut task_of_valid, ids) = task(&inputs);
        task_of_valid.node(op.clone(), &ids).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let (mut absent, mut is_type) = (None, false);
        match rng.usize(..6) {
            // The second source of these may be absent.
            0 if matches!(op.code(), OpCode::SoftMax | OpCode::Glu) => absent = Some(0),
            0 => absent = Some(rng.usize(..inputs.len().min(3))),
            1 => inputs.push((DType::F32, [1; 4])),
            2 => {
                let (source, dtype) = never[rng.usize(..never.len())];
                (inputs[source].0, is_type) = (dtype, true);
            }
            _ if tied.is_empty() => inputs.push(inputs[0]),
            _ => {
                let (source, d) = tied[rng.usize(..tied.len())];
                let (dtype, ne) = &mut inputs[source];
                ne[d] += if d == 0 { dtype.block_len() } else { 1 };
            }
        }
        let (mut task, mut ids) = task(&inputs);
        if let Some(source) = absent {
            ids[source] = None;
        }
        let what = format!("seed {seed}: {op:?} of {inputs:?}, without {absent:?}");
        let added = task.node(op.clone(), &ids);
        if let (true, Ok(dst)) = (is_type, &added) {
            task.name(*dst, "wrong");
            let error = Plan::new(Arc::new(task.build().unwrap()), &devices, &Options::default()).expect_err(&what);
            assert!(matches!(error, SchedError::NoDeviceForNode { .. }), "{what}: {error:?}");
            assert!(error.to_string().contains("\"wrong\""), "{what}: {error}");
            types += 1;
            continue;
        }
        let error = added.expect_err(&what);
        let BuildError::Node(node) = &error else { panic!("{what}: {error:?}") };
        assert_eq!((node.index, node.op, node.sources.len()), (0, op.code(), ids.len()), "{what}");
        let shown = error.to_string();
        for (name, id) in ["\"a\"", "\"b\"", "\"c\"", "\"d\"", "\"e\"", "\"f\""].iter().zip(&ids) {
            assert!(id.is_none() || shown.contains(name), "{what}: {shown}");
        }
        assert!(task.build().is_ok_and(|task| task.graph().nodes().is_empty()), "{what}");
    }
    assert!((10..100).contains(&types), "{types} types were left to the devices");
}

fn task_input(task: &mut TaskBuilder) -> TensorId {
    task.input("first", DType::F32, [4, 1, 1, 1]).unwrap()
}

#[test]
fn wrong_destinations_are_refused() {
    let ne = [8, 4, 1, 1];
    let (mut task, ids) = task(&[(DType::F32, ne), (DType::F32, ne)]);
    let cache = task.stored("cache", TensorDesc::contiguous(DType::F16, ne).unwrap(), 0, None).unwrap();
    let flat = OutputSpec { dtype: DType::F32, ne: [32, 1, 1, 1] };
    assert!(matches!(task.node_as(Unary::Sqr, &ids[..1], flat), Err(BuildError::Node(_))));
    let input = ids[1].unwrap();
    assert!(matches!(task.node_onto(CopyOp::Cpy, &ids[..1], input), Err(BuildError::Tensor(_))), "onto an input");
    assert!(
        matches!(task.node_onto(Reduce::Cumsum, &[Some(cache)], cache), Err(BuildError::Node(_))),
        "onto its source"
    );
    assert!(task.node(Unary::Sqr, &[None; 12]).is_err(), "many absent sources");
    task.node_onto(CopyOp::Cpy, &ids[..1], cache).unwrap();
    assert_eq!(task.build().unwrap().graph().nodes().len(), 1);
}

#[test]
fn tensors_of_another_task_are_refused() {
    let ne = [8, 4, 1, 1];
    let (mut one, own) = task(&[(DType::F32, ne)]);
    let (mut other, foreign) = task(&[(DType::F32, ne)]);
    let (own, foreign) = (own[0].unwrap(), foreign[0].unwrap());
    let desc = TensorDesc::contiguous(DType::F32, ne).unwrap();
    let is_foreign = |error: BuildError| matches!(error, BuildError::Tensor("a tensor of another graph"));
    assert!(one.tensor(foreign).is_none());
    assert!(is_foreign(one.node(Binary::Add, &[Some(own), Some(foreign)]).unwrap_err()));
    assert!(is_foreign(one.view(foreign, desc, 0).unwrap_err()));
    assert!(is_foreign(one.reshape(foreign, [32, 1, 1, 1]).unwrap_err()));
    assert!(is_foreign(one.permute(foreign, [1, 0, 2, 3]).unwrap_err()));
    assert!(is_foreign(one.desc(foreign).unwrap_err()));
    assert!(is_foreign(one.output(foreign).unwrap_err()));
    assert!(is_foreign(one.node_onto(CopyOp::Cpy, &[Some(own)], foreign).unwrap_err()));
    assert!(is_foreign(one.node(CopyOp::Cpy, &[Some(own), Some(foreign)]).unwrap_err()));
    assert!(is_foreign(one.node(Unary::Sqr, &[None, Some(foreign)]).unwrap_err()));
    one.name(foreign, "not of this task");
    let sum = one.node(Binary::Add, &[Some(own), Some(own)]).unwrap();
    let one = one.build().unwrap();
    assert_eq!(one.name(own), "a");
    assert!(other.output(sum).is_err());
}

/// The bytes of the block that holds an element, and the element's place in it.
fn place(desc: &TensorDesc, at: [usize; 4]) -> (usize, usize) {
    let (block, nb) = (desc.dtype().block_len(), desc.nb());
    (at[0] / block * nb[0] + at[1] * nb[1] + at[2] * nb[2] + at[3] * nb[3], at[0] % block)
}

fn indices(ne: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    let count: usize = ne.iter().product();
    (0..count).map(move |i| [i % ne[0], i / ne[0] % ne[1], i / ne[0] / ne[1] % ne[2], i / ne[0] / ne[1] / ne[2]])
}

/// Each permutation and reshape of each type either is refused or shows every element at the place that it has.
#[test]
fn views_show_elements_where_they_are_or_are_refused() {
    let axes: Vec<[usize; 4]> = indices([4; 4]).collect();
    let mut refused = 0;
    for &dtype in DType::ALL {
        // Dimension 1 is a whole number of blocks too, so that a moved dimension 0 would have whole rows.
        let ne = [2 * dtype.block_len(), dtype.block_len(), 2, 1];
        let (mut task, ids) = task(&[(dtype, ne)]);
        let (whole, id) = (TensorDesc::contiguous(dtype, ne).unwrap(), ids[0].unwrap());
        for &axes in &axes {
            let mut sorted = axes;
            sorted.sort_unstable();
            let view = task.permute(id, axes);
            assert_eq!(view.is_ok(), sorted == [0, 1, 2, 3] && (axes[0] == 0 || !dtype.is_block()), "{dtype} {axes:?}");
            refused += usize::from(view.is_err());
            let Ok(view) = view else { continue };
            let view = task.desc(view).unwrap();
            for at in indices(ne).step_by(7) {
                let mut moved = [0; 4];
                (0..4).for_each(|d| moved[axes[d]] = at[d]);
                assert_eq!(place(&view, moved), place(&whole, at), "{dtype} {axes:?} {at:?}");
            }
        }
        let count: usize = ne.iter().product();
        for (parts, rows) in [(1, 1), (2, 1), (4, 2), (3, 1), (2 * count / dtype.block_len(), 1), (2 * count, 1)] {
            let new = [count / parts, parts / rows, rows, 1];
            let view = task.reshape(id, new);
            let fits = new.iter().product::<usize>() == count && new[0].is_multiple_of(dtype.block_len());
            assert_eq!(view.is_ok(), fits, "{dtype} {new:?}");
            let Ok(view) = view else { continue };
            let view = task.desc(view).unwrap();
            for (to, from) in indices(new).zip(indices(ne)).step_by(7) {
                assert_eq!(place(&view, to), place(&whole, from), "{dtype} {new:?}");
            }
        }
        // Parts of a tensor: whole blocks, within its memory.
        let row = TensorDesc::contiguous(dtype, [ne[0], 1, 1, 1]).unwrap();
        let bytes = dtype.block_bytes();
        assert!(task.view(id, row, whole.extent() - row.extent()).is_ok(), "{dtype}");
        for offset in [whole.extent() - row.extent() + bytes, whole.extent(), usize::MAX] {
            assert!(task.view(id, row, offset).is_err(), "{dtype} {offset}");
        }
        assert_eq!(task.view(id, row, bytes - bytes / 2).is_ok(), !dtype.is_block(), "{dtype}");
        // Rows with gaps between them.
        let gaps = [bytes, 2 * bytes + 2, 64 * bytes, 128 * bytes];
        let gaps = TensorDesc::strided(dtype, [2 * dtype.block_len(), 3, 1, 1], gaps).unwrap();
        let gaps = task.stored("gaps", gaps, 0, None).unwrap();
        let part = TensorDesc::contiguous(dtype, [dtype.block_len(), 1, 1, 1]).unwrap();
        assert!(task.view(gaps, part, 2 * bytes + 2).is_ok(), "{dtype}: row 1");
        assert_eq!(task.view(gaps, part, 2 * bytes + 3).is_ok(), !dtype.is_block() || bytes == 1, "{dtype}: in row 1");
    }
    assert!(refused > DType::ALL.len() * (256 - 24));
}

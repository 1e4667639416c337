//! The barriers of a decoded token: its products are short, so barriers are a part of its time.

use super::*;
use crate::device::Region;
use crate::graph::TensorId;
use crate::ops::binary::Binary;
use crate::ops::flash_attn::FlashAttn;
use crate::ops::glu::{Glu, GluKind};
use crate::ops::mul_mat::MulMat;
use crate::ops::rope::{Rope, RopeMode};
use crate::ops::rows::Rows;
use crate::tensor::DType::{F16, F32, I32, I64, Q4_0};

/// Width, head size, positions of the KV cache.
const WIDTH: usize = 512;
const HEAD: usize = 64;
const CONTEXT: usize = 32;

/// A layer of a llama for one token, with a feed-forward size.
fn layer(ff: usize) -> Graph {
    let mut b = Builder::new();
    let leaf = |b: &mut Builder, dtype, ne| b.leaf(dtype, ne).unwrap();
    let product = |b: &mut Builder, x: TensorId, k, m| {
        let weights = b.leaf(Q4_0, [k, m, 1, 1]).unwrap();
        b.node(MulMat::PLAIN, &[Some(weights), Some(x)]).unwrap()
    };
    let norm = |b: &mut Builder, x: TensorId| {
        let weights = b.leaf(F32, [WIDTH, 1, 1, 1]).unwrap();
        let normed = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
        b.node(Binary::Mul, &[Some(normed), Some(weights)]).unwrap()
    };
    let view = |b: &mut Builder, of, dtype, ne| b.view(of, TensorDesc::contiguous(dtype, ne).unwrap(), 0).unwrap();
    let x = leaf(&mut b, F32, [WIDTH, 1, 1, 1]);
    let positions = leaf(&mut b, I32, [1, 1, 1, 1]);
    let rows = leaf(&mut b, I64, [1, 1, 1, 1]);
    let normed = norm(&mut b, x);
    let [q, k, v] = [0; 3].map(|_| product(&mut b, normed, WIDTH, WIDTH));
    let [q, k] = [q, k].map(|t| {
        let heads = view(&mut b, t, F32, [HEAD, WIDTH / HEAD, 1, 1]);
        b.node(Rope::new(RopeMode::Normal, HEAD as u32), &[Some(heads), Some(positions)]).unwrap()
    });
    let cache = [k, v].map(|t| {
        let cache = leaf(&mut b, F16, [WIDTH, CONTEXT, 1, 1]);
        let (row, dst) = (view(&mut b, t, F32, [WIDTH, 1, 1, 1]), view(&mut b, cache, F16, [WIDTH, CONTEXT, 1, 1]));
        b.node_into(Rows::SetRows, &[Some(row), Some(rows), Some(cache)], dst).unwrap();
        let nb = [2, 2 * WIDTH, 2 * HEAD, 2 * WIDTH * CONTEXT];
        b.view(cache, TensorDesc::strided(F16, [HEAD, CONTEXT, WIDTH / HEAD, 1], nb).unwrap(), 0).unwrap()
    });
    let q = view(&mut b, q, F32, [HEAD, 1, WIDTH / HEAD, 1]);
    let mask = leaf(&mut b, F16, [CONTEXT, 1, 1, 1]);
    let op = FlashAttn { scale: 0.125, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
    let attention = b.node(op, &[Some(q), Some(cache[0]), Some(cache[1]), Some(mask)]).unwrap();
    let attention = view(&mut b, attention, F32, [WIDTH, 1, 1, 1]);
    let out = product(&mut b, attention, WIDTH, WIDTH);
    let x = b.node(Binary::Add, &[Some(out), Some(x)]).unwrap();
    let normed = norm(&mut b, x);
    let [gate, up] = [0; 2].map(|_| product(&mut b, normed, WIDTH, ff));
    let both = b.node(Glu { kind: GluKind::Swiglu, swapped: false }, &[Some(gate), Some(up)]).unwrap();
    let down = product(&mut b, both, ff, WIDTH);
    b.node(Binary::Add, &[Some(down), Some(x)]).unwrap();
    b.build()
}

/// Barriers that the leader passes in a run of a graph.
fn barriers(graph: Graph) -> usize {
    let budget = MemoryBudget::new(64 << 20);
    let device = CpuDevice::new("CPU", 1, MathMode::Fast, 64 << 20).unwrap();
    let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
    let program = CpuProgram::new(&Arc::new(graph), MathMode::Fast, 1).unwrap();
    let (pool, abort, pause) = (device.pool(), AtomicBool::new(false), || false);
    let bindings: [Region; 1] = [buffer.whole()];
    let bound = program.bind(&pool, &bindings, Locking::WAIT).unwrap().unwrap();
    let shared = HostMemory::scratch(program.shared, &budget).unwrap();
    let mut local = vec![0.0; program.floats];
    let team = Team::new(&abort, &pause);
    let leader = team.leader();
    let run = RunState {
        begins_at: RunPosition::default(),
        paused_by_leader: AtomicBool::new(false),
        polls_at_first_collective: true,
        shared: SharedScratch::new(&shared),
        bound: &bound,
        groups: &JoinedGroups::default(),
    };
    assert_eq!(program.run_steps(&leader, 0, &mut local, &run), None);
    assert!(team.failure().is_none(), "{:?}", team.failure());
    leader.phase()
}

/// One barrier before each product and before attention, and one before the first of the small steps after them, which the
/// leader runs alone. A product whose packed column is too large for each worker to pack it alone has one more.
#[test]
fn a_decoded_token_has_few_barriers() {
    if crate::cpu::simd::GemmKernels::of(Q4_0).is_none() {
        eprintln!("not run: this processor has no kernels for Q4_0");
        return;
    }
    // q, k, v; rope and cache; attention; output; add and norm; gate, up; SWIGLU; down; add.
    assert_eq!(barriers(layer(1024)), 12);
    // The column of `down` is packed together.
    assert_eq!(barriers(layer(8192)), 13);
}

//! What the memory pass guarantees: reuse in place, buffer limits, alignment, exclusive ring memory, small arenas.

use super::*;
use crate::device::DeviceKind;
use crate::device::noop::NoopDevice;
use crate::ops::OutputSpec;
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::softmax::SoftMax;
use crate::ops::unary::Unary;
use crate::sched::tests::graphs;
use crate::sched::verify::verify;
use crate::sched::{Options, Plan, TaskBuilder};
use crate::tensor::{DType, TensorDesc};
use fastrand::Rng;

fn layout(task: &Arc<Task>, devices: &Devices, depth: usize) -> Result<(Plan, MemoryLayout), SchedError> {
    let plan = Plan::new(Arc::clone(task), devices, &Options { depth, ..Options::default() })?;
    let layout = place_tensors(task, devices, &plan.copy_paths, &plan.split_graph, depth)?;
    Ok((plan, layout))
}

fn gpu() -> Vec<Arc<dyn Device>> {
    vec![NoopDevice::new("GPU0", DeviceKind::Gpu).shared()]
}

/// For each tensor of `ids`: the position in `ids` of the first one with the same allocation.
fn allocation_classes(ids: &[TensorId], task: &Task, layout: &MemoryLayout) -> Vec<usize> {
    let allocation = |id: TensorId| task.span(id).and_then(|(slot, _)| layout.slots[slot as usize]).unwrap();
    ids.iter().map(|&id| ids.iter().position(|&other| allocation(other) == allocation(id)).unwrap()).collect()
}

const ROW: [usize; 4] = [64, 4, 1, 1];

#[test]
fn destinations_reuse_dead_sources_where_the_op_allows_it() {
    type Build = fn(&mut TaskBuilder, TensorId) -> Vec<TensorId>;
    let cases: [(&str, Build, &[usize]); 7] = [
        (
            "a chain",
            |b, x| {
                let mut ids = vec![x];
                for _ in 0..4 {
                    ids.push(b.node(Unary::Sqrt, &[ids.last().copied()]).unwrap());
                }
                ids
            },
            &[0, 0, 0, 0, 0],
        ),
        (
            "a source that is read later",
            |b, x| {
                let y = b.node(Unary::Sqrt, &[Some(x)]).unwrap();
                vec![x, y, b.node(Binary::Add, &[Some(x), Some(y)]).unwrap()]
            },
            &[0, 1, 0],
        ),
        (
            "a source that is an output",
            |b, x| {
                b.output(x).unwrap();
                vec![x, b.node(Unary::Sqrt, &[Some(x)]).unwrap()]
            },
            &[0, 1],
        ),
        ("a source twice", |b, x| vec![x, b.node(Binary::Mul, &[Some(x), Some(x)]).unwrap()], &[0, 0]),
        (
            "a source and the same bytes in another order",
            |b, x| {
                let square = b.reshape(x, [16, 16, 1, 1]).unwrap();
                let turned = b.permute(square, [1, 0, 2, 3]).unwrap();
                let copied = b.node(CopyOp::Cont, &[Some(turned)]).unwrap();
                vec![x, copied]
            },
            &[0, 1],
        ),
        (
            "a destination of another shape",
            |b, x| {
                let out = OutputSpec { dtype: DType::F32, ne: [16, 16, 1, 1] };
                vec![x, b.node_as(CopyOp::Cont, &[Some(x)], out).unwrap()]
            },
            &[0, 1],
        ),
        (
            "the second source",
            |b, x| {
                let y = b.node(Unary::Sqr, &[Some(x)]).unwrap();
                let soft = SoftMax { scale: 1.0, max_bias: 0.0 };
                let z = b.node(soft, &[Some(x), Some(y)]).unwrap();
                vec![x, y, z, b.node(Binary::Add, &[Some(x), Some(z)]).unwrap()]
            },
            &[0, 1, 1, 0],
        ),
    ];
    for (name, build, expected) in cases {
        let mut b = TaskBuilder::new();
        let input = b.input("x", DType::F32, ROW).unwrap();
        let x = b.node(Unary::Sqr, &[Some(input)]).unwrap();
        let ids = build(&mut b, x);
        b.output(*ids.last().unwrap()).unwrap();
        let task = Arc::new(b.build().unwrap());
        let (_, layout) = layout(&task, &gpu(), 1).unwrap();
        assert_eq!(allocation_classes(&ids, &task, &layout), expected, "{name}");
    }
}

/// A sum of squares: all of its terms are live at once.
fn sum_of_squares(terms: usize) -> Arc<Task> {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, ROW).unwrap();
    let squares: Vec<TensorId> = (0..terms).map(|_| b.node(Unary::Sqr, &[Some(x)]).unwrap()).collect();
    let sum = |b: &mut TaskBuilder, a, c| b.node(Binary::Add, &[Some(a), Some(c)]).unwrap();
    let all = squares.into_iter().reduce(|a, c| sum(&mut b, a, c)).unwrap();
    b.name(all, "sum");
    b.output(all).unwrap();
    Arc::new(b.build().unwrap())
}

#[test]
fn buffers_respect_the_maximum_buffer_size() {
    let limited =
        |limit| vec![NoopDevice::new("GPU0", DeviceKind::Gpu).with_info(|info| info.max_buffer = limit).shared()];
    // 8 tensors of 1024 bytes are live at once: the replica of x, and the 7 squares.
    let task = sum_of_squares(7);
    for (limit, arena) in [(u64::MAX, vec![8192]), (8192, vec![8192]), (3000, vec![2048; 4]), (1024, vec![1024; 8])] {
        let (_, layout) = layout(&task, &limited(limit), 1).unwrap();
        assert_eq!(layout.arenas[0].arena, arena, "buffers of at most {limit}");
    }
    // The limit of 1023 bytes is rounded down to the alignment of 64.
    let refused = layout(&task, &limited(1023), 1).unwrap_err().to_string();
    assert_eq!(refused, "the tensor of slot 1 needs 1 KiB on GPU0, whose largest buffer is 960 B");
}

#[test]
fn allocations_respect_alloc_size_and_alignment() {
    let noop = NoopDevice::new("GPU0", DeviceKind::Gpu).with_info(|info| info.alignment = 256);
    let devices = vec![noop.with_padding(100).shared()];
    for depth in [1, 2] {
        let (plan, layout) = layout(&sum_of_squares(3), &devices, depth).unwrap();
        let allocations = layout.slots.iter().flatten().chain(&layout.replicas);
        assert!(
            allocations.clone().all(|allocation| allocation.offset % 256 == 0 && allocation.bytes == 1280),
            "{layout:?}"
        );
        verify(&plan, &devices).unwrap();
    }
}

#[test]
fn replicas_have_exclusive_memory_when_runs_overlap() {
    let task = Arc::new(
        graphs::TransformerTask { devices: 2, layers: 2, ..graphs::TransformerTask::default() }.build().unwrap(),
    );
    for (depth, kind) in [(1, ArenaKind::Arena), (2, ArenaKind::Ring), (4, ArenaKind::Ring)] {
        let (plan, layout) = layout(&task, &graphs::devices(2, true), depth).unwrap();
        assert!(layout.replicas.iter().all(|allocation| allocation.kind == kind));
        assert!(layout.slots.iter().flatten().all(|allocation| allocation.kind == ArenaKind::Arena));
        for (number, sizes) in layout.arenas.iter().enumerate().filter(|_| depth > 1) {
            let here =
                plan.split_graph.replicas.iter().zip(&layout.replicas).filter(|(replica, _)| replica.device == number);
            assert_eq!(sizes.ring, [here.map(|(_, allocation)| allocation.bytes).sum::<u64>()]);
        }
    }
}

/// A random task: each node reads a few of the tensors before it, mostly recent ones.
fn random(rng: &mut Rng, nodes: usize) -> Arc<Task> {
    let mut b = TaskBuilder::new();
    let mut all = vec![b.input("x", DType::F32, [16, 8, 1, 1]).unwrap()];
    for _ in 0..nodes {
        let back = if rng.u8(0..6) == 0 { all.len() } else { all.len().min(4) };
        let a = all[all.len() - 1 - rng.usize(0..back)];
        let ne = b.desc(a).unwrap().ne();
        let made = match rng.u8(0..4) {
            0 if ne[1] < 256 => b.node(Concat::Concat { dim: 1 }, &[Some(a), Some(a)]),
            1 if ne[1] > 1 => {
                let half = TensorDesc::contiguous(DType::F32, [ne[0], ne[1] / 2, 1, 1]).unwrap();
                let half = b.view(a, half, 0).unwrap();
                b.node(Unary::Sqr, &[Some(half)])
            }
            2 => {
                let alike: Vec<TensorId> = all.iter().copied().filter(|&id| b.desc(id).unwrap().ne() == ne).collect();
                b.node(Binary::Add, &[Some(a), alike.last().copied()])
            }
            _ => b.node(Unary::Sqrt, &[Some(a)]),
        };
        all.push(made.unwrap());
        if rng.u8(0..20) == 0 {
            b.output(all[all.len() - 1]).unwrap();
        }
    }
    b.output(all[all.len() - 1]).unwrap();
    Arc::new(b.build().unwrap())
}

/// Checks that arenas exceed the peak of live bytes by at most 10 %.
fn check_arenas(name: &str, task: &Arc<Task>, devices: &Devices, depth: usize) {
    let (plan, layout) = layout(task, devices, depth).unwrap();
    verify(&plan, devices).unwrap_or_else(|fault| panic!("{name}: {fault}"));
    let mut lives = Lifetimes::new(task, devices, &plan.split_graph);
    lives.reuse_in_place(task, &plan.split_graph);
    for (number, sizes) in layout.arenas.iter().enumerate() {
        let slots =
            (0..lives.slots.len()).filter(|&slot| lives.is_base(slot) && plan.split_graph.homes[slot] == Some(number));
        let mut alive: Vec<Lifetime> = slots.filter_map(|slot| lives.slots[slot]).collect();
        // With a greater depth, replicas lie in the ring instead of the arena.
        let replicas = plan.split_graph.replicas.iter().zip(&lives.replicas);
        let here = replicas.filter(|(replica, _)| depth == 1 && replica.device == number);
        alive.extend(here.map(|(_, life)| *life));
        let items: Vec<PackItem> = alive
            .iter()
            .map(|life| PackItem { start: life.start, end: life.end, bytes: life.bytes.next_multiple_of(64) })
            .collect();
        let (peak, used) = (pack::peak_bytes(&items), sizes.arena.iter().sum::<u64>());
        assert!(used >= peak && used * 10 <= peak * 11, "{name}, device {number}: {used} bytes for {peak}");
    }
}

#[test]
fn arenas_exceed_the_peak_of_live_bytes_by_at_most_10_percent() {
    let mut rng = Rng::with_seed(4);
    for round in 0..60 {
        let task = random(&mut rng, 10 + 4 * round);
        check_arenas(&format!("random task {round}"), &task, &gpu(), 1 + round % 2);
    }
    for (name, make) in graphs::ALL {
        for (count, depth) in [(1, 1), (2, 1), (2, 4), (3, 1), (4, 2)] {
            let task = Arc::new(make(count).unwrap());
            check_arenas(&format!("{name} on {count}"), &task, &graphs::devices(count, true), depth);
        }
    }
    let model = graphs::TransformerTask { devices: 2, layers: 12, experts: true, ..graphs::TransformerTask::default() };
    check_arenas("a model", &Arc::new(model.build().unwrap()), &graphs::devices(2, true), 1);
}

#[test]
fn sources_of_cross_domain_copies_have_exclusive_ring_memory() {
    for (name, make) in graphs::ALL {
        // In `one_way`, each device is a domain, and some copy from others directly. The other devices are one domain.
        for (devices, crosses_domains) in [(graphs::one_way(3), true), (graphs::devices(3, true), false)] {
            for depth in [1, 2] {
                let task = Arc::new(make(3).unwrap());
                let (plan, layout) = layout(&task, &devices, depth).unwrap();
                let is_copied_directly = |slot: u32| {
                    let mut copies = plan.split_graph.replicas.iter().filter(|replica| replica.slot == slot);
                    copies.any(|replica| match replica.origin {
                        ReplicaOrigin::Device(home) => plan.copy_paths.can_copy(replica.device, home),
                        ReplicaOrigin::Host | ReplicaOrigin::Experts { .. } => false,
                    })
                };
                for (slot, allocation) in (0..).zip(&layout.slots).filter(|(_, allocation)| allocation.is_some()) {
                    let must_be_exclusive = crosses_domains && depth > 1 && is_copied_directly(slot);
                    assert_eq!(
                        allocation.is_some_and(|allocation| allocation.kind == ArenaKind::Ring),
                        must_be_exclusive,
                        "{name}, depth {depth}: whether slot {slot} is in the ring"
                    );
                    let shares_allocation = |(other, at): &(u32, &Option<Allocation>)| {
                        *at == allocation && plan.home(*other) == plan.home(slot)
                    };
                    let slots_there = (0..).zip(&layout.slots).filter(shares_allocation).count();
                    assert!(!must_be_exclusive || slots_there == 1, "{name}, depth {depth}: slot {slot} shares memory");
                }
            }
        }
    }
}

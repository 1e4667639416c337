//! Programs of several ranks on CPU devices of this process.

use super::*;
use crate::device::{Buffer, CollectiveGroup, GroupMember, Membership, Queue, TimelinePoint, UploadSource};
use crate::graph::TensorId;
use crate::ops::OutputSpec;
use crate::ops::binary::Binary;
use crate::ops::collective::{Collective, CollectiveKind, piece};
use crate::ops::rows::Rows;
use crate::ops::unary::Unary;

fn deadline() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(120))
}

fn device(name: &str, threads: usize, mode: MathMode) -> Arc<CpuDevice> {
    CpuDevice::new(name, threads, mode, 1 << 30).unwrap()
}

fn budget() -> Arc<MemoryBudget> {
    MemoryBudget::new(1 << 30)
}

fn group(ranks: usize) -> Vec<GroupMember> {
    CollectiveGroup::members(ranks, 1 << 24, &budget()).unwrap()
}

/// A queue with a program, and the memory of its graph.
struct Rank {
    queue: Box<dyn Queue>,
    graph: Arc<Graph>,
    program: Program,
    buffer: Buffer,
}

impl Rank {
    /// A queue that has joined a group by `member` as number 1.
    fn new(device: &Arc<CpuDevice>, graph: &Arc<Graph>, member: GroupMember) -> Rank {
        let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget()).unwrap();
        let (program, mut queue) = (device.prepare(Arc::clone(graph)).unwrap(), device.queue(&budget()).unwrap());
        queue.collectives().unwrap().join(1, Membership::InProcess(member)).unwrap();
        Rank { queue, graph: Arc::clone(graph), program, buffer }
    }

    fn region(&self, id: TensorId) -> Region {
        let tensor = self.graph.tensor(id).unwrap();
        self.buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
    }

    fn upload(&mut self, id: TensorId, values: &[f32]) {
        self.queue.upload(self.region(id), None, UploadSource::Borrowed(bytemuck::cast_slice(values))).unwrap();
    }

    /// Submits the program, or runs it on this thread for as long as it does not wait for another rank.
    fn submit(&mut self, inline: bool) {
        let bindings = Arc::from([self.buffer.whole()]);
        if inline {
            self.queue.run_inline(&self.program, &bindings, Duration::from_secs(60)).unwrap();
        } else {
            self.queue.run(&self.program, &bindings).unwrap();
        }
    }

    fn download(&mut self, id: TensorId) -> Vec<f32> {
        let bytes = self.queue.download(self.region(id)).unwrap().wait(deadline()).unwrap();
        bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()
    }
}

fn reduce(b: &mut Builder, x: TensorId) -> TensorId {
    b.node(Collective { kind: CollectiveKind::AllReduce, group: 1 }, &[Some(x)]).unwrap()
}

/// A program with collectives between other nodes: `sum = all_reduce(x^2)`, `y = sum + x`, `total = all_reduce(y)` in place,
/// `gathered = all_gather(part)` along axis 0, and `total + sum`.
struct Layer {
    graph: Arc<Graph>,
    x: TensorId,
    part: TensorId,
    gathered: TensorId,
    out: TensorId,
}

/// Rows of the gathered tensor.
const ROWS: usize = 5;

impl Layer {
    /// The graph of a rank with `n` elements, and `part` of `parts` elements of each gathered row.
    fn new(n: usize, [part, parts]: [usize; 2]) -> Layer {
        let mut b = Builder::new();
        let (x, part) = (b.leaf(DType::F32, [n, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [part, ROWS, 1, 1]).unwrap());
        let square = b.node(Unary::Sqr, &[Some(x)]).unwrap();
        let sum = reduce(&mut b, square);
        let y = b.node(Binary::Add, &[Some(sum), Some(x)]).unwrap();
        let desc = b.tensor(y).unwrap().desc;
        let total = b.view(y, desc, 0).unwrap();
        b.node_into(Collective { kind: CollectiveKind::AllReduce, group: 1 }, &[Some(y)], total).unwrap();
        let gather = Collective { kind: CollectiveKind::AllGather { axis: 0 }, group: 1 };
        let spec = OutputSpec { dtype: DType::F32, ne: [parts, ROWS, 1, 1] };
        let gathered = b.node_with_output(gather, &[Some(part)], spec).unwrap();
        let out = b.node(Binary::Add, &[Some(total), Some(sum)]).unwrap();
        Layer { graph: Arc::new(b.build()), x, part, gathered, out }
    }
}

fn values(n: usize, seed: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed as u64);
    // Of many magnitudes, so that another order of a sum gives other bits.
    (0..n).map(|_| (rng.f32() - 0.5) * f32::from(rng.u8(1..255)).exp2().sqrt().min(1e9)).collect()
}

/// Sums in the order of ranks.
fn sum_of_ranks(ranks: &[Vec<f32>]) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, x: &Vec<f32>| {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        sum
    };
    ranks[1..].iter().fold(ranks[0].clone(), add)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn every_rank_has_the_sum_in_the_order_of_ranks() {
    for (ranks, threads, mode) in [
        (2, 1, MathMode::Exact),
        (2, 2, MathMode::Fast),
        (3, 2, MathMode::Exact),
        (3, 1, MathMode::Fast),
        (5, 1, MathMode::Exact),
        (5, 2, MathMode::Fast),
    ] {
        let devices: Vec<_> = (0..ranks).map(|rank| device(&format!("CPU{rank}"), threads, mode)).collect();
        for n in [1, 37, 2048, 20_011, 300_000] {
            let parts: usize = (1..=ranks).sum();
            let layers: Vec<_> = (1..=ranks).map(|part| Layer::new(n, [part, parts])).collect();
            let mut members: Vec<_> = group(ranks);
            let queues = layers.iter().zip(&devices).map(|(l, device)| Rank::new(device, &l.graph, members.remove(0)));
            let mut queues: Vec<_> = queues.collect();
            let xs: Vec<_> = (0..ranks).map(|rank| values(n, 10 * n + rank)).collect();
            let blocks: Vec<_> = (0..ranks).map(|rank| values((rank + 1) * ROWS, rank)).collect();

            let sum = sum_of_ranks(&xs.iter().map(|x| x.iter().map(|x| x * x).collect()).collect::<Vec<_>>());
            let add = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<f32>>();
            let total = sum_of_ranks(&xs.iter().map(|x| add(&sum, x)).collect::<Vec<_>>());
            let want = bits(&add(&total, &sum));
            let row = |r: usize| blocks.iter().enumerate().flat_map(move |(b, x)| &x[r * (b + 1)..(r + 1) * (b + 1)]);
            let gathered: Vec<f32> = (0..ROWS).flat_map(row).copied().collect();

            for turn in 0..4 {
                for ((queue, layer), (x, block)) in queues.iter_mut().zip(&layers).zip(xs.iter().zip(&blocks)) {
                    queue.queue.fill(queue.buffer.whole(), 0xff).unwrap();
                    queue.upload(layer.x, x);
                    queue.upload(layer.part, block);
                }
                // All submitted, all inline, or mixed; from the first rank to the last or back.
                for at in 0..ranks {
                    let rank = if turn < 2 { at } else { ranks - 1 - at };
                    queues[rank].submit(turn == 1 || (turn == 3 && rank % 2 == 0));
                }
                for (rank, (queue, layer)) in queues.iter_mut().zip(&layers).enumerate() {
                    let what =
                        format!("rank {rank} of {ranks}, {threads} threads, {mode:?}, {n} elements, turn {turn}");
                    assert!(bits(&queue.download(layer.out)) == want, "{what}");
                    assert!(bits(&queue.download(layer.gathered)) == bits(&gathered), "{what}: gathered");
                }
            }
        }
    }
}

/// The pieces of a sum have the bits of the whole sum. Parts of BF16 are added in F32.
#[test]
fn pieces_have_the_bits_of_the_sum() {
    for (ranks, ne, dtype) in [
        (1, [5, 7, 1, 1], DType::F32),
        (2, [5, 7, 1, 1], DType::BF16),
        (3, [1, 7, 1, 1], DType::F32),
        (3, [2050, 64, 1, 1], DType::BF16),
        (7, [300, 7, 1, 1], DType::F32),
        (5, [40_000, 1, 1, 1], DType::BF16),
    ] {
        let axis = u8::from(ne[1] > 1);
        let (n, along) = (ne[0] * ne[1], ne[usize::from(axis)]);
        let parts: Vec<Vec<f32>> = (0..ranks).map(|rank| values(n, n + rank)).collect();
        let rounded = |x: &f32| if dtype == DType::BF16 { half::bf16::from_f32(*x).to_f32() } else { *x };
        let want = sum_of_ranks(&parts.iter().map(|part| part.iter().map(rounded).collect()).collect::<Vec<_>>());
        let mut queues = Vec::new();
        for (rank, member) in group(ranks).into_iter().enumerate() {
            let mut b = Builder::new();
            let part = b.leaf(dtype, ne).unwrap();
            let mut piece_ne = ne;
            piece_ne[usize::from(axis)] = piece(along, rank, ranks).len();
            let op = Collective { kind: CollectiveKind::ReduceScatter { axis }, group: 1 };
            let spec = OutputSpec { dtype: DType::F32, ne: piece_ne };
            let dst = b.node_with_output(op, &[Some(part)], spec).unwrap();
            let on = device(&format!("CPU{rank}"), 1 + rank % 2, MathMode::Exact);
            let mut queue = Rank::new(&on, &Arc::new(b.build()), member);
            let bytes: Vec<u8> = match dtype {
                DType::BF16 => parts[rank].iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
                _ => parts[rank].iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            queue.queue.upload(queue.region(part), None, UploadSource::Borrowed(&bytes)).unwrap();
            queue.submit(false);
            queues.push((queue, dst));
        }
        let stride = n / along;
        for (rank, (queue, dst)) in queues.iter_mut().enumerate() {
            let range = piece(along, rank, ranks);
            let want = bits(&want[range.start * stride..range.end * stride]);
            assert!(bits(&queue.download(*dst)) == want, "rank {rank} of {ranks}, {dtype} {ne:?}");
        }
    }
}

/// A graph of `rounds` in-place sums of `n` elements, and the tensor.
fn sums(n: usize, rounds: usize) -> (Arc<Graph>, TensorId) {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    for _ in 0..rounds {
        let desc = b.tensor(x).unwrap().desc;
        let next = b.view(x, desc, 0).unwrap();
        b.node_into(Collective { kind: CollectiveKind::AllReduce, group: 1 }, &[Some(x)], next).unwrap();
    }
    (Arc::new(b.build()), x)
}

/// Clients whose ranks 0 are on different devices: whatever the order in which their programs are submitted, none waits for a
/// turn that another one holds while it waits.
#[test]
fn crossed_groups_all_finish() {
    let devices = [device("A", 1, MathMode::Exact), device("B", 2, MathMode::Exact)];
    for seed in 0..100 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (graph, x) = sums(*rng.choice(&[1, 3000, 40_000]).unwrap(), 3);
        let n = graph.tensor(x).unwrap().desc.elements();
        let clients = rng.usize(2..5);
        let mut ranks = Vec::new();
        for client in 0..clients {
            for (rank, member) in group(2).into_iter().enumerate() {
                let mut rank_of = Rank::new(&devices[(client + rank) % 2], &graph, member);
                rank_of.upload(x, &vec![(rank + 1) as f32; n]);
                ranks.push(rank_of);
            }
        }
        let runs = rng.usize(1..4);
        let mut order: Vec<usize> = (0..ranks.len()).flat_map(|rank| vec![rank; runs]).collect();
        rng.shuffle(&mut order);
        for rank in order {
            ranks[rank].submit(rng.bool());
        }
        // 1 + 2, then doubled by each further round of two equal parts.
        let want = 3.0 * 2f32.powi(3 * runs as i32 - 1);
        for rank in &mut ranks {
            assert!(rank.download(x).iter().all(|&x| x == want), "seed {seed}");
        }
    }
}

/// Small programs and programs of the long lane, more of each than the device has threads, wait for their groups' other ranks;
/// another queue's programs run meanwhile.
#[test]
fn waiting_programs_hold_no_thread() {
    let (busy, other) = (device("busy", 2, MathMode::Exact), device("other", 1, MathMode::Exact));
    let (small, x) = sums(100, 2);
    let (large, y) = sums(SMALL_PROGRAM_COST / 2, 3);
    assert!(!CpuProgram::new(&large, MathMode::Exact, 1).unwrap().is_small());
    let mut pairs = Vec::new();
    for graph in std::iter::repeat_n(&small, 12).chain([&large; 3]) {
        let mut members = group(2).into_iter();
        let mut waiting = Rank::new(&busy, graph, members.next().unwrap());
        waiting.queue.fill(waiting.buffer.whole(), 0).unwrap();
        waiting.submit(false);
        pairs.push((waiting, members.next().unwrap(), graph));
    }
    for graph in [&small, &large] {
        // A group of one rank waits for nobody.
        let mut free = Rank::new(&busy, graph, group(1).remove(0));
        for inline in [false, true] {
            free.submit(inline);
            free.queue.mark().wait(deadline()).unwrap();
        }
    }
    for (waiting, member, graph) in &mut pairs {
        let point = waiting.queue.mark();
        assert_eq!(point.poll(), Ok(false));
        let member = std::mem::replace(member, group(1).remove(0));
        let mut last = Rank::new(&other, graph, member);
        last.queue.fill(last.buffer.whole(), 0).unwrap();
        last.submit(true);
        last.queue.mark().wait(deadline()).unwrap();
        point.wait(deadline()).unwrap();
        let tensor = if Arc::ptr_eq(graph, &small) { x } else { y };
        assert!(waiting.download(tensor).iter().all(|&x| x == 0.0));
    }
}

/// Rank 0 of three, whose program waits, and the other two.
fn waiting_rank(inline: bool) -> (Rank, TimelinePoint, [Rank; 2]) {
    let (graph, _) = sums(100, 3);
    let mut members = group(3).into_iter();
    let mut rank = |name: &str| Rank::new(&device(name, 1, MathMode::Exact), &graph, members.next().unwrap());
    let [mut first, second, third] = ["CPU0", "CPU1", "CPU2"].map(&mut rank);
    first.submit(inline);
    let point = first.queue.mark();
    assert_eq!(point.poll(), Ok(false));
    (first, point, [second, third])
}

#[test]
fn a_rank_that_is_missing_fails_the_others_by_name() {
    type Break = fn(Rank) -> Option<Rank>;
    let cases: [(Break, &str); 4] = [
        (|rank| Some(rank).filter(|_| false), "rank 1 (CPU1) has left the group"),
        (
            |mut rank| {
                // Its program waits in the first round when the queue ends.
                rank.submit(false);
                rank.queue.aborter().unwrap().abort();
                Some(rank)
            },
            "rank 1 (CPU1) has left the group",
        ),
        (
            |mut rank| {
                rank.queue.collectives().unwrap().join(1, Membership::InProcess(group(1).remove(0))).unwrap();
                Some(rank)
            },
            "rank 1 (CPU1) has left the group",
        ),
        (
            |mut rank| {
                let mut b = Builder::new();
                let (rows, ids) =
                    (b.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), b.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
                b.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
                let graph = Arc::new(b.build());
                let device = device("CPU9", 1, MathMode::Exact);
                rank.program = device.prepare(graph).unwrap();
                rank.queue.fill(rank.buffer.whole(), 1).unwrap();
                rank.submit(false);
                Some(rank)
            },
            "rank 1 (CPU1) has failed: GET_ROWS: ",
        ),
    ];
    for inline in [false, true] {
        for (number, (fail, want)) in cases.iter().enumerate() {
            let (mut first, point, [second, mut third]) = waiting_rank(inline);
            let failed = fail(second);
            let got = point.wait(deadline()).unwrap_err().to_string();
            assert!(got.starts_with(want), "case {number}: {got}");
            // The queue has failed with that error, and a rank that comes later fails with it too.
            assert!(first.queue.fill(first.buffer.whole(), 0).unwrap_err().to_string().starts_with(want), "{number}");
            third.queue.run(&third.program, &Arc::from([third.buffer.whole()])).unwrap();
            let got = third.queue.mark().wait(deadline()).unwrap_err().to_string();
            assert!(got.starts_with(want), "case {number}: {got}");
            drop(failed);
        }
    }
}

#[test]
fn a_program_of_an_unknown_group_is_refused_and_the_queue_stays_usable() {
    let (graph, x) = sums(10, 1);
    let mut rank = Rank::new(&device("CPU", 1, MathMode::Exact), &graph, group(1).remove(0));
    rank.upload(x, &[2.0; 10]);
    let mut b = Builder::new();
    let y = b.leaf(DType::F32, [10, 1, 1, 1]).unwrap();
    b.node(Collective { kind: CollectiveKind::AllReduce, group: 2 }, &[Some(y)]).unwrap();
    let device = device("CPU", 1, MathMode::Exact);
    let program = device.prepare(Arc::new(b.build())).unwrap();
    let whole = device.alloc(1 << 10, &budget()).unwrap().whole();
    let refused = rank.queue.run(&program, &Arc::from([whole.clone()]));
    assert!(matches!(refused, Err(DeviceError::Misuse(text)) if text.contains("not joined")), "{refused:?}");
    let refused = rank.queue.run_inline(&program, &Arc::from([whole]), Duration::ZERO);
    assert!(matches!(refused, Err(DeviceError::Misuse(text)) if text.contains("not joined")), "{refused:?}");
    rank.submit(false);
    assert_eq!(rank.download(x), [2.0; 10]);
}

//! Repacked weights: products, transfers and writes see the bytes of rows, whatever the layout is; and when weights are packed.

use crate::fixture::{CudaFixture, floats, test_deadline};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, CopyOutcome, Device, MemoryBudget, Program, Queue, Region, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{self, F32, I32, MXFP4, Q4_0, Q4_K, Q6_K, Q8_0};
use fanout::tensor::{Capability, TensorDesc};
use fanout_testing::compare::nmse;
use fanout_testing::transformer::{encode, noise};
use serde_json::Value;
use std::sync::Arc;

/// The types that can be packed.
fn types() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::Cuda).filter(|t| t.is_block())
}

/// Both devices round the columns to the same 8 bits. What remains is the order of the sums.
const MAX_NMSE: f64 = 1e-6;

/// Shape of the weight of most tests. Its rows of Q6_K are packed in pairs.
const SHAPE: [usize; 4] = [1024, 64, 1, 1];

/// The bytes of a tensor of random weights.
pub fn weights(dtype: DType, ne: [usize; 4], seed: u64) -> Vec<u8> {
    encode(dtype, &noise(seed, ne.iter().product()))
}

pub fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The product of a weight (slot 0) and `n` columns (slot 1); the result is slot 2.
fn product(dtype: DType, ne: [usize; 4], n: usize) -> Arc<Graph> {
    let mut b = Builder::with_separate_slots();
    let a = b.leaf(dtype, ne).unwrap();
    let x = b.leaf(F32, [ne[0], n, ne[2], ne[3]]).unwrap();
    b.node(MulMat::PLAIN, &[Some(a), Some(x)]).unwrap();
    Arc::new(b.build())
}

/// GET_ROWS of two rows of a weight (slot 0) by the ids in slot 1; the result is slot 2.
fn get_rows(dtype: DType, ne: [usize; 4]) -> Arc<Graph> {
    let mut b = Builder::with_separate_slots();
    let a = b.leaf(dtype, ne).unwrap();
    let ids = b.leaf(I32, [2, 1, 1, 1]).unwrap();
    b.node(Rows::GetRows, &[Some(a), Some(ids)]).unwrap();
    Arc::new(b.build())
}

/// A program with a buffer for each slot, on one device.
struct Bound {
    program: Program,
    buffers: Vec<Buffer>,
}

impl Bound {
    /// `first` is slot 0; the rest is new.
    fn new(device: &dyn Device, graph: &Arc<Graph>, first: &Buffer) -> Bound {
        let budget = MemoryBudget::new(1 << 30);
        let new = graph.slot_sizes().iter().skip(1).map(|&bytes| device.alloc(bytes as u64, &budget).unwrap());
        Bound {
            program: device.prepare(Arc::clone(graph)).unwrap(),
            buffers: [first.clone()].into_iter().chain(new).collect(),
        }
    }

    /// Uploads slot 1 and runs the program.
    fn run(&self, queue: &mut dyn Queue, input: &[u8]) {
        queue.upload(self.buffers[1].whole(), None, UploadSource::Borrowed(input)).unwrap();
        let bindings: Arc<[Region]> = self.buffers.iter().map(Buffer::whole).collect();
        queue.run(&self.program, &bindings).unwrap();
    }

    /// As `run`; returns slot 2.
    fn result(&self, queue: &mut dyn Queue, input: &[u8]) -> Vec<f32> {
        self.run(queue, input);
        floats(&read(queue, &self.buffers[2].whole()))
    }
}

pub fn read(queue: &mut dyn Queue, region: &Region) -> Vec<u8> {
    queue.download(region.clone()).unwrap().wait(test_deadline()).unwrap()
}

/// A buffer with these bytes.
fn filled(device: &dyn Device, queue: &mut dyn Queue, bytes: &[u8]) -> Buffer {
    let buffer = device.alloc(bytes.len() as u64, &MemoryBudget::new(1 << 30)).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(bytes)).unwrap();
    buffer
}

/// What the CPU computes, which rounds the columns as the GPU does.
fn on_cpu(graph: &Arc<Graph>, weight: &[u8], input: &[u8]) -> Vec<f32> {
    let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
    let mut queue = cpu.queue(&MemoryBudget::new(1 << 30)).unwrap();
    let weight = filled(&*cpu, &mut *queue, weight);
    Bound::new(&*cpu, graph, &weight).result(&mut *queue, input)
}

pub fn assert_close(got: &[f32], want: &[f32], what: &str) {
    let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
    let error = nmse(&wide(got), &wide(want));
    assert!(error <= MAX_NMSE, "{what}: NMSE {error:e}");
}

/// A packed-weights test: one GPU with counters.
pub struct Gpu {
    pub fixture: CudaFixture,
    pub queue: Box<dyn Queue>,
}

impl Gpu {
    pub fn new() -> Gpu {
        let fixture = CudaFixture::new("CUDAEMU_COUNTS=on\nCUDAEMU_DEVICES=2");
        Gpu { queue: fixture.queue(0), fixture }
    }

    /// Launches so far of the kernels whose names begin with `prefix`.
    pub fn launches(&mut self, prefix: &str) -> u64 {
        self.queue.mark().wait(test_deadline()).unwrap();
        let counts: Value = serde_json::from_str(&self.fixture.emulator.counts_json()).unwrap();
        let kernels = counts["kernels"].as_object().unwrap();
        let of = |(_, kernel): (&String, &Value)| kernel["launches"].as_u64().unwrap();
        kernels.iter().filter(|(name, _)| name.starts_with(prefix)).map(of).sum()
    }

    /// Conversions so far.
    pub fn conversions(&mut self) -> u64 {
        self.launches("mul_mat_pack") - self.launches("mul_mat_packed")
    }

    pub fn end(self) {
        let Gpu { mut fixture, queue } = self;
        drop(queue);
        assert!(fixture.drop_devices(), "a context was not released in time");
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
    }
}

/// Each type, in shapes with groups of 1 to 16 rows and several matrices, for each width of the kernels.
#[test]
fn products_read_packed_weights() {
    for dtype in types() {
        let mut gpu = Gpu::new();
        let rows = (16usize << 10).div_ceil(dtype.row_bytes(256).unwrap()).next_multiple_of(16);
        let mut shapes = vec![SHAPE, [256, rows, 1, 1], [512, rows / 2, 3, 1]];
        if dtype.block_len() == 32 {
            shapes.push([96, 4 * rows, 1, 1]);
        }
        for ne in shapes {
            let bytes = weights(dtype, ne, 1);
            let weight = filled(gpu.fixture.devices[0].as_ref(), &mut *gpu.queue, &bytes);
            let before = gpu.conversions();
            for n in [1, 2, 3, 5, 8, 9, 60] {
                let graph = product(dtype, ne, n);
                let columns = bytes_of(&noise(2, ne[0] * n * ne[2]));
                let got =
                    Bound::new(gpu.fixture.devices[0].as_ref(), &graph, &weight).result(&mut *gpu.queue, &columns);
                assert_close(&got, &on_cpu(&graph, &bytes, &columns), &format!("{dtype}, {ne:?}, {n} columns"));
            }
            assert_eq!(gpu.conversions() - before, 1, "{dtype}, {ne:?}: packed once");
            assert!(gpu.launches(&format!("mul_mat_packed_vec1_{}", dtype.name().to_lowercase())) > 0);
            assert!(read(&mut *gpu.queue, &weight.whole()) == bytes, "{dtype}, {ne:?}: other bytes come back");
        }
        gpu.end();
    }
}

/// The stride of a single row means nothing; kernels derive the length of rows from it.
#[test]
fn matrices_of_one_row_are_packed() {
    for (dtype, ne) in [(Q4_0, [32768, 1, 1, 1]), (Q4_K, [256, 1, 128, 1])] {
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let bytes = weights(dtype, ne, 1);
        let weight = filled(&*device, &mut *gpu.queue, &bytes);
        for n in [1, 9] {
            let (graph, columns) = (product(dtype, ne, n), bytes_of(&noise(2, ne[0] * n * ne[2])));
            let got = Bound::new(&*device, &graph, &weight).result(&mut *gpu.queue, &columns);
            assert_close(&got, &on_cpu(&graph, &bytes, &columns), &format!("{dtype}, {ne:?}, {n} columns"));
        }
        assert_eq!(gpu.conversions(), 1);
        drop((weight, device));
        gpu.end();
    }
}

/// The scale of a block of MXFP4 is an exponent: each that is a normal float gives the products of the CPU, with one column and on tensor
/// cores.
#[test]
fn every_scale_of_mxfp4_is_exact() {
    // One block in each row, as many rows as are packed. The codes of a row are 0 to 15 in some order.
    let rows = 1024;
    let weight: Vec<u8> = (0..rows)
        .flat_map(|row| {
            let nibble = move |i: usize| ((row + i) * 7 % 16) as u8;
            let exponent = 1 + (row % 240) as u8; // larger ones give infinite products
            [exponent].into_iter().chain((0..16).map(move |i| nibble(i) | (nibble(i + 5) << 4)))
        })
        .collect();
    for n in [1, 3] {
        let graph = product(MXFP4, [32, rows, 1, 1], n);
        let input = bytes_of(&noise(3, 32 * n));
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let buffer = filled(&*device, &mut *gpu.queue, &weight);
        let bound = Bound::new(&*device, &graph, &buffer);
        let got = [(); 2].map(|()| bound.result(&mut *gpu.queue, &input)); // the first run packs
        assert_eq!(gpu.conversions(), 1);
        let want = on_cpu(&graph, &weight, &input);
        for (i, (&got, &want)) in got[1].iter().zip(&want).enumerate() {
            // Values below the normal floats have few digits.
            assert!(
                (got - want).abs() <= 1e-5 * want.abs() + f32::MIN_POSITIVE,
                "{n} columns, result {i}: {got} {want}"
            );
        }
        drop((bound, buffer, device));
        gpu.end();
    }
}

/// A queue that packed a weight and has failed or gone does not fail others that read it.
#[test]
fn a_packed_weight_outlives_the_queue_that_packed_it() {
    let mut gpu = Gpu::new();
    let device = Arc::clone(&gpu.fixture.devices[0]);
    let (graph, columns) = (product(Q4_0, SHAPE, 1), bytes_of(&noise(2, SHAPE[0])));
    let bytes = weights(Q4_0, SHAPE, 1);
    let weight = filled(&*device, &mut *gpu.queue, &bytes);
    gpu.queue.mark().wait(test_deadline()).unwrap();
    let bound = Bound::new(&*device, &graph, &weight);
    let mut first = gpu.fixture.queue(0);
    bound.run(&mut *first, &columns);
    first.aborter().unwrap().abort();
    drop(first);
    assert_close(&bound.result(&mut *gpu.queue, &columns), &on_cpu(&graph, &bytes, &columns), "after the first queue");
    assert_eq!(gpu.conversions(), 1);
    drop((bound, weight, device));
    gpu.end();
}

/// What reads or writes a part of a packed weight sees rows, and the next product sees what was written.
#[test]
fn transfers_see_rows() {
    for dtype in [Q4_0, Q6_K, MXFP4] {
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let (graph, columns) = (product(dtype, SHAPE, 1), bytes_of(&noise(2, SHAPE[0])));
        let mut bytes = weights(dtype, SHAPE, 1);
        let weight = filled(&*device, &mut *gpu.queue, &bytes);
        let bound = Bound::new(&*device, &graph, &weight);
        let other = weights(dtype, SHAPE, 3);
        let row = dtype.row_bytes(SHAPE[0]).unwrap();
        let copies = device.alloc(bytes.len() as u64, &gpu.fixture.budget).unwrap();
        let remote = gpu.fixture.buffer(1, bytes.len() as u64);
        let mut queue_of_remote = gpu.fixture.queue(1);
        for step in 0..7 {
            assert_close(
                &bound.result(&mut *gpu.queue, &columns),
                &on_cpu(&graph, &bytes, &columns),
                &format!("{dtype} before {step}"),
            );
            let packed = gpu.conversions();
            let part = weight.whole().subregion(5 * row as u64 + 7, 2 * row as u64).unwrap();
            let range = 5 * row + 7..7 * row + 7;
            match step {
                0 => assert!(read(&mut *gpu.queue, &part) == bytes[range], "{dtype}: a download of a part"),
                1 => {
                    gpu.queue.upload(part, None, UploadSource::Borrowed(&other[range.clone()])).unwrap();
                    bytes[range.clone()].copy_from_slice(&other[range]);
                }
                2 => {
                    gpu.queue.fill(part, 0x35).unwrap();
                    bytes[range].fill(0x35);
                }
                3 => {
                    // From one part of the weight to another.
                    let to = weight.whole().subregion(40 * row as u64, 2 * row as u64).unwrap();
                    assert_eq!(gpu.queue.copy_from(part, to, None), Ok(CopyOutcome::Submitted));
                    bytes.copy_within(range, 40 * row);
                }
                4 => {
                    let copied = gpu.queue.copy_from(weight.whole(), copies.whole(), None);
                    assert_eq!(copied, Ok(CopyOutcome::Submitted));
                    assert!(read(&mut *gpu.queue, &copies.whole()) == bytes, "{dtype}: a copy");
                }
                5 => {
                    let point = gpu.queue.mark();
                    let copied = queue_of_remote.copy_from(weight.whole(), remote.whole(), Some(&point));
                    assert_eq!(copied, Ok(CopyOutcome::Submitted));
                    assert!(read(&mut *queue_of_remote, &remote.whole()) == bytes, "{dtype}: a copy to another GPU");
                }
                _ => {
                    gpu.queue.upload(weight.whole(), None, UploadSource::Borrowed(&other)).unwrap();
                    bytes.copy_from_slice(&other);
                    assert_eq!(gpu.conversions(), packed, "{dtype}: what is overwritten is not unpacked");
                }
            }
            if step < 6 {
                assert_eq!(gpu.conversions(), packed + 1, "{dtype}, step {step}: unpacked");
            }
            // The delay ends with an upload of the whole weight.
            gpu.queue.upload(weight.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
        }
        assert_close(
            &bound.result(&mut *gpu.queue, &columns),
            &on_cpu(&graph, &bytes, &columns),
            &format!("{dtype} at the end"),
        );
        drop((bound, weight, copies, remote, queue_of_remote, device));
        gpu.end();
    }
}

/// A weight that something needs in rows again and again is not converted there and back each time.
#[test]
fn an_unpacked_weight_stays_unpacked_for_a_while() {
    let mut gpu = Gpu::new();
    let device = Arc::clone(&gpu.fixture.devices[0]);
    let (graph, columns) = (product(Q4_K, SHAPE, 1), bytes_of(&noise(2, SHAPE[0])));
    let bytes = weights(Q4_K, SHAPE, 1);
    let weight = filled(&*device, &mut *gpu.queue, &bytes);
    let bound = Bound::new(&*device, &graph, &weight);
    let want = on_cpu(&graph, &bytes, &columns);
    for (runs, conversions) in [(1, 1), (16, 2), (2, 3), (32, 4), (2, 5)] {
        for _ in 0..runs {
            assert_close(&bound.result(&mut *gpu.queue, &columns), &want, "a product");
        }
        assert_eq!(gpu.conversions(), conversions, "after {runs} runs");
        if gpu.conversions() % 2 == 1 {
            assert!(read(&mut *gpu.queue, &weight.whole()) == bytes);
        }
    }
    drop((bound, weight, device));
    gpu.end();
}

/// Tied embeddings: GET_ROWS reads the packed table, and is no reason to pack or to unpack it.
#[test]
fn rows_are_read_from_a_packed_table() {
    for dtype in types() {
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let (rows, columns) = (get_rows(dtype, SHAPE), bytes_of(&noise(2, SHAPE[0])));
        let ids: Vec<u8> = [61i32, 2].iter().flat_map(|id| id.to_le_bytes()).collect();
        let bytes = weights(dtype, SHAPE, 1);
        let weight = filled(&*device, &mut *gpu.queue, &bytes);
        let (of_rows, of_product) =
            (Bound::new(&*device, &rows, &weight), Bound::new(&*device, &product(dtype, SHAPE, 1), &weight));
        let want = on_cpu(&rows, &bytes, &ids);
        for (conversions, packs) in [(0, true), (1, true), (1, false)] {
            assert!(of_rows.result(&mut *gpu.queue, &ids) == want, "{dtype}");
            assert_eq!(gpu.conversions(), conversions, "{dtype}");
            if packs {
                of_product.run(&mut *gpu.queue, &columns);
            }
        }
        drop((of_rows, of_product, weight, device));
        gpu.end();
    }
}

/// A program that writes what it multiplies, as a cache without flash attention, does not pack it.
#[test]
fn what_a_program_writes_is_not_packed() {
    let mut gpu = Gpu::new();
    let device = Arc::clone(&gpu.fixture.devices[0]);
    let mut b = Builder::with_separate_slots();
    let cache = b.leaf(Q8_0, SHAPE).unwrap();
    let columns = b.leaf(F32, [SHAPE[0], 1, 1, 1]).unwrap();
    let ids = b.leaf(I32, [1, 1, 1, 1]).unwrap();
    let desc = b.tensor(cache).unwrap().desc;
    let onto = b.view(cache, desc, 0).unwrap();
    let written = b.node_into(Rows::SetRows, &[Some(columns), Some(ids), Some(cache)], onto).unwrap();
    b.node(MulMat::PLAIN, &[Some(written), Some(columns)]).unwrap();
    let graph = Arc::new(b.build());
    let weight = filled(&*device, &mut *gpu.queue, &weights(Q8_0, SHAPE, 1));
    let bound = Bound::new(&*device, &graph, &weight);
    (0..3).for_each(|_| bound.run(&mut *gpu.queue, &bytes_of(&noise(2, SHAPE[0]))));
    assert_eq!(gpu.conversions(), 0);
    drop((bound, weight, device));
    gpu.end();
}

/// Products of views of a packed weight read whole groups packed.
#[test]
fn views_of_a_packed_weight_are_read() {
    let mut gpu = Gpu::new();
    let device = Arc::clone(&gpu.fixture.devices[0]);
    let bytes = weights(Q6_K, [1024, 96, 1, 1], 1);
    let row = Q6_K.row_bytes(1024).unwrap();
    let weight = filled(&*device, &mut *gpu.queue, &bytes);
    let whole = product(Q6_K, [1024, 96, 1, 1], 1);
    let columns = bytes_of(&noise(2, 1024));
    let check = |gpu: &mut Gpu, first: usize, rows: usize| {
        let mut b = Builder::with_separate_slots();
        let a = b.leaf(Q6_K, [1024, 96, 1, 1]).unwrap();
        let x = b.leaf(F32, [1024, 1, 1, 1]).unwrap();
        let view = b.view(a, TensorDesc::contiguous(Q6_K, [1024, rows, 1, 1]).unwrap(), first * row).unwrap();
        b.node(MulMat::PLAIN, &[Some(view), Some(x)]).unwrap();
        let graph = Arc::new(b.build());
        let got = Bound::new(&*device, &graph, &weight).result(&mut *gpu.queue, &columns);
        assert_close(&got, &on_cpu(&graph, &bytes, &columns), &format!("{rows} rows from {first}"));
    };
    Bound::new(&*device, &whole, &weight).run(&mut *gpu.queue, &columns);
    assert_eq!(gpu.conversions(), 1);
    check(&mut gpu, 32, 64);
    assert_eq!(gpu.conversions(), 1, "whole groups");
    check(&mut gpu, 31, 64);
    assert_eq!(gpu.conversions(), 2, "parts of groups need rows");
    drop((weight, device));
    gpu.end();
}

/// Queues that share a weight without points between them. One of them reads the weight back, so it is converted between their runs.
#[test]
fn queues_that_share_a_weight_agree() {
    for seed in 0..10 {
        let fixture = CudaFixture::new(&format!("CUDAEMU_SEED={seed}"));
        let device = &fixture.devices[0];
        let (graph, columns) = (product(Q4_0, SHAPE, 1), bytes_of(&noise(2, SHAPE[0])));
        let bytes = weights(Q4_0, SHAPE, 1);
        let want = on_cpu(&graph, &bytes, &columns);
        let mut first = fixture.queue(0);
        let weight = filled(&**device, &mut *first, &bytes);
        first.mark().wait(test_deadline()).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (weight, graph, columns, bytes, want) = (&weight, &graph, &columns, &bytes, &want);
                let fixture = &fixture;
                scope.spawn(move || {
                    let mut queue = fixture.queue(0);
                    let bound = Bound::new(&*fixture.devices[0], graph, weight);
                    for run in 0..12 {
                        assert_close(&bound.result(&mut *queue, columns), want, &format!("seed {seed}"));
                        if thread == 0 && run % 4 == 3 {
                            assert!(read(&mut *queue, &weight.whole()) == *bytes, "seed {seed}");
                        }
                    }
                });
            }
        });
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
    }
}

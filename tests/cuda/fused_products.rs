//! Fused products while one of their weights is in rows: the nodes run one by one then, and their columns come from other launches. Fused
//! products of F16 and BF16, which read F32 columns.

use crate::fixture::floats;
use crate::packed::{Gpu, assert_close, bytes_of, read, weights};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget, Program, Queue, Region, UploadSource};
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::glu::{Glu, GluKind};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rows::Rows;
use fanout::tensor::DType::{self, BF16, F16, F32, I32, Q4_K, Q8_0};
use fanout_testing::transformer::noise;
use std::sync::Arc;

/// Weights of the products of queries, keys and values, of gate and up, and of the product behind their SWIGLU.
const NAMES: [&str; 6] = ["queries", "keys", "values", "gate", "up", "down"];

/// The row of a weight that SET_ROWS writes, and the seed of its values.
const ROW: i32 = 9;
const ROW_SEED: u64 = 22;

/// A graph of fused products, with a slot for each tensor: three products of the same columns, RMS_NORM of the first one, two products of
/// the result, their SWIGLU, and a product of that.
struct Layer {
    graph: Arc<Graph>,
    dtype: DType,
    /// Slots of the weights, their shapes and bytes.
    weights: Vec<(usize, [usize; 2], Vec<u8>)>,
    /// Slot of the columns of the first products, and their bytes in even and in odd runs.
    columns: (usize, [Vec<u8>; 2]),
    /// Slots and bytes of the other leaves.
    inputs: Vec<(usize, Vec<u8>)>,
    /// Slots of the results that are not elided.
    results: Vec<usize>,
}

impl Layer {
    /// Weights of `dtype` with rows of `k` elements, and `n` columns. SET_ROWS changes the weight of number `written` before all products.
    fn new(dtype: DType, k: usize, n: usize, written: Option<usize>) -> Layer {
        let mut b = Builder::with_separate_slots();
        let mut inputs = Vec::new();
        let shapes = [[k, k], [k, 64], [k, 64], [k, k], [k, k], [k, 80]];
        let leaves = shapes.map(|[k, m]| b.leaf(dtype, [k, m, 1, 1]).unwrap());
        let x = b.leaf(F32, [k, n, 1, 1]).unwrap();
        let mut read = leaves;
        if let Some(written) = written {
            let (row, ids) = (b.leaf(F32, [k, 1, 1, 1]).unwrap(), b.leaf(I32, [1, 1, 1, 1]).unwrap());
            let desc = b.tensor(leaves[written]).unwrap().desc;
            let onto = b.view(leaves[written], desc, 0).unwrap();
            let srcs = [Some(row), Some(ids), Some(leaves[written])];
            read[written] = b.node_into(Rows::SetRows, &srcs, onto).unwrap();
            inputs.extend([(row, bytes_of(&noise(ROW_SEED, k))), (ids, ROW.to_le_bytes().to_vec())]);
        }
        let product =
            |b: &mut Builder, weight: usize, x| b.node(MulMat::PLAIN, &[Some(read[weight]), Some(x)]).unwrap();
        let [q, keys, values] = [0, 1, 2].map(|weight| product(&mut b, weight, x));
        let h = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(q)]).unwrap();
        let [gate, up] = [3, 4].map(|weight| product(&mut b, weight, h));
        [gate, up].into_iter().for_each(|id| b.set_use_count(id, 1).unwrap());
        let swiglu = Glu { kind: GluKind::Swiglu, swapped: false };
        let gated = b.node(swiglu, &[Some(gate), Some(up)]).unwrap();
        let down = product(&mut b, 5, gated);
        let graph = b.build();
        let slot = |id: TensorId| graph.tensor(id).unwrap().place.unwrap().slot as usize;
        let bytes = |(i, [k, m]): (usize, [usize; 2])| weights(dtype, [k, m, 1, 1], i as u64);
        let weights = shapes.into_iter().enumerate().map(|of| (slot(leaves[of.0]), of.1, bytes(of))).collect();
        let inputs = inputs.into_iter().map(|(id, bytes)| (slot(id), bytes)).collect();
        let columns = (slot(x), [20, 21].map(|seed| bytes_of(&noise(seed, k * n))));
        let results = [q, keys, values, h, gated, down].map(slot).to_vec();
        Layer { graph: Arc::new(graph), dtype, weights, columns, inputs, results }
    }

    fn row_bytes(&self, weight: usize) -> usize {
        self.dtype.row_bytes(self.weights[weight].1[0]).unwrap()
    }

    /// The program with a buffer for each slot. The weight of number `shifted` is not at a multiple of 16 bytes in its buffer.
    fn bind(&self, device: &dyn Device, queue: &mut dyn Queue, shifted: Option<usize>) -> BoundLayer {
        let budget = MemoryBudget::new(1 << 30);
        let slots = self.graph.slot_sizes().iter();
        let mut regions: Vec<_> =
            slots.map(|&bytes| device.alloc(bytes as u64, &budget).unwrap().whole()).collect::<Vec<_>>();
        if let Some((slot, _, bytes)) = shifted.map(|weight| &self.weights[weight]) {
            let larger = device.alloc(bytes.len() as u64 + 64, &budget).unwrap();
            regions[*slot] = larger.region(8, bytes.len() as u64).unwrap();
        }
        let of_weights = self.weights.iter().map(|(slot, _, bytes)| (slot, bytes));
        for (slot, bytes) in self.inputs.iter().map(|(slot, bytes)| (slot, bytes)).chain(of_weights) {
            queue.upload(regions[*slot].clone(), None, UploadSource::Borrowed(bytes)).unwrap();
        }
        BoundLayer { program: device.prepare(Arc::clone(&self.graph)).unwrap(), regions: regions.into(), runs: 0 }
    }

    /// The results of the CPU, which rounds columns as the GPU does, in even and in odd runs.
    fn on_cpu(&self) -> [Vec<Vec<f32>>; 2] {
        let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
        let mut queue = cpu.queue(&MemoryBudget::new(1 << 30)).unwrap();
        let mut bound = self.bind(&*cpu, &mut *queue, None);
        [(); 2].map(|()| bound.run(self, &mut *queue))
    }
}

/// A layer on a device.
struct BoundLayer {
    program: Program,
    regions: Arc<[Region]>,
    runs: usize,
}

impl BoundLayer {
    fn run(&mut self, layer: &Layer, queue: &mut dyn Queue) -> Vec<Vec<f32>> {
        let (slot, columns) = &layer.columns;
        let columns = &columns[self.runs % 2];
        self.runs += 1;
        queue.upload(self.regions[*slot].clone(), None, UploadSource::Borrowed(columns)).unwrap();
        queue.run(&self.program, &self.regions).unwrap();
        layer.results.iter().map(|&slot| floats(&read(queue, &self.regions[slot]))).collect()
    }

    /// As `run`, and compares the results. Returns the number of launches.
    fn check(&mut self, layer: &Layer, gpu: &mut Gpu, want: &[Vec<Vec<f32>>; 2], what: &str) -> u64 {
        let want = &want[self.runs % 2];
        let before = gpu.launches("");
        let got = self.run(layer, &mut *gpu.queue);
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert_close(got, want, &format!("{what}, result {i}"));
        }
        gpu.launches("") - before
    }
}

/// Writes the row that [`Layer::new`] writes to a weight, by a program of its own.
fn set_row(layer: &Layer, weight: usize, device: &dyn Device, queue: &mut dyn Queue, region: &Region) {
    let ([k, m], mut b) = (layer.weights[weight].1, Builder::with_separate_slots());
    let [table, row] = [(layer.dtype, [k, m, 1, 1]), (F32, [k, 1, 1, 1])].map(|(t, ne)| b.leaf(t, ne).unwrap());
    let ids = b.leaf(I32, [1, 1, 1, 1]).unwrap();
    let onto = b.view(table, b.tensor(table).unwrap().desc, 0).unwrap();
    b.node_into(Rows::SetRows, &[Some(row), Some(ids), Some(table)], onto).unwrap();
    let program = device.prepare(Arc::new(b.build())).unwrap();
    let mut regions = vec![region.clone()];
    for bytes in [bytes_of(&noise(ROW_SEED, k)), ROW.to_le_bytes().to_vec()] {
        let buffer = device.alloc(bytes.len() as u64, &MemoryBudget::new(1 << 20)).unwrap();
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
        regions.push(buffer.whole());
    }
    queue.run(&program, &regions.into()).unwrap();
}

/// Types, lengths of rows and numbers of columns for which all kernels are fused.
const SHAPES: [(DType, usize, usize); 2] = [(Q8_0, 1024, 1), (Q4_K, 512, 2)];

/// Launches with all weights packed: a conversion, one launch for queries, keys and values, the norm, the SWIGLU with its products, and
/// the last product.
const FUSED: u64 = 5;

/// Further launches while a weight is in rows: two of three products; or a product, the SWIGLU, and a conversion of its result.
const MORE: [u64; 6] = [2, 2, 2, 3, 3, 0];

/// A part of one weight is read, or a row of it is written by another program. It then is in rows for a while.
#[test]
fn products_follow_a_weight_from_packed_to_rows_and_back() {
    for (dtype, k, n) in SHAPES {
        let layer = Layer::new(dtype, k, n, None);
        let want = layer.on_cpu();
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let mut bound = layer.bind(&*device, &mut *gpu.queue, None);
        // The first run packs the weights, and the third one is a CUDA graph.
        let packs = bound.check(&layer, &mut gpu, &want, "first");
        assert_eq!(packs, NAMES.len() as u64 + FUSED, "{dtype}");
        for (weight, name) in NAMES.iter().enumerate() {
            let what = format!("{dtype}, {name} in rows");
            for _ in 0..2 {
                assert_eq!(bound.check(&layer, &mut gpu, &want, &what), FUSED, "{what}, before");
            }
            let (slot, _, bytes) = &layer.weights[weight];
            let (region, row) = (bound.regions[*slot].clone(), layer.row_bytes(weight));
            let part = region.subregion(3 * row as u64, row as u64).unwrap();
            assert!(read(&mut *gpu.queue, &part) == bytes[3 * row..4 * row], "{what}: bytes of a row");
            for _ in 0..3 {
                assert_eq!(bound.check(&layer, &mut gpu, &want, &what), FUSED + MORE[weight], "{what}");
            }
            let written = Layer::new(dtype, k, n, Some(weight)).on_cpu();
            set_row(&layer, weight, &*device, &mut *gpu.queue, &region);
            for _ in 0..3 {
                let what = format!("{what}, written");
                assert_eq!(bound.check(&layer, &mut gpu, &written, &what), FUSED + MORE[weight], "{what}");
            }
            // An upload of the whole weight ends the time in rows.
            gpu.queue.upload(region, None, UploadSource::Borrowed(bytes)).unwrap();
            assert_eq!(bound.check(&layer, &mut gpu, &want, &what), 1 + FUSED, "{what}: packed again");
        }
        drop((bound, device));
        gpu.end();
    }
}

/// A weight that is never packed, because the program writes it or its memory is not aligned.
#[test]
fn products_read_a_weight_that_is_never_packed() {
    for (dtype, k, n) in SHAPES {
        for (weight, name) in NAMES.iter().enumerate() {
            for is_written in [false, true] {
                let layer = Layer::new(dtype, k, n, is_written.then_some(weight));
                let want = layer.on_cpu();
                let mut gpu = Gpu::new();
                let device = Arc::clone(&gpu.fixture.devices[0]);
                let mut bound = layer.bind(&*device, &mut *gpu.queue, (!is_written).then_some(weight));
                let what = format!("{dtype}, {name} never packed, written {is_written}");
                let launches = FUSED + MORE[weight] + u64::from(is_written);
                // The first run packs the others.
                for packs in [NAMES.len() as u64 - 1, 0, 0] {
                    assert_eq!(bound.check(&layer, &mut gpu, &want, &what), packs + launches, "{what}");
                }
                drop((bound, device));
                gpu.end();
            }
        }
    }
}

/// Products of F16 and BF16 are fused for up to eight columns, whatever the alignment of their weights.
#[test]
fn products_of_halves_are_fused() {
    // With more columns than a block has, the products and the SWIGLU are launches of their own.
    for (dtype, k, n, launches) in
        [(F16, 96, 1, 4), (BF16, 200, 2, 4), (F16, 264, 5, 4), (BF16, 160, 8, 4), (F16, 96, 9, 8)]
    {
        for shifted in [None, Some(0), Some(1), Some(3), Some(4)] {
            let layer = Layer::new(dtype, k, n, None);
            let want = layer.on_cpu();
            let mut gpu = Gpu::new();
            let device = Arc::clone(&gpu.fixture.devices[0]);
            let mut bound = layer.bind(&*device, &mut *gpu.queue, shifted);
            let what = format!("{dtype}, {n} columns, {shifted:?} at a multiple of 8 bytes");
            for _ in 0..3 {
                assert_eq!(bound.check(&layer, &mut gpu, &want, &what), launches, "{what}");
            }
            drop((bound, device));
            gpu.end();
        }
    }
}

/// The first product has one row, whose stride its shape does not tell; the other products have more.
#[test]
fn a_product_of_one_row_is_fused_with_others() {
    for (dtype, k, n) in [(F16, 64, 1), (BF16, 100, 2), (F16, 100, 8)] {
        let mut b = Builder::with_separate_slots();
        let leaves = [1, 48, 17].map(|m| (m, b.leaf(dtype, [k, m, 1, 1]).unwrap()));
        let x = b.leaf(F32, [k, n, 1, 1]).unwrap();
        let results = leaves.map(|(_, leaf)| b.node(MulMat::PLAIN, &[Some(leaf), Some(x)]).unwrap());
        let graph = Arc::new(b.build());
        let slot = |id: TensorId| graph.tensor(id).unwrap().place.unwrap().slot as usize;
        let run = |device: &dyn Device, queue: &mut dyn Queue| {
            let budget = MemoryBudget::new(1 << 30);
            let slots = graph.slot_sizes().iter();
            let regions: Arc<[_]> = slots.map(|&bytes| device.alloc(bytes as u64, &budget).unwrap().whole()).collect();
            for (m, leaf) in leaves {
                let bytes = weights(dtype, [k, m, 1, 1], m as u64);
                queue.upload(regions[slot(leaf)].clone(), None, UploadSource::Borrowed(&bytes)).unwrap();
            }
            let columns = bytes_of(&noise(5, k * n));
            queue.upload(regions[slot(x)].clone(), None, UploadSource::Borrowed(&columns)).unwrap();
            let program = device.prepare(Arc::clone(&graph)).unwrap();
            queue.run(&program, &regions).unwrap();
            results.map(|result| floats(&read(queue, &regions[slot(result)])))
        };
        let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
        let want = run(&*cpu, &mut *cpu.queue(&MemoryBudget::new(1 << 30)).unwrap());
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let got = run(&*device, &mut *gpu.queue);
        assert_eq!(gpu.launches(""), 1, "{dtype}, {k} by {n}");
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_close(got, want, &format!("{dtype}, {k} by {n}, product {i}"));
        }
        drop(device);
        gpu.end();
    }
}

/// The SWIGLU lies on the columns of its products. If they are read from there, no block may write before all have read.
#[test]
fn a_swiglu_over_its_columns_is_right() {
    // Two products and the SWIGLU; a conversion of the columns, which are then elsewhere, and the fused launch.
    for (dtype, launches) in [(F16, 3), (BF16, 3), (Q8_0, 2)] {
        let (k, m) = (1024, 256);
        let mut b = Builder::with_separate_slots();
        let leaves = [0, 1].map(|_| b.leaf(dtype, [k, m, 1, 1]).unwrap());
        let x = b.leaf(F32, [k, 1, 1, 1]).unwrap();
        let [gate, up] = leaves.map(|leaf| b.node(MulMat::PLAIN, &[Some(leaf), Some(x)]).unwrap());
        [gate, up].into_iter().for_each(|id| b.set_use_count(id, 1).unwrap());
        let onto = b.view(x, b.tensor(gate).unwrap().desc, 0).unwrap();
        b.node_into(Glu { kind: GluKind::Swiglu, swapped: false }, &[Some(gate), Some(up)], onto).unwrap();
        let graph = Arc::new(b.build());
        let slot = |id: TensorId| graph.tensor(id).unwrap().place.unwrap().slot as usize;
        let run = |device: &dyn Device, queue: &mut dyn Queue, before_run: &mut dyn FnMut()| {
            let budget = MemoryBudget::new(1 << 30);
            let slots = graph.slot_sizes().iter();
            let regions: Arc<[_]> = slots.map(|&bytes| device.alloc(bytes as u64, &budget).unwrap().whole()).collect();
            for (seed, leaf) in leaves.into_iter().enumerate() {
                let bytes = weights(dtype, [k, m, 1, 1], seed as u64);
                queue.upload(regions[slot(leaf)].clone(), None, UploadSource::Borrowed(&bytes)).unwrap();
            }
            let program = device.prepare(Arc::clone(&graph)).unwrap();
            let mut result = Vec::new();
            // The first run packs the weights.
            for _ in 0..2 {
                before_run();
                let columns = bytes_of(&noise(5, k));
                queue.upload(regions[slot(x)].clone(), None, UploadSource::Borrowed(&columns)).unwrap();
                queue.run(&program, &regions).unwrap();
                result = floats(&read(queue, &regions[slot(x)].subregion(0, 4 * m as u64).unwrap()));
            }
            result
        };
        let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 30).unwrap();
        let want = run(&*cpu, &mut *cpu.queue(&MemoryBudget::new(1 << 30)).unwrap(), &mut || ());
        let mut gpu = Gpu::new();
        let device = Arc::clone(&gpu.fixture.devices[0]);
        let mut queue = device.queue(&MemoryBudget::new(1 << 30)).unwrap();
        let mut before = 0;
        let got = run(&*device, &mut *queue, &mut || before = gpu.launches(""));
        assert_close(&got, &want, &format!("{dtype}"));
        assert_eq!(gpu.launches("") - before, launches, "{dtype}");
        drop((queue, device));
        gpu.end();
    }
}

//! Estimates of the time that kernels take, and the cut of a program's launches into segments of at most one slice.
//!
//! An estimate is the time of the slowest resource: the bytes of the operands at the memory's bandwidth, or the multiply-adds
//! at the multiprocessors' rate. It decides where a program may give way to other clients, so an error of a factor of two does
//! little harm. The constants are on the slow side of what the kernels reach: a segment that is too short costs one launch
//! more.

use super::driver::Gpu;
use super::kernel::Loops;
use crate::ops::OpCode;
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;
use std::time::Duration;

/// Least time of a launch within a graph.
pub(super) const LAUNCH_TIME: Duration = Duration::from_nanos(1300);

/// Share of the memory's peak bandwidth that kernels reach.
const BANDWIDTH_SHARE: f64 = 0.75;

/// Multiply-adds per clock and multiprocessor: the FP32 lanes of the least capable one. Tensor cores do two to three times that
/// in the present tile kernels.
const MULTIPLY_ADDS_PER_CLOCK: f64 = 64.0;

/// Multiply-adds per weight that cost as much as reading and dequantising it: a vector kernel executes 1 to 5 instructions per weight,
/// at half of the issue rate.
const MULTIPLY_ADDS_PER_WEIGHT: u64 = 4;

/// Time of a pass of a loop that waits for a load.
const PASS_TIME: Duration = Duration::from_nanos(100);

/// Bytes that are moved for each element of a tensor whose rows are not dense: a sector.
const SECTOR: u64 = 32;

/// The time in which `gpu` runs the kernels of a node with op `code` and these operands, and at most `blocks` blocks in a launch. A grid with fewer blocks than the GPU has multiprocessors uses a part of it.
pub(super) fn kernel_time(
    gpu: &Gpu,
    code: OpCode,
    dst: &TensorDesc,
    srcs: &[Option<&TensorDesc>],
    blocks: u64,
) -> Duration {
    let multiprocessors = f64::from(gpu.multiprocessors.max(1));
    let busy = (blocks.max(1) as f64).min(multiprocessors);
    let bytes_per_second = gpu.bandwidth() as f64 * BANDWIDTH_SHARE * (busy / multiprocessors);
    let multiply_adds_per_second = gpu.clock_hz() as f64 * MULTIPLY_ADDS_PER_CLOCK * busy;
    let seconds = (moved_bytes(code, dst, srcs) as f64 / bytes_per_second)
        .max(multiply_adds(code, dst, srcs) as f64 / multiply_adds_per_second);
    LAUNCH_TIME.max(Duration::from_secs_f64(seconds))
}

/// The time of a launch whose threads loop, with so many blocks: its instructions at the multiprocessors' rate, or the passes of one thread.
pub(super) fn loop_time(gpu: &Gpu, loops: Loops, blocks: u64) -> Duration {
    let busy = blocks.clamp(1, u64::from(gpu.multiprocessors.max(1))) as f64;
    let instructions = loops.instructions as f64 / (gpu.clock_hz() as f64 * MULTIPLY_ADDS_PER_CLOCK * busy);
    Duration::from_secs_f64(instructions.max(loops.chain as f64 * PASS_TIME.as_secs_f64()))
}

/// Bytes that the kernels read and write.
fn moved_bytes(code: OpCode, dst: &TensorDesc, srcs: &[Option<&TensorDesc>]) -> u64 {
    let whole = |t: &TensorDesc| {
        let scattered = (t.elements() as u64).saturating_mul(SECTOR);
        if t.rows_dense() { t.dense_bytes() as u64 } else { scattered }
    };
    let first = srcs.first().copied().flatten();
    let (mut written, mut first_read) = (whole(dst), first.map_or(0, whole));
    match code {
        // The rows that are looked up, of a table of any size.
        OpCode::GetRows => first_read = first_read.min(written),
        // The destination is the whole cache.
        OpCode::SetRows => written = written.min(first_read),
        // At most as many experts as the tokens use.
        OpCode::MulMatId => {
            if let Some(experts) = first {
                let all = experts.ne()[2].max(1) as u64;
                let used = (dst.rows() as u64).min(all);
                first_read = (first_read / all).saturating_mul(used);
            }
        }
        _ => {}
    }
    let others = srcs.iter().skip(1).flatten().fold(0u64, |sum, t| sum.saturating_add(whole(t)));
    written.saturating_add(first_read).saturating_add(others)
}

/// Multiply-adds that the kernels compute: 0 for ops that compute little for each byte.
fn multiply_adds(code: OpCode, dst: &TensorDesc, srcs: &[Option<&TensorDesc>]) -> u64 {
    let ne = |i: usize| srcs.get(i).copied().flatten().map_or([0; 4], |t| t.ne().map(|n| n as u64));
    let product = |factors: &[u64]| factors.iter().fold(1u64, |all, &n| all.saturating_mul(n));
    let [a, b] = [ne(0), ne(1)];
    let elements = dst.elements() as u64;
    match code {
        OpCode::MulMat => product(&[elements, a[0]]).max(product(&[product(&a), MULTIPLY_ADDS_PER_WEIGHT])),
        OpCode::MulMatId => {
            let is_f32 = srcs.first().copied().flatten().is_some_and(|a| a.dtype() == DType::F32);
            let (slots, experts) = (dst.rows() as u64, a[2]);
            if slots > 2 * experts && !is_f32 {
                // By expert, as a plain product.
                let weights = product(&[a[0], a[1], experts, MULTIPLY_ADDS_PER_WEIGHT]);
                product(&[elements, a[0]]).max(weights)
            } else {
                // The kernel reads an expert's weights again for each token.
                product(&[elements, a[0], MULTIPLY_ADDS_PER_WEIGHT])
            }
        }
        // Each query times each position, for the scores and for the sum of the values.
        OpCode::FlashAttnExt => product(&[a[1], a[2], a[3], b[1], a[0].saturating_add(ne(2)[0])]),
        // A sorting network has log2(n)^2 / 2 passes.
        OpCode::Argsort | OpCode::TopK => {
            let passes = u64::from(a[0].max(2).ilog2() + 1);
            product(&[product(&a), passes, passes])
        }
        _ => 0,
    }
}

/// Consecutive launches of a program that take at most a slice by estimate, or one launch that takes longer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Segment {
    /// Indices of the launches.
    pub(super) launches: Range<usize>,
    /// Estimated time.
    pub(super) time: Duration,
}

/// Cuts launches of these estimated times into segments of at most `slice`. A launch without time runs instead of the one before, in the
/// same segment.
pub(super) fn cut_into_segments(times: impl IntoIterator<Item = Duration>, slice: Duration) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for (index, time) in times.into_iter().enumerate() {
        match segments.last_mut() {
            Some(last) if time.is_zero() || last.time.saturating_add(time) <= slice => {
                last.launches.end = index + 1;
                last.time += time;
            }
            _ => segments.push(Segment { launches: index..index + 1, time }),
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType::{F16, F32, I32, Q4_0};

    fn h100() -> Gpu {
        Gpu::with_capability(90)
    }

    fn tensor(dtype: DType, ne: [usize; 4]) -> TensorDesc {
        TensorDesc::contiguous(dtype, ne).unwrap()
    }

    /// A grid of one block cannot use the other multiprocessors, and a thread's passes take their time one after another.
    #[test]
    fn loops_take_the_time_of_their_instructions_or_of_one_thread() {
        let gpu = h100();
        let time = |instructions, chain, blocks| loop_time(&gpu, Loops { instructions, chain }, blocks);
        assert_eq!(time(0, 1 << 15, 1), PASS_TIME * (1 << 15));
        assert!(time(1 << 40, 1, 10_000) > Duration::from_millis(50));
        assert!(time(1 << 36, 1, 1) > 100 * time(1 << 36, 1, 10_000));
    }

    #[test]
    fn estimates_follow_the_slowest_resource() {
        let (x, weights) = (tensor(F32, [4096, 512, 1, 1]), tensor(Q4_0, [4096, 4096, 1, 1]));
        let (column, out, column_out) =
            (tensor(F32, [4096, 1, 1, 1]), tensor(F32, [4096, 512, 1, 1]), tensor(F32, [4096, 1, 1, 1]));
        let (table, cache) = (tensor(F16, [4096, 1 << 17, 1, 1]), tensor(F16, [4096, 1 << 17, 1, 1]));
        let ids = tensor(I32, [1, 1, 1, 1]);
        let experts = tensor(Q4_0, [4096, 1024, 128, 1]);
        let expert_out = tensor(F32, [1024, 8, 1, 1]);
        let (q, kv) = (tensor(F32, [128, 512, 32, 1]), tensor(F16, [128, 8192, 8, 1]));
        let attended = tensor(F32, [128, 32, 512, 1]);
        type Row<'a> = (&'a str, OpCode, &'a TensorDesc, &'a [&'a TensorDesc], u64, f64);
        let rows: &[Row<'_>] = &[
            // 16 MiB at 0.75 * 3.35 TB/s.
            ("addition", OpCode::Unary, &x, &[&x], 1 << 13, 6.7),
            ("addition in one block", OpCode::Unary, &x, &[&x], 1, 6.7 * 132.0),
            // 4 multiply-adds per weight at 64 * 132 * 1.98 GHz.
            ("mat-vec", OpCode::MulMat, &column_out, &[&weights, &column], 4096, 4.0),
            ("product", OpCode::MulMat, &out, &[&weights, &x], 4096, 513.0),
            ("few experts", OpCode::MulMatId, &expert_out, &[&experts, &column], 4096, 8.0),
            ("attention", OpCode::FlashAttnExt, &attended, &[&q, &kv, &kv], 4096, 2053.0),
            ("one row of a table", OpCode::GetRows, &column, &[&table, &ids], 16, 1.3),
            ("one row of a cache", OpCode::SetRows, &cache, &[&column, &ids], 16, 1.3),
        ];
        for &(name, code, dst, srcs, blocks, want) in rows {
            let srcs: Vec<_> = srcs.iter().copied().map(Some).collect();
            let micros = kernel_time(&h100(), code, dst, &srcs, blocks).as_secs_f64() * 1e6;
            assert!((micros / want - 1.0).abs() < 0.05, "{name}: {micros} us, not {want} us");
        }
    }

    /// A GPU that reports nothing, and sizes at the limit.
    #[test]
    fn estimates_are_finite() {
        let gpu = Gpu { multiprocessors: 0, clock_khz: 0, memory_clock_khz: 0, memory_bus_bits: 0, ..h100() };
        let huge = tensor(F32, [1 << 20, 1 << 20, 1 << 18, 1]);
        for code in [OpCode::MulMat, OpCode::MulMatId, OpCode::FlashAttnExt, OpCode::Argsort, OpCode::Unary] {
            assert!(
                kernel_time(&gpu, code, &huge, &[Some(&huge), Some(&huge), Some(&huge)], 0) > Duration::from_secs(1)
            );
            assert_eq!(kernel_time(&h100(), code, &tensor(F32, [0, 1, 1, 1]), &[None], 0), LAUNCH_TIME);
        }
    }

    #[test]
    fn segments_are_at_most_a_slice_or_one_launch() {
        type Row<'a> = (&'a [u64], &'a [(Range<usize>, u64)]);
        let rows: &[Row<'_>] = &[
            (&[], &[]),
            (&[1, 1], &[(0..2, 2)]),
            (&[1, 1, 1], &[(0..2, 2), (2..3, 1)]),
            (&[1, 5, 1, 1], &[(0..1, 1), (1..2, 5), (2..4, 2)]),
            (&[5, 0, 2, 0], &[(0..2, 5), (2..4, 2)]),
        ];
        for (times, want) in rows {
            let want: Vec<_> = want
                .iter()
                .map(|(launches, time)| Segment { launches: launches.clone(), time: Duration::from_millis(*time) })
                .collect();
            let times = times.iter().map(|&ms| Duration::from_millis(ms));
            assert_eq!(cut_into_segments(times, Duration::from_millis(2)), want);
        }
    }
}

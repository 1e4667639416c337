//! Communication between the lanes of a warp.

use std::fmt::Debug;
use std::sync::Arc;

use cudarc::driver::{CudaModule, DeviceRepr};

use crate::gpu::{Gpu, assert_same, floats, ints, launch, random, whole_floats};

const FILE: &str = "warp.sm_80";
/// Threads in three blocks of 64.
const N: usize = 192;
const BLOCKS: u32 = 3;
const BLOCK: u32 = 64;

/// The lanes that a lane reads in the eight shuffles of a kernel; itself if out of range.
fn sources(lane: usize) -> [usize; 8] {
    let up = |by: usize, width: usize| if lane % width >= by { lane - by } else { lane };
    let down = |by: usize, width: usize| if lane % width + by < width { lane + by } else { lane };
    let indexed = (lane & !15) | (lane * 7 % 16);
    // An exclusive or may reach a lower segment, but not a higher one.
    let other = lane ^ 20;
    let far = if other < 16 || lane >= 16 { other } else { lane };
    [5, indexed, up(3, 32), up(1, 8), down(3, 32), down(2, 4), lane ^ 1, far]
}

fn check_shuffles<T: DeviceRepr + Copy + PartialEq + Debug>(
    gpu: &Gpu,
    module: &Arc<CudaModule>,
    kernel: &str,
    values: &[T],
) {
    let out = gpu.alloc::<T>(8 * N);
    launch!(gpu, module, kernel, BLOCKS, BLOCK; &gpu.upload(values), &out);
    let want: Vec<T> = (0..N).flat_map(|i| sources(i % 32).map(|lane| values[i / 32 * 32 + lane])).collect();
    assert_same(kernel, &gpu.download(&out), &want);
}

#[test]
fn shuffles_read_the_lanes_of_their_definition() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let mut random = random(1);
    let wide: Vec<u64> = (0..N).map(|_| random.u64(..)).collect();
    check_shuffles(&gpu, &module, "shuffle_s32", &ints(N, i32::MIN..i32::MAX, 1));
    check_shuffles(&gpu, &module, "shuffle_f32", &floats(N, 2));
    check_shuffles(&gpu, &module, "shuffle_u64", &wide);
    check_shuffles(&gpu, &module, "shuffle_f64", &wide.iter().map(|&bits| bits as f64).collect::<Vec<_>>());

    let out = gpu.alloc::<u32>(N);
    launch!(gpu, module, "shuffle_in_range", BLOCKS, BLOCK; &out);
    let in_range = |i: usize| u32::from(i % 16 >= 4) | u32::from(i % 32 + 9 < 32) << 1 | 4;
    assert_same("shuffle_in_range", &gpu.download(&out), &(0..N).map(in_range).collect::<Vec<_>>());

    let (values, out) = (ints(N, -100..100, 3), gpu.alloc::<i32>(N));
    launch!(gpu, module, "shuffle_part", BLOCKS, BLOCK; &gpu.upload(&values), &out);
    let want: Vec<i32> = (0..N).map(|i| if i % 4 == 1 { values[i] + values[i ^ 8] } else { values[i] - 1 }).collect();
    assert_same("shuffle_part", &gpu.download(&out), &want);
}

#[test]
fn votes_combine_the_predicates_of_their_members() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    // Different kinds of warps: mixed, all positive, none, one half.
    let mut values = ints(N, -10..10, 4);
    values[32..64].fill(3);
    values[64..96].fill(-3);
    values[96..112].fill(1);
    values[112..128].fill(0);
    let out = gpu.alloc::<u32>(8 * N);
    launch!(gpu, module, "votes", BLOCKS, BLOCK; &gpu.upload(&values), &out);
    let ballot = |i: usize, holds: fn(usize, bool) -> bool| -> u32 {
        let warp = &values[i / 32 * 32..][..32];
        warp.iter().enumerate().map(|(lane, &value)| u32::from(holds(lane, value > 0)) << lane).sum()
    };
    let words = |i: usize| {
        let (all, late) = (ballot(i, |_, holds| holds), ballot(i, |lane, holds| !holds && lane > 15));
        let last =
            if i % 32 < 16 { [all & 0xffff, 16] } else { [u32::from(all >> 16 != 0), u32::from(all >> 16 == 0xffff)] };
        let uniform = all == 0 || all == u32::MAX;
        let active = if values[i] > 0 { all } else { 0 };
        [u32::from(all != 0), u32::from(all == u32::MAX), all, u32::from(uniform), active, late, last[0], last[1]]
    };
    assert_same("votes", &gpu.download(&out), &(0..N).flat_map(words).collect::<Vec<_>>());
}

#[test]
fn warp_reductions_scans_and_compaction_agree_with_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load(FILE);
    let values = whole_floats(N, 1000, 6);
    let out = gpu.alloc::<f32>(N / 16);
    launch!(gpu, module, "warp_reduce", BLOCKS, BLOCK; &gpu.upload(&values), &out);
    let reduce = |warp: &[f32]| [warp.iter().sum(), warp.iter().copied().fold(f32::MIN, f32::max)];
    assert_same("warp_reduce", &gpu.download(&out), &values.chunks(32).flat_map(reduce).collect::<Vec<_>>());

    let values = ints(N, -1000..1000, 7);
    let (input, out) = (gpu.upload(&values), gpu.alloc::<i32>(N));
    launch!(gpu, module, "warp_scan", BLOCKS, BLOCK; &input, &out);
    let scan = |i: usize| values[i / 32 * 32..=i].iter().sum();
    assert_same("warp_scan", &gpu.download(&out), &(0..N).map(scan).collect::<Vec<i32>>());

    for n in [1, 100, N] {
        let (out, count) = (gpu.zeros::<i32>(N), gpu.zeros::<i32>(1));
        launch!(gpu, module, "compact", BLOCKS, BLOCK; &input, &(n as i32), &out, &count);
        let mut want: Vec<i32> = values[..n].iter().copied().filter(|&value| value > 0).collect();
        assert_same("count of compact", &gpu.download(&count), &[want.len() as i32]);
        let mut got = gpu.download(&out)[..want.len()].to_vec();
        want.sort_unstable();
        got.sort_unstable();
        assert_same("compact", &got, &want);
    }

    let out = gpu.alloc::<i32>(N);
    launch!(gpu, module, "exchange_by_shared", BLOCKS, BLOCK; &input, &out);
    let total = |i: usize| values[i / 32 * 32..][..32].iter().sum();
    assert_same("exchange_by_shared", &gpu.download(&out), &(0..N).map(total).collect::<Vec<i32>>());
}

#[test]
fn integer_reductions_combine_the_values_of_their_members() {
    let gpu = Gpu::new(80);
    let module = gpu.load("warp.sm_80");
    let values = ints(N, i32::MIN..i32::MAX, 8);
    let out = gpu.alloc::<u32>(8 * N);
    launch!(gpu, module, "warp_reduce_integers", BLOCKS, BLOCK; &gpu.upload(&values), &out);
    let words = |i: usize| {
        let signed = &values[i / 32 * 32..][..32];
        let all: Vec<u32> = signed.iter().map(|&value| value as u32).collect();
        let sum = |part: &[u32]| part.iter().fold(0u32, |sum, value| sum.wrapping_add(*value));
        let or = all.iter().fold(0, |a, b| a | b) ^ all.iter().fold(0, |a, b| a ^ b);
        let last = if i % 32 < 8 { all[..8].iter().fold(u32::MAX, |a, b| a & b) } else { sum(&all[8..]) };
        let [least, most] = [signed.iter().min(), signed.iter().max()].map(|value| *value.unwrap() as u32);
        let [first, end] = [all.iter().min(), all.iter().max()].map(|value| *value.unwrap());
        [sum(&all), sum(&all), least, first, most, end, or, last]
    };
    assert_same("warp_reduce_integers", &gpu.download(&out), &(0..N).flat_map(words).collect::<Vec<_>>());
}

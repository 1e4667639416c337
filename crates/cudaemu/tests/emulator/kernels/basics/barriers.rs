//! Barriers of blocks.

use crate::gpu::{Gpu, assert_same, ints, launch, whole_floats};

#[test]
fn each_round_reads_the_values_before_the_barrier() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for (threads, rounds) in [(1, 3), (32, 5), (96, 8), (250, 1), (256, 7)] {
        let values = ints(2 * threads, -1000..1000, 1);
        let out = gpu.alloc::<i32>(values.len());
        launch!(gpu, module, "rotate", 2, threads as u32; &gpu.upload(&values), &out, &rounds);
        let block = |block: &[i32]| {
            let turned = |cells: Vec<i32>| (0..threads).map(|t| cells[(t + 33) % threads] + 1).collect();
            (0..rounds).fold(block.to_vec(), |cells, _| turned(cells))
        };
        let want: Vec<i32> = values.chunks(threads).flat_map(block).collect();
        assert_same(&format!("rotate {threads} by {rounds}"), &gpu.download(&out), &want);
    }
}

#[test]
fn reducing_barriers_combine_the_predicates_of_the_block() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for threads in [32, 50, 256] {
        let mut values = ints(3 * threads, -4..5, 2);
        values[0] = 6;
        values[threads] = -5;
        let out = gpu.alloc::<i32>(3 * values.len());
        launch!(gpu, module, "reducing_barriers", 3, threads as u32; &gpu.upload(&values), &out);
        let words = |i: usize| {
            let block = &values[i / threads * threads..][..threads];
            let count = block.iter().filter(|&&value| value > 0).count() as i32;
            [count, i32::from(block.iter().all(|&value| value > -5)), i32::from(block.iter().any(|&value| value > 5))]
        };
        assert_same(
            &format!("reducing_barriers {threads}"),
            &gpu.download(&out),
            &(0..values.len()).flat_map(words).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn named_barriers_synchronise_part_of_a_block() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    let values = ints(256, -1000..1000, 3);
    let out = gpu.alloc::<i32>(256);
    launch!(gpu, module, "named_halves", 1, 256; &gpu.upload(&values), &out);
    let cell = |t: usize| values[t / 128 * 128 + 127 - t % 128] * (2 + t as i32 / 128);
    assert_same("named_halves", &gpu.download(&out), &(0..256).map(|t| cell(255 - t)).collect::<Vec<_>>());

    let rounds = 5;
    let values = ints(32 * rounds, -1000..1000, 4);
    let out = gpu.alloc::<i32>(96);
    launch!(gpu, module, "producer_consumer", 1, 128; &gpu.upload(&values), &out, &(rounds as i32));
    let sum = |t: usize| (0..rounds).map(|round| values[32 * round + (t + 32) * 5 % 32]).sum();
    assert_same("producer_consumer", &gpu.download(&out), &(0..96).map(sum).collect::<Vec<i32>>());
}

#[test]
fn barriers_wait_for_divergent_lanes_and_not_for_exited_warps() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    let out = gpu.alloc::<i32>(64);
    launch!(gpu, module, "unaligned_barrier", 1, 64; &out);
    let want: Vec<i32> = (0..64).map(|t| (63 - t) * if t % 2 == 1 { 10 } else { 100 }).collect();
    assert_same("unaligned_barrier", &gpu.download(&out), &want);

    for warps in [1, 3, 8] {
        let values = ints(256, -1000..1000, 5);
        let out = gpu.zeros::<i32>(256);
        launch!(gpu, module, "early_exit", 1, 256; &gpu.upload(&values), &out, &(warps as i32));
        let want: Vec<i32> = (0..256).map(|t| if t < warps * 32 { values[warps * 32 - 1 - t] } else { 0 }).collect();
        assert_same(&format!("early_exit {warps}"), &gpu.download(&out), &want);
    }
}

#[test]
fn the_last_block_sees_the_partial_sums_of_all_blocks() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for (blocks, threads, n) in [(1, 32, 10), (5, 64, 1000), (9, 256, 3000)] {
        let values = whole_floats(n, 100, n as u64);
        let (partial, out) = (gpu.alloc::<f32>(blocks), gpu.alloc::<f32>(1));
        launch!(gpu, module, "sum_last_block", blocks as u32, threads; &gpu.upload(&values), &(n as i32), &partial, &out);
        assert_same(&format!("sum_last_block {blocks}"), &gpu.download(&out), &[values.iter().sum()]);
    }
}

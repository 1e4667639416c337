//! Barriers of blocks and of the grid.

use cudarc::driver::PushKernelArg;

use crate::gpu::{Gpu, ints, launch, same, shape, whole};

#[test]
fn rotations() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for (threads, rounds) in [(1, 3), (32, 5), (96, 8), (250, 1), (256, 7)] {
        let values = ints(2 * threads, -1000..1000, 1);
        let out = gpu.alloc::<i32>(values.len());
        launch!(gpu, module, "rotate", 2, threads as u32; &gpu.up(&values), &out, &rounds);
        let block = |block: &[i32]| {
            let turned = |cells: Vec<i32>| (0..threads).map(|t| cells[(t + 33) % threads] + 1).collect();
            (0..rounds).fold(block.to_vec(), |cells, _| turned(cells))
        };
        let want: Vec<i32> = values.chunks(threads).flat_map(block).collect();
        same(&format!("rotate {threads} by {rounds}"), &gpu.down(&out), &want);
    }
}

#[test]
fn barriers_that_reduce() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for threads in [32, 50, 256] {
        let mut values = ints(3 * threads, -4..5, 2);
        values[0] = 6;
        values[threads] = -5;
        let out = gpu.alloc::<i32>(3 * values.len());
        launch!(gpu, module, "reducing_barriers", 3, threads as u32; &gpu.up(&values), &out);
        let words = |i: usize| {
            let block = &values[i / threads * threads..][..threads];
            let count = block.iter().filter(|&&value| value > 0).count() as i32;
            [count, i32::from(block.iter().all(|&value| value > -5)), i32::from(block.iter().any(|&value| value > 5))]
        };
        same(
            &format!("reducing_barriers {threads}"),
            &gpu.down(&out),
            &(0..values.len()).flat_map(words).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn named_barriers() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    let values = ints(256, -1000..1000, 3);
    let out = gpu.alloc::<i32>(256);
    launch!(gpu, module, "named_halves", 1, 256; &gpu.up(&values), &out);
    let cell = |t: usize| values[t / 128 * 128 + 127 - t % 128] * (2 + t as i32 / 128);
    same("named_halves", &gpu.down(&out), &(0..256).map(|t| cell(255 - t)).collect::<Vec<_>>());

    let rounds = 5;
    let values = ints(32 * rounds, -1000..1000, 4);
    let out = gpu.alloc::<i32>(96);
    launch!(gpu, module, "producer_consumer", 1, 128; &gpu.up(&values), &out, &(rounds as i32));
    let sum = |t: usize| (0..rounds).map(|round| values[32 * round + (t + 32) * 5 % 32]).sum();
    same("producer_consumer", &gpu.down(&out), &(0..96).map(sum).collect::<Vec<i32>>());
}

#[test]
fn lanes_apart_and_warps_that_left() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    let out = gpu.alloc::<i32>(64);
    launch!(gpu, module, "unaligned_barrier", 1, 64; &out);
    let want: Vec<i32> = (0..64).map(|t| (63 - t) * if t % 2 == 1 { 10 } else { 100 }).collect();
    same("unaligned_barrier", &gpu.down(&out), &want);

    for warps in [1, 3, 8] {
        let values = ints(256, -1000..1000, 5);
        let out = gpu.zeros::<i32>(256);
        launch!(gpu, module, "early_exit", 1, 256; &gpu.up(&values), &out, &(warps as i32));
        let want: Vec<i32> = (0..256).map(|t| if t < warps * 32 { values[warps * 32 - 1 - t] } else { 0 }).collect();
        same(&format!("early_exit {warps}"), &gpu.down(&out), &want);
    }
}

#[test]
fn barrier_of_the_grid() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    let ring = module.load_function("ring").unwrap();
    for (blocks, threads, n, rounds) in [(1, 32, 50, 3), (4, 64, 100, 6), (7, 32, 1000, 4)] {
        let start: Vec<u32> = (0..n as u32).map(|i| i * i).collect();
        let (values, other, arrived) = (gpu.up(&start), gpu.alloc::<u32>(n), gpu.zeros::<u32>(1));
        let (length, turns) = (n as i32, rounds);
        let mut launch = gpu.stream().launch_builder(&ring);
        launch.arg(&values).arg(&other).arg(&length).arg(&turns).arg(&arrived);
        // SAFETY: the emulator checks what the kernel does with its arguments.
        unsafe { launch.launch_cooperative(shape(blocks, threads, 0)) }.unwrap();
        let step = |cells: Vec<u32>| (0..n).map(|i| cells[(i + n - 1) % n].wrapping_add(cells[(i + 1) % n])).collect();
        let want: Vec<u32> = (0..rounds).fold(start, |cells, _| step(cells));
        let out = if rounds % 2 == 0 { &values } else { &other };
        same(&format!("ring of {n} in {blocks} blocks"), &gpu.down(out), &want);
    }
}

#[test]
fn sum_by_the_last_block() {
    let gpu = Gpu::new(80);
    let module = gpu.load("barriers.sm_80");
    for (blocks, threads, n) in [(1, 32, 10), (5, 64, 1000), (9, 256, 3000)] {
        let values = whole(n, 100, n as u64);
        let (partial, out) = (gpu.alloc::<f32>(blocks), gpu.alloc::<f32>(1));
        launch!(gpu, module, "sum_last_block", blocks as u32, threads; &gpu.up(&values), &(n as i32), &partial, &out);
        same(&format!("sum_last_block {blocks}"), &gpu.down(&out), &[values.iter().sum()]);
    }
}

//! Prefix sums, by block and over all blocks.

use crate::gpu::{Gpu, assert_same, ints, launch};

fn inclusive_scan(values: &[i32]) -> Vec<i32> {
    values
        .iter()
        .scan(0, |sum, value| {
            *sum += value;
            Some(*sum)
        })
        .collect()
}

#[test]
fn each_block_is_scanned_and_gives_its_total() {
    // Kernel, numbers of threads of a block, elements per thread, and bytes of dynamic shared memory for n threads: two buffers
    // of n ints; 2n ints with one padding word per 32; none.
    type Row = (&'static str, &'static [u32], u32, fn(u32) -> u32);
    let rows: [Row; 3] = [
        ("scan_hillis_steele", &[1, 2, 32, 37, 256, 1024], 1, |n| 8 * n),
        ("scan_blelloch", &[1, 2, 16, 64, 512, 1024], 2, |n| 4 * (2 * n + n / 16)),
        ("scan_shuffle", &[32, 64, 96, 1024], 1, |_| 0),
    ];
    let gpu = Gpu::new(80);
    let module = gpu.load("scan.sm_80");
    for (kernel, thread_counts, per_thread, shared_bytes) in rows {
        for &threads in thread_counts {
            let (size, blocks) = ((threads * per_thread) as usize, 3);
            let values = ints(size * blocks, -1000..1000, u64::from(threads));
            let (input, out, totals) = (gpu.upload(&values), gpu.alloc::<i32>(values.len()), gpu.alloc::<i32>(blocks));
            launch!(gpu, module, kernel, blocks as u32, threads, shared shared_bytes(threads); &input, &out, &totals);
            let parts: Vec<Vec<i32>> = values.chunks(size).map(inclusive_scan).collect();
            let exclusive = kernel == "scan_blelloch";
            let want: Vec<i32> = parts
                .concat()
                .iter()
                .zip(&values)
                .map(|(sum, value)| sum - if exclusive { *value } else { 0 })
                .collect();
            let what = format!("{kernel}, {threads} threads");
            assert_same(&what, &gpu.download(&out), &want);
            assert_same(&what, &gpu.download(&totals), &parts.iter().map(|part| part[size - 1]).collect::<Vec<_>>());
        }
    }
}

#[test]
fn scans_of_blocks_plus_their_offsets_scan_the_whole_array() {
    let gpu = Gpu::new(80);
    let module = gpu.load("scan.sm_80");
    let (blocks, size) = (64, 128);
    let values = ints(blocks * size, -1000..1000, 5);
    let (input, out, totals) = (gpu.upload(&values), gpu.alloc::<i32>(values.len()), gpu.alloc::<i32>(blocks));
    let (offsets, total) = (gpu.alloc::<i32>(blocks), gpu.alloc::<i32>(1));
    launch!(gpu, module, "scan_shuffle", blocks as u32, size as u32; &input, &out, &totals);
    let shared_bytes = 4 * (blocks + blocks / 32) as u32;
    launch!(gpu, module, "scan_blelloch", 1, blocks as u32 / 2, shared shared_bytes; &totals, &offsets, &total);
    launch!(gpu, module, "scan_add_offsets", blocks as u32, size as u32; &out, &offsets);
    assert_same("scan in three launches", &gpu.download(&out), &inclusive_scan(&values));
    assert_same("total", &gpu.download(&total), &[values.iter().sum()]);
}

#[test]
fn blocks_that_wait_for_their_predecessor_scan_in_one_launch() {
    let gpu = Gpu::new(80);
    let module = gpu.load("scan.sm_80");
    for (threads, n) in [(32, 1), (32, 1000), (256, 10_000), (1024, 4096)] {
        let values = ints(n, -1000..1000, n as u64);
        let blocks = n.div_ceil(threads);
        let (input, out) = (gpu.upload(&values), gpu.alloc::<i32>(n));
        let (state, ticket) = (gpu.zeros::<u64>(blocks), gpu.zeros::<u32>(1));
        launch!(gpu, module, "scan_chained", blocks as u32, threads as u32; &input, &out, &state, &ticket, &(n as i32));
        assert_same(&format!("scan_chained of {n}"), &gpu.download(&out), &inclusive_scan(&values));
    }
}

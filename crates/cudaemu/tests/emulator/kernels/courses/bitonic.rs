//! Bitonic sort within warps and blocks, and over blocks.

use crate::gpu::{Gpu, assert_same, launch, random};

fn random_keys(count: usize) -> Vec<u32> {
    let mut random = random(count as u64);
    (0..count).map(|_| if random.bool() { random.u32(..) } else { random.u32(..8) }).collect()
}

#[test]
fn each_block_is_sorted() {
    let gpu = Gpu::new(80);
    let module = gpu.load("bitonic.sm_80");
    for threads in [1, 16, 128, 1024] {
        for alternate in [0, 1] {
            let (size, blocks) = (2 * threads as usize, 3);
            let keys = random_keys(size * blocks);
            let memory = gpu.upload(&keys);
            launch!(gpu, module, "bitonic_block", blocks as u32, threads; &memory, &alternate);
            let mut want = keys;
            for (index, block) in want.chunks_mut(size).enumerate() {
                block.sort_unstable();
                if alternate == 1 && index % 2 == 1 {
                    block.reverse();
                }
            }
            assert_same(
                &format!("bitonic_block, {threads} threads, alternate {alternate}"),
                &gpu.download(&memory),
                &want,
            );
        }
    }
}

#[test]
fn steps_over_all_blocks_sort_the_whole_array() {
    let gpu = Gpu::new(80);
    let module = gpu.load("bitonic.sm_80");
    let n = 2048;
    let keys = random_keys(n);
    let memory = gpu.upload(&keys);
    launch!(gpu, module, "bitonic_block", n as u32 / 256, 128; &memory, &1);
    let mut size = 512;
    while size <= n {
        let mut stride = size / 2;
        while stride > 0 {
            launch!(gpu, module, "bitonic_step", n as u32 / 512, 256; &memory, &(size as i32), &(stride as i32));
            stride /= 2;
        }
        size *= 2;
    }
    let mut want = keys;
    want.sort_unstable();
    assert_same("bitonic_step", &gpu.download(&memory), &want);
}

#[test]
fn each_warp_is_sorted() {
    let gpu = Gpu::new(80);
    let module = gpu.load("bitonic.sm_80");
    let keys = random_keys(192);
    let memory = gpu.upload(&keys);
    launch!(gpu, module, "bitonic_warp", 2, 96; &memory);
    let mut want = keys;
    want.chunks_mut(32).for_each(<[u32]>::sort_unstable);
    assert_same("bitonic_warp", &gpu.download(&memory), &want);
}

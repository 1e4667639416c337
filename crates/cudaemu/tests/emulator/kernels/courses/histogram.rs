//! Counts of byte values.

use crate::gpu::{Gpu, assert_same, launch, random};

#[test]
fn every_byte_is_counted_in_its_bin() {
    let gpu = Gpu::new(80);
    let module = gpu.load("histogram.sm_80");
    for kernel in ["histogram_global", "histogram_shared", "histogram_per_warp"] {
        for (n, grid, block) in [(16, 1, 32), (1008, 1, 64), (5008, 3, 256), (20_000, 5, 96)] {
            let mut random = random(n as u64);
            // Half of the bytes are 7, so that lanes collide.
            let bytes: Vec<u8> = (0..n).map(|_| if random.bool() { random.u8(..) } else { 7 }).collect();
            let counts = gpu.zeros::<u32>(256);
            launch!(gpu, module, kernel, grid, block; &gpu.upload(&bytes), &counts, &n);
            let mut want = vec![0; 256];
            bytes.iter().for_each(|&byte| want[byte as usize] += 1);
            assert_same(&format!("{kernel} of {n}"), &gpu.download(&counts), &want);
        }
    }
}

//! Copies in every width, with every kind of load and store.

use crate::gpu::{Gpu, assert_same, launch, random};

/// Kernel, and bytes of an element.
const KERNELS: [(&str, usize); 38] = [
    ("copy_u8", 1),
    ("copy_s8", 1),
    ("copy_u16", 2),
    ("copy_u32", 4),
    ("copy_f32", 4),
    ("copy_u64", 8),
    ("copy_f64", 8),
    ("copy_v2_u8", 2),
    ("copy_v4_u8", 4),
    ("copy_v2_u16", 4),
    ("copy_v4_u16", 8),
    ("copy_v2_u32", 8),
    ("copy_v4_u32", 16),
    ("copy_v2_f32", 8),
    ("copy_v4_f32", 16),
    ("copy_v2_u64", 16),
    ("copy_v2_f64", 16),
    ("copy_ldg_u8", 1),
    ("copy_ldg_u16", 2),
    ("copy_ldg_u32", 4),
    ("copy_ldg_u64", 8),
    ("copy_ldg_f32", 4),
    ("copy_ldg_f64", 8),
    ("copy_ldg_v2_u32", 8),
    ("copy_ldg_v4_f32", 16),
    ("copy_ldg_v4_u8", 4),
    ("copy_ldg_v2_u64", 16),
    ("copy_streaming", 4),
    ("copy_streaming_v4", 16),
    ("copy_l2_only", 4),
    ("copy_l2_only_v4", 16),
    ("copy_all_levels", 4),
    ("copy_all_levels_v4", 16),
    ("copy_last_use", 4),
    ("copy_last_use_v4", 16),
    ("copy_uncached", 4),
    ("copy_uncached_v4", 16),
    ("copy_volatile", 4),
];

fn random_bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut random = random(seed);
    (0..count).map(|_| random.u8(..)).collect()
}

#[test]
fn copies_of_every_width_keep_the_bytes() {
    let gpu = Gpu::new(80);
    let module = gpu.load("copy.sm_80");
    for (kernel, size) in KERNELS {
        for n in [1, 33, 200] {
            let values = random_bytes(n * size, n as u64);
            let (from, to) = (gpu.upload(&values), gpu.alloc::<u8>(n * size));
            launch!(gpu, module, kernel, n.div_ceil(64) as u32, 64; &from, &to, &(n as i32));
            assert_same(&format!("{kernel} of {n}"), &gpu.download(&to), &values);
        }
    }
}

/// A structure whose size is not a power of two. The byte between its members need not be written: the compiler marks it as
/// unused by the load (`.pragma "used_bytes_mask 127"`). It does not mark the four bytes at the end.
#[test]
fn copies_of_structures_need_no_initialised_padding() {
    let gpu = Gpu::new(80);
    let module = gpu.load("copy.sm_80");
    for n in [1, 50, 130] {
        let values = random_bytes(32 * n, n as u64);
        let to = gpu.zeros::<u8>(values.len());
        launch!(gpu, module, "copy_records", n.div_ceil(64) as u32, 64; &gpu.upload(&values), &to, &(n as i32));
        assert_same(&format!("copy_records of {n}"), &gpu.download(&to), &values);

        let mut from = gpu.alloc::<u8>(values.len());
        for record in 0..n {
            for part in [32 * record..32 * record + 7, 32 * record + 8..32 * record + 32] {
                gpu.stream().memcpy_htod(&values[part.clone()], &mut from.slice_mut(part)).unwrap();
            }
        }
        let to = gpu.zeros::<u8>(values.len());
        launch!(gpu, module, "copy_records", n.div_ceil(64) as u32, 64; &from, &to, &(n as i32));
        let written = |bytes: &[u8]| -> Vec<u8> {
            bytes.iter().enumerate().filter(|(at, _)| at % 32 != 7).map(|(_, &byte)| byte).collect()
        };
        assert_same(&format!("copy_records of {n}, without padding"), &written(&gpu.download(&to)), &written(&values));
    }
}

#[test]
fn byte_copies_and_fills_stop_at_whole_pieces_of_16_bytes() {
    let gpu = Gpu::new(80);
    let module = gpu.load("copy.sm_80");
    for n in [16, 160, 1000] {
        let values = random_bytes(n, 2);
        let whole = n / 16 * 16;
        let to = gpu.zeros::<u8>(n);
        launch!(gpu, module, "copy_bytes", n.div_ceil(512) as u32, 32; &gpu.upload(&values), &to, &(n as i32));
        let mut want = vec![0; n];
        want[..whole].copy_from_slice(&values[..whole]);
        assert_same(&format!("copy_bytes of {n}"), &gpu.download(&to), &want);
        launch!(gpu, module, "fill_bytes", n.div_ceil(512) as u32, 32; &to, &0x1a5, &(n as i32));
        want[..whole].fill(0xa5);
        assert_same(&format!("fill_bytes of {n}"), &gpu.download(&to), &want);
    }
}

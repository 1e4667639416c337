//! Every state space, parameters and special registers.

use crate::gpu::{Gpu, assert_close, assert_same, floats, ints, launch};

#[test]
fn constant_memory_has_initial_values_and_takes_writes_of_the_host() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    for n in [1, 100] {
        let x = floats(n, 1);
        let out = gpu.alloc::<f32>(n);
        launch!(gpu, module, "constant_polynomial", n.div_ceil(64) as u32, 64; &gpu.upload(&x), &out, &(n as i32));
        let want: Vec<f64> =
            x.iter().map(|&x| f64::from(x)).map(|x| 1.0 - 2.0 * x + 0.5 * x * x + 4.0 * x * x * x).collect();
        assert_close("constant_polynomial", &gpu.download(&out), &want, 0.0, 1e-6);
        let settings: Vec<i32> = (0..8).map(|k| k * k - n as i32).collect();
        gpu.set_global(&module, "settings", &settings.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
        let out = gpu.alloc::<i32>(n);
        launch!(gpu, module, "constant_from_host", n.div_ceil(64) as u32, 64; &out, &(n as i32));
        assert_same(
            "constant_from_host",
            &gpu.download(&out),
            &(0..n).map(|i| settings[i & 7] + i as i32).collect::<Vec<_>>(),
        );
    }
}

#[test]
fn module_variables_keep_their_values_between_launches() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    for round in 1..=2 {
        let (out, scaled) = (gpu.alloc::<u32>(20), gpu.alloc::<f64>(64));
        launch!(gpu, module, "device_globals", 1, 64; &out, &scaled);
        let mut want = vec![1, 1, 2, 3, 5, 8, 13, 21];
        want.resize(16, 0);
        want.extend("warp".bytes().map(u32::from));
        assert_same("device_globals", &gpu.download(&out), &want);
        assert_same("scale", &gpu.download(&scaled), &(0..64).map(|i| 2.5 * f64::from(i)).collect::<Vec<_>>());
        let counter = module.get_global("counter", gpu.stream()).unwrap();
        let bytes = gpu.stream().clone_dtoh(&counter).unwrap();
        assert_eq!(u32::from_le_bytes(bytes.try_into().unwrap()), 64 * round, "counter");
    }
}

#[test]
fn static_and_dynamic_shared_memory_reverse_a_block() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    let x = floats(3 * 256, 2);
    let out = gpu.alloc::<f32>(x.len());
    let reversed = |size: usize| x.chunks(size).flat_map(|block| block.iter().rev().copied()).collect::<Vec<_>>();
    launch!(gpu, module, "shared_static_reverse", 3, 256; &gpu.upload(&x), &out);
    assert_same("shared_static_reverse", &gpu.download(&out), &reversed(256));
    for threads in [1, 48, 96, 256] {
        let out = gpu.alloc::<f32>(x.len());
        launch!(gpu, module, "shared_dynamic_reverse", x.len() as u32 / threads, threads, shared 5 * threads; &gpu.upload(&x), &out);
        assert_same(&format!("shared_dynamic_reverse by {threads}"), &gpu.download(&out), &reversed(threads as usize));
    }
}

#[test]
fn local_arrays_are_sorted_per_thread() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    let values = ints(16 * 96, 0..1000, 3);
    let out = gpu.alloc::<i32>(96);
    launch!(gpu, module, "local_sort", 2, 48; &gpu.upload(&values), &out);
    let sorted = |part: &[i32]| {
        let mut all = part.to_vec();
        all.sort_unstable();
        all[(part[0] & 15) as usize]
    };
    assert_same("local_sort", &gpu.download(&out), &values.chunks(16).map(sorted).collect::<Vec<_>>());
}

#[test]
fn generic_pointers_reach_every_space() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    let values = ints(64, -100..100, 4);
    let out = gpu.alloc::<i32>(64);
    launch!(gpu, module, "generic_pointers", 1, 64; &gpu.upload(&values), &out);
    let sum: i32 = values[..8].iter().sum();
    assert_same(
        "generic_pointers",
        &gpu.download(&out),
        &(0..64).map(|i| sum * [1, 10, 100][i % 3]).collect::<Vec<_>>(),
    );
    let out = gpu.alloc::<u32>(4);
    launch!(gpu, module, "spaces_of_addresses", 1, 32; &out);
    assert_same("spaces_of_addresses", &gpu.download(&out), &[1, 2, 4, 8]);
}

/// The kernel's `Settings`, laid out as C++ does.
#[repr(C)]
#[derive(Clone, Copy)]
struct Settings {
    offset: i64,
    steps: [i32; 5],
    pairs: [(f32, u8); 3],
}
// SAFETY: plain numbers.
unsafe impl cudarc::driver::DeviceRepr for Settings {}

/// Four words at an address that is a multiple of 16.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Words([u32; 4]);
// SAFETY: plain numbers.
unsafe impl cudarc::driver::DeviceRepr for Words {}

#[test]
fn parameters_of_every_type_arrive() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    let settings =
        Settings { offset: -(1 << 40), steps: [3, -1, 4, 1, -5], pairs: [(0.5, 10), (1.5, 200), (-2.5, 30)] };
    let words = Words([1, 20, 300, 4000]);
    let out = gpu.alloc::<f64>(64);
    launch!(gpu, module, "parameters", 1, 64; &-7i8, &50_000u16, &-100_000i32, &(1i64 << 41), &0.25f32, &1e-3f64, &true, &settings, &words, &out);
    let value = |i: usize| {
        let sum = -7.0 + 50_000.0 - 100_000.0 + (1i64 << 41) as f64 + 0.25 + 1e-3 + 1000.0 - (1i64 << 40) as f64;
        let product = settings.pairs[i % 3].0 * f32::from(settings.pairs[(i + 1) % 3].1);
        sum + f64::from(settings.steps[i % 5]) + f64::from(product) + 4321.0
    };
    assert_close("parameters", &gpu.download(&out), &(0..64).map(value).collect::<Vec<_>>(), 1e-15, 0.0);
}

#[test]
fn special_registers_describe_the_position_of_the_thread() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    for (grid, block, dynamic) in [([1, 1, 1], [1, 1, 1], 0), ([3, 2, 2], [5, 4, 3], 48), ([2, 1, 1], [64, 1, 1], 1000)]
    {
        let (blocks, threads) = (grid.iter().product::<u32>(), block.iter().product::<u32>());
        let out = gpu.alloc::<u32>((16 * blocks * threads) as usize);
        let [grid_xyz, block_xyz] = [grid, block].map(|[x, y, z]| (x, y, z));
        launch!(gpu, module, "special_registers", grid_xyz, block_xyz, shared dynamic; &out);
        let position = |index: u32, [x, y, _]: [u32; 3]| [index % x, index / x % y, index / x / y];
        let words = |index: u32| {
            let (b, t) = (index / threads, index % threads);
            let (thread, place, lane) = (position(t, block), position(b, grid), t % 32);
            let bit = 1u32 << lane;
            let masks = [bit - 1, bit | (bit - 1), bit, !(bit - 1), !(bit | (bit - 1))];
            let mut words = [&thread[..], &place, &[threads, blocks, lane, t / 32], &masks].concat();
            words.push(dynamic);
            words
        };
        let want: Vec<u32> = (0..blocks * threads).flat_map(words).collect();
        assert_same(&format!("special_registers {grid:?} {block:?}"), &gpu.download(&out), &want);
    }
}

#[test]
fn launch_bounds_limit_the_threads_of_a_block() {
    let gpu = Gpu::new(80);
    let module = gpu.load("spaces.sm_80");
    let out = gpu.alloc::<i32>(256);
    launch!(gpu, module, "bounded", 2, 128; &out);
    assert_same("bounded", &gpu.download(&out), &(0..256).map(|i| i % 128).collect::<Vec<_>>());
    assert_eq!(module.load_function("bounded").unwrap().max_threads_per_block(), Ok(128));
}

//! The cooperative groups library.

use cudarc::driver::PushKernelArg;

use crate::gpu::{Gpu, assert_same, ints, launch, launch_config};

#[test]
fn grid_tile_and_coalesced_groups_synchronise_their_threads() {
    let gpu = Gpu::new(80);
    let module = gpu.load("groups.sm_80");
    let grid = module.load_function("groups_grid").unwrap();
    for blocks in [1, 5] {
        let start = ints(64, -10..10, 1);
        let cells = gpu.upload(&start);
        let mut launch = gpu.stream().launch_builder(&grid);
        launch.arg(&cells);
        // SAFETY: the emulator checks what the kernel does with its arguments.
        unsafe { launch.launch_cooperative(launch_config(blocks, 64, 0)) }.unwrap();
        let turns = |&cell: &i32| (0..blocks as i32).fold(cell, |cell, turn| cell * 2 + turn);
        assert_same(
            &format!("groups_grid {blocks}"),
            &gpu.download(&cells),
            &start.iter().map(turns).collect::<Vec<_>>(),
        );
    }
    let values = ints(192, -1000..1000, 2);
    let (input, out) = (gpu.upload(&values), gpu.alloc::<i32>(192));
    launch!(gpu, module, "groups_tile", 3, 64; &input, &out);
    let tile = |i: usize| values[i / 8 * 8..][..8].iter().sum::<i32>() + i as i32 % 8;
    assert_same("groups_tile", &gpu.download(&out), &(0..192).map(tile).collect::<Vec<_>>());
    launch!(gpu, module, "groups_active", 3, 64; &input, &out);
    let odd = |part: &[i32]| part.iter().filter(|&&value| value & 1 == 1).count() as i32;
    let active = |i: usize| {
        let warp = &values[i / 32 * 32..][..32];
        if values[i] & 1 == 1 { odd(&warp[..i % 32]) + 100 * odd(warp) } else { -1 }
    };
    assert_same("groups_active", &gpu.download(&out), &(0..192).map(active).collect::<Vec<_>>());
}

//! The cooperative groups library.

use cudarc::driver::PushKernelArg;

use crate::gpu::{Gpu, ints, launch, same, shape};

#[test]
fn grid_tiles_and_active_lanes() {
    let gpu = Gpu::new(80);
    let module = gpu.load("groups.sm_80");
    let grid = module.load_function("groups_grid").unwrap();
    for blocks in [1, 5] {
        let start = ints(64, -10..10, 1);
        let cells = gpu.up(&start);
        let mut launch = gpu.stream().launch_builder(&grid);
        launch.arg(&cells);
        // SAFETY: the emulator checks what the kernel does with its arguments.
        unsafe { launch.launch_cooperative(shape(blocks, 64, 0)) }.unwrap();
        let turns = |&cell: &i32| (0..blocks as i32).fold(cell, |cell, turn| cell * 2 + turn);
        same(&format!("groups_grid {blocks}"), &gpu.down(&cells), &start.iter().map(turns).collect::<Vec<_>>());
    }
    let values = ints(192, -1000..1000, 2);
    let (input, out) = (gpu.up(&values), gpu.alloc::<i32>(192));
    launch!(gpu, module, "groups_tile", 3, 64; &input, &out);
    let tile = |i: usize| values[i / 8 * 8..][..8].iter().sum::<i32>() + i as i32 % 8;
    same("groups_tile", &gpu.down(&out), &(0..192).map(tile).collect::<Vec<_>>());
    launch!(gpu, module, "groups_active", 3, 64; &input, &out);
    let odd = |part: &[i32]| part.iter().filter(|&&value| value & 1 == 1).count() as i32;
    let active = |i: usize| {
        let warp = &values[i / 32 * 32..][..32];
        if values[i] & 1 == 1 { odd(&warp[..i % 32]) + 100 * odd(warp) } else { -1 }
    };
    same("groups_active", &gpu.down(&out), &(0..192).map(active).collect::<Vec<_>>());
}

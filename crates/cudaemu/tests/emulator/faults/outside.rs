//! Faults outside of allocations: out of bounds, after free, null pointers.

use cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;

use super::{FaultCase, Gpu, Launch, attempt, check_all, numbers};

const OUTSIDE: &str = "access outside an allocation: ";

#[test]
fn accesses_outside_of_global_memory_are_reported() {
    const N: usize = 100;
    /// Launches a kernel on two buffers of `N` floats; returns the addresses of both.
    fn run(gpu: &Gpu, module: &std::sync::Arc<cudarc::driver::CudaModule>, kernel: &str, n: i32) -> [u64; 2] {
        let (input, out) = (gpu.upload(&[1.0f32; N]), gpu.zeros::<f32>(N));
        attempt!(gpu, module, kernel, 2, 64; &input, &out, &n);
        [gpu.address(&input), gpu.address(&out)]
    }
    let row = |kernel, block, thread, instruction, fault: Launch| FaultCase {
        file: "out_of_bounds",
        kernel,
        kind: OUTSIDE,
        block,
        thread,
        instruction,
        error: CUDA_ERROR_ILLEGAL_ADDRESS,
        fault,
        clean: |gpu, module| {
            run(gpu, module, "out_of_bounds_clean", N as i32);
            None
        },
    };
    // Each launch returns the expected state space and address; `None` for a clean run. Thread 35 of block 1 has index 99 and
    // reads index 100; thread 36 has index 100.
    check_all(&[
        row("read_past_end_fault", 1, 35, "ld.global.f32", |gpu, module| {
            Some(("Global", run(gpu, module, "read_past_end_fault", N as i32)[0] + 4 * N as u64))
        }),
        row("write_past_end_fault", 1, 36, "st.global.f32", |gpu, module| {
            Some(("Global", run(gpu, module, "write_past_end_fault", N as i32)[1] + 4 * N as u64))
        }),
        row("read_before_start_fault", 0, 0, "ld.global.f32", |gpu, module| {
            Some(("Global", run(gpu, module, "read_before_start_fault", N as i32)[0] - 4))
        }),
        row("write_before_start_fault", 0, 0, "st.global.f32", |gpu, module| {
            Some(("Global", run(gpu, module, "write_before_start_fault", N as i32)[1] - 4))
        }),
        // 102 floats: the vector of thread 25 (elements 100 to 103) crosses the end.
        row("vector_over_end_fault", 0, 25, "ld.global.v4.f32", |gpu, module| {
            let (input, out) = (gpu.upload(&[1.0f32; 102]), gpu.zeros::<f32>(N));
            attempt!(gpu, module, "vector_over_end_fault", 2, 64; &input, &out, &102);
            Some(("Global", gpu.address(&input) + 4 * N as u64))
        }),
        row("atomic_past_end_fault", 1, 36, "atom.global.add.f32", |gpu, module| {
            Some(("Global", run(gpu, module, "atomic_past_end_fault", N as i32)[1] + 4 * N as u64))
        }),
    ]);
}

#[test]
fn accesses_outside_of_shared_local_and_constant_memory_are_reported() {
    /// Indices for 64 threads, one of them far outside.
    fn indices() -> Vec<i32> {
        (0..64).map(|i| if i == 37 { 1 << 20 } else { i % 8 }).collect()
    }
    let row = |file, kernel, thread, instruction, fault, clean| FaultCase {
        file,
        kernel,
        kind: OUTSIDE,
        block: 0,
        thread,
        instruction,
        error: CUDA_ERROR_ILLEGAL_ADDRESS,
        fault,
        clean,
    };
    check_all(&[
        row(
            "out_of_bounds_shared",
            "shared_static_fault",
            37,
            "ld.shared.u32",
            |gpu, module| {
                let (input, index) = (gpu.upload(&numbers(64)), gpu.upload(&indices()));
                attempt!(gpu, module, "shared_static_fault", 1, 64; &input, &index, &gpu.zeros::<i32>(64));
                Some(("Shared", 4 << 20))
            },
            |gpu, module| {
                attempt!(gpu, module, "shared_static_clean", 1, 64; &gpu.upload(&numbers(64)), &gpu.zeros::<i32>(64));
                None
            },
        ),
        row(
            "out_of_bounds_shared",
            "shared_dynamic_write_fault",
            63,
            "st.shared.u32",
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "shared_dynamic_write_fault", 1, 64, shared 256; &input, &out);
                Some(("Shared", 256))
            },
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "shared_dynamic_clean", 1, 64, shared 256; &input, &out);
                None
            },
        ),
        row(
            "out_of_bounds_shared",
            "shared_dynamic_read_fault",
            0,
            "ld.shared.u32",
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "shared_dynamic_read_fault", 1, 64, shared 256; &input, &out);
                Some(("Shared", 256))
            },
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "shared_dynamic_clean", 1, 64, shared 256; &input, &out);
                None
            },
        ),
        row(
            "out_of_bounds_local",
            "local_array_fault",
            37,
            "ld.local.u32",
            |gpu, module| {
                let (input, index) = (gpu.upload(&numbers(8)), gpu.upload(&indices()));
                attempt!(gpu, module, "local_array_fault", 1, 64; &input, &index, &gpu.zeros::<i32>(64));
                Some(("Local", 4 << 20))
            },
            |gpu, module| {
                let (input, index) = (gpu.upload(&numbers(8)), gpu.upload(&indices()));
                attempt!(gpu, module, "local_array_clean", 1, 64; &input, &index, &gpu.zeros::<i32>(64));
                None
            },
        ),
        row(
            "out_of_bounds_constant",
            "constant_fault",
            37,
            "ld.const.u32",
            |gpu, module| {
                use cudarc::driver::DevicePtr;
                let (index, out) = (gpu.upload(&indices()), gpu.zeros::<i32>(64));
                let constants = module.get_global("constants", gpu.stream()).unwrap();
                let address = constants.device_ptr(gpu.stream()).0;
                attempt!(gpu, module, "constant_fault", 1, 64; &index, &out);
                Some(("Const", address + (4 << 20)))
            },
            |gpu, module| {
                attempt!(gpu, module, "constant_clean", 1, 64; &gpu.upload(&indices()), &gpu.zeros::<i32>(64));
                None
            },
        ),
    ]);
}

#[test]
fn uses_after_free_are_reported() {
    let row = |kernel, instruction, fault, clean| FaultCase {
        file: "use_after_free",
        kernel,
        kind: "use after free: ",
        block: 0,
        thread: 0,
        instruction,
        error: CUDA_ERROR_ILLEGAL_ADDRESS,
        fault,
        clean,
    };
    check_all(&[
        row(
            "read_cells",
            "ld.global.u32",
            |gpu, module| {
                let (cells, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                let address = gpu.address(&cells);
                drop(cells);
                attempt!(gpu, module, "read_cells", 1, 64; &address, &out);
                Some(("Global", address))
            },
            |gpu, module| {
                // Freed in stream order, after the kernel: valid.
                attempt!(gpu, module, "read_cells", 1, 64; &gpu.upload(&numbers(64)), &gpu.zeros::<i32>(64));
                None
            },
        ),
        row(
            "write_cells",
            "st.global.u32",
            |gpu, module| {
                let cells = gpu.upload(&numbers(64));
                let address = gpu.address(&cells);
                drop(cells);
                attempt!(gpu, module, "write_cells", 1, 64; &address, &5);
                Some(("Global", address))
            },
            |gpu, module| {
                attempt!(gpu, module, "write_cells", 1, 64; &gpu.alloc::<i32>(64), &5);
                None
            },
        ),
        row(
            "add_to_cells",
            "atom.global.add.u32",
            |gpu, module| {
                let cells = gpu.upload(&numbers(64));
                let address = gpu.address(&cells);
                drop(cells);
                attempt!(gpu, module, "add_to_cells", 1, 64; &address, &5);
                Some(("Global", address))
            },
            |gpu, module| {
                attempt!(gpu, module, "add_to_cells", 1, 64; &gpu.upload(&numbers(64)), &5);
                None
            },
        ),
        row(
            "use_address",
            "ld.global.u32",
            |gpu, module| {
                let (kept, cells, out) = (gpu.zeros::<u64>(1), gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "keep_address", 1, 1; &kept, &cells);
                let address = gpu.address(&cells);
                drop(cells);
                attempt!(gpu, module, "use_address", 1, 64; &kept, &out);
                Some(("Global", address))
            },
            |gpu, module| {
                let (kept, cells, out) = (gpu.zeros::<u64>(1), gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "keep_address", 1, 1; &kept, &cells);
                attempt!(gpu, module, "use_address", 1, 64; &kept, &out);
                assert_eq!(gpu.download(&out), numbers(64));
                None
            },
        ),
    ]);
}

#[test]
fn uses_of_null_pointers_are_reported() {
    let row = |kernel, instruction, fault| FaultCase {
        file: "null_pointer",
        kernel,
        kind: OUTSIDE,
        block: 0,
        thread: 0,
        instruction,
        error: CUDA_ERROR_ILLEGAL_ADDRESS,
        fault,
        clean: |gpu, module| {
            let out = gpu.zeros::<i32>(32);
            attempt!(gpu, module, "null_pointer_clean", 1, 32; &0u64, &out);
            assert_eq!(gpu.download(&out), [-1; 32]);
            None
        },
    };
    check_all(&[
        row("null_pointer_read_fault", "ld.global.u32", |gpu, module| {
            attempt!(gpu, module, "null_pointer_read_fault", 1, 32; &0u64, &gpu.zeros::<i32>(32));
            Some(("Global", 0))
        }),
        row("null_pointer_offset_fault", "ld.global.u64", |gpu, module| {
            attempt!(gpu, module, "null_pointer_offset_fault", 1, 32; &0u64, &gpu.zeros::<i32>(32));
            Some(("Global", 8))
        }),
        row("null_pointer_write_fault", "st.global.u32", |gpu, module| {
            attempt!(gpu, module, "null_pointer_write_fault", 1, 32; &0u64, &gpu.zeros::<i32>(32));
            Some(("Global", 0))
        }),
    ]);
}

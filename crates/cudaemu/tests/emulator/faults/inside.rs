//! Faults inside of allocations: misaligned accesses, and reads of bytes that were never written.

use cudarc::driver::sys::CUresult::{CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_MISALIGNED_ADDRESS};

use super::{FaultCase, Launch, attempt, check_all, numbers};

/// Atomics are reported as reads too.
const UNINITIALISED: &str = "read of uninitialised memory; read of ";

/// A case for a kernel with parameters (bytes, other, offset): `$offset` is misaligned, `$aligned` is not.
macro_rules! misaligned {
    ($kernel:literal, $instruction:literal, $offset:literal, $aligned:literal) => {
        FaultCase {
            file: "misaligned",
            kernel: $kernel,
            kind: "misaligned access; ",
            block: 0,
            thread: 0,
            instruction: $instruction,
            error: CUDA_ERROR_MISALIGNED_ADDRESS,
            fault: |gpu, module| {
                let (bytes, other) = (gpu.zeros::<u8>(1024), gpu.zeros::<u8>(1024));
                attempt!(gpu, module, $kernel, 1, 32; &bytes, &other, &$offset);
                Some(("Global", gpu.address(&bytes) + $offset))
            },
            clean: |gpu, module| {
                let (bytes, other) = (gpu.zeros::<u8>(1024), gpu.zeros::<u8>(1024));
                attempt!(gpu, module, $kernel, 1, 32; &bytes, &other, &$aligned);
                None
            },
        }
    };
}

#[test]
fn misaligned_accesses_are_reported() {
    check_all(&[
        misaligned!("misaligned_read_u16", "ld.global.u16", 1, 2),
        misaligned!("misaligned_read_u32", "ld.global.u32", 2, 4),
        misaligned!("misaligned_read_u64", "ld.global.u64", 4, 8),
        misaligned!("misaligned_read_v4_u32", "ld.global.v4.u32", 8, 16),
        misaligned!("misaligned_write_u16", "st.global.u16", 1, 2),
        misaligned!("misaligned_write_u32", "st.global.u32", 2, 4),
        misaligned!("misaligned_write_u64", "st.global.u64", 4, 8),
        misaligned!("misaligned_write_v4_u32", "st.global.v4.u32", 8, 16),
        FaultCase {
            file: "misaligned",
            kernel: "misaligned_shared",
            kind: "misaligned access; ",
            block: 0,
            thread: 0,
            instruction: "st.shared.u32",
            error: CUDA_ERROR_MISALIGNED_ADDRESS,
            fault: |gpu, module| {
                attempt!(gpu, module, "misaligned_shared", 1, 64; &gpu.zeros::<i32>(64), &2);
                Some(("Shared", 2))
            },
            clean: |gpu, module| {
                attempt!(gpu, module, "misaligned_shared", 1, 64; &gpu.zeros::<i32>(64), &4);
                None
            },
        },
        FaultCase {
            file: "misaligned",
            kernel: "misaligned_atomic",
            kind: "misaligned access; ",
            block: 0,
            thread: 0,
            instruction: "atom.global.add.u32",
            error: CUDA_ERROR_MISALIGNED_ADDRESS,
            fault: |gpu, module| {
                let bytes = gpu.zeros::<u8>(16);
                attempt!(gpu, module, "misaligned_atomic", 1, 32; &bytes, &2);
                Some(("Global", gpu.address(&bytes) + 2))
            },
            clean: |gpu, module| {
                attempt!(gpu, module, "misaligned_atomic", 1, 32; &gpu.zeros::<u8>(16), &4);
                None
            },
        },
    ]);
}

#[test]
fn reads_of_uninitialised_memory_are_reported() {
    let row = |file, kernel, block, thread, instruction, fault, clean| FaultCase {
        file,
        kernel,
        kind: UNINITIALISED,
        block,
        thread,
        instruction,
        error: CUDA_ERROR_LAUNCH_FAILED,
        fault,
        clean,
    };
    let clean_shared: Launch = |gpu, module| {
        attempt!(gpu, module, "uninitialised_shared_clean", 1, 64; &gpu.upload(&numbers(64)), &gpu.zeros::<i32>(64));
        None
    };
    check_all(&[
        row(
            "uninitialised_global",
            "uninitialised_global",
            1,
            6,
            "ld.global.u32",
            |gpu, module| {
                let (mut input, out) = (gpu.alloc::<i32>(100), gpu.alloc::<i32>(100));
                gpu.stream().memcpy_htod(&numbers(70), &mut input.slice_mut(..70)).unwrap();
                attempt!(gpu, module, "uninitialised_global", 2, 64; &input, &out, &100);
                Some(("Global", gpu.address(&input) + 280))
            },
            |gpu, module| {
                let (input, out) = (gpu.alloc::<i32>(100), gpu.alloc::<i32>(100));
                attempt!(gpu, module, "write_every", 2, 64; &input, &100);
                attempt!(gpu, module, "uninitialised_global", 2, 64; &input, &out, &100);
                None
            },
        ),
        row(
            "uninitialised_global",
            "uninitialised_global",
            0,
            1,
            "ld.global.u32",
            |gpu, module| {
                let (input, out) = (gpu.alloc::<i32>(100), gpu.alloc::<i32>(100));
                attempt!(gpu, module, "write_every_second", 2, 64; &input, &100);
                attempt!(gpu, module, "uninitialised_global", 2, 64; &input, &out, &100);
                Some(("Global", gpu.address(&input) + 4))
            },
            |gpu, module| {
                // A copy is not a read: unwritten bytes stay unwritten in the copy.
                let input = gpu.alloc::<i32>(100);
                let copy = gpu.stream().clone_dtod(&input).unwrap();
                gpu.download(&copy);
                attempt!(gpu, module, "write_every", 2, 64; &copy, &100);
                attempt!(gpu, module, "uninitialised_global", 2, 64; &copy, &input, &100);
                None
            },
        ),
        row(
            "uninitialised_shared",
            "uninitialised_shared_fault",
            0,
            63,
            "ld.shared.u32",
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "uninitialised_shared_fault", 1, 64; &input, &out);
                Some(("Shared", 256))
            },
            clean_shared,
        ),
        row(
            "uninitialised_shared",
            "uninitialised_shared_atomic_fault",
            0,
            0,
            "atom.shared.add.u32",
            |gpu, module| {
                let (input, out) = (gpu.upload(&numbers(64)), gpu.zeros::<i32>(64));
                attempt!(gpu, module, "uninitialised_shared_atomic_fault", 1, 64; &input, &out);
                Some(("Shared", 0))
            },
            clean_shared,
        ),
        row(
            "uninitialised_local",
            "uninitialised_local",
            0,
            5,
            "ld.local.u32",
            |gpu, module| {
                let order: Vec<i32> = (0..8).collect();
                let index: Vec<i32> = (0..32).map(|i| i % 8).collect();
                attempt!(gpu, module, "uninitialised_local", 1, 32; &gpu.upload(&order), &gpu.upload(&index), &gpu.zeros::<i32>(32), &5);
                Some(("Local", 20))
            },
            |gpu, module| {
                let order: Vec<i32> = (0..8).collect();
                let index: Vec<i32> = (0..32).map(|i| i % 8).collect();
                attempt!(gpu, module, "uninitialised_local", 1, 32; &gpu.upload(&order), &gpu.upload(&index), &gpu.zeros::<i32>(32), &8);
                None
            },
        ),
    ]);
}

//! Kernels that stop early: traps, assertions, endless loops, stack overflows.

use cudarc::driver::sys::CUresult::{
    CUDA_ERROR_ASSERT, CUDA_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT,
};

use super::numbers;
use super::{FaultCase, attempt, check_all};

#[test]
fn kernels_that_stop_early_are_reported() {
    let row = |file, kernel, kind, thread, instruction, error, fault, clean| FaultCase {
        file,
        kernel,
        kind,
        block: 0,
        thread,
        instruction,
        error,
        fault,
        clean,
    };
    /// A case for a kernel on 32 values that stops at a negative one: value 9 is negative in the faulty run.
    macro_rules! negative {
        ($kernel:literal, $kind:literal, $instruction:literal, $error:expr) => {
            row(
                "trap",
                $kernel,
                $kind,
                9,
                $instruction,
                $error,
                |gpu, module| {
                    let mut values = numbers(32);
                    values[9] = -1;
                    attempt!(gpu, module, $kernel, 1, 32; &gpu.upload(&values), &gpu.zeros::<i32>(32));
                    None
                },
                |gpu, module| {
                    attempt!(gpu, module, $kernel, 1, 32; &gpu.upload(&numbers(32)), &gpu.zeros::<i32>(32));
                    None
                },
            )
        };
    }
    let assertion = "faults/trap.cu:11: void assert_where_negative(const int *, int *): block: [0,0,0], thread: [9,0,0] Assertion `in[i] >= 0 && \"the values are not negative\"` failed.";
    let mut asserts = negative!("assert_where_negative", "", "call", CUDA_ERROR_ASSERT);
    asserts.kind = assertion;
    check_all(&[
        negative!("trap_where_negative", "the kernel executed a trap", "trap", CUDA_ERROR_LAUNCH_FAILED),
        asserts,
        negative!("unreachable_where_negative", "the kernel executed a trap", "trap", CUDA_ERROR_LAUNCH_FAILED),
        row(
            "endless_loop",
            "wait_for_flag",
            "the launch does not end",
            0,
            "",
            CUDA_ERROR_LAUNCH_TIMEOUT,
            |gpu, module| {
                attempt!(gpu, module, "wait_for_flag", 1, 32; &gpu.zeros::<i32>(1), &gpu.zeros::<i32>(32));
                None
            },
            |gpu, module| {
                attempt!(gpu, module, "wait_for_flag", 1, 32; &gpu.upload(&[1]), &gpu.zeros::<i32>(32));
                None
            },
        ),
        row(
            "endless_loop",
            "one_lane_stays",
            "the launch does not end",
            7,
            "",
            CUDA_ERROR_LAUNCH_TIMEOUT,
            |gpu, module| {
                attempt!(gpu, module, "one_lane_stays", 1, 32; &100, &7, &gpu.zeros::<i32>(32));
                None
            },
            |gpu, module| {
                attempt!(gpu, module, "one_lane_stays", 1, 32; &100, &-1, &gpu.zeros::<i32>(32));
                None
            },
        ),
        row(
            "stack_overflow",
            "recurse",
            "stack overflow",
            0,
            "call",
            CUDA_ERROR_HARDWARE_STACK_ERROR,
            |gpu, module| {
                attempt!(gpu, module, "recurse", 1, 32; &5000, &gpu.upload(&numbers(64)), &gpu.zeros::<i32>(32));
                None
            },
            |gpu, module| {
                attempt!(gpu, module, "recurse", 1, 32; &2, &gpu.upload(&numbers(64)), &gpu.zeros::<i32>(32));
                None
            },
        ),
    ]);
}

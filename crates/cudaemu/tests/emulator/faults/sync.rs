//! Faults of cooperating threads: races, barriers, shuffles, asynchronous copies.

use cudarc::driver::sys::CUresult::{self, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT};

use super::{FaultCase, attempt, check_all};

/// A case for a kernel that takes `in` and `out` of 1024 words each and runs as one block.
macro_rules! row {
    ($file:literal, $kernel:literal, $clean:literal, $threads:literal, $kind:expr, thread $thread:literal, $instruction:literal, $access:expr) => {
        row!($file, $kernel, $clean, $threads, $kind, thread $thread, $instruction, $access, CUDA_ERROR_LAUNCH_FAILED)
    };
    ($file:literal, $kernel:literal, $clean:literal, $threads:literal, $kind:expr, thread $thread:literal, $instruction:literal, $access:expr, $error:expr) => {
        FaultCase {
            file: $file,
            kernel: $kernel,
            kind: $kind,
            block: 0,
            thread: $thread,
            instruction: $instruction,
            error: $error,
            fault: |gpu, module| {
                let input: Vec<i32> = (0..1024).map(|i| i % 11 + 1).collect();
                attempt!(gpu, module, $kernel, 1, $threads; &gpu.upload(&input), &gpu.zeros::<i32>(1024));
                $access
            },
            clean: |gpu, module| {
                let input: Vec<i32> = (0..1024).map(|i| i % 11 + 1).collect();
                attempt!(gpu, module, $clean, 1, $threads; &gpu.upload(&input), &gpu.zeros::<i32>(1024));
                None
            },
        }
    };
}

#[test]
fn races_in_shared_memory_are_reported() {
    check_all(&[
        row!("shared_race", "read_after_write_fault", "shared_race_clean", 256, "data race: ", thread 0, "st.shared", Some(("Shared", 0))),
        row!("shared_race", "write_after_read_fault", "shared_race_clean", 256, "data race: ", thread 0, "ld.shared", Some(("Shared", 1020))),
        row!("shared_race", "write_after_write_fault", "neighbouring_bytes_clean", 256, "data race: ", thread 128, "st.shared", Some(("Shared", 0))),
        row!("shared_race", "atomic_race_fault", "atomic_race_clean", 256, "data race: ", thread 0, "st.shared", Some(("Shared", 0))),
        row!("warp_race", "warp_race_fault", "warp_race_clean", 32, "data race: ", thread 0, "ld.volatile.shared", Some(("Shared", 4))),
    ]);
}

#[test]
fn divergent_barriers_and_deadlocks_are_reported() {
    const DIVERGENT: &str = "divergent barrier: ";
    /// The kernels of barrier_deadlock.cu take one buffer.
    macro_rules! deadlock {
        ($kernel:literal, $thread:literal, $instruction:literal) => {
            FaultCase {
                file: "barrier_deadlock",
                kernel: $kernel,
                kind: "deadlock: ",
                block: 0,
                thread: $thread,
                instruction: $instruction,
                error: CUDA_ERROR_LAUNCH_TIMEOUT,
                fault: |gpu, module| {
                    attempt!(gpu, module, $kernel, 1, 64; &gpu.zeros::<i32>(64));
                    None
                },
                clean: |gpu, module| {
                    attempt!(gpu, module, "barrier_deadlock_clean", 1, 64; &gpu.zeros::<i32>(64));
                    None
                },
            }
        };
    }
    let mut in_loop = row!("divergent_barrier", "barrier_in_loop_fault", "divergent_barrier_clean", 64, DIVERGENT, thread 32, "bar", None);
    in_loop.clean = |gpu, module| {
        attempt!(gpu, module, "barrier_in_loop_clean", 1, 64; &5, &gpu.zeros::<i32>(64));
        None
    };
    // The even and the odd lanes wait at different barriers, so they never reconverge.
    let mut apart = deadlock!("warp_and_block_barrier_fault", 1, "bar.warp.sync");
    (apart.kind, apart.error) = ("inactive lane: bar.warp.sync waits for lanes 0x55555555", CUDA_ERROR_LAUNCH_FAILED);
    check_all(&[
        row!("divergent_barrier", "barrier_in_branch_fault", "divergent_barrier_clean", 64, DIVERGENT, thread 1, "bar", None),
        row!("divergent_barrier", "barrier_in_both_branches_fault", "divergent_barrier_clean", 64, DIVERGENT, thread 0, "bar", None),
        in_loop,
        deadlock!("different_barriers_fault", 0, "bar.sync"),
        deadlock!("too_few_threads_fault", 0, "bar.sync"),
        apart,
    ]);
}

#[test]
fn inactive_lanes_are_reported() {
    const INACTIVE: &str = "inactive lane: ";
    check_all(&[
        row!("inactive_lane", "source_lane_fault", "inactive_lane_clean", 32, INACTIVE, thread 0, "shfl.sync.down.b32", None),
        row!("inactive_lane", "mask_without_caller_fault", "inactive_lane_clean", 32, INACTIVE, thread 31, "shfl.sync.bfly.b32", None),
        row!("inactive_lane", "vote_without_caller_fault", "mask_of_exited_clean", 32, INACTIVE, thread 16, "vote.sync.ballot.b32", None),
    ]);
}

#[test]
fn reads_before_an_asynchronous_copy_completes_are_reported() {
    const PENDING: &str = "asynchronous copy not waited for: ";
    const FAILED: CUresult = CUDA_ERROR_LAUNCH_FAILED;
    check_all(&[
        row!("missing_async_wait", "async_wait_missing_fault", "async_wait_clean", 64, PENDING, thread 0, "ld.shared", Some(("Shared", 1008)), FAILED),
        row!("missing_async_wait", "async_wait_too_early_fault", "async_stages_clean", 64, PENDING, thread 32, "ld.shared", Some(("Shared", 1536)), FAILED),
        row!("missing_async_wait", "async_barrier_missing_fault", "async_wait_clean", 64, "read of uninitialised memory", thread 0, "ld.shared", Some(("Shared", 1008)), FAILED),
    ]);
}

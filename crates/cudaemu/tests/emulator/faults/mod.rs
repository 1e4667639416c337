//! Deliberate faults, one row for each way to commit one: the report, its location, and the error code of the driver. Before
//! each fault a valid counterpart runs without a report, and afterwards another context still works.
//!
//! Not detected: races in global memory between blocks (`kernels/faults/global_race.cu`), because only shared memory records
//! the last accesses of each byte. In shared memory, a plain write is not detected if the same thread then executes an atomic
//! before another thread does: of unordered atomics and the accesses before them, only the last one is kept.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

mod endings;
mod inside;
mod leaks;
mod outside;
mod sync;

use std::sync::Arc;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaModule};

use crate::gpu::{Gpu, launch, ptx};

/// Launches a kernel that may fail at once, like `launch!` for valid kernels: the result shows in the wait.
macro_rules! attempt {
    ($gpu:expr, $module:expr, $kernel:expr, $grid:expr, $block:expr; $($arg:expr),* $(,)?) => {
        attempt!($gpu, $module, $kernel, $grid, $block, shared 0; $($arg),*)
    };
    ($gpu:expr, $module:expr, $kernel:expr, $grid:expr, $block:expr, shared $shared:expr; $($arg:expr),* $(,)?) => {{
        use cudarc::driver::PushKernelArg;
        let function = $module.load_function($kernel).unwrap();
        let shape = crate::gpu::launch_config($grid, $block, $shared);
        // SAFETY: the emulator checks what a kernel does with its arguments; cudarc keeps them alive.
        let _ = unsafe { $gpu.stream().launch_builder(&function)$(.arg($arg))*.launch(shape) };
    }};
}
use attempt;

/// Launches a kernel; for memory faults, returns the memory and address that must be reported.
type Launch = fn(&Gpu, &Arc<CudaModule>) -> Option<(&'static str, u64)>;

/// One deliberate fault, and the report that it must cause.
struct FaultCase {
    /// Name of the PTX file, without target.
    file: &'static str,
    /// The kernel that must be reported.
    kernel: &'static str,
    /// Start of the report.
    kind: &'static str,
    /// `blockIdx.x` and `threadIdx.x` of the thread that must be reported.
    block: u32,
    thread: u32,
    /// A part of the faulty instruction's line.
    instruction: &'static str,
    /// The expected error code.
    error: CUresult,
    /// The launch that faults.
    fault: Launch,
    /// The valid counterpart.
    clean: Launch,
}

/// Settings with a low instruction limit, after which a launch counts as endless.
const SETTINGS: &str = "CUDAEMU_DEVICES=2\nCUDAEMU_MAX_INSTRUCTIONS=200K";

/// Runs a case; returns the deviations from it, none if all is as expected.
fn deviations(row: &FaultCase) -> Vec<String> {
    let file = format!("{}.sm_80", row.file);
    let text = ptx(&file);
    {
        let gpu = Gpu::with_settings(80, SETTINGS);
        let module = gpu.load(&file);
        (row.clean)(&gpu, &module);
        gpu.finish();
    }
    let gpu = Gpu::with_settings(80, SETTINGS);
    let other = CudaContext::new(1).unwrap();
    gpu.context().bind_to_thread().unwrap();
    let module = gpu.load(&file);
    let access = (row.fault)(&gpu, &module);
    drop(module);
    let (errors, reports) = gpu.errors_and_reports(other);
    let mut wrong = Vec::new();
    for (when, error) in ["the wait", "a call after it"].iter().zip(errors) {
        if error.map_err(|error| error.0) != Err(row.error) {
            wrong.push(format!("{when} answered {error:?}, expected {:?}", row.error));
        }
    }
    let [report] = &reports[..] else {
        wrong.push(format!("{} reports: {reports:?}", reports.len()));
        return wrong;
    };
    let place =
        format!("\n  in kernel {}, block ({},0,0), thread ({},0,0)\n  at PTX line ", row.kernel, row.block, row.thread);
    if !report.starts_with(row.kind) || !report.contains(&place) {
        wrong.push(format!("expected {:?} and {place:?}", row.kind));
    }
    if let Some((memory, address)) = access
        && !report.contains(&format!(" at {memory} {address:#x}\n"))
    {
        wrong.push(format!("expected {memory} {address:#x}"));
    }
    let line = report.rsplit_once("PTX line ").and_then(|(_, line)| line.split_once(": "));
    let quoted = line.and_then(|(number, quoted)| {
        let number: usize = number.parse().ok()?;
        Some(text.lines().nth(number - 1)?.trim() == quoted && quoted.contains(row.instruction))
    });
    if quoted != Some(true) {
        wrong.push(format!("expected a line of the file with {}", row.instruction));
    }
    if !wrong.is_empty() {
        wrong.push(report.clone());
    }
    wrong
}

/// The integers from 1 on.
fn numbers(count: i32) -> Vec<i32> {
    (1..=count).collect()
}

#[track_caller]
fn check_all(rows: &[FaultCase]) {
    let wrong: Vec<String> = rows
        .iter()
        .map(|row| (row, deviations(row)))
        .filter(|(_, wrong)| !wrong.is_empty())
        .map(|(row, wrong)| format!("{} {}:\n  {}", row.file, row.kernel, wrong.join("\n  ")))
        .collect();
    assert!(wrong.is_empty(), "{} of {} rows:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
}

/// A limitation that the module header lists.
#[test]
fn races_in_global_memory_are_not_reported() {
    let gpu = Gpu::new(80);
    let module = gpu.load("global_race.sm_80");
    let count = gpu.zeros::<i32>(1);
    launch!(gpu, module, "global_count_clean", 4, 64; &count);
    assert_eq!(gpu.download(&count), [256]);
    launch!(gpu, module, "global_count_fault", 4, 64; &count);
    assert!((257..=512).contains(&gpu.download(&count)[0]));
}

//! An emulated device through cudarc, the API that programs use, and helpers for the tests of kernels: comparisons and input
//! values.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

use std::fmt::Debug;
use std::sync::Arc;

use cudaemu::test::Session;
use cudarc::driver::{
    CudaContext, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, LaunchConfig, ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;

/// A device that fails the test on drop if there is any report: a fault or a leak.
pub struct Gpu {
    open: Option<(Arc<CudaContext>, Arc<CudaStream>)>,
    emulator: Session,
}

impl Gpu {
    /// A device of this compute capability, written as a target: 75, 80, 89 or 90.
    pub fn new(target: u32) -> Self {
        Self::with_settings(target, "")
    }

    /// As [`Gpu::new`], with further settings.
    pub fn with_settings(target: u32, settings: &str) -> Self {
        let settings = format!("CUDAEMU_CAPABILITY={}.{}\nCUDAEMU_SMS=4\n{settings}", target / 10, target % 10);
        let emulator = cudaemu::test::start(&settings).unwrap();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        Self { open: Some((context, stream)), emulator }
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.open.as_ref().unwrap().0
    }

    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.open.as_ref().unwrap().1
    }

    pub fn emulator(&self) -> &Session {
        &self.emulator
    }

    /// Loads `kernels/ptx/<file>.ptx`.
    #[track_caller]
    pub fn load(&self, file: &str) -> Arc<CudaModule> {
        let text = ptx(file);
        self.context().load_module(Ptx::from_src(text)).unwrap_or_else(|error| self.panic_with_reports(file, error))
    }

    /// Copies values to new device memory.
    #[track_caller]
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> CudaSlice<T> {
        self.stream().clone_htod(values).unwrap_or_else(|error| self.panic_with_reports("copy to the device", error))
    }

    /// Device memory filled with zeros.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, count: usize) -> CudaSlice<T> {
        self.stream().alloc_zeros(count).unwrap()
    }

    /// Uninitialised device memory.
    pub fn alloc<T: DeviceRepr>(&self, count: usize) -> CudaSlice<T> {
        // SAFETY: only the emulator reads it, and reports reads of unwritten bytes.
        unsafe { self.stream().alloc(count) }.unwrap()
    }

    /// The values of a buffer, after all operations of the stream.
    #[track_caller]
    pub fn download<T: DeviceRepr>(&self, memory: &CudaSlice<T>) -> Vec<T> {
        self.stream().clone_dtoh(memory).unwrap_or_else(|error| self.panic_with_reports("copy from the device", error))
    }

    /// Waits for all operations.
    #[track_caller]
    pub fn finish(&self) {
        self.stream().synchronize().unwrap_or_else(|error| self.panic_with_reports("work", error));
    }

    /// The device address of a buffer.
    pub fn address<T>(&self, memory: &CudaSlice<T>) -> u64 {
        memory.device_ptr(self.stream()).0
    }

    /// Writes a variable of a module.
    #[track_caller]
    pub fn set_global(&self, module: &Arc<CudaModule>, name: &str, bytes: &[u8]) {
        let mut global =
            module.get_global(name, self.stream()).unwrap_or_else(|error| self.panic_with_reports(name, error));
        assert_eq!(global.len(), bytes.len(), "bytes of {name}");
        self.stream().memcpy_htod(bytes, &mut global).unwrap();
        // The caller owns the bytes, so the copy must be done before this returns.
        self.finish();
    }

    /// Waits for an operation that must fail: returns the errors of the wait and of a later call, and the reports. The other
    /// context must stay usable.
    #[track_caller]
    pub fn errors_and_reports(mut self, other: Arc<CudaContext>) -> ([Result<(), DriverError>; 2], Vec<String>) {
        let errors = [self.stream().synchronize(), self.stream().alloc_zeros::<u8>(1).map(drop)];
        let there = other.default_stream();
        let memory = there.clone_htod(&[1, 2, 3]).unwrap();
        assert_eq!(there.clone_dtoh(&memory), Ok(vec![1, 2, 3]), "another context");
        let reports = self.emulator.reports();
        // Drop them before the next test gets the emulator.
        drop((memory, there, other));
        self.open = None;
        (errors, reports)
    }

    /// Fails the test with an error and the reports of the emulator.
    #[track_caller]
    pub fn panic_with_reports(&self, what: &str, error: DriverError) -> ! {
        panic!("{what}: {error}\n{}", self.emulator.reports().join("\n"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let Some((context, stream)) = self.open.take() else { return };
        let finished = stream.synchronize();
        drop((context, stream));
        if !std::thread::panicking() {
            assert_eq!(self.emulator.reports(), Vec::<String>::new());
            finished.unwrap();
        }
    }
}

/// The text of `kernels/ptx/<file>.ptx`.
pub fn ptx(file: &str) -> String {
    let path = format!("{}/kernels/ptx/{file}.ptx", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Extents of a grid or block.
pub trait Extents {
    fn xyz(self) -> (u32, u32, u32);
}

impl Extents for u32 {
    fn xyz(self) -> (u32, u32, u32) {
        (self, 1, 1)
    }
}

impl Extents for (u32, u32) {
    fn xyz(self) -> (u32, u32, u32) {
        (self.0, self.1, 1)
    }
}

impl Extents for (u32, u32, u32) {
    fn xyz(self) -> Self {
        self
    }
}

/// Grid, block, and bytes of dynamic shared memory of a launch.
pub fn launch_config(grid: impl Extents, block: impl Extents, shared: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: grid.xyz(), block_dim: block.xyz(), shared_mem_bytes: shared }
}

/// `launch!(gpu, module, "kernel", grid, block; arguments…)`, with `shared bytes` before the semicolon if not 0.
macro_rules! launch {
    ($gpu:expr, $module:expr, $kernel:expr, $grid:expr, $block:expr; $($arg:expr),* $(,)?) => {
        launch!($gpu, $module, $kernel, $grid, $block, shared 0; $($arg),*)
    };
    ($gpu:expr, $module:expr, $kernel:expr, $grid:expr, $block:expr, shared $shared:expr; $($arg:expr),* $(,)?) => {{
        use cudarc::driver::PushKernelArg;
        let kernel: &str = $kernel;
        let function = $module.load_function(kernel).unwrap_or_else(|error| $gpu.panic_with_reports(kernel, error));
        let shape = crate::gpu::launch_config($grid, $block, $shared);
        // SAFETY: the emulator checks what a kernel does with its arguments; cudarc keeps them alive.
        unsafe { $gpu.stream().launch_builder(&function)$(.arg($arg))*.launch(shape) }
            .unwrap_or_else(|error| $gpu.panic_with_reports(kernel, error));
    }};
}
pub(crate) use launch;

/// Fails if a value deviates from the expected one by more than both bounds. NaN only matches NaN, infinities only themselves.
#[track_caller]
pub fn assert_close<T: Into<f64> + Copy + Debug>(what: &str, got: &[T], want: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (&value, &expected)) in got.iter().zip(want).enumerate() {
        let found: f64 = value.into();
        let same = found == expected || found.is_nan() && expected.is_nan();
        let near = (found - expected).abs() <= (expected.abs() * relative).max(absolute) && expected.is_finite();
        assert!(same || near, "{what}: [{index}] is {found:e}, expected {expected:e}");
    }
}

/// Fails if two lists differ, and reports the first difference.
#[track_caller]
pub fn assert_same<T: PartialEq + Debug>(what: &str, got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    if let Some(index) = (0..got.len()).find(|&index| got[index] != want[index]) {
        panic!("{what}: [{index}] is {:?}, expected {:?}", got[index], want[index]);
    }
}

pub fn random(seed: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed)
}

/// Random values in -1..1.
pub fn floats(count: usize, seed: u64) -> Vec<f32> {
    let mut random = random(seed);
    (0..count).map(|_| random.f32() * 2.0 - 1.0).collect()
}

/// Random integers as floats, from `-largest` to `largest`. Their sums are exact in f32 while they stay below 2^24.
pub fn whole_floats(count: usize, largest: i32, seed: u64) -> Vec<f32> {
    let mut random = random(seed);
    (0..count).map(|_| random.i32(-largest..=largest) as f32).collect()
}

/// Random integers of a range.
pub fn ints(count: usize, range: std::ops::Range<i32>, seed: u64) -> Vec<i32> {
    let mut random = random(seed);
    (0..count).map(|_| random.i32(range.clone())).collect()
}

//! Adds two vectors on an emulated device, through cudarc; with `--fault` it writes past their end. `cargo run -p cudaemu
//! --example vector_add`

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const PTX: &str = include_str!("../kernels/ptx/elementwise.sm_80.ptx");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // From here on "libcuda.so" is the emulator. The rest is an ordinary CUDA program.
    cudaemu::test::load()?;

    let device = CudaContext::new(0)?;
    let stream = device.default_stream();
    let kernel = device.load_module(Ptx::from_src(PTX))?.load_function("vector_add")?;

    let a = stream.clone_htod(&(0..1000).map(|i| i as f32).collect::<Vec<_>>())?;
    let b = stream.clone_htod(&vec![0.5f32; 1000])?;
    let mut c = stream.alloc_zeros::<f32>(1000)?;
    // The kernel only processes indices below this number.
    let count = if std::env::args().any(|argument| argument == "--fault") { 1001 } else { 1000 };

    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&a).arg(&b).arg(&mut c).arg(&count);
    #[allow(unsafe_code, reason = "cudarc's launch is unsafe")]
    // SAFETY: the arguments match the kernel's parameters. The emulator checks that the vectors are long enough.
    unsafe {
        launch.launch(LaunchConfig::for_num_elems(count as u32))?;
    }
    let sums = stream.clone_dtoh(&c)?;
    println!("{} + 0.5 = {}, … {} + 0.5 = {}", 0, sums[0], 999, sums[999]);
    Ok(())
}

//! Smoke test through cudarc: open a device, allocate, copy, load a module, launch.
#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const SCALE: &str = r#"
.version 7.0
.target sm_75
.address_size 64
.visible .entry scale(.param .u64 data, .param .u32 factor, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b32 %f<4>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %f1, [factor];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $done;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %f2, [%rd4];
    mul.lo.u32 %f3, %f2, %f1;
    st.global.u32 [%rd4], %f3;
$done:
    ret;
}
"#;

#[test]
fn a_kernel_runs_from_device_selection_to_result() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=2\nCUDAEMU_COUNTS=on").unwrap();
    assert_eq!(CudaContext::device_count(), Ok(2));
    {
        let context = CudaContext::new(1).unwrap();
        assert_eq!(context.compute_capability(), Ok((8, 0)));
        assert_eq!(context.name().unwrap(), "CUDA emulator sm_80");
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_src(SCALE)).unwrap();
        let scale = module.load_function("scale").unwrap();
        let host: Vec<u32> = (0..1000).collect();
        let mut data = stream.clone_htod(&host).unwrap();
        let mut launch = stream.launch_builder(&scale);
        launch.arg(&mut data).arg(&3u32).arg(&1000u32);
        // SAFETY: the arguments match the kernel's parameters, and the buffer has 1000 elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }.unwrap();
        let back = stream.clone_dtoh(&data).unwrap();
        assert_eq!(back, host.iter().map(|x| x * 3).collect::<Vec<_>>());
        let counts = emulator.counts_json();
        assert!(counts.contains("\"scale\": {\"launches\": 1, \"blocks\": 1, \"threads\": 1024,"), "{counts}");
        assert!(counts.contains("\"global_read\": {\"requests\": 32, \"bytes\": 4000, \"sectors\": 125}"), "{counts}");
        assert!(counts.contains("\"cuLaunchKernel\": 1"), "{counts}");
        assert_eq!((emulator.calls("cuLaunchKernel"), emulator.calls("cuGraphLaunch")), (1, 0));
        assert!(counts.ends_with("\"simulated_us\": 0}"), "{counts}");
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

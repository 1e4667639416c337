//! Calls that fail with any code, and kernels that are loaded after their module.

use crate::driver::support::{PrimaryContext, get_function, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

#[test]
fn the_nth_call_of_a_function_returns_the_code_and_does_nothing() {
    let emulator = cudaemu::test::start("CUDAEMU_FAIL_CALL=cuMemAlloc_v2:2:2").unwrap();
    let primary = PrimaryContext::new(0);
    let mut address = [0; 3];
    // SAFETY: out parameters point to variables of their types.
    let allocated = address.each_mut().map(|address| unsafe { sys::cuMemAlloc_v2(address, 16) });
    assert_eq!(allocated, [CUresult::CUDA_SUCCESS, CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_SUCCESS]);
    assert_eq!(address[1], 0);
    // All functions count for `*`, from now on.
    assert_eq!(emulator.fail_calls("*:2:700,cuMemFree_v2:9:1"), Ok(0));
    // SAFETY: the addresses are those of allocations.
    let freed = [address[0], address[2], address[2]].map(|address| unsafe { sys::cuMemFree_v2(address) });
    assert_eq!(freed, [CUresult::CUDA_SUCCESS, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, CUresult::CUDA_SUCCESS]);
    assert_eq!(emulator.fail_calls(""), Ok(1), "the call that was not made");
    assert!(emulator.fail_calls("cuInit").is_err());
    drop(primary);
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_launch_loads_its_kernel_if_nothing_has_loaded_it() {
    for (driver, loads, lazy) in [("12.9", false, 1), ("12.9", true, 0), ("12.3", false, 0)] {
        let settings = format!("CUDAEMU_FUNCTION_BYTES=1M\nCUDAEMU_DRIVER_VERSION={driver}");
        let emulator = cudaemu::test::start(&settings).unwrap();
        let primary = PrimaryContext::new(0);
        let function = get_function(load_kernels(), "exact");
        if loads {
            assert_eq!(cu_func_load(function), 0);
        }
        let before = emulator.alloc_syncs();
        (0..2).for_each(|_| ok(launch(function, 64, std::ptr::null_mut(), &[])));
        assert_eq!((emulator.lazy_loads(), emulator.alloc_syncs() - before), (lazy, lazy), "{driver} {loads}");
        drop(primary);
    }
    let emulator = cudaemu::test::start("CUDAEMU_FUNCTION_BYTES=1G\nCUDAEMU_MEMORY=64M").unwrap();
    let primary = PrimaryContext::new(0);
    let function = get_function(load_kernels(), "exact");
    assert_eq!(launch(function, 64, std::ptr::null_mut(), &[]), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    drop((primary, emulator));
}

/// `cuFuncLoad`, which the bindings of CUDA 12.0 do not have.
fn cu_func_load(function: sys::CUfunction) -> u32 {
    // SAFETY: the emulator exports this function with this signature.
    unsafe {
        let load = sys::culib().get::<unsafe extern "C" fn(sys::CUfunction) -> u32>(b"cuFuncLoad\0").unwrap();
        load(function)
    }
}

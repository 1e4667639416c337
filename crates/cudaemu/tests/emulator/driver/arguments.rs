//! Invalid arguments: stale and foreign handles, null pointers, launches beyond the limits. Each gives an error and has no
//! other effect.

use super::support::{PrimaryContext, get_function, handle, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const INVALID_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;

#[test]
fn stale_and_foreign_handles_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    let primary = PrimaryContext::new(0);
    // SAFETY: the test passes invalid handles on purpose; out parameters point to variables of their types.
    unsafe {
        let past = handle(|s| sys::cuStreamCreate(s, 0));
        ok(sys::cuStreamDestroy_v2(past));
        let event = handle(|e| sys::cuEventCreate(e, 0));
        let module = load_kernels();
        let wrong: [u64; 6] = [past as u64, 0x1234, u64::MAX, event as u64, module as u64, primary.context as u64];
        for stream in wrong.map(|wrong| wrong as sys::CUstream) {
            for answer in [
                sys::cuStreamDestroy_v2(stream),
                sys::cuStreamSynchronize(stream),
                sys::cuStreamQuery(stream),
                sys::cuStreamWaitEvent(stream, event, 0),
                sys::cuEventRecord(event, stream),
                sys::cuMemsetD8Async(0, 0, 1, stream),
                launch(get_function(module, "trap"), 1, stream, &[]),
            ] {
                assert_eq!(answer, INVALID_HANDLE);
            }
        }
        let gone = handle(|e| sys::cuEventCreate(e, 0));
        ok(sys::cuEventDestroy_v2(gone));
        for wrong in [0, 7, gone as u64, module as u64] {
            let event = wrong as sys::CUevent;
            assert_eq!(sys::cuEventDestroy_v2(event), INVALID_HANDLE);
            assert_eq!(sys::cuEventQuery(event), INVALID_HANDLE);
            assert_eq!(sys::cuEventRecord(event, std::ptr::null_mut()), INVALID_HANDLE);
            let mut f = std::ptr::null_mut();
            if wrong != module as u64 {
                assert_eq!(sys::cuModuleGetFunction(&mut f, event.cast(), c"trap".as_ptr()), INVALID_HANDLE);
                assert_eq!(sys::cuModuleUnload(event.cast()), INVALID_HANDLE);
            }
            assert_eq!(launch(event.cast(), 1, std::ptr::null_mut(), &[]), INVALID_HANDLE);
            assert_eq!(
                sys::cuCtxSetCurrent(if event.is_null() { 7 as sys::CUcontext } else { event.cast() }),
                CUresult::CUDA_ERROR_INVALID_CONTEXT
            );
            assert_eq!(sys::cuMemPoolTrimTo(event.cast(), 0), INVALID_VALUE);
        }
        let trap = get_function(module, "trap");
        ok(sys::cuModuleUnload(module));
        assert_eq!(sys::cuModuleUnload(module), INVALID_HANDLE);
        assert_eq!(launch(trap, 1, std::ptr::null_mut(), &[]), INVALID_HANDLE);
        ok(sys::cuEventDestroy_v2(event));
    }
}

#[test]
fn null_out_parameters_and_texts_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: the test passes null on purpose.
    unsafe {
        let module = load_kernels();
        let null = std::ptr::null_mut();
        let mut function = std::ptr::null_mut();
        for answer in [
            sys::cuStreamCreate(std::ptr::null_mut(), 0),
            sys::cuEventCreate(std::ptr::null_mut(), 0),
            sys::cuEventElapsedTime(std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut()),
            sys::cuModuleLoadData(std::ptr::null_mut(), c"".as_ptr().cast()),
            sys::cuModuleLoadData(std::ptr::from_mut(&mut std::ptr::null_mut()), std::ptr::null()),
            sys::cuModuleLoad(std::ptr::from_mut(&mut std::ptr::null_mut()), std::ptr::null()),
            sys::cuModuleGetFunction(std::ptr::null_mut(), module, c"trap".as_ptr()),
            sys::cuModuleGetFunction(&mut function, module, std::ptr::null()),
            sys::cuCtxGetCurrent(std::ptr::null_mut()),
            sys::cuMemAllocAsync(std::ptr::null_mut(), 16, null),
            sys::cuLaunchHostFunc(null, None, std::ptr::null_mut()),
            sys::cuStreamCreate(std::ptr::from_mut(&mut std::ptr::null_mut()), 77),
            sys::cuEventCreate(std::ptr::from_mut(&mut std::ptr::null_mut()), 77),
        ] {
            assert_eq!(answer, INVALID_VALUE);
        }
        ok(sys::cuModuleUnload(module));
    }
}

#[test]
fn launches_beyond_the_limits_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: most launches fail before the kernel starts; the others pass the parameters that the kernels declare.
    unsafe {
        let module = load_kernels();
        let (trap, exact) = (get_function(module, "trap"), get_function(module, "exact"));
        let null = std::ptr::null_mut();
        let run = |f, grid: [u32; 3], block: [u32; 3], shared| {
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(f, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, null, none, none)
        };
        for (grid, block, shared) in [
            ([0, 1, 1], [1, 1, 1], 0),
            ([1, 65536, 1], [1, 1, 1], 0),
            ([1, 1, 65536], [1, 1, 1], 0),
            ([1 << 31, 1, 1], [1, 1, 1], 0),
            ([1, 1, 1], [0, 1, 1], 0),
            ([1, 1, 1], [1025, 1, 1], 0),
            ([1, 1, 1], [1, 1, 65], 0),
            ([1, 1, 1], [32, 32, 2], 0),
            ([1, 1, 1], [u32::MAX, u32::MAX, 2], 0),
            ([1, 1, 1], [1, 1, 1], (48 << 10) + 1),
        ] {
            assert_eq!(run(trap, grid, block, shared), INVALID_VALUE, "{grid:?} {block:?} {shared}");
        }
        assert_eq!(run(exact, [1, 1, 1], [32, 1, 1], 0), INVALID_VALUE);
        // More dynamic shared memory after opting in, up to the device's limit.
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        assert_eq!(sys::cuFuncSetAttribute(exact, attribute, 166_913), INVALID_VALUE);
        ok(sys::cuFuncSetAttribute(exact, attribute, 166_912));
        ok(run(exact, [1, 1, 1], [64, 1, 1], 166_912));
        assert_eq!(run(exact, [1, 1, 1], [64, 1, 1], 166_913), INVALID_VALUE);
        // A missing array of parameters.
        let copy = get_function(module, "copy");
        assert_eq!(run(copy, [1, 1, 1], [1, 1, 1], 0), INVALID_VALUE);
    }
}

#[test]
fn tables_of_private_functions_are_not_supported() {
    let _emulator = cudaemu::test::start("").unwrap();
    let mut table = std::ptr::null();
    // SAFETY: the out parameter points to a variable of its type.
    let answer = unsafe { sys::cuGetExportTable(&mut table, std::ptr::null()) };
    assert_eq!(answer, CUresult::CUDA_ERROR_NOT_SUPPORTED);
}

//! Contexts: each thread's context stack, limits, and leaks at the end of a context.

use super::support::{PrimaryContext, get, handle, load_kernels, ok};
use cudarc::driver::sys::{self, CUlimit_enum as L, CUresult};

#[test]
fn each_thread_has_its_own_context_stack() {
    let _emulator = cudaemu::test::start("CUDAEMU_DEVICES=2").unwrap();
    let primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let current = || handle(|c| sys::cuCtxGetCurrent(c));
        let second = handle(|c| sys::cuCtxCreate_v3(c, std::ptr::null_mut(), 0, 0, 1));
        assert_eq!(current(), second);
        let other = std::thread::spawn(|| handle(|c| sys::cuCtxGetCurrent(c)).is_null());
        assert!(other.join().unwrap());
        ok(sys::cuCtxDestroy_v2(second));
        assert_eq!(current(), primary.context);
        assert_eq!(sys::cuCtxDestroy_v2(second), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(sys::cuCtxDestroy_v2(primary.context), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(sys::cuCtxSetCurrent(second), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        ok(sys::cuCtxSetCurrent(std::ptr::null_mut()));
        assert!(current().is_null());
        let mut address = 0;
        assert_eq!(sys::cuMemAlloc_v2(&mut address, 16), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
}

#[test]
fn limits_are_kept_in_range() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        assert_eq!(get(|v| sys::cuCtxGetLimit(v, L::CU_LIMIT_STACK_SIZE)), 1024);
        ok(sys::cuCtxSetLimit(L::CU_LIMIT_STACK_SIZE, 4001));
        assert_eq!(get(|v| sys::cuCtxGetLimit(v, L::CU_LIMIT_STACK_SIZE)), 4016);
        assert_eq!(sys::cuCtxSetLimit(L::CU_LIMIT_MAX, 1), CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT);
    }
}

#[test]
fn unreleased_resources_are_reported_at_the_end_of_a_context() {
    let emulator = cudaemu::test::start("").unwrap();
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let primary = PrimaryContext::new(0);
        let mut left = std::ptr::null_mut();
        ok(sys::cuStreamCreate(&mut left, 0));
        ok(sys::cuStreamCreate(&mut left, 0));
        get(|a| sys::cuMemAlloc_v2(a, 1000));
        get(|a| sys::cuMemAllocAsync(a, 24, left));
        let event = handle(|e| sys::cuEventCreate(e, 0));
        load_kernels();
        drop(primary);
        assert_eq!(
            emulator.reports(),
            ["leak: the primary context of device 0 ended with unreleased resources: 2 streams, 1 event, 1 module, \
              1024 bytes of memory (1 from cuMemAlloc, 1 from cuMemAllocAsync)"]
        );
        // Its handles are invalid too.
        let _primary = PrimaryContext::new(0);
        assert_eq!(sys::cuStreamSynchronize(left), CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
}

#[test]
fn a_reset_ends_the_primary_context() {
    let emulator = cudaemu::test::start("").unwrap();
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let primary = PrimaryContext::new(0);
        let event = handle(|e| sys::cuEventCreate(e, 2));
        ok(sys::cuDevicePrimaryCtxReset_v2(0));
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        assert_eq!(sys::cuEventQuery(event), CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(emulator.reports().len(), 1);
        drop(primary);
        let again = PrimaryContext::new(0);
        ok(sys::cuCtxSynchronize());
        drop(again);
    }
}

#[test]
fn memory_may_be_freed_in_a_stream_of_another_context() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=2").unwrap();
    let first = PrimaryContext::new(0);
    let second = PrimaryContext::new(1);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let null = std::ptr::null_mut();
        let a = get(|a| sys::cuMemAllocAsync(a, 16, null));
        let b = get(|b| sys::cuMemAllocAsync(b, 16, null));
        ok(sys::cuCtxSetCurrent(first.context));
        ok(sys::cuMemFreeAsync(a, null));
        ok(sys::cuCtxSynchronize());
        ok(sys::cuMemFreeAsync(b, null));
        drop(second);
        ok(sys::cuCtxSynchronize());
    }
    drop(first);
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_context_retained_while_it_is_released_stays() {
    use std::sync::mpsc::{Receiver, Sender, channel};
    type Ends = (Sender<()>, Receiver<()>);
    extern "C" fn wait(ends: *mut std::ffi::c_void) {
        // SAFETY: the test passes this value and waits for the callback.
        let (entered, go) = unsafe { &*ends.cast::<Ends>() };
        entered.send(()).unwrap();
        go.recv().unwrap();
    }
    let _emulator = cudaemu::test::start("").unwrap();
    let primary = PrimaryContext::new(0);
    let ((entered, seen), (go, wanted)) = (channel(), channel());
    let mut ends: Ends = (entered, wanted);
    // SAFETY: out parameters point to variables of their types; `ends` outlives the call.
    unsafe {
        ok(sys::cuLaunchHostFunc(std::ptr::null_mut(), Some(wait), std::ptr::from_mut(&mut ends).cast()));
        let device = primary.device;
        let release = std::thread::spawn(move || sys::cuDevicePrimaryCtxRelease_v2(device));
        seen.recv().unwrap();
        // Valid whether or not the other thread has started the release.
        let context = handle(|c| sys::cuDevicePrimaryCtxRetain(c, device));
        assert_eq!(context, primary.context);
        go.send(()).unwrap();
        ok(release.join().unwrap());
        ok(sys::cuCtxSynchronize());
        drop(primary);
        assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(device), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
}

#[test]
fn a_thread_has_no_context_after_its_context_stack_is_destroyed() {
    struct Last(std::sync::mpsc::Sender<CUresult>);
    impl Drop for Last {
        fn drop(&mut self) {
            // SAFETY: it takes no arguments.
            let _ = self.0.send(unsafe { sys::cuCtxSynchronize() });
        }
    }
    thread_local! {
        static LAST: std::cell::RefCell<Option<Last>> = const { std::cell::RefCell::new(None) };
    }
    let _emulator = cudaemu::test::start("").unwrap();
    let primary = PrimaryContext::new(0);
    let (answer, came) = std::sync::mpsc::channel();
    let context = primary.context as usize;
    let thread = std::thread::spawn(move || {
        // Thread-local values are destroyed in reverse order of creation, so this one is destroyed after the driver's.
        LAST.set(Some(Last(answer)));
        // SAFETY: the context is alive.
        unsafe {
            ok(sys::cuCtxSetCurrent(context as sys::CUcontext));
            ok(sys::cuCtxSynchronize());
        }
    });
    thread.join().unwrap();
    assert_eq!(came.recv(), Ok(CUresult::CUDA_ERROR_INVALID_CONTEXT));
}

//! Two devices: a kernel needs peer access to use the other device's memory; copies do not.

use super::support::{PrimaryContext, get, get_function, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUresult};

#[test]
fn kernels_need_peer_access_and_copies_do_not() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=2").unwrap();
    for enabled in [true, false] {
        let first = PrimaryContext::new(0);
        // SAFETY: out parameters point to variables of their types; the kernel gets the parameters that it declares.
        unsafe {
            let a = get(|a| sys::cuMemAlloc_v2(a, 4));
            ok(sys::cuMemsetD32_v2(a, 11, 1));
            ok(sys::cuCtxSynchronize());
            let second = PrimaryContext::new(1);
            let b = get(|b| sys::cuMemAlloc_v2(b, 8));
            let copy = get_function(load_kernels(), "copy");
            ok(sys::cuMemcpyPeerAsync(b + 4, second.context, a, first.context, 4, std::ptr::null_mut()));
            if enabled {
                ok(sys::cuCtxEnablePeerAccess(first.context, 0));
                let again = sys::cuCtxEnablePeerAccess(first.context, 0);
                assert_eq!(again, CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
            }
            ok(launch(copy, 1, std::ptr::null_mut(), &[b, a]));
            if enabled {
                ok(sys::cuCtxSynchronize());
                let mut words = [0u32; 2];
                ok(sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), b, 8));
                assert_eq!(words, [11; 2]);
            } else {
                assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
                assert!(
                    emulator.reports().iter().any(|report| report.contains("not accessible")),
                    "{:?}",
                    emulator.reports()
                );
            }
        }
    }
}

#[test]
fn peer_access_fails_between_unsupported_pairs() {
    let _emulator = cudaemu::test::start("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none").unwrap();
    let first = PrimaryContext::new(0);
    let second = PrimaryContext::new(1);
    // SAFETY: the contexts are alive.
    unsafe {
        assert_eq!(sys::cuCtxEnablePeerAccess(first.context, 0), CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        assert_eq!(sys::cuCtxEnablePeerAccess(second.context, 0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(sys::cuCtxEnablePeerAccess(std::ptr::null_mut(), 0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        // Without peer access, copies go through the host.
        ok(sys::cuCtxSetCurrent(first.context));
        let a = get(|a| sys::cuMemAlloc_v2(a, 4));
        ok(sys::cuMemsetD32_v2(a, 7, 1));
        ok(sys::cuCtxSynchronize());
        ok(sys::cuCtxSetCurrent(second.context));
        let b = get(|b| sys::cuMemAlloc_v2(b, 4));
        ok(sys::cuMemcpyPeerAsync(b, second.context, a, first.context, 4, std::ptr::null_mut()));
        let mut word = 0u32;
        ok(sys::cuMemcpyDtoH_v2(std::ptr::from_mut(&mut word).cast(), b, 4));
        assert_eq!(word, 7);
    }
}

//! Every kind of memory: allocation, copies between all kinds, memsets, pools.

use std::ffi::c_void;

use super::support::{PrimaryContext, get, handle, ok};
use cudarc::driver::sys::{self, CUresult};

fn session(settings: &str) -> (cudaemu::test::Session, PrimaryContext) {
    let emulator = cudaemu::test::start(settings).unwrap();
    let primary = PrimaryContext::new(0);
    (emulator, primary)
}

fn copy_to_device(address: u64, data: &[u8]) {
    // SAFETY: the source is as long as the copy.
    ok(unsafe { sys::cuMemcpyHtoD_v2(address, data.as_ptr().cast(), data.len()) });
}

fn copy_from_device(address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: the destination is as long as the copy.
    ok(unsafe { sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), address, bytes) });
    data
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn allocations_are_accounted_and_limited() {
    let (emulator, primary) = session("CUDAEMU_MEMORY=1M");
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let info = || {
            let (mut free, mut total) = (0, 0);
            ok(sys::cuMemGetInfo_v2(&mut free, &mut total));
            (free, total)
        };
        assert_eq!(info(), (1 << 20, 1 << 20));
        let a = get(|a| sys::cuMemAlloc_v2(a, 512 << 10));
        assert_eq!(info().0, 512 << 10);
        assert_eq!(a % 256, 0);
        let mut b = 0;
        assert_eq!(sys::cuMemAlloc_v2(&mut b, 768 << 10), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(sys::cuMemAlloc_v2(&mut b, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuMemAlloc_v2(std::ptr::null_mut(), 16), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuMemAlloc_v2(&mut b, usize::MAX), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        ok(sys::cuMemFree_v2(a));
        assert_eq!(sys::cuMemFree_v2(a), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuMemFree_v2(a + 4), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuMemFree_v2(0));
        // Allocation waits for a queued stream-ordered free if memory is exhausted.
        let a = get(|a| sys::cuMemAllocAsync(a, 768 << 10, std::ptr::null_mut()));
        ok(sys::cuMemFreeAsync(a, std::ptr::null_mut()));
        let b = get(|b| sys::cuMemAllocAsync(b, 768 << 10, std::ptr::null_mut()));
        ok(sys::cuMemFree_v2(b));
        assert_eq!(sys::cuMemFreeAsync(b, std::ptr::null_mut()), CUresult::CUDA_ERROR_INVALID_VALUE);
        drop(primary);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn copies_between_all_kinds_of_memory_keep_the_bytes() {
    let (emulator, primary) = session("");
    let data = pattern(1000);
    // SAFETY: all memory is as long as the copies.
    unsafe {
        let [a, b, managed] = [
            get(|a| sys::cuMemAlloc_v2(a, 1000)),
            get(|b| sys::cuMemAlloc_v2(b, 1000)),
            get(|m| sys::cuMemAllocManaged(m, 1000, 1)),
        ];
        let pinned: *mut c_void = handle(|p| sys::cuMemHostAlloc(p, 1000, 0));
        let stream = handle(|s| sys::cuStreamCreate(s, 0));
        copy_to_device(a, &data);
        ok(sys::cuMemcpyDtoD_v2(b, a, 1000));
        assert_eq!(copy_from_device(b, 1000), data);
        assert_eq!(copy_from_device(b + 10, 20), data[10..30]);
        ok(sys::cuMemsetD8_v2(b, 0, 1000));
        assert_eq!(get(|d| sys::cuMemHostGetDevicePointer_v2(d, pinned, 0)), pinned as u64);
        ok(sys::cuMemcpyDtoH_v2(pinned, a, 1000));
        assert_eq!(std::slice::from_raw_parts(pinned.cast::<u8>(), 1000), data);
        ok(sys::cuMemcpyHtoD_v2(b, pinned, 1000));
        ok(sys::cuMemcpyDtoDAsync_v2(managed, b, 1000, stream));
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(std::slice::from_raw_parts(managed as *const u8, 1000), data);
        let mut out = vec![0u8; 1000];
        ok(sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), managed, 1000));
        assert_eq!(out, data);
        // Pageable bytes are staged when the call is made; pinned ones are read when the copy executes.
        let mut source = pattern(1000);
        ok(sys::cuMemcpyHtoDAsync_v2(a, source.as_ptr().cast(), 1000, stream));
        source.fill(9);
        assert_eq!(copy_from_device(a, 1000).len(), 1000);
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(copy_from_device(a, 1000), data);
        // A copy to pageable memory is done when the call returns.
        ok(sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), a, 1000, stream));
        assert_eq!(out, data);
        for address in [a, b, managed] {
            ok(sys::cuMemFree_v2(address));
        }
        ok(sys::cuMemFreeHost(pinned));
        assert_eq!(sys::cuMemFreeHost(pinned), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuStreamDestroy_v2(stream));
        drop(primary);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn memsets_write_every_element_and_nothing_else() {
    let (_emulator, _primary) = session("");
    // SAFETY: the memory is as long as the fills.
    unsafe {
        let null = std::ptr::null_mut();
        let a = get(|a| sys::cuMemAlloc_v2(a, 100));
        ok(sys::cuMemsetD8_v2(a, 0, 100));
        ok(sys::cuMemsetD8_v2(a, 5, 3));
        ok(sys::cuMemsetD32Async(a + 8, 0x0a0b_0c0d, 2, null));
        assert_eq!(copy_from_device(a, 17), [5, 5, 5, 0, 0, 0, 0, 0, 13, 12, 11, 10, 13, 12, 11, 10, 0]);
        for wrong in [
            sys::cuMemsetD32_v2(a + 1, 0, 1),
            sys::cuMemsetD8_v2(a, 0, 101),
            sys::cuMemsetD8_v2(a - 1, 0, 1),
            sys::cuMemsetD32_v2(a, 0, usize::MAX / 2),
            sys::cuMemsetD8_v2(0, 0, 1),
        ] {
            assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        ok(sys::cuMemsetD8_v2(a, 0, 0));
        ok(sys::cuMemFree_v2(a));
    }
}

#[test]
fn pools_account_memory_and_reject_use_after_destruction() {
    let (emulator, primary) = session("CUDAEMU_MEMORY=64M");
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let stream = handle(|s| sys::cuStreamCreate(s, 1));
        let mut properties: sys::CUmemPoolProps = std::mem::zeroed();
        properties.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let pool = handle(|p| sys::cuMemPoolCreate(p, &properties));
        let used = || {
            let mut bytes = 0u64;
            let place = std::ptr::from_mut(&mut bytes).cast();
            ok(sys::cuMemPoolGetAttribute(
                pool,
                sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                place,
            ));
            bytes
        };
        let mut keep = 1u64 << 20;
        let place = std::ptr::from_mut(&mut keep).cast();
        ok(sys::cuMemPoolSetAttribute(pool, sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, place));
        let a = get(|a| sys::cuMemAllocFromPoolAsync(a, 1000, pool, stream));
        assert_eq!(used(), 1000);
        ok(sys::cuMemsetD8Async(a, 3, 1000, stream));
        ok(sys::cuMemFreeAsync(a, stream));
        assert_eq!(sys::cuMemFreeAsync(a, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(used(), 0);
        assert_eq!(sys::cuMemsetD8Async(a, 3, 1000, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuMemPoolTrimTo(pool, 0));
        ok(sys::cuMemPoolDestroy(pool));
        assert_eq!(sys::cuMemPoolTrimTo(pool, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuStreamDestroy_v2(stream));
        drop(primary);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn copies_outside_of_memory_are_rejected() {
    let (_emulator, _primary) = session("");
    let data = [0u8; 64];
    // SAFETY: the calls that would access memory outside of `data` must fail; that is tested.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 64));
        let host = data.as_ptr().cast::<c_void>();
        for wrong in [
            sys::cuMemcpyHtoD_v2(a + 1, host, 64),
            sys::cuMemcpyHtoD_v2(a - 512, host, 1),
            sys::cuMemcpyHtoD_v2(0, host, 1),
            sys::cuMemcpyHtoD_v2(a, std::ptr::null(), 1),
            sys::cuMemcpyHtoD_v2(host as u64, host, 1),
            sys::cuMemcpyDtoD_v2(a, a + 60, 5),
            sys::cuMemcpyDtoH_v2(std::ptr::null_mut(), a, 1),
            sys::cuMemcpyDtoD_v2(a, a, usize::MAX),
        ] {
            assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        ok(sys::cuMemcpyHtoD_v2(a, host, 0));
        ok(sys::cuMemFree_v2(a));
        assert_eq!(sys::cuMemcpyHtoD_v2(a, host, 1), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

//! Every kind of memory: allocation, copies between all kinds, memsets, pointer attributes, pools, mappings.

use std::ffi::c_void;

use super::support::{PrimaryContext, get, handle, ok};
use cudarc::driver::sys::{self, CUpointer_attribute_enum as P, CUresult};

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
        let pinned: *mut c_void = handle(|p| sys::cuMemAllocHost_v2(p, 1000));
        let stream = handle(|s| sys::cuStreamCreate(s, 0));
        copy_to_device(a, &data);
        ok(sys::cuMemcpyDtoD_v2(b, a, 1000));
        assert_eq!(copy_from_device(b, 1000), data);
        assert_eq!(copy_from_device(b + 10, 20), data[10..30]);
        // Any pointer to any pointer.
        ok(sys::cuMemsetD8_v2(b, 0, 1000));
        ok(sys::cuMemcpy(pinned as u64, a, 1000));
        assert_eq!(std::slice::from_raw_parts(pinned.cast::<u8>(), 1000), data);
        ok(sys::cuMemcpy(b, pinned as u64, 1000));
        ok(sys::cuMemcpyAsync(managed, b, 1000, stream));
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(std::slice::from_raw_parts(managed as *const u8, 1000), data);
        let mut out = vec![0u8; 1000];
        ok(sys::cuMemcpy(out.as_mut_ptr() as u64, managed, 1000));
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
        // Memory of the program that is registered with the driver.
        let mut own = vec![1u8; 8192];
        let start = own.as_mut_ptr().cast::<c_void>();
        ok(sys::cuMemHostRegister_v2(start, 8192, 0));
        assert_eq!(sys::cuMemHostRegister_v2(start, 8192, 0), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(get(|d| sys::cuMemHostGetDevicePointer_v2(d, start, 0)), start as u64);
        ok(sys::cuMemcpyHtoDAsync_v2(a, start, 1000, stream));
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(copy_from_device(a, 1000), vec![1; 1000]);
        ok(sys::cuMemHostUnregister(start));
        assert_eq!(sys::cuMemHostUnregister(start), CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
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
        let (mut a, mut pitch) = (0, 0);
        ok(sys::cuMemAllocPitch_v2(&mut a, &mut pitch, 100, 4, 4));
        assert_eq!(pitch, 512);
        ok(sys::cuMemsetD8_v2(a, 0, 4 * pitch));
        ok(sys::cuMemsetD16_v2(a, 0x0102, 3));
        ok(sys::cuMemsetD32Async(a + 8, 0x0a0b_0c0d, 2, null));
        assert_eq!(copy_from_device(a, 17), [2, 1, 2, 1, 2, 1, 0, 0, 13, 12, 11, 10, 13, 12, 11, 10, 0]);
        ok(sys::cuMemsetD2D8_v2(a, pitch, 5, 3, 4));
        ok(sys::cuMemsetD2D32Async(a + 4, pitch, 6, 1, 2, null));
        for (row, bytes) in
            [[5, 5, 5, 1, 6, 0, 0, 0], [5, 5, 5, 0, 6, 0, 0, 0], [5, 5, 5, 0, 0, 0, 0, 0]].iter().enumerate()
        {
            assert_eq!(copy_from_device(a + (row * pitch) as u64, 8), bytes);
        }
        for wrong in [
            sys::cuMemsetD32_v2(a + 1, 0, 1),
            sys::cuMemsetD16_v2(a + 1, 0, 1),
            sys::cuMemsetD8_v2(a, 0, 4 * pitch + 1),
            sys::cuMemsetD8_v2(a - 1, 0, 1),
            sys::cuMemsetD32_v2(a, 0, usize::MAX / 2),
            sys::cuMemsetD2D8_v2(a, 2, 0, 3, 2),
            sys::cuMemsetD8_v2(0, 0, 1),
        ] {
            assert_eq!(wrong, CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        ok(sys::cuMemsetD8_v2(a, 0, 0));
        ok(sys::cuMemFree_v2(a));
    }
}

#[test]
fn copies_of_two_and_three_dimensions_respect_pitches() {
    let (_emulator, _primary) = session("");
    let data = pattern(16 * 8 * 3);
    // SAFETY: the structures are plain numbers and pointers, and the memory is as long as the copies.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 4096));
        ok(sys::cuMemsetD8_v2(a, 0, 4096));
        let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY2D>::zeroed();
        (*copy.as_mut_ptr()).srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        (*copy.as_mut_ptr()).dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let mut copy = copy.assume_init();
        (copy.srcHost, copy.srcPitch, copy.srcXInBytes, copy.srcY) = (data.as_ptr().cast(), 16, 2, 1);
        (copy.dstDevice, copy.dstPitch, copy.dstXInBytes, copy.dstY) = (a, 32, 1, 2);
        (copy.WidthInBytes, copy.Height) = (5, 3);
        ok(sys::cuMemcpy2D_v2(&copy));
        let back = copy_from_device(a, 32 * 6);
        for (i, &byte) in back.iter().enumerate() {
            let (x, y) = (i % 32, i / 32);
            let inside = (1..6).contains(&x) && (2..5).contains(&y);
            assert_eq!(byte, if inside { data[(y - 2 + 1) * 16 + x - 1 + 2] } else { 0 });
        }
        copy.dstPitch = 4;
        assert_eq!(sys::cuMemcpy2D_v2(&copy), CUresult::CUDA_ERROR_INVALID_VALUE);
        copy.dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_ARRAY;
        assert_eq!(sys::cuMemcpy2D_v2(&copy), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(sys::cuMemcpy2D_v2(std::ptr::null()), CUresult::CUDA_ERROR_INVALID_VALUE);

        let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
        (*copy.as_mut_ptr()).srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
        (*copy.as_mut_ptr()).dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let mut copy = copy.assume_init();
        (copy.srcHost, copy.srcPitch, copy.srcHeight) = (data.as_ptr().cast(), 16, 8);
        (copy.dstDevice, copy.dstPitch, copy.dstHeight, copy.dstZ) = (a, 16, 4, 1);
        (copy.WidthInBytes, copy.Height, copy.Depth) = (16, 4, 3);
        ok(sys::cuMemcpy3DAsync_v2(&copy, std::ptr::null_mut()));
        for slice in 0..3 {
            assert_eq!(copy_from_device(a + 64 * (slice + 1), 64), data[slice as usize * 128..][..64]);
        }
        ok(sys::cuMemFree_v2(a));
    }
}

#[test]
fn pointer_attributes_describe_the_allocation() {
    let (_emulator, primary) = session("");
    // SAFETY: out parameters are places of the attributes' types.
    unsafe {
        let a = get(|a| sys::cuMemAlloc_v2(a, 1000));
        let pinned: *mut c_void = handle(|p| sys::cuMemHostAlloc(p, 100, 4));
        let int = |attribute, address| {
            get::<u32>(|v| sys::cuPointerGetAttribute(std::ptr::from_mut(&mut *v).cast(), attribute, address))
        };
        let long = |attribute, address| {
            get::<u64>(|v| sys::cuPointerGetAttribute(std::ptr::from_mut(&mut *v).cast(), attribute, address))
        };
        assert_eq!(int(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a + 5), 2);
        assert_eq!(int(P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned as u64), 1);
        assert_eq!(int(P::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a), 0);
        assert_eq!(long(P::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, a + 5), a);
        assert_eq!(long(P::CU_POINTER_ATTRIBUTE_RANGE_SIZE, a + 5), 1000);
        assert_eq!(long(P::CU_POINTER_ATTRIBUTE_CONTEXT, a), primary.context as u64);
        assert_eq!(get(|f| sys::cuMemHostGetFlags(f, pinned)) & 4, 4);
        let (mut base, mut bytes) = (0, 0);
        ok(sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, a + 999));
        assert_eq!((base, bytes), (a, 1000));
        assert_eq!(sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, a + 1000), CUresult::CUDA_ERROR_NOT_FOUND);
        let stack = 0u32;
        let mut value = 0u64;
        let place = std::ptr::from_mut(&mut value).cast();
        let unknown = std::ptr::from_ref(&stack) as u64;
        assert_eq!(
            sys::cuPointerGetAttribute(place, P::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, unknown),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        ok(sys::cuMemFree_v2(a));
        ok(sys::cuMemFreeHost(pinned));
    }
}

#[test]
fn pools_account_memory_and_reject_use_after_destruction() {
    let (emulator, primary) = session("CUDAEMU_MEMORY=64M");
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let stream = handle(|s| sys::cuStreamCreate(s, 1));
        let fixed = handle(|p| sys::cuDeviceGetDefaultMemPool(p, 0));
        assert_eq!(handle(|p| sys::cuDeviceGetMemPool(p, 0)), fixed);
        assert_eq!(sys::cuMemPoolDestroy(fixed), CUresult::CUDA_ERROR_INVALID_VALUE);
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
        assert_eq!(
            get::<u64>(|v| sys::cuPointerGetAttribute(
                std::ptr::from_mut(&mut *v).cast(),
                P::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                a
            )),
            pool as u64
        );
        ok(sys::cuMemFreeAsync(a, stream));
        assert_eq!(sys::cuMemFreeAsync(a, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuStreamSynchronize(stream));
        assert_eq!(used(), 0);
        assert_eq!(sys::cuMemsetD8Async(a, 3, 1000, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuMemPoolTrimTo(pool, 0));
        ok(sys::cuDeviceSetMemPool(0, pool));
        ok(sys::cuMemPoolDestroy(pool));
        assert_eq!(handle(|p| sys::cuDeviceGetMemPool(p, 0)), fixed);
        assert_eq!(sys::cuMemPoolTrimTo(pool, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuStreamDestroy_v2(stream));
        drop(primary);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn memory_mapped_twice_is_the_same_memory() {
    let (_emulator, _primary) = session("");
    // SAFETY: the structures are plain numbers, out parameters point to variables of their types.
    unsafe {
        let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let unit = get(|bytes| sys::cuMemGetAllocationGranularity(bytes, &properties, minimum));
        let address = get(|a| sys::cuMemAddressReserve(a, 2 * unit, 0, 0, 0));
        let mut memory = 0;
        assert_eq!(sys::cuMemCreate(&mut memory, unit + 1, &properties, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuMemCreate(&mut memory, unit, &properties, 0));
        ok(sys::cuMemMap(address, unit, 0, memory, 0));
        ok(sys::cuMemMap(address + unit as u64, unit, 0, memory, 0));
        let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
        access.location = properties.location;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        ok(sys::cuMemSetAccess(address, 2 * unit, &access, 1));
        ok(sys::cuMemRelease(memory));
        assert_eq!(sys::cuMemRelease(memory), CUresult::CUDA_ERROR_INVALID_VALUE);
        // The same memory is mapped at both addresses.
        copy_to_device(address, &pattern(100));
        assert_eq!(copy_from_device(address + unit as u64, 100), pattern(100));
        ok(sys::cuMemUnmap(address, 2 * unit));
        ok(sys::cuMemAddressFree(address, 2 * unit));
        assert_eq!(sys::cuMemsetD8_v2(address, 0, 1), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
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

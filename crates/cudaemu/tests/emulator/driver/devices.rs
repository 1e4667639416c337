//! Devices: programs see the devices that the settings describe.

use super::support::{PrimaryContext, get, handle, ok};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUdevice_attribute_enum as A, CUresult};

#[test]
fn calls_before_cu_init_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let mut count = 0;
        assert_eq!(sys::cuDeviceGetCount(&mut count), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        let mut context = std::ptr::null_mut();
        assert_eq!(sys::cuCtxGetCurrent(&mut context), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(get(|v| sys::cuDriverGetVersion(v)), 12090);
        assert_eq!(sys::cuInit(1), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuInit(0));
        ok(sys::cuDeviceGetCount(&mut count));
        assert_eq!(count, 1);
    }
}

#[test]
fn devices_have_the_configured_attributes() {
    let settings = "CUDAEMU_DEVICES=3\nCUDAEMU_CAPABILITY=8.0,9.0,7.5\nCUDAEMU_MEMORY=1G,64M,2G\nCUDAEMU_NAME=One,Two,Three\n\
                    CUDAEMU_SMS=4,132,40\nCUDAEMU_PCI=0000:0a:00,0000:0b:00,0001:0c:01\nCUDAEMU_DRIVER_VERSION=12.4\nCUDAEMU_PEERS=0-1";
    let _emulator = cudaemu::test::start(settings).unwrap();
    assert_eq!(CudaContext::device_count(), Ok(3));
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        assert_eq!(get(|v| sys::cuDriverGetVersion(v)), 12040);
        for (device, name, memory, sm, sms, pci) in [
            (0, "One", 1 << 30, (8, 0), 4, [0, 10, 0]),
            (1, "Two", 64 << 20, (9, 0), 132, [0, 11, 0]),
            (2, "Three", 2 << 30, (7, 5), 40, [1, 12, 1]),
        ] {
            assert_eq!(cudarc::driver::result::device::get_name(device).unwrap(), name);
            assert_eq!(get(|bytes| sys::cuDeviceTotalMem_v2(bytes, device)), memory);
            let attribute = |attribute| get(|value| sys::cuDeviceGetAttribute(value, attribute, device));
            let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
            assert_eq!((major, attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)), sm);
            assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), sms);
            assert_eq!(attribute(A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED), 1);
            let bus_id = [
                A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
                A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
                A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
            ];
            assert_eq!(bus_id.map(attribute), pci);
        }
        let can = |a, b| get(|can| sys::cuDeviceCanAccessPeer(can, a, b));
        assert_eq!([can(0, 1), can(1, 0), can(0, 2), can(0, 0)], [1, 1, 0, 0]);
    }
}

#[test]
fn visible_devices_are_numbered_in_the_order_of_the_list() {
    let settings = "CUDAEMU_DEVICES=3\nCUDAEMU_NAME=One,Two,Three\nCUDA_VISIBLE_DEVICES=2,0";
    let _emulator = cudaemu::test::start(settings).unwrap();
    let names: Vec<String> = (0..CudaContext::device_count().unwrap())
        .map(|d| CudaContext::new(d as usize).unwrap().name().unwrap())
        .collect();
    assert_eq!(names, ["Three", "One"]);
}

#[test]
fn wrong_settings_are_rejected_and_zero_devices_fail_cu_init() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=0").unwrap();
    // SAFETY: no pointer arguments.
    assert_eq!(unsafe { sys::cuInit(0) }, CUresult::CUDA_ERROR_NO_DEVICE);
    let message = emulator.configure("CUDAEMU_MEMORY=lots").unwrap_err();
    assert!(message.starts_with("CUDAEMU_MEMORY=lots cannot be used: "), "{message}");
    assert!(emulator.configure("nonsense").is_err());
}

#[test]
fn invalid_device_numbers_and_null_pointers_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    // SAFETY: the test passes null on purpose; other out parameters point to variables of their types.
    unsafe {
        ok(sys::cuInit(0));
        let mut device = 0;
        for ordinal in [-1, 1, i32::MAX] {
            assert_eq!(sys::cuDeviceGet(&mut device, ordinal), CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        let null = std::ptr::null_mut();
        assert_eq!(sys::cuDeviceGetCount(null), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(sys::cuDeviceGet(null, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        let mut bytes = 0;
        assert_eq!(sys::cuDeviceTotalMem_v2(&mut bytes, 3), CUresult::CUDA_ERROR_INVALID_DEVICE);
        assert_eq!(sys::cuDeviceGetName(std::ptr::null_mut(), 10, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
        let mut name = [0; 5];
        ok(sys::cuDeviceGetName(name.as_mut_ptr(), 5, 0));
        assert_eq!(name.map(|c| c as u8), *b"CUDA\0");
        let mut text = std::ptr::null();
        ok(sys::cuGetErrorName(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, &mut text));
        assert_eq!(std::ffi::CStr::from_ptr(text), c"CUDA_ERROR_ILLEGAL_ADDRESS");
    }
}

#[test]
fn a_primary_context_lives_until_its_last_release() {
    let _emulator = cudaemu::test::start("").unwrap();
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let first = PrimaryContext::new(0);
        let again = handle(|c| sys::cuDevicePrimaryCtxRetain(c, 0));
        assert_eq!(again, first.context);
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
        ok(sys::cuCtxSynchronize());
        drop(first);
        assert_eq!(sys::cuDevicePrimaryCtxRelease_v2(0), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED);
        ok(sys::cuCtxSetCurrent(std::ptr::null_mut()));
        assert_eq!(sys::cuCtxSynchronize(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
    }
}

//! Modules, functions and occupancy.

use std::ffi::{CStr, CString, c_void};

use super::support::{KERNELS, PrimaryContext, get, get_function, handle, launch, load_kernels, ok};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as F, CUresult};

#[test]
fn module_variables_have_their_initial_values() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let module = load_kernels();
        let (mut address, mut bytes) = (0, 0);
        ok(sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"table".as_ptr()));
        assert_eq!(bytes, 16);
        let mut words = [0u32; 4];
        ok(sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, 16));
        assert_eq!(words, [1, 2, 3, 4]);
        // The host may write constant memory.
        ok(sys::cuMemcpyHtoD_v2(address + 4, [9u32].as_ptr().cast(), 4));
        ok(sys::cuModuleGetGlobal_v2(&mut address, std::ptr::null_mut(), module, c"answer".as_ptr()));
        ok(sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, 4));
        assert_eq!(words[0], 42);
        let absent = sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"absent".as_ptr());
        assert_eq!(absent, CUresult::CUDA_ERROR_NOT_FOUND);
        let mut f = std::ptr::null_mut();
        assert_eq!(sys::cuModuleGetFunction(&mut f, module, c"absent".as_ptr()), CUresult::CUDA_ERROR_NOT_FOUND);
        assert_eq!(sys::cuMemFree_v2(address), CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(sys::cuModuleUnload(module));
        assert_eq!(sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), address, 4), CUresult::CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn invalid_modules_are_rejected_with_a_log() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    let header = ".version 7.0\n.target sm_80\n.address_size 64\n";
    let body = ".visible .entry k()\n{\n    frobnicate.u32 %r1;\n    ret;\n}\n";
    for (text, code, part) in [
        (format!("{header}{body}"), CUresult::CUDA_ERROR_INVALID_PTX, "line 6"),
        ("nonsense".to_owned(), CUresult::CUDA_ERROR_INVALID_PTX, "line 1"),
        (KERNELS.replace("sm_75", "sm_90"), CUresult::CUDA_ERROR_INVALID_PTX, "the device is sm_80"),
        (KERNELS.replace("7.0", "9.9"), CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "supports none newer than 8.8"),
        ("\u{7f}ELF\u{1}".to_owned(), CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU, "machine code"),
    ] {
        let text = CString::new(text).unwrap();
        let mut log = vec![0u8; 1000];
        let mut options = [
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option_enum::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), 1000 as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: the arrays have the given length, the log buffer has the given size.
        let answer = unsafe {
            sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options.as_mut_ptr(), values.as_mut_ptr())
        };
        assert_eq!(answer, code);
        let log = CStr::from_bytes_until_nul(&log).unwrap().to_str().unwrap();
        assert!(log.contains(part), "{log}");
        assert_eq!(values[1] as usize, log.len());
    }
    let mut module = std::ptr::null_mut();
    // SAFETY: the path is a C string.
    let answer = unsafe { sys::cuModuleLoad(&mut module, c"/no/such/file.ptx".as_ptr()) };
    assert_eq!(answer, CUresult::CUDA_ERROR_FILE_NOT_FOUND);
}

#[test]
fn function_attributes_and_occupancy_follow_the_limits() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: out parameters point to variables of their types.
    unsafe {
        let module = load_kernels();
        let (scale, exact) = (get_function(module, "scale"), get_function(module, "exact"));
        let attribute = |f, attribute| get(|v| sys::cuFuncGetAttribute(v, attribute, f));
        assert_eq!(attribute(scale, F::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK), 1024);
        assert_eq!(attribute(exact, F::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK), 64);
        assert_eq!(attribute(scale, F::CU_FUNC_ATTRIBUTE_PTX_VERSION), 75);
        assert_eq!(attribute(scale, F::CU_FUNC_ATTRIBUTE_BINARY_VERSION), 80);
        assert_eq!(attribute(scale, F::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES), 0);
        assert_eq!(attribute(scale, F::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES), 48 << 10);
        for (shared, most, expected) in
            [(0, 0, (216, 1024)), (0, 256, (864, 256)), (0, 32, (3456, 32)), (40 << 10, 128, (432, 128))]
        {
            let (mut grid, mut block) = (0, 0);
            ok(sys::cuOccupancyMaxPotentialBlockSizeWithFlags(&mut grid, &mut block, scale, None, shared, most, 0));
            assert_eq!((grid, block), expected, "{shared} {most}");
        }
    }
}

#[test]
fn unsupported_launch_attributes_are_rejected() {
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    // SAFETY: the structures are initialised as the calls require; the kernel gets the parameters that it declares.
    unsafe {
        let exact = get_function(load_kernels(), "exact");
        let attribute = |id, value: [u32; 3]| {
            let mut attribute = std::mem::MaybeUninit::<sys::CUlaunchAttribute>::zeroed();
            (*attribute.as_mut_ptr()).id = id;
            std::ptr::addr_of_mut!((*attribute.as_mut_ptr()).value).cast::<[u32; 3]>().write(value);
            attribute.assume_init()
        };
        use sys::CUlaunchAttributeID_enum as L;
        for (id, value, answer) in [
            (L::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, [1, 0, 0], CUresult::CUDA_SUCCESS),
            (L::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, [1, 1, 1], CUresult::CUDA_SUCCESS),
            (L::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, [2, 1, 1], CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE),
            (L::CU_LAUNCH_ATTRIBUTE_PRIORITY, [0, 0, 0], CUresult::CUDA_SUCCESS),
            (L::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, [1, 0, 0], CUresult::CUDA_ERROR_NOT_SUPPORTED),
        ] {
            let mut attributes = [attribute(id, value)];
            let config = sys::CUlaunchConfig {
                gridDimX: 2,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: 64,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                hStream: std::ptr::null_mut(),
                attrs: attributes.as_mut_ptr(),
                numAttrs: 1,
            };
            assert_eq!(sys::cuLaunchKernelEx(&config, exact, std::ptr::null_mut(), std::ptr::null_mut()), answer);
        }
        ok(sys::cuCtxSynchronize());
    }
}

#[test]
fn huge_sizes_are_rejected_or_allocated_lazily() {
    let emulator = cudaemu::test::start("CUDAEMU_MEMORY=64G").unwrap();
    let _primary = PrimaryContext::new(0);
    let text = CString::new(
        ".version 7.0\n.target sm_75\n.address_size 64\n.global .align 8 .b8 big[60000000000];\n\
         .visible .entry small() { ret; }\n\
         .visible .entry wide() .maxntid 65536, 65536, 65536 { ret; }\n\
         .func inner() { .local .align 4 .b8 y[300000]; .reg .b32 %r<2>; mov.u32 %r1, 1; st.local.u32 [y], %r1; ret; }\n\
         .visible .entry deep() { .local .align 4 .b8 x[300000]; .reg .b32 %r<2>; mov.u32 %r1, 1; st.local.u32 [x], %r1; call inner; ret; }\n",
    )
    .unwrap();
    // SAFETY: out parameters point to variables of their types, the image is a zero-terminated text.
    unsafe {
        let module = handle(|m| sys::cuModuleLoadData(m, text.as_ptr().cast()));
        let (mut address, mut bytes) = (0, 0);
        ok(sys::cuModuleGetGlobal_v2(&mut address, &mut bytes, module, c"big".as_ptr()));
        assert_eq!(bytes, 60_000_000_000);
        let mut word = 1u64;
        ok(sys::cuMemcpyDtoH_v2((&raw mut word).cast(), address + bytes as u64 - 8, 8));
        assert_eq!(word, 0);
        let null = std::ptr::null_mut();
        // A launch must not see the local memory of another kernel's launch.
        ok(launch(get_function(module, "small"), 1024, null, &[]));
        ok(launch(get_function(module, "wide"), 1024, null, &[]));
        let refused = launch(get_function(module, "deep"), 1, null, &[]);
        assert_eq!(refused, CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
        ok(sys::cuCtxSynchronize());
        ok(sys::cuModuleUnload(module));
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

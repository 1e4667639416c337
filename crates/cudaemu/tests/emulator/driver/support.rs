//! Helpers for the driver tests: a current context, calls that must succeed, and small kernels.

use cudarc::driver::sys::{self, CUresult};

/// Kernels: `scale(data, factor, count)` multiplies words, `overrun(data, offset)` writes a word at a byte offset, `trap()`
/// traps, `spin()` never ends, `copy(to, from)` copies a word, `exact()` needs blocks of 64 threads. Variables: `answer`,
/// `table` in constant memory.
pub const KERNELS: &str = r#"
.version 7.0
.target sm_75
.address_size 64
.global .align 4 .u32 answer = 42;
.const .align 4 .u32 table[4] = {1, 2, 3, 4};
.visible .entry scale(.param .u64 data, .param .u32 factor, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r6, [factor];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $done;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.u32 %r7, [%rd4];
    mul.lo.u32 %r8, %r7, %r6;
    st.global.u32 [%rd4], %r8;
$done:
    ret;
}
.visible .entry overrun(.param .u64 data, .param .u64 offset)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [offset];
    add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r1, 7;
    st.global.u32 [%rd3], %r1;
    ret;
}
.visible .entry trap()
{
    trap;
    ret;
}
.visible .entry spin()
{
$again:
    bra $again;
}
.visible .entry copy(.param .u64 to, .param .u64 from)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.global.u32 %r1, [%rd2];
    st.global.u32 [%rd1], %r1;
    ret;
}
.visible .entry exact() .reqntid 64, 1, 1
{
    ret;
}
"#;

/// Asserts that a call succeeds.
#[track_caller]
pub fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// Asserts that a call succeeds; returns the value of its out parameter.
#[track_caller]
pub fn get<T: Default>(call: impl FnOnce(*mut T) -> CUresult) -> T {
    let mut value = T::default();
    ok(call(&mut value));
    value
}

/// As [`get`], for handles, which have no default.
#[track_caller]
pub fn handle<T>(call: impl FnOnce(*mut *mut T) -> CUresult) -> *mut T {
    let mut value = std::ptr::null_mut();
    ok(call(&mut value));
    value
}

/// A retained primary context that is current; dropping it releases the context.
pub struct PrimaryContext {
    pub device: sys::CUdevice,
    pub context: sys::CUcontext,
}

impl PrimaryContext {
    pub fn new(ordinal: i32) -> Self {
        // SAFETY: out parameters point to variables of their types.
        unsafe {
            ok(sys::cuInit(0));
            let device = get(|d| sys::cuDeviceGet(d, ordinal));
            let context = handle(|c| sys::cuDevicePrimaryCtxRetain(c, device));
            ok(sys::cuCtxSetCurrent(context));
            Self { device, context }
        }
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: the context was retained.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Loads [`KERNELS`] into the current context.
pub fn load_kernels() -> sys::CUmodule {
    let text = std::ffi::CString::new(KERNELS).unwrap();
    // SAFETY: the image is a zero-terminated text.
    handle(|m| unsafe { sys::cuModuleLoadData(m, text.as_ptr().cast()) })
}

/// A function of a module.
pub fn get_function(module: sys::CUmodule, name: &str) -> sys::CUfunction {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: the name is a C string.
    handle(|f| unsafe { sys::cuModuleGetFunction(f, module, name.as_ptr()) })
}

/// Parameters of a kernel node of one block of `threads` threads; `pointers` point to the kernel's parameters.
pub fn node_params(
    function: sys::CUfunction,
    threads: u32,
    pointers: &mut [*mut std::ffi::c_void],
) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: function,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: pointers.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

/// Adds a kernel node of one block to a graph, behind the nodes `after`; parameters as for [`launch`].
pub fn add_node(
    graph: sys::CUgraph,
    function: sys::CUfunction,
    threads: u32,
    params: &[u64],
    after: &[sys::CUgraphNode],
) -> sys::CUgraphNode {
    let mut pointers = pointers(params);
    let node = node_params(function, threads, &mut pointers);
    // SAFETY: all structures are complete, and live during the call.
    handle(|n| unsafe { sys::cuGraphAddKernelNode_v2(n, graph, after.as_ptr(), after.len(), &node) })
}

/// Pointers to parameters, which a call only reads.
pub fn pointers(params: &[u64]) -> Vec<*mut std::ffi::c_void> {
    params.iter().map(|value| std::ptr::from_ref(value).cast_mut().cast()).collect()
}

/// Launches one block of `threads` threads in a stream. Parameters are given as 8-byte values; the kernel reads as many bytes
/// of each as it declares.
pub fn launch(function: sys::CUfunction, threads: u32, stream: sys::CUstream, params: &[u64]) -> CUresult {
    let mut pointers = pointers(params);
    // SAFETY: for each parameter of the kernels there is a pointer to at least its number of bytes.
    unsafe {
        sys::cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, pointers.as_mut_ptr(), std::ptr::null_mut())
    }
}

//! Helpers for tests of streams and graphs: two kernels, and functions to launch them.

use std::sync::Arc;

pub use crate::driver::support::ok;
use crate::driver::support::{add_node, handle};
use cudaemu::test::Session;
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// `add`: data[i] += value for i < count. `sum`: a[i] += b[i] for i < count.
const PTX: &str = r#"
.version 7.0
.target sm_75
.address_size 64
.visible .entry add(.param .u64 data, .param .f32 value, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [data];
    ld.param.f32 %f1, [value];
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
    ld.global.f32 %f2, [%rd4];
    add.f32 %f3, %f2, %f1;
    st.global.f32 [%rd4], %f3;
$done:
    ret;
}
.visible .entry sum(.param .u64 a, .param .u64 b, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra $done;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f1, [%rd6];
    ld.global.f32 %f2, [%rd7];
    add.f32 %f3, %f1, %f2;
    st.global.f32 [%rd6], %f3;
$done:
    ret;
}
"#;

/// Exclusive use of the emulator, with these settings.
pub fn emulator(settings: &str) -> Session {
    cudaemu::test::start(settings).unwrap()
}

/// A device's context, without cudarc's own events for slices.
pub fn context(device: usize) -> Arc<CudaContext> {
    let context = CudaContext::new(device).unwrap();
    // SAFETY: the tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    context
}

/// The floats 0, 1, 2, …
pub fn floats(count: usize) -> Vec<f32> {
    (0..count).map(|i| i as f32).collect()
}

/// The content of a buffer, after the stream's operations.
pub fn read(stream: &Arc<CudaStream>, data: &CudaSlice<f32>) -> Vec<f32> {
    stream.clone_dtoh(data).unwrap()
}

/// A buffer's address.
pub fn address(data: &CudaSlice<f32>, stream: &CudaStream) -> u64 {
    data.device_ptr(stream).0
}

/// The kernels of [`PTX`].
pub struct Kernels {
    /// data[i] += value
    pub add: CudaFunction,
    sum: CudaFunction,
}

impl Kernels {
    /// Loads the kernels into a context.
    pub fn load(context: &Arc<CudaContext>) -> Self {
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let [add, sum] = ["add", "sum"].map(|name| module.load_function(name).unwrap());
        Self { add, sum }
    }

    /// a += b
    pub fn sum(&self, stream: &Arc<CudaStream>, a: &mut CudaSlice<f32>, b: &CudaSlice<f32>) {
        let count = a.len() as u32;
        let mut launch = stream.launch_builder(&self.sum);
        launch.arg(a).arg(b).arg(&count);
        // SAFETY: the arguments match the kernel's parameters, and the buffers have `count` elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.unwrap();
    }

    /// Adds a node to a graph, behind the nodes `after`: data[i] += value
    pub fn add_node(
        &self,
        graph: sys::CUgraph,
        (data, value, count): (u64, f32, u32),
        after: &[sys::CUgraphNode],
    ) -> sys::CUgraphNode {
        let params = [data, value.to_bits().into(), count.into()];
        add_node(graph, self.add.cu_function(), count, &params, after)
    }

    /// Adds a node to a graph, behind the nodes `after`: a += b
    pub fn sum_node(
        &self,
        graph: sys::CUgraph,
        (a, b, count): (u64, u64, u32),
        after: &[sys::CUgraphNode],
    ) -> sys::CUgraphNode {
        add_node(graph, self.sum.cu_function(), count, &[a, b, count.into()], after)
    }
}

/// Data of an edge: from_port, to_port, type, reserved.
pub type Data = [u8; 8];

/// The type of `cuGraphAddDependencies_v2`.
type Connect = unsafe extern "C" fn(
    sys::CUgraph,
    *const sys::CUgraphNode,
    *const sys::CUgraphNode,
    *const Data,
    usize,
) -> sys::CUresult;

/// `cuGraphAddDependencies_v2`, which the bindings lack.
pub fn connect_function() -> Connect {
    // SAFETY: the type above is that of the driver's function.
    unsafe { *sys::culib().get::<Connect>(b"cuGraphAddDependencies_v2\0").unwrap() }
}

/// A graph to which nodes are added; it must be instantiated.
pub fn graph() -> sys::CUgraph {
    // SAFETY: the out parameter points to a variable of its type.
    handle(|g| unsafe { sys::cuGraphCreate(g, 0) })
}

/// An executable graph, which is destroyed on drop.
pub struct GraphExec(pub sys::CUgraphExec);

impl GraphExec {
    /// Instantiates a graph, and destroys the graph.
    pub fn new(graph: sys::CUgraph) -> Self {
        // SAFETY: the out parameter points to a variable of its type.
        let exec = handle(|e| unsafe { sys::cuGraphInstantiateWithFlags(e, graph, 0) });
        // SAFETY: the graph is not used again.
        ok(unsafe { sys::cuGraphDestroy(graph) });
        Self(exec)
    }

    /// Launches it in a stream.
    pub fn launch(&self, stream: &CudaStream) {
        // SAFETY: both are alive.
        ok(unsafe { sys::cuGraphLaunch(self.0, stream.cu_stream()) });
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: it is not used again.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}

/// data[i] += value for the first `count`.
pub fn launch(stream: &Arc<CudaStream>, add: &CudaFunction, data: &mut CudaSlice<f32>, value: f32, count: u32) {
    let mut launch = stream.launch_builder(add);
    launch.arg(data).arg(&value).arg(&count);
    // SAFETY: the arguments match the kernel's parameters, and the buffer has at least `count` elements.
    unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }.unwrap();
}

/// data[i] += value for all.
pub fn add(stream: &Arc<CudaStream>, kernels: &Kernels, data: &mut CudaSlice<f32>, value: f32) {
    let count = data.len() as u32;
    launch(stream, &kernels.add, data, value, count);
}

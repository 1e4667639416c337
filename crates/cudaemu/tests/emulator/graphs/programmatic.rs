//! Programmatic edges: their data is kept, and a kernel behind one is checked for its wait.

use super::support::{address, context, emulator, floats, ok, read};
use cudarc::driver::CudaFunction;
use cudarc::driver::sys::{self, CUresult};
use cudarc::nvrtc::Ptx;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

/// from_port, to_port, type, reserved.
type Data = [u8; 8];
type Edges = unsafe extern "C" fn(
    sys::CUgraph,
    *const sys::CUgraphNode,
    *const sys::CUgraphNode,
    *const Data,
    usize,
) -> CUresult;
type Dependencies = unsafe extern "C" fn(sys::CUgraphNode, *mut sys::CUgraphNode, *mut Data, *mut usize) -> CUresult;
type WithoutData = unsafe extern "C" fn(sys::CUgraphNode, *mut sys::CUgraphNode, *mut usize) -> u32;

const PROGRAMMATIC: Data = [1, 0, 1, 0, 0, 0, 0, 0];

/// `twice` doubles a float and waits for the grids before; `fast` does not wait.
const PTX: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 data)
{griddepcontrol.launch_dependents;griddepcontrol.wait;
    .reg .f32 %f;
    .reg .b64 %rd;
    ld.param.u64 %rd, [data];
    ld.global.f32 %f, [%rd];
    add.f32 %f, %f, %f;
    st.global.f32 [%rd], %f;
    ret;
}
.visible .entry fast(.param .u64 data)
{
    griddepcontrol.launch_dependents;
    ret;
}
";

/// A function of the driver that the bindings lack.
fn function<F: Copy>(name: &[u8]) -> F {
    // SAFETY: the types above are those of the driver's functions.
    unsafe { *sys::culib().get::<F>(name).unwrap() }
}

/// Parameters of a kernel node of one thread.
fn params(kernel: &CudaFunction, arguments: &mut [*mut c_void; 1]) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: kernel.cu_function(),
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 1,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: arguments.as_mut_ptr(),
        extra: null_mut(),
        kern: null_mut(),
        ctx: null_mut(),
    }
}

#[test]
fn programmatic_edges_keep_their_data_and_need_kernels_that_wait() {
    let emulator = emulator("CUDAEMU_CAPABILITY=9.0");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let module = context.load_module(Ptx::from_src(PTX)).unwrap();
        let data = stream.clone_htod(&floats(2)[1..]).unwrap();
        let mut address = address(&data, &stream);
        let [connect, disconnect]: [Edges; 2] =
            [&b"cuGraphAddDependencies_v2\0"[..], b"cuGraphRemoveDependencies_v2\0"].map(function);
        let dependencies: Dependencies = function(b"cuGraphNodeGetDependencies_v2\0");
        let without_data: WithoutData = function(b"cuGraphNodeGetDependencies\0");
        let kernels = ["twice", "fast"].map(|name| module.load_function(name).unwrap());
        for (kernel, want, report) in [(&kernels[0], 8.0, false), (&kernels[1], 32.0, true)] {
            let mut graph = null_mut();
            let mut nodes = [null_mut(); 3];
            let mut arguments = [(&raw mut address).cast()];
            // SAFETY: all structures are complete, and live during the calls.
            unsafe {
                ok(sys::cuGraphCreate(&mut graph, 0));
                for (node, kernel) in nodes.iter_mut().zip([&kernels[0], &kernels[0], kernel]) {
                    let params = params(kernel, &mut arguments);
                    ok(sys::cuGraphAddKernelNode_v2(node, graph, null(), 0, &params));
                }
                // Nothing is added if one edge is not valid.
                for wrong in [[0, 0, 1, 0, 0, 0, 0, 0], [3, 0, 1, 0, 0, 0, 0, 0], [1; 8], [1, 0, 0, 0, 0, 0, 0, 0]] {
                    let added = connect(graph, nodes.as_ptr(), nodes[1..].as_ptr(), [PROGRAMMATIC, wrong].as_ptr(), 2);
                    assert_eq!(added, CUresult::CUDA_ERROR_INVALID_VALUE, "{wrong:?}");
                }
                ok(connect(graph, nodes.as_ptr(), nodes[1..].as_ptr(), [PROGRAMMATIC; 2].as_ptr(), 2));
                let (mut before, mut found, mut count) = ([null_mut(); 1], [[9; 8]; 1], 1);
                ok(dependencies(nodes[1], before.as_mut_ptr(), found.as_mut_ptr(), &mut count));
                assert_eq!((before[0], found[0], count), (nodes[0], PROGRAMMATIC, 1));
                // A query that cannot return the data fails, with an error that the bindings lack: CUDA_ERROR_LOSSY_QUERY.
                assert_eq!(without_data(nodes[1], before.as_mut_ptr(), &mut count), 402);
                // The data of an edge is part of its name.
                let removed = disconnect(graph, nodes.as_ptr(), nodes[1..].as_ptr(), null(), 1);
                assert_eq!(removed, CUresult::CUDA_ERROR_INVALID_VALUE);
                let exec = super::instantiate(graph);
                let launches = emulator.programmatic_launches();
                ok(sys::cuGraphLaunch(exec, stream.cu_stream()));
                assert_eq!(emulator.programmatic_launches() - launches, 2);
                // A copy of the graph has the same edges.
                let mut copy = null_mut();
                ok(sys::cuGraphClone(&mut copy, graph));
                let mut in_copy = null_mut();
                ok(sys::cuGraphNodeFindInClone(&mut in_copy, nodes[2], copy));
                ok(dependencies(in_copy, before.as_mut_ptr(), found.as_mut_ptr(), &mut count));
                assert_eq!(found[0], PROGRAMMATIC);
                for graph in [graph, copy] {
                    ok(sys::cuGraphDestroy(graph));
                }
                assert_eq!(read(&stream, &data), [want]);
                ok(sys::cuGraphExecDestroy(exec));
            }
            let reports = emulator.reports();
            assert_eq!(reports.iter().any(|text| text.contains("kernel fast has a programmatic dependency")), report);
        }
    }
}

#[test]
fn programmatic_edges_are_refused_if_the_settings_say_so() {
    let _emulator = emulator("CUDAEMU_CAPABILITY=9.0\nCUDAEMU_PROGRAMMATIC_EDGES=off");
    let context = context(0);
    let module = context.load_module(Ptx::from_src(PTX)).unwrap();
    let kernel = module.load_function("twice").unwrap();
    let connect: Edges = function(b"cuGraphAddDependencies_v2\0");
    let (mut graph, mut nodes, mut address) = (null_mut(), [null_mut(); 2], 0u64);
    let mut arguments = [(&raw mut address).cast()];
    // SAFETY: all structures are complete, and live during the calls. Nothing is launched.
    unsafe {
        ok(sys::cuGraphCreate(&mut graph, 0));
        for node in &mut nodes {
            ok(sys::cuGraphAddKernelNode_v2(node, graph, null(), 0, &params(&kernel, &mut arguments)));
        }
        let add = |data: Data| connect(graph, &nodes[0], &nodes[1], &data, 1);
        assert_eq!(add(PROGRAMMATIC), CUresult::CUDA_ERROR_NOT_SUPPORTED);
        ok(add([0; 8]));
        ok(sys::cuGraphDestroy(graph));
    }
}

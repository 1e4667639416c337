//! Graphs and stream capture, through cudarc and the raw functions.
#![allow(unsafe_code, reason = "launches and the raw functions are unsafe")]

mod order;
mod programmatic;
mod support;
mod time;
mod time_by_bytes;

use cudarc::driver::sys::{self, CUresult, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaStream, DriverError};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use support::{Kernels, add, context, emulator, floats, launch, ok, read};

const NO_FLAGS: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

fn count_nodes(graph: sys::CUgraph) -> (usize, usize) {
    let (mut nodes, mut edges) = (0, 0);
    // SAFETY: with null arrays only the counts are written.
    unsafe {
        ok(sys::cuGraphGetNodes(graph, null_mut(), &mut nodes));
        ok(sys::cuGraphGetEdges(graph, null_mut(), null_mut(), &mut edges));
    }
    (nodes, edges)
}

fn instantiate(graph: sys::CUgraph) -> sys::CUgraphExec {
    let mut exec = null_mut();
    // SAFETY: `exec` is a place for the answer.
    ok(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
    exec
}

fn as_result(error: CUresult) -> Result<(), DriverError> {
    error.result()
}

#[test]
fn a_captured_chain_is_replayed_with_new_input() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.clone_htod(&floats(100)).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        assert_eq!(stream.capture_status().unwrap(), sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        for _ in 0..3 {
            add(&stream, &kernels, &mut data, 1.0);
        }
        let graph = stream.end_capture(NO_FLAGS).unwrap().unwrap();
        assert_eq!(stream.capture_status().unwrap(), sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        assert_eq!(count_nodes(graph.cu_graph()), (3, 2));
        // Capture executes nothing.
        assert_eq!(read(&stream, &data), floats(100));
        graph.upload().unwrap();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(read(&stream, &data), floats(100).iter().map(|x| x + 6.0).collect::<Vec<_>>());
        stream.memcpy_htod(&[5.0f32; 100], &mut data).unwrap();
        graph.launch().unwrap();
        assert_eq!(read(&stream, &data), [8.0; 100]);
        // A second exec of the same graph.
        let second = instantiate(graph.cu_graph());
        // SAFETY: the handles are valid; an executable graph may be destroyed while it runs.
        unsafe {
            ok(sys::cuGraphLaunch(second, stream.cu_stream()));
            ok(sys::cuGraphExecDestroy(second));
            assert_eq!(sys::cuGraphLaunch(second, stream.cu_stream()), CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        assert_eq!(read(&stream, &data), [11.0; 100]);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_captured_fork_and_join_is_ordered_under_every_seed() {
    for seed in 0..30 {
        let emulator = emulator(&format!("CUDAEMU_SEED={seed}"));
        {
            let context = context(0);
            let (main, side) = (context.new_stream().unwrap(), context.new_stream().unwrap());
            let kernels = Kernels::load(&context);
            let mut a = main.clone_htod(&[1.0f32; 64]).unwrap();
            let mut b = main.clone_htod(&[2.0f32; 64]).unwrap();
            main.synchronize().unwrap();
            main.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
            add(&main, &kernels, &mut a, 1.0);
            let fork = main.record_event(None).unwrap();
            side.wait(&fork).unwrap();
            add(&main, &kernels, &mut a, 10.0);
            add(&side, &kernels, &mut b, 100.0);
            let join = side.record_event(None).unwrap();
            main.wait(&join).unwrap();
            // a += b
            kernels.sum(&main, &mut a, &b);
            let graph = main.end_capture(NO_FLAGS).unwrap().unwrap();
            assert_eq!(count_nodes(graph.cu_graph()), (4, 4));
            for _ in 0..3 {
                graph.launch().unwrap();
            }
            // a: ((1+11+102)+11+202)+11+302
            assert_eq!(read(&main, &a), [640.0; 64], "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn calls_that_a_capture_forbids_are_rejected() {
    let emulator = emulator("");
    {
        let context = context(0);
        let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let outside = other.record_event(None).unwrap();
        let begin = || stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        let end = || stream.end_capture(NO_FLAGS).map(|graph| graph.is_some());
        let failed = |error: CUresult| Err(DriverError(error));
        use CUresult::*;
        let invalidated = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

        begin();
        assert_eq!(stream.synchronize(), as_result(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        assert_eq!(stream.synchronize(), as_result(invalidated));
        assert_eq!(end(), failed(invalidated));

        begin();
        assert_eq!(stream.wait(&outside), as_result(CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
        assert_eq!(end(), failed(invalidated));

        begin();
        let mut address = 0;
        // SAFETY: the out parameter points to a variable of its type.
        let allocated = unsafe { sys::cuMemAlloc_v2(&mut address, 16) };
        assert_eq!(allocated, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(end(), failed(invalidated));

        begin();
        let inside = stream.record_event(None).unwrap();
        other.wait(&inside).unwrap();
        // SAFETY: the only pointer is to a live buffer.
        unsafe { ok(sys::cuLaunchHostFunc(other.cu_stream(), Some(empty_host_function), null_mut())) };
        assert_eq!(end(), failed(CUDA_ERROR_STREAM_CAPTURE_UNJOINED));

        begin();
        let inside = stream.record_event(None).unwrap();
        assert_eq!(inside.synchronize(), as_result(CUDA_ERROR_CAPTURED_EVENT));
        assert_eq!(end(), failed(invalidated));

        // The default stream synchronises with blocking streams, so it cannot be used while one of them is captured.
        let mut blocking = null_mut();
        // SAFETY: the out parameter points to a variable of its type; the stream is live.
        unsafe {
            ok(sys::cuStreamCreate(&mut blocking, 0));
            ok(sys::cuStreamBeginCapture_v2(blocking, Mode::CU_STREAM_CAPTURE_MODE_RELAXED));
            assert_eq!(sys::cuStreamSynchronize(null_mut()), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
            let mut graph = null_mut();
            assert_eq!(sys::cuStreamEndCapture(blocking, &mut graph), invalidated);
            assert!(graph.is_null());
            assert_eq!(
                sys::cuStreamBeginCapture_v2(null_mut(), Mode::CU_STREAM_CAPTURE_MODE_RELAXED),
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
            );
            ok(sys::cuStreamDestroy_v2(blocking));
        }

        begin();
        assert_eq!(stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL), as_result(CUDA_ERROR_ILLEGAL_STATE));
        assert_eq!(end(), Ok(true));
        assert_eq!(end(), failed(CUDA_ERROR_ILLEGAL_STATE));
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

extern "C" fn empty_host_function(_: *mut c_void) {}

extern "C" fn count(counter: *mut c_void) {
    // SAFETY: the tests pass the address of a counter that outlives the callback.
    let counter = unsafe { &*counter.cast::<AtomicU32>() };
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A graph built node by node: memset → kernel that adds `value` → copy to `out`, and a host function after the kernel.
struct BuiltGraph {
    graph: sys::CUgraph,
    nodes: [sys::CUgraphNode; 4],
}

impl BuiltGraph {
    fn new(
        kernels: &Kernels,
        context: sys::CUcontext,
        data: u64,
        out: u64,
        value: &mut f32,
        counter: &AtomicU32,
    ) -> Self {
        let mut made = Self { graph: null_mut(), nodes: [null_mut(); 4] };
        let (graph, nodes) = (&mut made.graph, &mut made.nodes);
        let set = sys::CUDA_MEMSET_NODE_PARAMS {
            dst: data,
            pitch: 0,
            value: 1.5f32.to_bits(),
            elementSize: 4,
            width: 64,
            height: 1,
        };
        let mut arguments = Kernels::add_arguments(&data, value, &64);
        let kernel = kernels.node_params(&mut arguments);
        let copy = copy_params(out, data, 64 * 4);
        let host =
            sys::CUDA_HOST_NODE_PARAMS { fn_: Some(count), userData: std::ptr::from_ref(counter).cast_mut().cast() };
        // SAFETY: all structures are complete, and live during the calls.
        unsafe {
            ok(sys::cuGraphCreate(graph, 0));
            ok(sys::cuGraphAddMemsetNode(&mut nodes[0], *graph, null(), 0, &set, context));
            ok(sys::cuGraphAddKernelNode_v2(&mut nodes[1], *graph, &nodes[0], 1, &kernel));
            ok(sys::cuGraphAddMemcpyNode(&mut nodes[2], *graph, &nodes[1], 1, &copy, context));
            ok(sys::cuGraphAddHostNode(&mut nodes[3], *graph, null(), 0, &host));
            ok(sys::cuGraphAddDependencies(*graph, &nodes[1], &nodes[3], 1));
        }
        made
    }
}

fn copy_params(to: u64, from: u64, bytes: usize) -> sys::CUDA_MEMCPY3D {
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcHost: null(),
        srcDevice: from,
        srcArray: null_mut(),
        reserved0: null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: to,
        dstArray: null_mut(),
        reserved1: null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: bytes,
        Height: 1,
        Depth: 1,
    }
}

#[test]
fn a_built_graph_is_queried_updated_and_cloned() {
    let emulator = emulator("CUDAEMU_SEED=5");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let (data, out) = (stream.alloc_zeros::<f32>(64).unwrap(), stream.alloc_zeros::<f32>(64).unwrap());
        let [data_at, out_at] = [support::address(&data, &stream), support::address(&out, &stream)];
        let counter = AtomicU32::new(0);
        let made = BuiltGraph::new(&kernels, context.cu_ctx(), data_at, out_at, &mut 1.0, &counter);
        let exec = instantiate(made.graph);
        let run = |exec| {
            // SAFETY: live handles.
            ok(unsafe { sys::cuGraphLaunch(exec, stream.cu_stream()) });
            read(&stream, &out)[63]
        };
        assert_eq!(count_nodes(made.graph), (4, 3));
        assert_eq!((run(exec), counter.load(Ordering::Relaxed)), (2.5, 1));
        // SAFETY: all structures are initialised and outlive the calls; the driver returned the pointers that are read.
        unsafe {
            // Queried parameters: the kernel node holds copies.
            let mut kernel: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            ok(sys::cuGraphKernelNodeGetParams_v2(made.nodes[1], &mut kernel));
            assert_eq!(kernel.blockDimX, 32);
            assert_eq!((*kernel.kernelParams.add(1)).cast::<f32>().read(), 1.0);
            let mut copy = copy_params(0, 0, 0);
            ok(sys::cuGraphMemcpyNodeGetParams(made.nodes[2], &mut copy));
            assert_eq!((copy.dstDevice, copy.srcDevice, copy.WidthInBytes), (out_at, data_at, 256));
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            ok(sys::cuGraphNodeGetType(made.nodes[3], &mut kind));
            assert_eq!(kind, sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST);
            let (mut roots, mut found) = ([null_mut(); 3], 3);
            ok(sys::cuGraphGetRootNodes(made.graph, roots.as_mut_ptr(), &mut found));
            assert_eq!((roots, found), ([made.nodes[0], null_mut(), null_mut()], 1));

            // One node of the exec changes; the graph does not.
            let mut ten = 10.0f32;
            let mut arguments = Kernels::add_arguments(&data_at, &mut ten, &64);
            let changed = kernels.node_params(&mut arguments);
            ok(sys::cuGraphExecKernelNodeSetParams_v2(exec, made.nodes[1], &changed));
            assert_eq!(run(exec), 11.5);
            ok(sys::cuGraphNodeSetEnabled(exec, made.nodes[1], 0));
            assert_eq!(run(exec), 1.5);
            assert_eq!(sys::cuGraphNodeSetEnabled(exec, made.nodes[3], 0), CUresult::CUDA_ERROR_INVALID_VALUE);
            ok(sys::cuGraphNodeSetEnabled(exec, made.nodes[1], 1));

            // The whole exec is updated from a clone with another memset.
            let mut clone = null_mut();
            ok(sys::cuGraphClone(&mut clone, made.graph));
            let mut node = null_mut();
            ok(sys::cuGraphNodeFindInClone(&mut node, made.nodes[0], clone));
            let mut set: sys::CUDA_MEMSET_NODE_PARAMS = std::mem::zeroed();
            ok(sys::cuGraphMemsetNodeGetParams(node, &mut set));
            set.value = 7.0f32.to_bits();
            ok(sys::cuGraphMemsetNodeSetParams(node, &set));
            let mut info: sys::CUgraphExecUpdateResultInfo = std::mem::zeroed();
            ok(sys::cuGraphExecUpdate_v2(exec, clone, &mut info));
            assert_eq!(run(exec), 8.0);
            // A further edge makes it a different graph: the update fails and changes nothing.
            let mut extra = null_mut();
            ok(sys::cuGraphAddEmptyNode(&mut extra, clone, &node, 1));
            let updated = sys::cuGraphExecUpdate_v2(exec, clone, &mut info);
            assert_eq!(updated, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
            assert_eq!(info.result, sys::CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
            assert_eq!((run(exec), counter.load(Ordering::Relaxed)), (8.0, 5));

            // A cycle, a foreign node and a stale handle give errors.
            let cycle = sys::cuGraphAddDependencies(made.graph, &made.nodes[2], &made.nodes[0], 1);
            assert_eq!(cycle, CUresult::CUDA_ERROR_INVALID_VALUE);
            let foreign = sys::cuGraphAddDependencies(made.graph, &node, &made.nodes[0], 1);
            assert_eq!(foreign, CUresult::CUDA_ERROR_INVALID_VALUE);

            // As two children of another graph, which runs it twice in a row.
            let (mut outer, mut children) = (null_mut(), [null_mut(); 2]);
            ok(sys::cuGraphCreate(&mut outer, 0));
            ok(sys::cuGraphAddChildGraphNode(&mut children[0], outer, null(), 0, made.graph));
            ok(sys::cuGraphAddChildGraphNode(&mut children[1], outer, &children[0], 1, made.graph));
            let path = std::env::temp_dir().join(format!("cudaemu-graph-{}.dot", std::process::id()));
            let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
            ok(sys::cuGraphDebugDotPrint(outer, name.as_ptr(), 0));
            let dot = std::fs::read_to_string(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            assert!(
                dot.starts_with("digraph") && dot.matches("KERNEL add").count() == 2 && dot.matches("->").count() == 7,
                "{dot}"
            );
            let outer_exec = instantiate(outer);
            ok(sys::cuGraphDestroy(made.graph));
            ok(sys::cuGraphDestroy(outer));
            assert_eq!(sys::cuGraphDestroy(outer), CUresult::CUDA_ERROR_INVALID_VALUE);
            assert_eq!((run(outer_exec), counter.load(Ordering::Relaxed)), (2.5, 7));
            for exec in [exec, outer_exec] {
                ok(sys::cuGraphExecDestroy(exec));
            }
            ok(sys::cuGraphDestroy(clone));
        }
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn launching_a_graph_into_a_capture_makes_it_a_child() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.clone_htod(&[0.0f32; 32]).unwrap();
        stream.synchronize().unwrap();
        let capture = |stream: &Arc<CudaStream>, work: &mut dyn FnMut()| {
            stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
            work();
            stream.end_capture(NO_FLAGS).unwrap().unwrap()
        };
        let inner = capture(&stream, &mut || add(&stream, &kernels, &mut data, 1.0));
        let outer = capture(&stream, &mut || (0..3).for_each(|_| inner.launch().unwrap()));
        assert_eq!(count_nodes(outer.cu_graph()), (3, 2));
        drop(inner);
        outer.launch().unwrap();
        assert_eq!(read(&stream, &data), [3.0; 32]);
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_graph_releases_its_memory_and_user_objects() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let out = stream.alloc_zeros::<f32>(64).unwrap();
        let out_at = support::address(&out, &stream);
        let freed = AtomicU32::new(0);
        // SAFETY: all structures are complete, and live during the calls.
        unsafe {
            let (mut graph, mut nodes) = (null_mut(), [null_mut(); 4]);
            ok(sys::cuGraphCreate(&mut graph, 0));
            let mut alloc: sys::CUDA_MEM_ALLOC_NODE_PARAMS = std::mem::zeroed();
            alloc.poolProps.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            alloc.poolProps.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            alloc.bytesize = 256;
            ok(sys::cuGraphAddMemAllocNode(&mut nodes[0], graph, null(), 0, &mut alloc));
            let set = sys::CUDA_MEMSET_NODE_PARAMS {
                dst: alloc.dptr,
                pitch: 0,
                value: 2.0f32.to_bits(),
                elementSize: 4,
                width: 64,
                height: 1,
            };
            ok(sys::cuGraphAddMemsetNode(&mut nodes[1], graph, &nodes[0], 1, &set, context.cu_ctx()));
            let copy = copy_params(out_at, alloc.dptr, 256);
            ok(sys::cuGraphAddMemcpyNode(&mut nodes[2], graph, &nodes[1], 1, &copy, context.cu_ctx()));
            ok(sys::cuGraphAddMemFreeNode(&mut nodes[3], graph, &nodes[2], 1, alloc.dptr));
            let mut clone = null_mut();
            assert_eq!(sys::cuGraphClone(&mut clone, graph), CUresult::CUDA_ERROR_NOT_SUPPORTED);
            let mut object = null_mut();
            ok(sys::cuUserObjectCreate(&mut object, std::ptr::from_ref(&freed).cast_mut().cast(), Some(count), 1, 1));
            ok(sys::cuGraphRetainUserObject(graph, object, 1, 1));
            let exec = instantiate(graph);
            ok(sys::cuGraphDestroy(graph));
            ok(sys::cuGraphLaunch(exec, stream.cu_stream()));
            ok(sys::cuGraphLaunch(exec, stream.cu_stream()));
            assert_eq!(freed.load(Ordering::Relaxed), 0);
            ok(sys::cuGraphExecDestroy(exec));
            assert_eq!(read(&stream, &out), [2.0; 64]);
            context.synchronize().unwrap();
            assert_eq!(freed.load(Ordering::Relaxed), 1);
            let mut used = 1u64;
            let attribute = sys::CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT;
            ok(sys::cuDeviceGetGraphMemAttribute(0, attribute, std::ptr::from_mut(&mut used).cast()));
            assert_eq!(used, 0);
        }
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_kernel_node_has_the_handle_of_its_function() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.clone_htod(&[0.0f32; 32]).unwrap();
        stream.synchronize().unwrap();
        stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        launch(&stream, &kernels.add, &mut data, 4.0, 32);
        let graph = stream.end_capture(NO_FLAGS).unwrap().unwrap();
        let (mut nodes, mut count) = ([null_mut(); 1], 1);
        // SAFETY: an array of one element, and a variable for the parameters.
        unsafe {
            ok(sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &mut count));
            let mut params: sys::CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
            ok(sys::cuGraphKernelNodeGetParams_v2(nodes[0], &mut params));
            assert_eq!(params.func, kernels.add.cu_function());
        }
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

//! Graphs of kernels, and simulated time.
#![allow(unsafe_code, reason = "launches and the raw functions are unsafe")]

mod order;
mod programmatic;
mod support;
mod time;
mod time_by_bytes;

use crate::driver::support::{node_params, pointers};
use cudarc::driver::sys::{self, CUresult};
use std::ptr::null_mut;
use support::{GraphExec, Kernels, address, connect_function, context, emulator, floats, graph, ok, read};

fn instantiate(graph: sys::CUgraph) -> sys::CUgraphExec {
    let mut exec = null_mut();
    // SAFETY: `exec` is a place for the answer.
    ok(unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0) });
    exec
}

#[test]
fn a_chain_is_replayed_with_new_input() {
    let emulator = emulator("");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let mut data = stream.clone_htod(&floats(100)).unwrap();
        stream.synchronize().unwrap();
        let (chain, data_at) = (graph(), address(&data, &stream));
        let mut last = Vec::new();
        for _ in 0..3 {
            last = vec![kernels.add_node(chain, (data_at, 1.0, 100), &last)];
        }
        let second = instantiate(chain);
        let exec = GraphExec::new(chain);
        // Building executes nothing.
        assert_eq!(read(&stream, &data), floats(100));
        exec.launch(&stream);
        exec.launch(&stream);
        assert_eq!(read(&stream, &data), floats(100).iter().map(|x| x + 6.0).collect::<Vec<_>>());
        stream.memcpy_htod(&[5.0f32; 100], &mut data).unwrap();
        exec.launch(&stream);
        assert_eq!(read(&stream, &data), [8.0; 100]);
        // A second exec of the same graph.
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
fn a_fork_and_join_is_ordered_under_every_seed() {
    for seed in 0..30 {
        let emulator = emulator(&format!("CUDAEMU_SEED={seed}"));
        {
            let context = context(0);
            let stream = context.new_stream().unwrap();
            let kernels = Kernels::load(&context);
            let a = stream.clone_htod(&[1.0f32; 64]).unwrap();
            let b = stream.clone_htod(&[2.0f32; 64]).unwrap();
            stream.synchronize().unwrap();
            let [a_at, b_at] = [&a, &b].map(|buffer| address(buffer, &stream));
            let forks = graph();
            let first = kernels.add_node(forks, (a_at, 1.0, 64), &[]);
            let main = kernels.add_node(forks, (a_at, 10.0, 64), &[first]);
            let side = kernels.add_node(forks, (b_at, 100.0, 64), &[first]);
            kernels.sum_node(forks, (a_at, b_at, 64), &[main, side]);
            let exec = GraphExec::new(forks);
            for _ in 0..3 {
                exec.launch(&stream);
            }
            // a: ((1+11+102)+11+202)+11+302
            assert_eq!(read(&stream, &a), [640.0; 64], "seed {seed}");
        }
        assert_eq!(emulator.reports(), Vec::<String>::new());
    }
}

#[test]
fn a_node_of_an_executable_graph_is_changed_and_wrong_edges_are_rejected() {
    let emulator = emulator("CUDAEMU_SEED=5");
    {
        let context = context(0);
        let stream = context.new_stream().unwrap();
        let kernels = Kernels::load(&context);
        let data = stream.alloc_zeros::<f32>(64).unwrap();
        let data_at = address(&data, &stream);
        let made = graph();
        let nodes = [0; 3].map(|_| kernels.add_node(made, (data_at, 1.0, 64), &[]));
        let other = graph();
        let foreign = kernels.add_node(other, (data_at, 1.0, 64), &[]);
        // SAFETY: all structures are initialised and outlive the calls.
        unsafe {
            let connect = |from: &[sys::CUgraphNode], to: &[sys::CUgraphNode]| {
                connect_function()(made, from.as_ptr(), to.as_ptr(), std::ptr::null(), from.len())
            };
            ok(connect(&nodes[..2], &nodes[1..]));
            // A cycle and a foreign node give errors.
            assert_eq!(connect(&nodes[2..], &nodes[..1]), CUresult::CUDA_ERROR_INVALID_VALUE);
            assert_eq!(connect(&[foreign], &nodes[..1]), CUresult::CUDA_ERROR_INVALID_VALUE);
            let exec = GraphExec::new(made);
            exec.launch(&stream);
            assert_eq!(read(&stream, &data), [3.0; 64]);
            let params = [data_at, 10.0f32.to_bits().into(), 64];
            let mut pointers = pointers(&params);
            let changed = node_params(kernels.add.cu_function(), 64, &mut pointers);
            ok(sys::cuGraphExecKernelNodeSetParams_v2(exec.0, nodes[1], &changed));
            assert_eq!(
                sys::cuGraphExecKernelNodeSetParams_v2(exec.0, foreign, &changed),
                CUresult::CUDA_ERROR_INVALID_VALUE
            );
            exec.launch(&stream);
            assert_eq!(read(&stream, &data), [15.0; 64]);
            // Stale handles.
            assert_eq!(sys::cuGraphDestroy(made), CUresult::CUDA_ERROR_INVALID_VALUE);
            ok(sys::cuGraphDestroy(other));
        }
    }
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

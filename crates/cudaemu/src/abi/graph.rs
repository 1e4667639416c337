//! Graphs of kernels: creation, edges, executable graphs and changes of their nodes.

use std::ffi::c_uint;

use super::ffi_guard::{In, Out, api, with_state};
use super::launch::parameters;
use crate::config::ProgrammaticEdges;
use crate::driver::driver;
use crate::driver::graph::KernelNode;
use crate::driver::launch::LaunchRequest;
use crate::driver::{Driver, StateGuard};
use crate::engine::EdgeData;
use crate::error::{Error, Result};
use crate::handle::{FunctionId, GraphExecId, GraphId, NodeId, StreamId};
use crate::mem::HostMemory;

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelNodeParams {
    function: FunctionId,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: In<HostMemory>,
    extra: In<u64>,
    /// A `CUkernel` and a context, which may take the place of the function's: not supported.
    kernel: [u64; 2],
}

impl KernelNodeParams {
    /// The node's driver form.
    fn node(self, driver: &Driver, state: &mut StateGuard<'_>) -> Result<KernelNode> {
        let Self { function, grid, block, shared, params, extra, .. } = self;
        let request = LaunchRequest { function, grid, block, shared, stream: StreamId::default(), cluster: [1; 3] };
        let (launch, context) = driver.checked_launch(state, request, |kernel| parameters(kernel, params, extra))?;
        Ok(KernelNode { launch, context })
    }
}

api! {
    fn cuGraphCreate(graph: Out<GraphId>, flags: c_uint) {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        graph.write_with(|| with_state(|_, state| Ok(state.graphs.create())))
    }

    fn cuGraphDestroy(graph: GraphId) {
        with_state(|_, state| state.graphs.destroy(graph))
    }

    fn cuGraphAddKernelNode_v2(
        node: Out<NodeId>,
        graph: GraphId,
        after: In<NodeId>,
        count: usize,
        params: In<KernelNodeParams>,
    ) {
        node.write_with(|| {
            let (after, kernel) = (after.read_array(count)?, params.get()?);
            with_state(|driver, state| {
                let kernel = kernel.node(driver, state)?;
                state.graphs.add(graph, &after, kernel)
            })
        })
    }

    fn cuGraphAddDependencies_v2(graph: GraphId, from: In<NodeId>, to: In<NodeId>, data: In<EdgeData>, count: usize) {
        let data = match data.is_given() {
            true => data.read_array(count)?,
            false => vec![EdgeData::default(); count],
        };
        let ends = from.read_array(count)?.into_iter().zip(to.read_array(count)?);
        let edges: Vec<_> = ends.zip(data).collect();
        with_state(|driver, state| {
            let refused = driver.config.hardware.programmatic_edges == ProgrammaticEdges::Refused;
            if refused && edges.iter().any(|(_, data)| data.is_programmatic()) {
                return Err(Error::NotSupported);
            }
            state.graphs.connect(graph, &edges)
        })
    }

    fn cuGraphInstantiateWithFlags(exec: Out<GraphExecId>, graph: GraphId, flags: u64) {
        exec.write_with(|| with_state(|_, state| state.graphs.instantiate(graph, flags)))
    }

    fn cuGraphExecDestroy(exec: GraphExecId) {
        with_state(|_, state| state.graphs.destroy_exec(exec))
    }

    fn cuGraphLaunch(exec: GraphExecId, stream: StreamId) {
        driver()?.launch_graph(exec, stream)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: GraphExecId, node: NodeId, params: In<KernelNodeParams>) {
        let kernel = params.get()?;
        with_state(|driver, state| {
            let fixed = driver.config.hardware.programmatic_edges == ProgrammaticEdges::Fixed;
            if fixed && state.graphs.is_behind_programmatic_edge(exec, node)? {
                return Err(Error::NotSupported);
            }
            let kernel = kernel.node(driver, state)?;
            state.graphs.set_exec_node(exec, node, kernel)
        })
    }
}

//! Executable graphs: instantiation, launch, update and parameters of `CUgraphExec`.

use std::ffi::{c_char, c_uint};

use super::super::ffi_guard::{In, InOut, Out, api, with_state};
use super::params::{HostNodeParams, KernelNodeParams, KernelNodeParamsV1, MemsetNodeParams, NodeParams as Params};
use crate::abi::memcpy::Copy3D;
use crate::config::ProgrammaticEdges;
use crate::driver::graph::{GraphNode, UPLOAD, UpdateResultInfo};
use crate::driver::{Driver, StateGuard, driver};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, GraphExecId, GraphId, NodeId, StreamId};

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
struct Instantiate {
    flags: u64,
    stream: StreamId,
    node: NodeId,
    result: c_uint,
}

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
struct UpdateInfo {
    result: c_uint,
    node: NodeId,
    from: NodeId,
}

/// Changes a kernel node of an executable graph.
fn set_exec_kernel(
    driver: &Driver,
    state: &mut StateGuard<'_>,
    (exec, node): (GraphExecId, NodeId),
    kernel: &KernelNodeParams,
) -> Result<()> {
    let fixed = driver.config.hardware.programmatic_edges == ProgrammaticEdges::Fixed;
    if fixed && state.graphs.is_behind_programmatic_edge(exec, node)? {
        return Err(Error::NotSupported);
    }
    let new = kernel.node(driver, state)?;
    state.graphs.set_exec_node(exec, node, new)
}

api! {
    fn cuGraphInstantiate_v2(exec: Out<GraphExecId>, graph: GraphId, node: Out<NodeId>, _log: Out<c_char>, _room: usize) {
        node.set(NodeId::default());
        exec.write_with(|| instantiate(graph, 0))
    }

    fn cuGraphInstantiateWithFlags(exec: Out<GraphExecId>, graph: GraphId, flags: u64) {
        // The upload flag needs a stream, which only `cuGraphInstantiateWithParams` names.
        exec.write_with(|| if flags & UPLOAD == 0 { instantiate(graph, flags) } else { Err(Error::InvalidValue) })
    }

    fn cuGraphInstantiateWithParams(exec: Out<GraphExecId>, graph: GraphId, params: InOut<Instantiate>) {
        exec.check_not_null()?;
        let mut wanted = params.at(0)?;
        let made = instantiate(graph, wanted.flags);
        wanted.node = NodeId::default();
        wanted.result = u32::from(made.is_err());
        params.set_at(0, wanted);
        let made = made?;
        exec.set(made);
        if wanted.flags & UPLOAD != 0 { driver()?.upload_graph(made, wanted.stream) } else { Ok(()) }
    }

    fn cuGraphExecGetFlags(exec: GraphExecId, flags: Out<u64>) {
        flags.write_with(|| with_state(|_, state| state.graphs.exec_flags(exec)))
    }

    fn cuGraphExecGetId(exec: GraphExecId, id: Out<c_uint>) {
        id.write_with(|| with_state(|_, state| Ok(state.graphs.exec_number(exec)? as c_uint)))
    }

    fn cuGraphExecDestroy(exec: GraphExecId) {
        driver()?.destroy_exec(exec)
    }

    fn cuGraphUpload(exec: GraphExecId, stream: StreamId) {
        driver()?.upload_graph(exec, stream)
    }

    fn cuGraphLaunch(exec: GraphExecId, stream: StreamId) {
        driver()?.launch_graph(exec, stream)
    }

    fn cuGraphExecUpdate(exec: GraphExecId, graph: GraphId, node: Out<NodeId>, result: Out<c_uint>) {
        let updated = with_state(|_, state| state.graphs.update(exec, graph))?;
        node.set(updated.node);
        result.set(updated.result);
        verdict(updated)
    }

    fn cuGraphExecUpdate_v2(exec: GraphExecId, graph: GraphId, info: Out<UpdateInfo>) {
        let updated = with_state(|_, state| state.graphs.update(exec, graph))?;
        info.set(UpdateInfo { result: updated.result, node: updated.node, from: updated.from });
        verdict(updated)
    }

    fn cuGraphNodeSetEnabled(exec: GraphExecId, node: NodeId, enabled: c_uint) {
        with_state(|_, state| state.graphs.enable(exec, node, enabled != 0))
    }

    fn cuGraphNodeGetEnabled(exec: GraphExecId, node: NodeId, enabled: Out<c_uint>) {
        enabled.write_with(|| with_state(|_, state| {
            let (payload, enabled) = state.graphs.exec_node(exec, node)?;
            if payload.can_be_disabled() { Ok(c_uint::from(enabled)) } else { Err(Error::InvalidValue) }
        }))
    }

    fn cuGraphExecKernelNodeSetParams(exec: GraphExecId, node: NodeId, params: In<KernelNodeParamsV1>) {
        let kernel = KernelNodeParams::from(params.get()?);
        with_state(|driver, state| {
            set_exec_kernel(driver, state, (exec, node), &kernel)
        })
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: GraphExecId, node: NodeId, params: In<KernelNodeParams>) {
        let kernel = params.get()?;
        with_state(|driver, state| {
            set_exec_kernel(driver, state, (exec, node), &kernel)
        })
    }

    fn cuGraphExecMemcpyNodeSetParams(exec: GraphExecId, node: NodeId, params: In<Copy3D>, context: ContextId) {
        let request = params.get()?.request()?;
        with_state(|driver, state| {
            let context = state.context_or_current(context)?;
            state.graphs.set_exec_node(exec, node, driver.copy_node(request, context)?)
        })
    }

    fn cuGraphExecMemsetNodeSetParams(exec: GraphExecId, node: NodeId, params: In<MemsetNodeParams>, context: ContextId) {
        let fill = params.get()?;
        with_state(|driver, state| {
            let context = state.context_or_current(context)?;
            state.graphs.set_exec_node(exec, node, driver.memset_node(fill.fill()?, context)?)
        })
    }

    fn cuGraphExecHostNodeSetParams(exec: GraphExecId, node: NodeId, params: In<HostNodeParams>) {
        let new = params.get()?.node()?;
        with_state(|_, state| state.graphs.set_exec_node(exec, node, new))
    }

    fn cuGraphExecChildGraphNodeSetParams(exec: GraphExecId, node: NodeId, child: GraphId) {
        with_state(|_, state| state.graphs.set_exec_child(exec, node, child))
    }

    fn cuGraphExecEventRecordNodeSetEvent(exec: GraphExecId, node: NodeId, event: EventId) {
        with_state(|_, state| {
            let new = state.event_node(event, GraphNode::Record)?;
            state.graphs.set_exec_node(exec, node, new)
        })
    }

    fn cuGraphExecEventWaitNodeSetEvent(exec: GraphExecId, node: NodeId, event: EventId) {
        with_state(|_, state| {
            let new = state.event_node(event, GraphNode::Wait)?;
            state.graphs.set_exec_node(exec, node, new)
        })
    }

    fn cuGraphExecNodeSetParams(exec: GraphExecId, node: NodeId, params: Params) {
        with_state(|driver, state| {
            if let Some(child) = params.child()? {
                return state.graphs.set_exec_child(exec, node, child);
            }
            let new = params.node(driver, state)?;
            state.graphs.set_exec_node(exec, node, new)
        })
    }
}

fn instantiate(graph: GraphId, flags: u64) -> Result<GraphExecId> {
    with_state(|_, state| state.graphs.instantiate(graph, flags))
}

fn verdict(updated: UpdateResultInfo) -> Result<()> {
    if updated.result == 0 { Ok(()) } else { Err(Error::GraphExecUpdateFailure) }
}

//! What is instantiated of graphs.

use std::ffi::{c_char, c_uint};

use super::super::door::{In, InOut, Out, api, locked};
use super::params::{Fill, Host, Kernel, KernelV1, Node as Params};
use crate::abi::copies::Copy3D;
use crate::driver::driver;
use crate::driver::graph::{Node, UPLOAD, Updated};
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

api! {
    fn cuGraphInstantiate_v2(exec: Out<GraphExecId>, graph: GraphId, node: Out<NodeId>, _log: Out<c_char>, _room: usize) {
        node.set(NodeId::default());
        exec.answer(|| instantiate(graph, 0))
    }

    fn cuGraphInstantiateWithFlags(exec: Out<GraphExecId>, graph: GraphId, flags: u64) {
        // To upload at once, a stream has to be named: see below.
        exec.answer(|| if flags & UPLOAD == 0 { instantiate(graph, flags) } else { Err(Error::InvalidValue) })
    }

    fn cuGraphInstantiateWithParams(exec: Out<GraphExecId>, graph: GraphId, params: InOut<Instantiate>) {
        exec.given()?;
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
        flags.answer(|| locked(|_, state| state.graphs.exec_flags(exec)))
    }

    fn cuGraphExecGetId(exec: GraphExecId, id: Out<c_uint>) {
        id.answer(|| locked(|_, state| Ok(state.graphs.exec_number(exec)? as c_uint)))
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
        let updated = locked(|_, state| state.graphs.update(exec, graph))?;
        node.set(updated.node);
        result.set(updated.result);
        verdict(updated)
    }

    fn cuGraphExecUpdate_v2(exec: GraphExecId, graph: GraphId, info: Out<UpdateInfo>) {
        let updated = locked(|_, state| state.graphs.update(exec, graph))?;
        info.set(UpdateInfo { result: updated.result, node: updated.node, from: updated.from });
        verdict(updated)
    }

    fn cuGraphNodeSetEnabled(exec: GraphExecId, node: NodeId, enabled: c_uint) {
        locked(|_, state| state.graphs.enable(exec, node, enabled != 0))
    }

    fn cuGraphNodeGetEnabled(exec: GraphExecId, node: NodeId, enabled: Out<c_uint>) {
        enabled.answer(|| locked(|_, state| {
            let (payload, enabled) = state.graphs.step(exec, node)?;
            if payload.can_be_disabled() { Ok(c_uint::from(enabled)) } else { Err(Error::InvalidValue) }
        }))
    }

    fn cuGraphExecKernelNodeSetParams(exec: GraphExecId, node: NodeId, params: In<KernelV1>) {
        let kernel = Kernel::from(params.get()?);
        locked(|driver, state| {
            let node_of = kernel.node(driver, state)?;
            state.graphs.set_step(exec, node, node_of)
        })
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: GraphExecId, node: NodeId, params: In<Kernel>) {
        let kernel = params.get()?;
        locked(|driver, state| {
            let new = kernel.node(driver, state)?;
            state.graphs.set_step(exec, node, new)
        })
    }

    fn cuGraphExecMemcpyNodeSetParams(exec: GraphExecId, node: NodeId, params: In<Copy3D>, context: ContextId) {
        let request = params.get()?.request()?;
        locked(|driver, state| {
            let context = state.context_or_current(context)?;
            state.graphs.set_step(exec, node, driver.copy_node(request, context)?)
        })
    }

    fn cuGraphExecMemsetNodeSetParams(exec: GraphExecId, node: NodeId, params: In<Fill>, context: ContextId) {
        let fill = params.get()?;
        locked(|driver, state| {
            let context = state.context_or_current(context)?;
            state.graphs.set_step(exec, node, driver.fill_node(fill.fill()?, context)?)
        })
    }

    fn cuGraphExecHostNodeSetParams(exec: GraphExecId, node: NodeId, params: In<Host>) {
        let new = params.get()?.node()?;
        locked(|_, state| state.graphs.set_step(exec, node, new))
    }

    fn cuGraphExecChildGraphNodeSetParams(exec: GraphExecId, node: NodeId, child: GraphId) {
        locked(|_, state| state.graphs.set_child(exec, node, child))
    }

    fn cuGraphExecEventRecordNodeSetEvent(exec: GraphExecId, node: NodeId, event: EventId) {
        locked(|_, state| {
            let new = state.event_node(event, Node::Record)?;
            state.graphs.set_step(exec, node, new)
        })
    }

    fn cuGraphExecEventWaitNodeSetEvent(exec: GraphExecId, node: NodeId, event: EventId) {
        locked(|_, state| {
            let new = state.event_node(event, Node::Wait)?;
            state.graphs.set_step(exec, node, new)
        })
    }

    fn cuGraphExecNodeSetParams(exec: GraphExecId, node: NodeId, params: Params) {
        locked(|driver, state| {
            if let Some(child) = params.child()? {
                return state.graphs.set_child(exec, node, child);
            }
            let new = params.node(driver, state)?;
            state.graphs.set_step(exec, node, new)
        })
    }
}

fn instantiate(graph: GraphId, flags: u64) -> Result<GraphExecId> {
    locked(|_, state| state.graphs.instantiate(graph, flags))
}

fn verdict(updated: Updated) -> Result<()> {
    if updated.result == 0 { Ok(()) } else { Err(Error::GraphExecUpdateFailure) }
}

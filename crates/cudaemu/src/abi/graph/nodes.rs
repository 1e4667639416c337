//! Creation of graph nodes, one function of the API per kind.

use std::ffi::c_uint;

use super::super::ffi_guard::{In, InOut, Out, api, with_state};
use super::params::{
    HostNodeParams, KernelNodeParams, KernelNodeParamsV1, MemAllocNodeParams, MemsetNodeParams, NodeParams as Params,
};
use crate::abi::memcpy::Copy3D;
use crate::driver::driver;
use crate::driver::graph::GraphNode;
use crate::driver::{Driver, StateGuard};
use crate::engine::EdgeData;
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, GraphId, NodeId};

api! {
    fn cuGraphAddKernelNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, params: In<KernelNodeParamsV1>) {
        let kernel = KernelNodeParams::from(params.get()?);
        add(node, graph, after, count, |driver, state| kernel.node(driver, state))
    }

    fn cuGraphAddKernelNode_v2(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, params: In<KernelNodeParams>) {
        let kernel = params.get()?;
        add(node, graph, after, count, |driver, state| kernel.node(driver, state))
    }

    fn cuGraphAddMemcpyNode(
        node: Out<NodeId>,
        graph: GraphId,
        after: In<NodeId>,
        count: usize,
        params: In<Copy3D>,
        context: ContextId,
    ) {
        let request = params.get()?.request()?;
        add(node, graph, after, count, |driver, state| driver.copy_node(request, state.context_or_current(context)?))
    }

    fn cuGraphAddMemsetNode(
        node: Out<NodeId>,
        graph: GraphId,
        after: In<NodeId>,
        count: usize,
        params: In<MemsetNodeParams>,
        context: ContextId,
    ) {
        let fill = params.get()?;
        add(node, graph, after, count, |driver, state| {
            driver.memset_node(fill.fill()?, state.context_or_current(context)?)
        })
    }

    fn cuGraphAddHostNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, params: In<HostNodeParams>) {
        let host = params.get()?;
        add(node, graph, after, count, |_, _| host.node())
    }

    fn cuGraphAddEmptyNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize) {
        add(node, graph, after, count, |_, _| Ok(GraphNode::Empty))
    }

    fn cuGraphAddEventRecordNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, event: EventId) {
        add(node, graph, after, count, |_, state| state.event_node(event, GraphNode::Record))
    }

    fn cuGraphAddEventWaitNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, event: EventId) {
        add(node, graph, after, count, |_, state| state.event_node(event, GraphNode::Wait))
    }

    fn cuGraphAddChildGraphNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, child: GraphId) {
        let after = after.read_array(count)?;
        node.write_with(|| with_state(|_, state| state.graphs.add_child(graph, &after, child)))
    }

    fn cuGraphAddMemAllocNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, params: InOut<MemAllocNodeParams>) {
        let after = after.read_array(count)?;
        let mut alloc = params.at(0)?;
        node.write_with(|| {
            let (node, address) = alloc.add(graph, &after)?;
            alloc.address = address;
            params.set_at(0, alloc);
            Ok(node)
        })
    }

    fn cuGraphAddMemFreeNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, address: u64) {
        add(node, graph, after, count, |_, state| state.free_node(address))
    }

    fn cuGraphAddNode(node: Out<NodeId>, graph: GraphId, after: In<NodeId>, count: usize, params: Params) {
        any(node, graph, after, In::null(), count, params)
    }

    fn cuGraphAddNode_v2(
        node: Out<NodeId>,
        graph: GraphId,
        after: In<NodeId>,
        data: In<EdgeData>,
        count: usize,
        params: Params,
    ) {
        any(node, graph, after, data, count, params)
    }

    fn cuGraphNodeGetType(node: NodeId, kind: Out<c_uint>) {
        kind.write_with(|| with_state(|_, state| Ok(state.graphs.node(node)?.kind())))
    }

    fn cuGraphChildGraphNodeGetGraph(node: NodeId, child: Out<GraphId>) {
        child.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            GraphNode::Child(child) => Ok(*child),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphMemFreeNodeGetParams(node: NodeId, address: Out<u64>) {
        address.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            GraphNode::Free(address) => Ok(*address),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphEventRecordNodeGetEvent(node: NodeId, event: Out<EventId>) {
        event.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            GraphNode::Record(event) => Ok(*event),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphEventWaitNodeGetEvent(node: NodeId, event: Out<EventId>) {
        event.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            GraphNode::Wait(event) => Ok(*event),
            _ => Err(Error::InvalidValue),
        }))
    }
}

/// Creates a node and returns its handle.
fn add(
    node: Out<NodeId>,
    graph: GraphId,
    after: In<NodeId>,
    count: usize,
    make: impl FnOnce(&Driver, &mut StateGuard<'_>) -> Result<GraphNode>,
) -> Result<()> {
    let after = after.read_array(count)?;
    node.write_with(|| {
        with_state(|driver, state| {
            state.graphs.get(graph)?;
            let payload = make(driver, state)?;
            state.graphs.add(graph, &after, payload)
        })
    })
}

/// Creates a node of the kind that the parameters name. Its edges are full dependencies: data other than zeros, which few programs
/// give here, is refused.
fn any(
    node: Out<NodeId>,
    graph: GraphId,
    after: In<NodeId>,
    data: In<EdgeData>,
    count: usize,
    params: Params,
) -> Result<()> {
    if data.is_given() && data.read_array(count)?.iter().any(|&data| data != EdgeData::default()) {
        return Err(Error::NotSupported);
    }
    if let Some(child) = params.child()? {
        let after = after.read_array(count)?;
        node.check_not_null()?;
        let made = with_state(|_, state| state.graphs.add_child(graph, &after, child))?;
        if let GraphNode::Child(copy) = with_state(|_, state| state.graphs.node(made).cloned())? {
            params.answer_child(copy);
        }
        node.set(made);
        return Ok(());
    }
    if let Some(alloc) = params.alloc()? {
        let after = after.read_array(count)?;
        return node.write_with(|| {
            let (node, address) = alloc.add(graph, &after)?;
            params.answer_address(address);
            Ok(node)
        });
    }
    driver()?;
    add(node, graph, after, count, |driver, state| params.node(driver, state))
}

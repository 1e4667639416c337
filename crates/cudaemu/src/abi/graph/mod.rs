//! Graphs: creation, edges, topology queries, conditional and user objects. Submodules: `nodes` creates nodes, `params` reads
//! and writes their parameters, `exec` holds executable graphs.

mod exec;
mod nodes;
mod params;

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::ffi_guard::{In, InOut, Opaque, Out, Text, api, with_state};
use crate::config::ProgrammaticEdges;
use crate::driver::driver;
use crate::driver::graph::Graphs;
use crate::engine::{Edge, EdgeData, HostCall};
use crate::error::{Error, Result};
use crate::handle::{GraphId, NodeId, UserObjectId};

api! {
    fn cuGraphCreate(graph: Out<GraphId>, flags: c_uint) {
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        graph.write_with(|| with_state(|_, state| Ok(state.graphs.create())))
    }

    fn cuGraphDestroy(graph: GraphId) {
        driver()?.destroy_graph(graph)
    }

    fn cuGraphClone(clone: Out<GraphId>, graph: GraphId) {
        clone.write_with(|| with_state(|_, state| state.graphs.copy(graph)))
    }

    fn cuGraphNodeFindInClone(found: Out<NodeId>, node: NodeId, clone: GraphId) {
        found.write_with(|| with_state(|_, state| state.graphs.find_in_clone(node, clone)))
    }

    fn cuGraphDestroyNode(node: NodeId) {
        driver()?.destroy_node(node)
    }

    fn cuGraphGetNodes(graph: GraphId, nodes: Out<NodeId>, count: InOut<usize>) {
        let found = with_state(|_, state| Ok(state.graphs.get(graph)?.iter().map(|(id, _)| id).collect()))?;
        list(found, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: GraphId, nodes: Out<NodeId>, count: InOut<usize>) {
        let found = with_state(|_, state| Ok(state.graphs.get(graph)?.roots()))?;
        list(found, nodes, count)
    }

    fn cuGraphGetEdges(graph: GraphId, from: Out<NodeId>, to: Out<NodeId>, count: InOut<usize>) {
        edges(graph, from, to, Out::new(0), count)
    }

    fn cuGraphGetEdges_v2(graph: GraphId, from: Out<NodeId>, to: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) {
        edges(graph, from, to, data, count)
    }

    fn cuGraphNodeGetDependencies(node: NodeId, nodes: Out<NodeId>, count: InOut<usize>) {
        dependencies(node, nodes, Out::new(0), count)
    }

    fn cuGraphNodeGetDependencies_v2(node: NodeId, nodes: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) {
        dependencies(node, nodes, data, count)
    }

    fn cuGraphNodeGetDependentNodes(node: NodeId, nodes: Out<NodeId>, count: InOut<usize>) {
        dependents(node, nodes, Out::new(0), count)
    }

    fn cuGraphNodeGetDependentNodes_v2(node: NodeId, nodes: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) {
        dependents(node, nodes, data, count)
    }

    fn cuGraphAddDependencies(graph: GraphId, from: In<NodeId>, to: In<NodeId>, count: usize) {
        change(graph, from, to, In::null(), count, Graphs::connect)
    }

    fn cuGraphAddDependencies_v2(graph: GraphId, from: In<NodeId>, to: In<NodeId>, data: In<EdgeData>, count: usize) {
        change(graph, from, to, data, count, Graphs::connect)
    }

    fn cuGraphRemoveDependencies(graph: GraphId, from: In<NodeId>, to: In<NodeId>, count: usize) {
        change(graph, from, to, In::null(), count, Graphs::disconnect)
    }

    fn cuGraphRemoveDependencies_v2(graph: GraphId, from: In<NodeId>, to: In<NodeId>, data: In<EdgeData>, count: usize) {
        change(graph, from, to, data, count, Graphs::disconnect)
    }

    fn cuGraphNodeGetContainingGraph(node: NodeId, graph: Out<GraphId>) {
        graph.write_with(|| with_state(|_, state| state.graphs.graph_of(node)))
    }

    fn cuGraphGetId(graph: GraphId, id: Out<c_uint>) {
        id.write_with(|| with_state(|_, state| Ok(state.graphs.graph_number(graph)? as c_uint)))
    }

    fn cuGraphDebugDotPrint(graph: GraphId, path: Text, _flags: c_uint) {
        let text = with_state(|_, state| state.graphs.dot(graph))?;
        std::fs::write(path.read()?, text).map_err(|_| Error::OperatingSystem)
    }

    fn cuUserObjectCreate(
        object: Out<UserObjectId>,
        data: Opaque,
        destroy: Option<extern "C" fn(Opaque)>,
        references: c_uint,
        flags: c_uint,
    ) {
        let destroy = destroy.ok_or(Error::InvalidValue)?;
        // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC (1) is mandatory in the driver API: the destructor does not synchronise.
        if flags != 1 {
            return Err(Error::InvalidValue);
        }
        let raw = [(destroy as *const c_void).addr() as u64, data.address()];
        let call = HostCall { run: Arc::new(move |_| destroy(data)), run_after_error: true, raw };
        object.write_with(|| with_state(|_, state| state.graphs.create_object(call, references)))
    }

    fn cuUserObjectRetain(object: UserObjectId, count: c_uint) {
        with_state(|_, state| state.graphs.retain_object(object, count))
    }

    fn cuUserObjectRelease(object: UserObjectId, count: c_uint) {
        finish(with_state(|_, state| state.graphs.release_object(object, count))?)
    }

    fn cuGraphRetainUserObject(graph: GraphId, object: UserObjectId, count: c_uint, flags: c_uint) {
        with_state(|_, state| state.graphs.graph_retain_object(graph, object, count, flags))
    }

    fn cuGraphReleaseUserObject(graph: GraphId, object: UserObjectId, count: c_uint) {
        finish(with_state(|_, state| state.graphs.graph_release_object(graph, object, count))?)
    }

    fn cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_uint, value: Out<u64>) {
        value.write_with(|| with_state(|driver, state| state.graphs.memory_attribute(driver.device(device)? as u32, attribute)))
    }

    fn cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_uint, value: In<u64>) {
        let value = value.get()?;
        with_state(|driver, state| state.graphs.reset_memory_attribute(driver.device(device)? as u32, attribute, value))
    }

    fn cuDeviceGraphMemTrim(device: c_int) {
        // Nothing to trim: memory of destroyed graphs is freed at once.
        driver()?.device(device).map(drop)
    }
}

/// Name and address of each function that this folder exports.
pub(super) fn all_entries() -> Vec<(&'static str, *const c_void)> {
    [entries(), nodes::entries(), params::entries(), exec::entries()].concat()
}

fn finish(destructor: Option<HostCall>) -> Result<()> {
    if let Some(call) = destructor {
        (call.run)(None);
    }
    Ok(())
}

/// Returns an array by the driver's convention: without a buffer, its length; with one, as many elements as fit, and nulls in
/// the rest.
fn list(found: Vec<NodeId>, place: Out<NodeId>, count: InOut<usize>) -> Result<()> {
    let room = count.at(0)?;
    if !place.is_given() {
        count.set_at(0, found.len());
        return Ok(());
    }
    for index in 0..room {
        place.set_at(index, found.get(index).copied().unwrap_or_default());
    }
    count.set_at(0, room.min(found.len()));
    Ok(())
}

/// Returns the data of edges, of which an array of nodes was given if `is_given`. A query without a place for data fails if there is
/// any: its caller would take every dependency for a full one.
fn edge_data(found: &[EdgeData], place: Out<EdgeData>, is_given: bool, room: usize) -> Result<()> {
    if place.is_given() {
        let rest = std::iter::repeat_n(EdgeData::default(), room.saturating_sub(found.len()));
        let written = if is_given { room } else { 0 };
        found.iter().copied().chain(rest).take(written).enumerate().for_each(|(at, data)| place.set_at(at, data));
        return Ok(());
    }
    let is_lossy = is_given && found.iter().any(|&data| data != EdgeData::default());
    if is_lossy { Err(Error::LossyQuery) } else { Ok(()) }
}

fn edges(graph: GraphId, from: Out<NodeId>, to: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) -> Result<()> {
    if from.is_given() != to.is_given() {
        return Err(Error::InvalidValue);
    }
    let (found, data_found): (Vec<Edge>, Vec<EdgeData>) = with_state(|_, state| {
        let graph = state.graphs.get(graph)?;
        Ok(graph.edges().into_iter().map(|edge| (edge, graph.edge_data(edge))).unzip())
    })?;
    let (sources, targets): (Vec<NodeId>, Vec<NodeId>) = found.into_iter().unzip();
    let room = count.at(0)?;
    edge_data(&data_found, data, from.is_given(), room)?;
    list(sources, from, count)?;
    if from.is_given() {
        count.set_at(0, room);
    }
    list(targets, to, count)
}

fn dependencies(node: NodeId, nodes: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) -> Result<()> {
    let (found, data_found): (Vec<NodeId>, Vec<EdgeData>) = with_state(|_, state| {
        let graph = state.graphs.get(state.graphs.graph_of(node)?)?;
        Ok(graph.dependencies(node)?.into_iter().map(|before| (before, graph.edge_data((before, node)))).unzip())
    })?;
    edge_data(&data_found, data, nodes.is_given(), count.at(0)?)?;
    list(found, nodes, count)
}

fn dependents(node: NodeId, nodes: Out<NodeId>, data: Out<EdgeData>, count: InOut<usize>) -> Result<()> {
    let (found, data_found): (Vec<NodeId>, Vec<EdgeData>) = with_state(|_, state| {
        let graph = state.graphs.get(state.graphs.graph_of(node)?)?;
        Ok(graph.dependents(node)?.into_iter().map(|after| (after, graph.edge_data((node, after)))).unzip())
    })?;
    edge_data(&data_found, data, nodes.is_given(), count.at(0)?)?;
    list(found, nodes, count)
}

/// [`Graphs::connect`] or [`Graphs::disconnect`].
type ChangeEdges = fn(&mut Graphs, GraphId, &[(Edge, EdgeData)]) -> Result<()>;

/// Adds or removes edges. A programmatic edge keeps its data, but orders its nodes as any other.
fn change(
    graph: GraphId,
    from: In<NodeId>,
    to: In<NodeId>,
    data: In<EdgeData>,
    count: usize,
    change: ChangeEdges,
) -> Result<()> {
    let edges = from.read_array(count)?.into_iter().zip(to.read_array(count)?);
    let data = if data.is_given() { data.read_array(count)? } else { vec![EdgeData::default(); count] };
    let edges: Vec<_> = edges.zip(data).collect();
    with_state(|driver, state| {
        let refused = driver.config.hardware.programmatic_edges == ProgrammaticEdges::Refused;
        if refused && edges.iter().any(|(_, data)| data.is_programmatic()) {
            return Err(Error::NotSupported);
        }
        change(&mut state.graphs, graph, &edges)
    })
}

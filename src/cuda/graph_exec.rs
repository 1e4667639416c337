//! CUDA graphs: builds the launches of a program node by node, and replays them as a single launch.
//!
//! One launch replaces a driver call per kernel, whose cost dominates small models. The graph is built from its nodes rather than
//! captured from a stream: a capture fails if another thread makes certain calls meanwhile.
#![allow(unsafe_code)]

use super::context::{DeviceContext, PrimaryContext};
use super::driver_api::{self, DriverError, EdgeData};
use super::events::Stream;
use super::kernel::{ArgumentBuffer, LaunchAddresses, LoadedLaunch};
use crate::device::DeviceError;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::sync::Arc;

/// An executable CUDA graph, a chain of kernels.
#[derive(Debug)]
pub(super) struct GraphExec {
    raw: sys::CUgraphExec,
    /// The graph from which it was instantiated owns the nodes, which updates of the executable graph name.
    _graph: Graph,
    nodes: Vec<sys::CUgraphNode>,
    /// Whether its edges are programmatic.
    programmatic: bool,
    context: Arc<PrimaryContext>,
}

// SAFETY: an executable graph may be used from any thread, but not concurrently; the lock of its program serialises its uses.
unsafe impl Send for GraphExec {}

/// A CUDA graph (CUgraph), which owns its nodes.
#[derive(Debug)]
struct Graph(sys::CUgraph);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is destroyed once. It is an object of the host, independent of contexts.
        let _ = unsafe { driver_api::cuGraphDestroy(self.0) };
    }
}

/// Calls `make` with the parameters of a kernel node for a launch at these addresses.
fn with_parameters<T>(
    launch: &LoadedLaunch,
    at: &LaunchAddresses,
    make: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T,
) -> T {
    let mut arguments: ArgumentBuffer = launch.arguments(at);
    let mut list = [(&raw mut arguments).cast::<c_void>()];
    let ([x, y, z], [tx, ty, tz], shared) = launch.shape();
    make(&sys::CUDA_KERNEL_NODE_PARAMS {
        func: launch.function(),
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: tx,
        blockDimY: ty,
        blockDimZ: tz,
        sharedMemBytes: shared,
        kernelParams: list.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    })
}

/// A failed driver call: its name and the error.
type FailedCall = (&'static str, DriverError);

/// Whether an error may say that the driver has no programmatic edges, or not for this call.
fn may_refuse(e: DriverError) -> bool {
    !e.poisons() && e != DriverError::OUT_OF_MEMORY
}

/// From now on, graphs have plain edges.
fn refuse_programmatic(context: &DeviceContext, (call, e): FailedCall) {
    let name = &context.primary().name;
    log::warn!("{name}: no programmatic dependent launch, because {call} failed: {e}");
    context.programmatic.refuse();
}

impl GraphExec {
    /// Builds a graph of these launches, in order. The context must be current.
    ///
    /// Its edges are programmatic where the device has them (see `programmatic`). If the driver refuses these, which nothing but the
    /// call tells, this and all later graphs have plain ones.
    pub(super) fn build<'a>(
        context: &DeviceContext,
        launches: impl IntoIterator<Item = (&'a LoadedLaunch, LaunchAddresses)> + Clone,
    ) -> Result<GraphExec, DeviceError> {
        if context.programmatic.has_edges() {
            match GraphExec::try_build(context, launches.clone(), true) {
                Err(failed) if may_refuse(failed.1) => refuse_programmatic(context, failed),
                built => return built.map_err(|(call, e)| context.driver_error(call, e)),
            }
        }
        GraphExec::try_build(context, launches, false).map_err(|(call, e)| context.driver_error(call, e))
    }

    /// Builds a graph with plain or programmatic edges.
    fn try_build<'a>(
        context: &DeviceContext,
        launches: impl IntoIterator<Item = (&'a LoadedLaunch, LaunchAddresses)>,
        programmatic: bool,
    ) -> Result<GraphExec, FailedCall> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the function writes one handle.
        unsafe { driver_api::cuGraphCreate(&raw mut raw, 0) }.map_err(|e| ("cuGraphCreate", e))?;
        let (graph, mut nodes) = (Graph(raw), Vec::<sys::CUgraphNode>::new());
        for (launch, at) in launches {
            let mut node = std::ptr::null_mut();
            let before = match programmatic {
                false => nodes.last().map_or(&[][..], std::slice::from_ref),
                true => &[],
            };
            // SAFETY: the graph and the node before are alive. The parameters come from a launch (see `LoadedLaunch::launch`);
            // the driver copies the arguments. The program keeps the function loaded for longer than this graph.
            with_parameters(launch, &at, |parameters| unsafe {
                driver_api::cuGraphAddKernelNode_v2(&raw mut node, graph.0, before.as_ptr(), before.len(), parameters)
            })
            .map_err(|e| ("cuGraphAddKernelNode", e))?;
            nodes.push(node);
        }
        if programmatic && let Some(edges @ 1..) = nodes.len().checked_sub(1) {
            let data = vec![EdgeData::PROGRAMMATIC; edges];
            // SAFETY: the graph is alive. Edge i goes from node i to node i + 1: both arrays have as many nodes as there are edges.
            unsafe {
                driver_api::cuGraphAddDependencies_v2(
                    graph.0,
                    nodes.as_ptr(),
                    nodes[1..].as_ptr(),
                    data.as_ptr(),
                    edges,
                )
            }
            .map_err(|e| ("cuGraphAddDependencies", e))?;
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is alive; the function writes one handle.
        unsafe { driver_api::cuGraphInstantiateWithFlags(&raw mut raw, graph.0, 0) }
            .map_err(|e| ("cuGraphInstantiate", e))?;
        let context = Arc::clone(context.primary());
        Ok(GraphExec { raw, _graph: graph, nodes, programmatic, context })
    }

    /// Number of its launches.
    pub(super) fn launches(&self) -> usize {
        self.nodes.len()
    }

    /// Changes kernels and addresses, for later launches. There must be as many launches as the graph has. Returns false if the driver
    /// refuses to change kernels after programmatic edges: later graphs have plain ones. Then, and after an error, the graph must not
    /// be launched any more.
    pub(super) fn update<'a>(
        &mut self,
        context: &DeviceContext,
        launches: impl IntoIterator<Item = (&'a LoadedLaunch, LaunchAddresses)>,
    ) -> Result<bool, DeviceError> {
        let mut nodes = self.nodes.iter();
        for (launch, at) in launches {
            let &node = nodes.next().ok_or_else(|| DeviceError::Bug("a graph of other launches".to_owned()))?;
            // SAFETY: the executable graph and the node are alive, since `_graph` owns the node; the parameters are as in `build`.
            // Launches that were submitted before keep their parameters.
            let changed = with_parameters(launch, &at, |parameters| unsafe {
                driver_api::cuGraphExecKernelNodeSetParams_v2(self.raw, node, parameters)
            });
            match changed {
                Err(e) if self.programmatic && may_refuse(e) => {
                    refuse_programmatic(context, ("cuGraphExecKernelNodeSetParams", e));
                    return Ok(false);
                }
                changed => changed.map_err(|e| context.driver_error("cuGraphExecKernelNodeSetParams", e))?,
            }
        }
        Ok(true)
    }

    /// Replays the graph: submits all its kernels with one launch.
    pub(super) fn launch(&self, context: &DeviceContext, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive. The launching queue retains the memory that the kernels access, as for single
        // launches.
        unsafe { driver_api::cuGraphLaunch(self.raw, stream.raw()) }
            .map_err(|e| context.driver_error("cuGraphLaunch", e))
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.context.bind_for_release() {
            // SAFETY: the handle is destroyed once; the driver defers the release until running launches are done.
            let _ = unsafe { driver_api::cuGraphExecDestroy(self.raw) };
        }
    }
}

//! Parameters of graph nodes: the C structures of the API, their translation to the driver's types, and `cuGraph*GetParams` and
//! `cuGraph*SetParams`.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::super::ffi_guard::{In, Opaque, Out, api, with_state};
use super::super::launch::parameters;
use super::super::memcpy::Copy3D;
use crate::driver::graph::{GraphNode as Payload, KernelNode};
use crate::driver::launch::LaunchRequest;
use crate::driver::{Driver, StateGuard, driver};
use crate::engine::{self, HostCall};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, FunctionId, GraphId, Handle, KernelId, NodeId};
use crate::mem::HostMemory;

/// `CUDA_KERNEL_NODE_PARAMS_v1`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelNodeParamsV1 {
    function: FunctionId,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    params: In<HostMemory>,
    extra: In<u64>,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernelNodeParams {
    first: KernelNodeParamsV1,
    kernel: KernelId,
    context: ContextId,
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MemsetNodeParams {
    address: u64,
    pitch: usize,
    value: c_uint,
    bytes: c_uint,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HostNodeParams {
    function: Option<extern "C" fn(Opaque)>,
    data: Opaque,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MemAllocNodeParams {
    /// `CUmemPoolProps`: allocation type, handle types, location {type, id}.
    pool: [c_uint; 4],
    security: u64,
    reserved: [u64; 8],
    access: u64,
    access_count: usize,
    bytes: usize,
    pub(super) address: u64,
}

/// A pointer to `CUgraphNodeParams`: the kind, padding, and from byte 16 the parameters of that kind.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct NodeParams(HostMemory);

impl From<KernelNodeParamsV1> for KernelNodeParams {
    fn from(first: KernelNodeParamsV1) -> Self {
        Self { first, kernel: KernelId::default(), context: ContextId::default() }
    }
}

impl KernelNodeParams {
    /// The node's driver form.
    pub(super) fn node(self, driver: &Driver, state: &mut StateGuard<'_>) -> Result<Payload> {
        self.node_with(driver, state, false)
    }

    fn node_with(self, driver: &Driver, state: &mut StateGuard<'_>, cooperative: bool) -> Result<Payload> {
        let KernelNodeParamsV1 { function, grid, block, shared, params, extra } = self.first;
        // A `CUkernel` of a library may take the place of the function.
        let function = if function.is_null() { FunctionId::from_raw(self.kernel.raw()) } else { function };
        let stream = Default::default();
        let request = LaunchRequest { function, grid, block, shared, stream, cooperative, cluster: [1; 3] };
        driver.kernel_node(state, request, |kernel| parameters(kernel, params, extra))
    }

    fn of(node: &KernelNode) -> Self {
        let LaunchRequest { function, grid, block, shared, .. } = node.request;
        let params = In::new(node.pointers.as_ptr().expose_provenance() as u64);
        let first = KernelNodeParamsV1 { function, grid, block, shared, params, extra: In::null() };
        Self { first, kernel: KernelId::default(), context: node.context }
    }
}

impl MemsetNodeParams {
    /// The engine's form of the memset.
    pub(super) fn fill(self) -> Result<engine::Memset> {
        let Self { address, pitch, value, bytes, width, height } = self;
        let bytes = u8::try_from(bytes).map_err(|_| Error::InvalidValue)?;
        Ok(engine::Memset { address, pitch: pitch as u64, value, bytes, width: width as u64, height: height as u64 })
    }

    fn of(fill: &engine::Memset) -> Self {
        let engine::Memset { address, pitch, value, bytes, width, height } = *fill;
        let [pitch, width, height] = [pitch, width, height].map(|extent| extent as usize);
        Self { address, pitch, value, bytes: bytes.into(), width, height }
    }
}

impl HostNodeParams {
    /// The node's driver form.
    pub(super) fn node(self) -> Result<Payload> {
        let (function, data) = (self.function.ok_or(Error::InvalidValue)?, self.data);
        let raw = [(function as *const c_void).addr() as u64, data.address()];
        Ok(Payload::Host(HostCall { run: Arc::new(move |_| function(data)), run_after_error: false, raw }))
    }
}

impl MemAllocNodeParams {
    /// Adds an allocation node. Returns the node and the address of its memory.
    pub(super) fn add(&self, graph: GraphId, after: &[NodeId]) -> Result<(NodeId, u64)> {
        // Only pinned memory of a device, without a shareable handle.
        let [kind, handles, location, device] = self.pool;
        if kind != 1 || handles != 0 || location != 1 {
            return Err(Error::InvalidValue);
        }
        let driver = driver()?;
        let device = driver.device(device as i32)? as u32;
        let state = driver.lock();
        let context = state.current()?;
        let made = driver.add_alloc_node(state, graph, after, device, self.bytes as u64, context);
        made.map(|(node, address, _state)| (node, address))
    }
}

impl NodeParams {
    fn kind(self) -> Result<c_uint> {
        In::new(self.0.address()).get()
    }

    fn body(self) -> u64 {
        self.0.address() + 16
    }

    /// The graph of a child graph node; `None` for other kinds.
    pub(super) fn child(self) -> Result<Option<GraphId>> {
        if self.kind()? == 4 { In::new(self.body()).get().map(Some) } else { Ok(None) }
    }

    /// Writes the handle of the node's own copy of the child graph.
    pub(super) fn answer_child(self, graph: GraphId) {
        Out::new(self.body()).set(graph);
    }

    /// The parameters of an allocation node; `None` for other kinds.
    pub(super) fn alloc(self) -> Result<Option<MemAllocNodeParams>> {
        if self.kind()? == 10 { In::new(self.body()).get().map(Some) } else { Ok(None) }
    }

    /// Writes the address that an allocation node allocated.
    pub(super) fn answer_address(self, address: u64) {
        Out::new(self.body() + std::mem::offset_of!(MemAllocNodeParams, address) as u64).set(address);
    }

    /// The driver form of a node of any other kind.
    pub(super) fn node(self, driver: &Driver, state: &mut StateGuard<'_>) -> Result<Payload> {
        let body = self.body();
        match self.kind()? {
            0 => In::<KernelNodeParams>::new(body).get()?.node(driver, state),
            1 => {
                // Layout: flags and a reserved word, the context at byte 8, the copy at byte 16.
                let context = state.context_or_current(In::new(body + 8).get()?)?;
                driver.copy_node(In::<Copy3D>::new(body + 16).get()?.request()?, context)
            }
            2 => {
                let context = In::new(body + size_of::<MemsetNodeParams>() as u64).get()?;
                let context = state.context_or_current(context)?;
                driver.memset_node(In::<MemsetNodeParams>::new(body).get()?.fill()?, context)
            }
            3 => In::<HostNodeParams>::new(body).get()?.node(),
            5 => Ok(Payload::Empty),
            6 => state.event_node(In::<EventId>::new(body).get()?, Payload::Wait),
            7 => state.event_node(In::<EventId>::new(body).get()?, Payload::Record),
            11 => state.free_node(In::new(body).get()?),
            // Semaphores of other interfaces, batched value operations, conditional nodes.
            8 | 9 | 12 | 13 => Err(Error::NotSupported),
            _ => Err(Error::InvalidValue),
        }
    }
}

api! {
    fn cuGraphKernelNodeGetParams(node: NodeId, params: Out<KernelNodeParamsV1>) {
        params.write_with(|| with_kernel(node, |kernel| KernelNodeParams::of(kernel).first))
    }

    fn cuGraphKernelNodeGetParams_v2(node: NodeId, params: Out<KernelNodeParams>) {
        params.write_with(|| with_kernel(node, KernelNodeParams::of))
    }

    fn cuGraphKernelNodeSetParams(node: NodeId, params: In<KernelNodeParamsV1>) {
        set_kernel(node, params.get()?.into())
    }

    fn cuGraphKernelNodeSetParams_v2(node: NodeId, params: In<KernelNodeParams>) {
        set_kernel(node, params.get()?)
    }

    fn cuGraphKernelNodeGetAttribute(node: NodeId, attribute: c_uint, value: Out<[u8; 64]>) {
        value.write_with(|| with_kernel(node, |kernel| (kernel.request.cooperative, kernel.priority)).and_then(|(together, priority)| {
            let mut bytes = [0; 64];
            match attribute {
                2 => bytes[0] = together.into(),
                8 => bytes[..4].copy_from_slice(&priority.to_le_bytes()),
                4 => [0, 4, 8].into_iter().for_each(|at| bytes[at] = 1),
                // Hints without effect: they keep their default value, zero.
                1 | 5 | 6 | 9 | 10 | 11 | 14 => {}
                _ => return Err(Error::InvalidValue),
            }
            Ok(bytes)
        }))
    }

    fn cuGraphKernelNodeSetAttribute(node: NodeId, attribute: c_uint, value: In<[u8; 64]>) {
        let value = value.get()?;
        let number = i32::from_le_bytes([value[0], value[1], value[2], value[3]]);
        with_state(|driver, state| {
            let Payload::Kernel(kernel) = state.graphs.node(node)? else { return Err(Error::InvalidValue) };
            let mut kernel = kernel.clone();
            match attribute {
                2 => {
                    let request = LaunchRequest { cooperative: number != 0, ..kernel.request };
                    let params = kernel.launch.launch.params.to_vec();
                    let Payload::Kernel(new) = driver.kernel_node(state, request, |_| Ok(params))? else {
                        return Err(Error::InvalidValue);
                    };
                    kernel = Box::new(KernelNode { priority: kernel.priority, ..*new });
                }
                8 => kernel.priority = number.clamp(engine::HIGHEST_PRIORITY, 0),
                1 | 5 | 6 | 9 | 10 | 11 | 14 => {}
                4 => return Err(Error::NotSupported),
                _ => return Err(Error::InvalidValue),
            }
            state.graphs.set_node(node, Payload::Kernel(kernel))
        })
    }

    fn cuGraphKernelNodeCopyAttributes(to: NodeId, from: NodeId) {
        let priority = with_kernel(from, |kernel| kernel.priority)?;
        with_state(|_, state| {
            let Payload::Kernel(kernel) = state.graphs.node(to)? else { return Err(Error::InvalidValue) };
            let kernel = Box::new(KernelNode { priority, ..(**kernel).clone() });
            state.graphs.set_node(to, Payload::Kernel(kernel))
        })
    }

    fn cuGraphMemcpyNodeGetParams(node: NodeId, params: Out<Copy3D>) {
        params.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            Payload::Memcpy(copy) => Ok(Copy3D::of(&copy.request)),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphMemcpyNodeSetParams(node: NodeId, params: In<Copy3D>) {
        let request = params.get()?.request()?;
        with_state(|driver, state| {
            let context = state.graphs.node(node)?.context().ok_or(Error::InvalidValue)?;
            state.graphs.set_node(node, driver.copy_node(request, context)?)
        })
    }

    fn cuGraphMemsetNodeGetParams(node: NodeId, params: Out<MemsetNodeParams>) {
        params.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            Payload::Memset(fill, _) => Ok(MemsetNodeParams::of(fill)),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphMemsetNodeSetParams(node: NodeId, params: In<MemsetNodeParams>) {
        let fill = params.get()?.fill()?;
        with_state(|driver, state| {
            let context = state.graphs.node(node)?.context().ok_or(Error::InvalidValue)?;
            state.graphs.set_node(node, driver.memset_node(fill, context)?)
        })
    }

    fn cuGraphHostNodeGetParams(node: NodeId, params: Out<[u64; 2]>) {
        params.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            Payload::Host(call) => Ok(call.raw),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphHostNodeSetParams(node: NodeId, params: In<HostNodeParams>) {
        let new = params.get()?.node()?;
        with_state(|_, state| state.graphs.set_node(node, new))
    }

    fn cuGraphMemAllocNodeGetParams(node: NodeId, params: Out<MemAllocNodeParams>) {
        params.write_with(|| with_state(|_, state| match state.graphs.node(node)? {
            Payload::Alloc(memory) => Ok(MemAllocNodeParams {
                pool: [1, 0, 1, memory.device],
                security: 0,
                reserved: [0; 8],
                access: 0,
                access_count: 0,
                bytes: memory.bytes as usize,
                address: memory.address,
            }),
            _ => Err(Error::InvalidValue),
        }))
    }

    fn cuGraphEventRecordNodeSetEvent(node: NodeId, event: EventId) {
        with_state(|_, state| {
            let new = state.event_node(event, Payload::Record)?;
            state.graphs.set_node(node, new)
        })
    }

    fn cuGraphEventWaitNodeSetEvent(node: NodeId, event: EventId) {
        with_state(|_, state| {
            let new = state.event_node(event, Payload::Wait)?;
            state.graphs.set_node(node, new)
        })
    }

    fn cuGraphNodeSetParams(node: NodeId, params: NodeParams) {
        with_state(|driver, state| {
            let new = params.node(driver, state)?;
            state.graphs.set_node(node, new)
        })
    }
}

fn with_kernel<R>(node: NodeId, read: impl FnOnce(&KernelNode) -> R) -> Result<R> {
    with_state(|_, state| match state.graphs.node(node)? {
        Payload::Kernel(kernel) => Ok(read(kernel)),
        _ => Err(Error::InvalidValue),
    })
}

fn set_kernel(node: NodeId, kernel: KernelNodeParams) -> Result<()> {
    // Attributes are set separately, so new parameters keep the node's priority and cooperative flag.
    let (priority, cooperative) = with_kernel(node, |kernel| (kernel.priority, kernel.request.cooperative))?;
    with_state(|driver, state| {
        let Payload::Kernel(new) = kernel.node_with(driver, state, cooperative)? else {
            return Err(Error::InvalidValue);
        };
        state.graphs.set_node(node, Payload::Kernel(Box::new(KernelNode { priority, ..*new })))
    })
}

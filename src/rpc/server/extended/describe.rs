//! The replies to HELLO_EXT, with the devices, and to SUPPORTS_OP.

use std::sync::Arc;

use crate::device::{Device, DeviceError, DeviceKind, Support, Unsupported};
use crate::graph::validate::{self, GraphError, OpSet, UntrustedTensor, widen_strides};
use crate::graph::{Graph, SlotOffset};
use crate::ops::OpCode;
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::session::program_cache::{MAX_CACHED_BYTES, MAX_PROGRAMS};
use crate::rpc::wire::GraphCompute;
use crate::rpc::wire::ext::{DeviceFault, DeviceRecord, HelloExtReply, ServerCapabilities};
use crate::tensor::{DType, TensorDesc};

/// The reply to HELLO_EXT for a client that may use `devices`.
pub(super) fn hello_ext_reply(server: &ServerContext, devices: &[&Arc<dyn Device>]) -> HelloExtReply {
    HelloExtReply {
        build: format!("rpc-server {}", crate::VERSION),
        max_message: server.config.limits.max_body,
        graph_budget: MAX_CACHED_BYTES,
        max_graphs: MAX_PROGRAMS as u32,
        capabilities: ServerCapabilities {
            load_by_digest: server.gguf_index.is_some(),
            peer_transfers: server.peers.permits_transfers(),
        },
        devices: devices.iter().map(|device| device_record(&***device)).collect(),
    }
}

fn device_record(device: &dyn Device) -> DeviceRecord {
    let info = device.info();
    let (pinned, import_host) = (device.pinned_memory().is_some(), device.import_host().is_some());
    let caps = [info.caps.asynchronous, pinned, import_host, info.caps.events];
    DeviceRecord {
        name: info.name.clone(),
        description: info.description.clone(),
        kind: match info.kind {
            DeviceKind::Cpu => 0,
            DeviceKind::Gpu => 1,
        },
        caps: (0..).zip(caps).map(|(bit, can)| u32::from(can) << bit).sum(),
        alignment: info.alignment,
        max_buffer: info.max_buffer,
        features: device.features().into_iter().map(|feature| (feature.name, feature.value)).collect(),
    }
}

/// The reply to SUPPORTS_OP for a graph with one node: `Ok(false)` if the device supports the node, `Ok(true)` if it is also
/// so fast that copying weights to it is worthwhile (offload).
///
/// # Errors
/// Why the device does not support the node.
pub(super) fn supports_op(graph: &GraphCompute<'_>, device: &dyn Device) -> Result<bool, DeviceFault> {
    let graph = import_unallocated(graph).map_err(|e| import_fault(&e))?;
    let node = match graph.nodes() {
        [node] => graph.node_view(node),
        nodes => {
            return Err(DeviceFault::new(format!("expected a graph with one compute node, got {}", nodes.len())));
        }
    };
    let node = node.ok_or_else(|| DeviceFault::new("the node names tensors that are not in its graph"))?;
    match device.support(node) {
        Support::Yes => Ok(false),
        Support::Offload => Ok(true),
        Support::No(unsupported) => Err(DeviceFault::from(&DeviceError::from(unsupported))),
    }
}

/// Imports a graph of tensors without buffers. Graph validation needs memory for each tensor, so each gets a slot of its
/// own.
fn import_unallocated(graph: &GraphCompute<'_>) -> Result<Graph, GraphError> {
    let (mut slots, mut tensors) = (Vec::new(), Vec::with_capacity(graph.tensors().len()));
    for record in graph.tensors().iter() {
        let mut tensor = UntrustedTensor {
            id: record.id,
            dtype: record.dtype,
            ne: record.ne,
            nb: record.nb,
            op: record.op,
            params: record.op_params,
            flags: record.flags,
            srcs: record.src,
            use_count: record.use_count,
            place: None,
        };
        let ne = record.ne.map(|n| n as usize);
        let desc = DType::from_wire(record.dtype)
            .map(|dtype| TensorDesc::strided(dtype, ne, widen_strides(dtype, ne, record.nb)));
        if let Some(Ok(desc)) = desc {
            tensor.place = Some(SlotOffset { slot: slots.len() as u32, offset: 0 }); // no overflow: at most one slot per record
            slots.push(desc.extent().max(desc.dense_bytes()));
        }
        tensors.push(tensor);
    }
    let listed: Vec<u64> = graph.nodes().iter().collect();
    validate::import_untrusted(&listed, &tensors, slots, OpSet::Extension)
}

/// The error of a graph that was sent with SUPPORTS_OP. An unsupported graph is a regular reply, and not a protocol error.
fn import_fault(error: &GraphError) -> DeviceFault {
    match error {
        &GraphError::UnsupportedOp(op) => DeviceFault::from(&DeviceError::from(unknown_op(op))),
        other => DeviceFault::new(other.to_string()),
    }
}

/// The error for an op that this server does not run: a newer one, or one that no server can run.
pub(super) fn unknown_op(op: OpCode) -> Unsupported {
    Unsupported { op, reason: op.impossible().unwrap_or("this server does not know the op").to_owned() }
}

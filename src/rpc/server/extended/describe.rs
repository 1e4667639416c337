//! What a server tells about itself: its devices, and what they run.

use crate::device::{Device, DeviceError, DeviceKind, Support, Unsupported};
use crate::graph::validate::{self, GraphError, UntrustedTensor, widen_strides};
use crate::graph::{Graph, SlotOffset};
use crate::ops::OpCode;
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::session::program_cache::{MAX_BYTES, MAX_PROGRAMS};
use crate::rpc::wire::GraphCompute;
use crate::rpc::wire::ext::{Abilities, DeviceRecord, Fault, GreetReply};
use crate::tensor::{DType, TensorDesc};

/// The answer to GREET.
pub(super) fn server(server: &ServerContext) -> GreetReply {
    GreetReply {
        build: format!("rpc-server {}", crate::VERSION),
        max_message: server.config.limits.max_body,
        graph_budget: MAX_BYTES,
        max_graphs: MAX_PROGRAMS as u32,
        abilities: Abilities { loads: server.models.is_some(), dials: !server.peers.is_empty() },
        sessions: server.lifecycle.sessions(),
        devices: server.devices.iter().map(|device| record(&**device)).collect(),
    }
}

fn record(device: &dyn Device) -> DeviceRecord {
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

/// The answer to SUPPORT: whether the device runs the one node of a graph, and so well that weights are worth bringing.
pub(super) fn support(graph: &GraphCompute<'_>, device: &dyn Device) -> Result<bool, Fault> {
    let graph = placed(graph).map_err(|e| fault(&e))?;
    let node = match graph.nodes() {
        [node] => graph.node_view(node),
        nodes => return Err(Fault::new(format!("expected a graph with one node that computes, got {}", nodes.len()))),
    };
    let node = node.ok_or_else(|| Fault::new("a node of tensors that are not in its graph"))?;
    match device.support(node) {
        Support::Yes => Ok(false),
        Support::Offload => Ok(true),
        Support::No(unsupported) => Err(Fault::from(&DeviceError::from(unsupported))),
    }
}

/// A graph of tensors that lie nowhere: each is given memory of its own, which the rules for graphs ask for.
fn placed(graph: &GraphCompute<'_>) -> Result<Graph, GraphError> {
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
            tensor.place = Some(SlotOffset { slot: slots.len() as u32, offset: 0 }); // no more than there are records
            slots.push(desc.extent().max(desc.dense_bytes()));
        }
        tensors.push(tensor);
    }
    let listed: Vec<u64> = graph.nodes().iter().collect();
    validate::import_untrusted(&listed, &tensors, slots)
}

/// What is wrong with a graph that a client asks about: no mistake of that client's.
fn fault(error: &GraphError) -> Fault {
    match error {
        &GraphError::UnsupportedOp(op) => Fault::from(&DeviceError::from(unknown_op(op))),
        other => Fault::new(other.to_string()),
    }
}

/// An op that is newer than this server.
pub(super) fn unknown_op(op: OpCode) -> Unsupported {
    Unsupported { op, reason: "this server does not know the op".to_owned() }
}

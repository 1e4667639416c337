//! The [`Device`] of servers with the extensions. Unlike 7.0, the extensions report names, features and supported ops.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::super::connection::Connection;
use super::super::device::RemoteDevice;
use super::super::graph_messages::{not_expressible, tensor_record};
use super::super::queue::RemoteQueue;
use super::extended_protocol::ExtendedProtocol;
use super::peer_copies;
use crate::device::{
    Buffer, Caps, Device, DeviceError, DeviceInfo, DeviceKind, Feature, LinkStats, MemoryBudget, MemoryInfo,
    PeerCopies, Program, Queue, Support, Unsupported,
};
use crate::graph::Graph;
use crate::ops::{MAX_SRC, NodeView};
use crate::poison::lock;
use crate::rpc::fault;
use crate::rpc::wire::GraphCompute;
use crate::rpc::wire::ext::{self, DeviceRecord, ExtCommand, ExtRequest, ExtResponse};
use crate::tensor::TensorDesc;

/// Longest reason in a reply to SUPPORTS_OP.
const MAX_REASON_BYTES: u64 = 64 << 10;

/// Limit of cached replies. A scheduler queries a few hundred kinds of nodes.
const MAX_CACHED_SUPPORT: usize = 1 << 14;

/// Longest device name that is used as given, in bytes.
const MAX_DEVICE_NAME_BYTES: usize = 64;

#[derive(Debug)]
struct ExtendedDevice {
    remote: Arc<RemoteDevice>,
    features: Vec<Feature>,
    /// Cached replies, by the encoded request.
    support_cache: Mutex<HashMap<Vec<u8>, Support>>,
}

/// Lists the devices of a server.
pub(in super::super) fn enumerate(connection: &Arc<Connection>) -> Result<Vec<Arc<dyn Device>>, DeviceError> {
    let records = &connection.session()?.server.devices;
    let names = device_names(records);
    let devices = (0..).zip(records).zip(names);
    devices.map(|((index, record), name)| open_device(connection, index, record, &name)).collect()
}

/// Names of the devices after the endpoint's name: the server's own name where it is unique and safe to print in a list, else
/// the index.
fn device_names(records: &[DeviceRecord]) -> Vec<String> {
    let is_safe_char = |c: char| c.is_ascii_alphanumeric() || "._-+()".contains(c);
    let unique = |name: &str| records.iter().filter(|other| other.name.eq_ignore_ascii_case(name)).count() == 1;
    // A number could be confused with the index of a device.
    let is_number = |name: &str| name.bytes().all(|b| b.is_ascii_digit());
    let usable = |name: &str| {
        name.len() <= MAX_DEVICE_NAME_BYTES && name.chars().all(is_safe_char) && unique(name) && !is_number(name)
    };
    let name = |(index, record): (usize, &DeviceRecord)| {
        if usable(&record.name) { record.name.clone() } else { index.to_string() }
    };
    records.iter().enumerate().map(name).collect()
}

fn open_device(
    connection: &Arc<Connection>,
    index: u32,
    record: &DeviceRecord,
    name: &str,
) -> Result<Arc<dyn Device>, DeviceError> {
    let server = &connection.session()?.server;
    // Kinds of later revisions count as GPUs: what matters is that their memory is not the host's.
    let kind = if record.kind == 0 { DeviceKind::Cpu } else { DeviceKind::Gpu };
    let info = DeviceInfo {
        description: format!("{} ({} at {})", record.description, server.build, connection.endpoint()),
        alignment: record.alignment,
        max_buffer: record.max_buffer,
        domain: connection.domain(),
        caps: Caps { asynchronous: true, events: true },
        ..DeviceInfo::new(format!("{}/{name}", connection.endpoint()), kind)
    };
    let remote = Arc::new(RemoteDevice::new(connection, index, info)?);
    let features = record.features.iter().map(|(name, value)| Feature::new(name.clone(), value)).collect();
    Ok(Arc::new(ExtendedDevice { remote, features, support_cache: Mutex::default() }))
}

impl ExtendedDevice {
    fn request_support(&self, node: &NodeView<'_>) -> Result<Support, DeviceError> {
        let body = encode_support_request(self.remote.index, node)?;
        if let Some(known) = lock(&self.support_cache).get(&body) {
            return Ok(known.clone());
        }
        let connection = &self.remote.connection;
        let command = ExtCommand::SupportsOp;
        let reply =
            connection.call_encoded(command.name(), 1..=MAX_REASON_BYTES, |out| out.extend_from_slice(&body))?;
        let support = match ExtResponse::decode(command, &reply) {
            // "Worth an upload of weights" is an estimate for the server's own bus. Over a network the upload would be repeated
            // for each batch, while the client's CPU has the weights in its memory: count the node as merely supported.
            Ok(ExtResponse::SupportsOp(Ok(_))) => Support::Yes,
            Ok(ExtResponse::SupportsOp(Err(fault))) => {
                Support::No(match fault::device_error(fault, &self.remote.info.name) {
                    DeviceError::Unsupported(unsupported) => unsupported,
                    other => Unsupported { op: node.op.code(), reason: other.to_string() },
                })
            }
            other => return Err(connection.fail(format!("the server replied to SUPPORTS_OP with {other:?}"))),
        };
        let mut cache = lock(&self.support_cache);
        if cache.len() >= MAX_CACHED_SUPPORT {
            cache.clear();
        }
        cache.insert(body, support.clone());
        Ok(support)
    }
}

/// Encodes the SUPPORTS_OP request for a node. Its tensors have no buffer.
fn encode_support_request(device: u32, node: &NodeView<'_>) -> Result<Vec<u8>, DeviceError> {
    let mut records = Vec::new();
    let mut dst = tensor_record(node.dst);
    (dst.id, dst.op, dst.op_params) = (MAX_SRC as u64 + 1, node.op.code().to_wire(), node.op.encode().0);
    dst.flags = crate::rpc::wire::TensorRecord::FLAG_COMPUTE;
    for i in 0..MAX_SRC {
        dst.src[i] = match node.srcs.get(i) {
            Some(src) => {
                let mut record = tensor_record(src);
                record.id = i as u64 + 1;
                records.push(record.encode());
                record.id
            }
            None if node.op.writes_onto(i) => dst.id,
            None => 0,
        };
    }
    records.push(dst.encode());
    let nodes = [dst.id.to_le_bytes()];
    let bug = |e| DeviceError::Bug(format!("a node that does not fit a message: {e}"));
    let graph = GraphCompute::new(device, &nodes, &records).map_err(bug)?;
    let mut body = Vec::new();
    ExtRequest::SupportsOp(ext::SupportsOp { graph }).encode(&mut body);
    Ok(body)
}

impl Device for ExtendedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.remote.info
    }

    fn features(&self) -> Vec<Feature> {
        self.features.clone()
    }

    fn lost(&self) -> Option<DeviceError> {
        self.remote.connection.check_alive().err()
    }

    fn endpoint(&self) -> Option<&str> {
        Some(self.remote.connection.endpoint())
    }

    fn link_stats(&self) -> Option<LinkStats> {
        Some(self.remote.connection.link_stats())
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.remote.memory()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.remote.alloc_buffer(bytes, budget.reserve(bytes)?)
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        self.remote.alloc_size(tensor)
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        let lost = |e: DeviceError| Support::No(Unsupported { op: node.op.code(), reason: e.to_string() });
        match not_expressible(&node, &self.remote.connection) {
            Some(unsupported) => Support::No(unsupported),
            None => self.request_support(&node).unwrap_or_else(lost),
        }
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.remote.prepare(graph)
    }

    fn queue(&self, _: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let protocol = ExtendedProtocol::new(Arc::clone(&self.remote))?;
        let (timeline, max_message) =
            (Arc::clone(&protocol.timeline), self.remote.connection.session()?.server.max_message);
        Ok(Box::new(RemoteQueue::new(Arc::clone(&self.remote), timeline, protocol, max_message)?))
    }

    fn peer_copies(&self) -> Option<&dyn PeerCopies> {
        Some(self)
    }
}

impl PeerCopies for ExtendedDevice {
    fn copies_from(&self, other: &DeviceInfo) -> bool {
        let other_server =
            || peer_copies::connection_of(&other.domain).is_some_and(|source| self.remote.can_receive_from(&source));
        self.remote.info.domain == other.domain || other_server()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_unique_and_printable() {
        let record = |name: &&str| DeviceRecord {
            name: (*name).to_owned(),
            description: String::new(),
            kind: 0,
            caps: 0,
            alignment: 64,
            max_buffer: 1,
            features: Vec::new(),
        };
        let named = |given: &[&str]| device_names(&given.iter().map(record).collect::<Vec<_>>());
        assert_eq!(named(&["CUDA0", "CUDA1", "CPU"]), ["CUDA0", "CUDA1", "CPU"]);
        assert_eq!(named(&["CPU", "cpu", "A"]), ["0", "1", "A"]);
        assert_eq!(named(&["", "a,b", "c/d", "1", &"x".repeat(65)]), ["0", "1", "2", "3", "4"]);
    }
}

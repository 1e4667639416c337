//! Test support for the extended protocol: requests and notifications of a client, and a device that runs nothing until it is
//! released.

use crate::support::*;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, ForwardDevice, MemoryBudget, Queue, Timeline, TimelinePoint};
use fanout::rpc::wire::ext::{
    BufferSpan, BufferSpans, DeviceFault, ExtCommand, ExtRequest, ExtResponse, Fill, HelloExt, HelloExtReply, Mark,
    NOTIFICATION_HEADER, Notification, NotificationHeader, NotifyReached, OpenQueue, PrepareGraph, REVISION, ReadSpans,
    RunGraph, TensorShape, Wait, WriteHead,
};
use fanout::rpc::wire::*;
use std::io::Read as _;
use std::sync::Arc;

/// A device whose queues run nothing until the test releases it, or fail if the test fails it.
#[derive(Debug)]
pub(crate) struct HeldDevice {
    inner: Arc<dyn Device>,
    gate: Arc<Timeline>,
}

impl HeldDevice {
    pub(crate) fn new(name: &str) -> Arc<HeldDevice> {
        HeldDevice::wrap(CpuDevice::new(name, 1, MathMode::Exact, MEMORY).expect("a device"))
    }

    pub(crate) fn wrap(inner: Arc<dyn Device>) -> Arc<HeldDevice> {
        Arc::new(HeldDevice { inner, gate: Timeline::new() })
    }

    pub(crate) fn release(&self) {
        self.gate.advance(1);
    }

    pub(crate) fn fail(&self, error: DeviceError) {
        self.gate.fail(error);
    }
}

impl ForwardDevice for HeldDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let mut queue = self.inner.queue(budget)?;
        queue.wait(&TimelinePoint::new(&self.gate, 1))?;
        Ok(queue)
    }
}

/// A decoded notification with owned data.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ReceivedNotification {
    Reply(Vec<u8>),
    MarkReached(u32, u64),
    ReadData(u64, Vec<u8>),
    QueueFailed(u32, DeviceFault),
    ProtocolError(String),
    ServerState(ext::ServerState),
}

pub(crate) fn data_notification(id: u64, bytes: impl AsRef<[u8]>) -> ReceivedNotification {
    ReceivedNotification::ReadData(id, bytes.as_ref().to_vec())
}

impl Client {
    /// A connection that has exchanged HELLO and HELLO_EXT.
    pub(crate) fn connect_extended(server: &TestServer) -> (Client, HelloExtReply) {
        let mut client = Client::connect(server);
        client.send_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() }));
        let mut header = [0; RESPONSE_HEADER];
        client.stream.read_exact(&mut header).expect("a reply to HELLO_EXT");
        let mut body = vec![0; ResponseHeader::decode(&header).size as usize];
        client.stream.read_exact(&mut body).expect("a whole reply");
        match ExtResponse::decode(ExtCommand::HelloExt, &body) {
            Ok(ExtResponse::HelloExt(reply)) => (client, reply),
            other => panic!("{other:?}"),
        }
    }

    /// An extended connection with one queue per device. The id of the queue is the index of the device.
    pub(crate) fn connect_with_queues(server: &TestServer) -> Client {
        let (mut client, _) = Client::connect_extended(server);
        (0..server.devices.len() as u32).for_each(|device| client.open_queue(device, device));
        client
    }

    pub(crate) fn send_ext(&mut self, request: &ExtRequest<'_>) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        self.write(&bytes);
    }

    pub(crate) fn open_queue(&mut self, queue: u32, device: u32) {
        self.send_ext(&ExtRequest::OpenQueue(OpenQueue { queue, device }));
    }

    pub(crate) fn mark(&mut self, queue: u32, number: u64) {
        self.send_ext(&ExtRequest::Mark(Mark { queue, number }));
    }

    pub(crate) fn notify_reached(&mut self, queue: u32, number: u64) {
        self.send_ext(&ExtRequest::NotifyReached(NotifyReached { queue, number }));
    }

    pub(crate) fn wait_for_mark(&mut self, queue: u32, of: u32, number: u64) {
        self.send_ext(&ExtRequest::Wait(Wait { queue, other_queue: of, number }));
    }

    pub(crate) fn write_span(&mut self, queue: u32, span: BufferSpan, shape: Option<TensorShape>, data: &[u8]) {
        self.send_ext(&ExtRequest::WriteHead(WriteHead { queue, span, shape }));
        self.write(data);
    }

    pub(crate) fn read_spans(&mut self, queue: u32, id: u64, spans: &[BufferSpan]) {
        let spans: Vec<_> = spans.iter().map(BufferSpans::encode).collect();
        self.send_ext(&ExtRequest::ReadSpans(ReadSpans { queue, id, spans: BufferSpans::new(&spans) }));
    }

    pub(crate) fn fill_span(&mut self, queue: u32, span: BufferSpan, value: u8) {
        self.send_ext(&ExtRequest::Fill(Fill { queue, span, value }));
    }

    pub(crate) fn prepare_graph(&mut self, id: u64, device: u32, nodes: &[u64], tensors: &[TensorRecord]) {
        let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
        let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
        let graph = GraphCompute::new(device, &nodes, &tensors).expect("counts within u32");
        self.send_ext(&ExtRequest::PrepareGraph(PrepareGraph { id, graph }));
    }

    pub(crate) fn run_graph(&mut self, queue: u32, graph: u64) {
        self.send_ext(&ExtRequest::RunGraph(RunGraph { queue, graph }));
    }

    /// The next notification other than SERVER_STATE, which the server also sends as a heartbeat.
    #[track_caller]
    pub(crate) fn next_notification(&mut self) -> ReceivedNotification {
        loop {
            match self.next_notification_or_state() {
                ReceivedNotification::ServerState(_) => {}
                told => return told,
            }
        }
    }

    /// The next notification.
    #[track_caller]
    pub(crate) fn next_notification_or_state(&mut self) -> ReceivedNotification {
        let mut header = [0; NOTIFICATION_HEADER];
        self.stream.read_exact(&mut header).unwrap_or_else(|e| panic!("no notification: {e}"));
        let NotificationHeader { kind, size } = NotificationHeader::decode(&header).expect("a valid notification");
        let mut body = vec![0; size as usize];
        self.stream.read_exact(&mut body).expect("a complete notification");
        match Notification::decode(kind, &body).expect("a valid notification") {
            Notification::Reply(body) => ReceivedNotification::Reply(body.to_vec()),
            Notification::MarkReached { queue, number } => ReceivedNotification::MarkReached(queue, number),
            Notification::ReadData { id, bytes } => ReceivedNotification::ReadData(id, bytes.to_vec()),
            Notification::QueueFailed { queue, fault } => ReceivedNotification::QueueFailed(queue, fault),
            Notification::ProtocolError(reason) => ReceivedNotification::ProtocolError(reason.to_owned()),
            Notification::ServerState(state) => ReceivedNotification::ServerState(state),
            other => panic!("{other:?}"),
        }
    }

    /// The body of the next notification, which must be a reply.
    #[track_caller]
    pub(crate) fn next_ext_reply(&mut self) -> Vec<u8> {
        match self.next_notification() {
            ReceivedNotification::Reply(body) => body,
            other => panic!("expected REPLY, got {other:?}"),
        }
    }

    /// Asserts that the reply to a PING is the next notification: the connection is open, and the server sent nothing else.
    #[track_caller]
    pub(crate) fn assert_ping_replied(&mut self) {
        self.send_ext(&ExtRequest::Ping(ext::Ping {}));
        let body = self.next_ext_reply();
        assert!(matches!(
            ExtResponse::decode(ExtCommand::Ping, &body),
            Ok(ExtResponse::Ping(ext::ServerState::Ready, 1..))
        ));
    }

    /// Allocates a buffer in an extended session and requests its base address.
    pub(crate) fn alloc_ext(&mut self, device: u32, size: u64) -> ClientBuffer {
        self.send(&Request::AllocBuffer(AllocBuffer { device, size }));
        let body = self.next_ext_reply();
        let Ok(Response::AllocBuffer(reply)) = Response::decode(RpcCommand::AllocBuffer, &body) else {
            panic!("{body:?}")
        };
        assert!(reply.remote_ptr != 0, "the server has no memory for {size} bytes");
        self.send(&Request::BufferGetBase(BufferGetBase { remote_ptr: reply.remote_ptr }));
        let base = u64::from_le_bytes(*self.next_ext_reply().first_chunk().expect("8 bytes"));
        ClientBuffer { handle: reply.remote_ptr, base, size }
    }

    /// Asserts that the server sent a PROTOCOL_ERROR notification, logged the same text and closed the connection.
    #[track_caller]
    pub(crate) fn expect_protocol_error(mut self, parts: &[&str]) {
        let reason = match self.next_notification() {
            ReceivedNotification::ProtocolError(reason) => reason,
            other => panic!("expected PROTOCOL_ERROR with {parts:?}, got {other:?}"),
        };
        assert!(parts.iter().all(|part| reason.contains(part)), "expected {parts:?} in {reason:?}");
        self.expect_refused(&[&reason]);
    }
}

impl ClientBuffer {
    /// A span of the buffer.
    pub(crate) fn span(&self, offset: u64, len: u64) -> BufferSpan {
        BufferSpan { buffer: self.handle, offset, len }
    }

    /// The span of the whole buffer.
    pub(crate) fn whole_span(&self) -> BufferSpan {
        self.span(0, self.size)
    }
}

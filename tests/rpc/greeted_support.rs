//! A client that has greeted, and devices that wait until they are told to go on.

use crate::support::*;
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Device, DeviceError, ForwardDevice, Point, Queue, Timeline};
use fanout::rpc::wire::ext::{
    Answer, Ask, ExtCommand, ExtRequest, Fault, Fill, Greet, GreetReply, KeepGraph, Mark, NOTICE_HEADER, Notice,
    NoticeHeader, OpenQueue, REVISION, Read, RunGraph, Shape, Span, Spans, Wait, WriteHead,
};
use fanout::rpc::wire::*;
use std::io::Read as _;
use std::sync::Arc;

/// Whose queues do nothing before their gate opens, or fail with it.
#[derive(Debug)]
pub(crate) struct Held {
    inner: Arc<CpuDevice>,
    gate: Arc<Timeline>,
}

impl Held {
    pub(crate) fn new(name: &str) -> Arc<Held> {
        let inner = CpuDevice::new(name, 1, Path::Exact, MEMORY).expect("a device");
        Arc::new(Held { inner, gate: Timeline::new() })
    }

    pub(crate) fn open(&self) {
        self.gate.advance(1);
    }

    pub(crate) fn fail(&self, error: DeviceError) {
        self.gate.fail(error);
    }
}

impl ForwardDevice for Held {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, account: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let mut queue = self.inner.queue(account)?;
        queue.wait(&Point::new(&self.gate, 1))?;
        Ok(queue)
    }
}

/// A notice that has been read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Told {
    Reply(Vec<u8>),
    Reached(u32, u64),
    Data(u64, Vec<u8>),
    Failed(u32, Fault),
    Refused(String),
    State(ext::State),
}

pub(crate) fn data(id: u64, bytes: impl AsRef<[u8]>) -> Told {
    Told::Data(id, bytes.as_ref().to_vec())
}

impl Client {
    /// A connection after its GREET.
    pub(crate) fn greet(server: &TestServer) -> (Client, GreetReply) {
        let mut client = Client::open(server);
        client.ask(&ExtRequest::Greet(Greet { revision: REVISION.into() }));
        let mut header = [0; RESPONSE_HEADER];
        client.stream.read_exact(&mut header).expect("a reply to GREET");
        let mut body = vec![0; ResponseHeader::decode(&header).size as usize];
        client.stream.read_exact(&mut body).expect("a whole reply");
        match Answer::decode(ExtCommand::Greet, &body) {
            Ok(Answer::Greet(reply)) => (client, reply),
            other => panic!("{other:?}"),
        }
    }

    /// A connection after its GREET, with a queue of its number on each device.
    pub(crate) fn with_queues(server: &TestServer) -> Client {
        let (mut client, _) = Client::greet(server);
        (0..server.devices.len() as u32).for_each(|device| client.open_queue(device, device));
        client
    }

    pub(crate) fn ask(&mut self, request: &ExtRequest<'_>) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        self.write(&bytes);
    }

    pub(crate) fn open_queue(&mut self, queue: u32, device: u32) {
        self.ask(&ExtRequest::OpenQueue(OpenQueue { queue, device }));
    }

    pub(crate) fn mark(&mut self, queue: u32, number: u64) {
        self.ask(&ExtRequest::Mark(Mark { queue, number }));
    }

    pub(crate) fn ask_for(&mut self, queue: u32, number: u64) {
        self.ask(&ExtRequest::Ask(Ask { queue, number }));
    }

    pub(crate) fn wait_for(&mut self, queue: u32, of: u32, number: u64) {
        self.ask(&ExtRequest::Wait(Wait { queue, of, number }));
    }

    pub(crate) fn write_span(&mut self, queue: u32, span: Span, shape: Option<Shape>, data: &[u8]) {
        self.ask(&ExtRequest::WriteHead(WriteHead { queue, span, shape }));
        self.write(data);
    }

    pub(crate) fn read_spans(&mut self, queue: u32, id: u64, spans: &[Span]) {
        let spans: Vec<_> = spans.iter().map(Spans::encode).collect();
        self.ask(&ExtRequest::Read(Read { queue, id, spans: Spans::new(&spans) }));
    }

    pub(crate) fn fill_span(&mut self, queue: u32, span: Span, value: u8) {
        self.ask(&ExtRequest::Fill(Fill { queue, span, value }));
    }

    pub(crate) fn keep_graph(&mut self, id: u64, device: u32, nodes: &[u64], tensors: &[TensorRecord]) {
        let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
        let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
        let graph = GraphCompute::new(device, &nodes, &tensors).expect("few enough");
        self.ask(&ExtRequest::KeepGraph(KeepGraph { id, graph }));
    }

    pub(crate) fn run_graph(&mut self, queue: u32, graph: u64) {
        self.ask(&ExtRequest::RunGraph(RunGraph { queue, graph }));
    }

    /// The next notice that is more than a sign of life.
    #[track_caller]
    pub(crate) fn told(&mut self) -> Told {
        loop {
            match self.heard() {
                Told::State(_) => {}
                told => return told,
            }
        }
    }

    /// The next notice.
    #[track_caller]
    pub(crate) fn heard(&mut self) -> Told {
        let mut header = [0; NOTICE_HEADER];
        self.stream.read_exact(&mut header).unwrap_or_else(|e| panic!("no notice: {e}"));
        let NoticeHeader { kind, size } = NoticeHeader::decode(&header).expect("a notice");
        let mut body = vec![0; size as usize];
        self.stream.read_exact(&mut body).expect("a whole notice");
        match Notice::decode(kind, &body).expect("a notice") {
            Notice::Reply(body) => Told::Reply(body.to_vec()),
            Notice::Reached { queue, number } => Told::Reached(queue, number),
            Notice::Data { id, bytes } => Told::Data(id, bytes.to_vec()),
            Notice::Failed { queue, fault } => Told::Failed(queue, fault),
            Notice::Refused(reason) => Told::Refused(reason.to_owned()),
            Notice::State(state) => Told::State(state),
            other => panic!("{other:?}"),
        }
    }

    /// The body of the reply that must be the next notice.
    #[track_caller]
    pub(crate) fn answered(&mut self) -> Vec<u8> {
        match self.told() {
            Told::Reply(body) => body,
            other => panic!("expected a reply, got {other:?}"),
        }
    }

    /// That nothing is wrong on this connection, and nothing else is told meanwhile.
    #[track_caller]
    pub(crate) fn pings(&mut self) {
        self.ask(&ExtRequest::Ping(ext::Ping {}));
        let body = self.answered();
        assert!(matches!(Answer::decode(ExtCommand::Ping, &body), Ok(Answer::Ping(ext::State::Ready, 1..))));
    }

    /// A buffer of a session that has greeted, with its base address.
    pub(crate) fn buffer(&mut self, device: u32, size: u64) -> ClientBuffer {
        self.send(&Request::AllocBuffer(AllocBuffer { device, size }));
        let body = self.answered();
        let Ok(Response::AllocBuffer(reply)) = Response::decode(Command::AllocBuffer, &body) else {
            panic!("{body:?}")
        };
        assert!(reply.remote_ptr != 0, "no memory");
        self.send(&Request::BufferGetBase(BufferGetBase { remote_ptr: reply.remote_ptr }));
        let base = u64::from_le_bytes(*self.answered().first_chunk().expect("8 bytes"));
        ClientBuffer { handle: reply.remote_ptr, base, size }
    }

    /// That the server has said why and closed this connection, with the same words in its log.
    #[track_caller]
    pub(crate) fn expect_told_refusal(mut self, parts: &[&str]) {
        let reason = match self.told() {
            Told::Refused(reason) => reason,
            other => panic!("expected to be refused with {parts:?}, got {other:?}"),
        };
        assert!(parts.iter().all(|part| reason.contains(part)), "expected {parts:?} in {reason:?}");
        self.expect_refused(&[&reason]);
    }
}

impl ClientBuffer {
    /// A part of it.
    pub(crate) fn span(&self, offset: u64, len: u64) -> Span {
        Span { buffer: self.handle, offset, len }
    }

    /// All of it.
    pub(crate) fn all(&self) -> Span {
        self.span(0, self.size)
    }
}

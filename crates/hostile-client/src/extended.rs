//! Messages of the hostile client in a session of the extensions.

use super::{Attacker, PAGE, encode};
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::{BufferGetBase, FreeBuffer, GetDeviceMemory, REQUEST_HEADER, Request};
use fanout::tensor::ByteRuns;

/// Queues that the attacker opens first, on the devices 0, 0 and 1.
const OPEN_QUEUES: u32 = 3;

/// The attacker's state of an extended session, from which it generates valid messages.
#[derive(Default)]
pub(super) struct ExtendedState {
    /// Number of the last mark of each queue.
    marks: [u64; OPEN_QUEUES as usize],
    /// Id of the last prepared graph.
    graph: u64,
    /// Whether this graph should still be prepared.
    prepared: bool,
}

fn encode_ext(request: &ExtRequest<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

/// The first messages of a session, after HELLO.
pub(super) fn opening_messages() -> Vec<u8> {
    let open = |queue| encode_ext(&ExtRequest::OpenQueue(OpenQueue { queue, device: queue / 2 }));
    [
        vec![encode_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() }))],
        (0..OPEN_QUEUES).map(open).collect(),
    ]
    .concat()
    .concat()
}

impl Attacker<'_> {
    /// A queue of device 0, which has all buffers; sometimes a queue of device 1, or an invalid one.
    fn queue(&mut self) -> u32 {
        if self.is_invalid_here(24) { [2, 3, u32::MAX][self.choices.below(3)] } else { self.choices.below(2) as u32 }
    }

    fn span(&mut self, len: u64) -> BufferSpan {
        let (buffer, _, size) = self.buffer();
        let offset =
            if self.is_invalid_here(16) { self.choices.extreme() } else { self.choices.below(PAGE as usize) as u64 };
        let len = if self.is_invalid_here(16) { self.choices.extreme() } else { len };
        BufferSpan { buffer, offset: offset.min(size.saturating_sub(len)), len }
    }

    /// The last mark of a queue, if it has one; sometimes an invalid one.
    fn existing_mark(&mut self, queue: u32) -> Option<u64> {
        if self.is_invalid_here(16) {
            return Some(self.choices.extreme());
        }
        self.extended.marks.get(queue as usize).copied().filter(|&last| last > 0)
    }

    pub(super) fn extended_message(&mut self) -> Vec<u8> {
        if self.buffers.is_empty() {
            return self.alloc();
        }
        let (queue, len) = (self.queue(), self.choices.below(600) as u64);
        match self.choices.below(20) {
            0 => self.alloc(),
            1..4 => {
                self.extended.graph += u64::from(!self.is_invalid_here(16));
                self.extended.prepared = true;
                // The id, and the body of a GRAPH_COMPUTE.
                let graph = self.graph().split_off(REQUEST_HEADER);
                let header = ExtHeader { command: ExtCommand::PrepareGraph, size: 8 + graph.len() as u64 };
                [&header.encode()[..], &self.extended.graph.to_le_bytes(), &graph].concat()
            }
            4..6 if self.extended.prepared || self.is_invalid_here(8) => {
                let graph = if self.is_invalid_here(16) { self.choices.extreme() } else { self.extended.graph };
                encode_ext(&ExtRequest::RunGraph(RunGraph { queue, graph }))
            }
            6..8 => {
                let span = self.span(len);
                let shape = self
                    .is_invalid_here(4)
                    .then(|| TensorShape { dtype: self.choices.below(40) as u32, ne: [len as u32, 1, 1, 1] });
                let head = encode_ext(&ExtRequest::WriteHead(WriteHead { queue, span, shape }));
                [head, vec![self.choices.byte(); len as usize]].concat()
            }
            8..10 => {
                let spans: Vec<_> = (0..self.choices.below(4)).map(|_| BufferSpans::encode(&self.span(len))).collect();
                encode_ext(&ExtRequest::ReadSpans(ReadSpans {
                    queue,
                    id: self.choices.word(),
                    spans: BufferSpans::new(&spans),
                }))
            }
            10 => encode_ext(&ExtRequest::Fill(Fill { queue, span: self.span(len), value: self.choices.byte() })),
            11 => encode_ext(&ExtRequest::CopySpan(CopySpan { queue, src: self.span(len), dst: self.span(len) })),
            12..14 => {
                let step = u64::from(!self.is_invalid_here(16));
                let last = self.extended.marks.get_mut(queue as usize);
                let number = last.map_or(1, |last| {
                    *last += step;
                    *last
                });
                encode_ext(&ExtRequest::Mark(Mark { queue, number }))
            }
            14 if let Some(number) = self.existing_mark(queue) => {
                encode_ext(&ExtRequest::NotifyReached(NotifyReached { queue, number }))
            }
            15 => {
                let of = self.queue();
                let Some(number) = self.existing_mark(of) else { return Vec::new() };
                encode_ext(&ExtRequest::Wait(Wait { queue, other_queue: of, number }))
            }
            16 => {
                let graph = self.graph().split_off(REQUEST_HEADER);
                let header = ExtHeader { command: ExtCommand::SupportsOp, size: graph.len() as u64 };
                [&header.encode()[..], &graph].concat()
            }
            17 => {
                let remote_ptr = self.buffer().0;
                (self.extended.prepared, self.computed) = (false, false);
                self.buffers.retain(|b| b.0 != remote_ptr);
                encode(&Request::FreeBuffer(FreeBuffer { remote_ptr }))
            }
            18 if self.is_invalid_here(2) => self.rare_message(queue, len),
            _ => {
                let remote_ptr = self.buffer().0;
                let device = u32::from(self.is_invalid_here(16)) * 2;
                [
                    encode_ext(&ExtRequest::Ping(Ping {})),
                    encode(&Request::BufferGetBase(BufferGetBase { remote_ptr })),
                    encode(&Request::GetDeviceMemory(GetDeviceMemory { device })),
                ]
                .concat()
            }
        }
    }

    /// A LOAD, often of a slice that fits neither the tensor nor the span, or whose offsets overflow. The latter is no
    /// [`ByteRuns`], so its bytes are written into the message.
    fn load(&mut self, queue: u32, span: BufferSpan) -> Vec<u8> {
        let (digest, name, whole) = ([1; 32], "../a", ByteRuns::whole(span.len));
        let load = Load { queue, span, shape: None, digest, bytes: span.len, runs: whole, name };
        let mut bytes = encode_ext(&ExtRequest::Load(load));
        // The length of the tensor and the four numbers of the runs are in front of the name.
        let end = bytes.len() - 4 - name.len();
        for number in bytes[end - 5 * 8..end].chunks_exact_mut(8) {
            if self.choices.below(3) == 0 {
                number.copy_from_slice(&self.choices.extreme().to_le_bytes());
            }
        }
        bytes
    }

    /// A message that clients send rarely, or never.
    fn rare_message(&mut self, queue: u32, len: u64) -> Vec<u8> {
        let (span, token) = (self.span(len), [7; TRANSFER_TOKEN_BYTES]);
        match self.choices.below(11) {
            0 => encode_ext(&ExtRequest::CloseQueue(CloseQueue { queue })),
            1 => encode_ext(&ExtRequest::OpenQueue(OpenQueue { queue: self.choices.word() as u32, device: 0 })),
            2 => encode_ext(&ExtRequest::HelloExt(HelloExt { revision: REVISION.into() })),
            3 => self.load(queue, span),
            4 => encode_ext(&ExtRequest::IssueTokens(IssueTokens { count: self.choices.extreme() as u32 })),
            5 => encode_ext(&ExtRequest::ReceiveFromPeer(ReceiveFromPeer { queue, span, token })),
            6 => encode_ext(&ExtRequest::SendToPeer(SendToPeer { queue, span, token, address: "127.0.0.1:1" })),
            7 => encode_ext(&ExtRequest::PeerWrite(PeerWrite { token, at: 0, data: &[1; 100] })),
            8 => encode_ext(&ExtRequest::ProbePeer(ProbePeer { address: "127.0.0.1:1" })),
            9 => encode_ext(&ExtRequest::Status(Status {})),
            _ => {
                let command = ExtCommand::ALL[self.choices.below(ExtCommand::ALL.len())];
                ExtHeader { command, size: self.choices.extreme() }.encode().to_vec()
            }
        }
    }
}

//! What a hostile client says that has greeted.

use super::{Attacker, PAGE, frame};
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::{BufferGetBase, FreeBuffer, GetDeviceMemory, REQUEST_HEADER, Request};

/// Queues that it opens in the beginning, on the devices 0, 0 and 1.
const OPEN_QUEUES: u32 = 3;

/// What an attacker knows of its session beyond what 7.0 has.
#[derive(Default)]
pub(super) struct ExtendedState {
    /// Numbers of the last marks.
    marks: [u64; OPEN_QUEUES as usize],
    /// The graph that was kept last, and whether it must be there yet.
    graph: u64,
    kept: bool,
}

fn frame_ext(request: &ExtRequest<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

/// How such a session begins.
pub(super) fn opening_messages() -> Vec<u8> {
    let open = |queue| frame_ext(&ExtRequest::OpenQueue(OpenQueue { queue, device: queue / 2 }));
    [vec![frame_ext(&ExtRequest::Greet(Greet { revision: REVISION.into() }))], (0..OPEN_QUEUES).map(open).collect()]
        .concat()
        .concat()
}

impl Attacker<'_> {
    /// A queue of device 0, where all memory is; now and then one of device 1, or none.
    fn queue(&mut self) -> u32 {
        if self.is_invalid_here(24) { [2, 3, u32::MAX][self.choices.below(3)] } else { self.choices.below(2) as u32 }
    }

    fn span(&mut self, len: u64) -> Span {
        let (buffer, _, size) = self.buffer();
        let offset =
            if self.is_invalid_here(16) { self.choices.extreme() } else { self.choices.below(PAGE as usize) as u64 };
        let len = if self.is_invalid_here(16) { self.choices.extreme() } else { len };
        Span { buffer, offset: offset.min(size.saturating_sub(len)), len }
    }

    /// A mark of a queue that was made, unless it slips.
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
                self.extended.kept = true;
                // The body of a GRAPH_COMPUTE behind a number.
                let graph = self.graph().split_off(REQUEST_HEADER);
                let header = ExtHeader { command: ExtCommand::KeepGraph, size: 8 + graph.len() as u64 };
                [&header.encode()[..], &self.extended.graph.to_le_bytes(), &graph].concat()
            }
            4..6 if self.extended.kept || self.is_invalid_here(8) => {
                let graph = if self.is_invalid_here(16) { self.choices.extreme() } else { self.extended.graph };
                frame_ext(&ExtRequest::RunGraph(RunGraph { queue, graph }))
            }
            6..8 => {
                let span = self.span(len);
                let shape = self
                    .is_invalid_here(4)
                    .then(|| Shape { dtype: self.choices.below(40) as u32, ne: [len as u32, 1, 1, 1] });
                let head = frame_ext(&ExtRequest::WriteHead(WriteHead { queue, span, shape }));
                [head, vec![self.choices.byte(); len as usize]].concat()
            }
            8..10 => {
                let spans: Vec<_> = (0..self.choices.below(4)).map(|_| Spans::encode(&self.span(len))).collect();
                frame_ext(&ExtRequest::Read(Read { queue, id: self.choices.word(), spans: Spans::new(&spans) }))
            }
            10 => frame_ext(&ExtRequest::Fill(Fill { queue, span: self.span(len), value: self.choices.byte() })),
            11 => frame_ext(&ExtRequest::Copy(Copy { queue, src: self.span(len), dst: self.span(len) })),
            12..14 => {
                let step = u64::from(!self.is_invalid_here(16));
                let last = self.extended.marks.get_mut(queue as usize);
                let number = last.map_or(1, |last| {
                    *last += step;
                    *last
                });
                frame_ext(&ExtRequest::Mark(Mark { queue, number }))
            }
            14 if let Some(number) = self.existing_mark(queue) => frame_ext(&ExtRequest::Ask(Ask { queue, number })),
            15 => {
                let of = self.queue();
                let Some(number) = self.existing_mark(of) else { return Vec::new() };
                frame_ext(&ExtRequest::Wait(Wait { queue, of, number }))
            }
            16 => {
                let graph = self.graph().split_off(REQUEST_HEADER);
                let header = ExtHeader { command: ExtCommand::Support, size: graph.len() as u64 };
                [&header.encode()[..], &graph].concat()
            }
            17 => {
                let remote_ptr = self.buffer().0;
                (self.extended.kept, self.computed) = (false, false);
                self.buffers.retain(|b| b.0 != remote_ptr);
                frame(&Request::FreeBuffer(FreeBuffer { remote_ptr }))
            }
            18 if self.is_invalid_here(2) => self.rare_message(queue, len),
            _ => {
                let remote_ptr = self.buffer().0;
                let device = u32::from(self.is_invalid_here(16)) * 2;
                [
                    frame_ext(&ExtRequest::Ping(Ping {})),
                    frame(&Request::BufferGetBase(BufferGetBase { remote_ptr })),
                    frame(&Request::GetDeviceMemory(GetDeviceMemory { device })),
                ]
                .concat()
            }
        }
    }

    /// What few clients say, or none.
    fn rare_message(&mut self, queue: u32, len: u64) -> Vec<u8> {
        let (span, tickets) = (self.span(len), [[7; TICKET]; 3]);
        let tickets = TicketList(&tickets[..self.choices.below(4)]);
        match self.choices.below(10) {
            0 => frame_ext(&ExtRequest::CloseQueue(CloseQueue { queue })),
            1 => frame_ext(&ExtRequest::OpenQueue(OpenQueue { queue: self.choices.word() as u32, device: 0 })),
            2 => frame_ext(&ExtRequest::Greet(Greet { revision: 1 })),
            3 => frame_ext(&ExtRequest::Load(Load { queue, span, shape: None, digest: [1; 32], name: "../a" })),
            4 => frame_ext(&ExtRequest::Tickets(Tickets { count: self.choices.extreme() as u32 })),
            5 => frame_ext(&ExtRequest::Receive(Receive { queue, span, tickets })),
            6 => frame_ext(&ExtRequest::Send(Send { queue, span, tickets, address: "127.0.0.1:1" })),
            7 => frame_ext(&ExtRequest::Put(Put { ticket: [7; TICKET], data: &[1; 100] })),
            8 => frame_ext(&ExtRequest::Reach(Reach { address: "127.0.0.1:1" })),
            _ => {
                let command = ExtCommand::ALL[self.choices.below(ExtCommand::ALL.len())];
                ExtHeader { command, size: self.choices.extreme() }.encode().to_vec()
            }
        }
    }
}

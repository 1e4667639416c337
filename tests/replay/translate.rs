//! Translation of recorded buffer handles and addresses to those that this crate's server returned for the same requests.

use fanout::rpc::wire::{GraphCompute, Request, SetTensor, TENSOR_RECORD, TensorRecord};
use std::collections::HashMap;

#[derive(Default)]
pub(crate) struct Translator {
    /// The buffers by their recorded handles.
    buffers: HashMap<u64, TranslatedBuffer>,
}

struct TranslatedBuffer {
    ours: u64,
    size: u64,
    recorded_base: u64,
    our_base: u64,
}

impl Translator {
    /// Records the two handles of a buffer.
    pub(crate) fn record_buffer(&mut self, recorded: u64, ours: u64, size: u64) {
        self.buffers.insert(recorded, TranslatedBuffer { ours, size, recorded_base: 0, our_base: 0 });
    }

    /// Records the two base addresses of a buffer.
    pub(crate) fn record_base(&mut self, recorded: u64, recorded_base: u64, our_base: u64) {
        let buffer = self.buffers.get_mut(&recorded).expect("a buffer that was allocated");
        (buffer.recorded_base, buffer.our_base) = (recorded_base, our_base);
    }

    fn handle(&self, recorded: u64) -> u64 {
        self.buffers.get(&recorded).map_or(recorded, |b| b.ours)
    }

    fn tensor(&self, t: &TensorRecord) -> TensorRecord {
        let mut t = t.clone();
        if let Some(b) = self.buffers.get(&t.buffer) {
            let offset = t.data.wrapping_sub(b.recorded_base);
            assert!(offset <= b.size, "{} lies {offset} bytes into a buffer of {}", t.name(), b.size);
            (t.buffer, t.data) = (b.ours, b.our_base + offset);
        }
        t
    }

    /// Encodes a recorded request with translated handles and addresses.
    pub(crate) fn request(&self, request: &Request<'_>) -> Vec<u8> {
        let mut frame = Vec::new();
        let mut request = request.clone();
        match &mut request {
            Request::BufferGetBase(r) => r.remote_ptr = self.handle(r.remote_ptr),
            Request::FreeBuffer(r) => r.remote_ptr = self.handle(r.remote_ptr),
            Request::BufferClear(r) => r.remote_ptr = self.handle(r.remote_ptr),
            Request::SetTensor(SetTensor { head, .. }) => head.tensor = self.tensor(&head.tensor),
            Request::SetTensorHash(r) => r.tensor = self.tensor(&r.tensor),
            Request::GetTensor(r) => r.tensor = self.tensor(&r.tensor),
            Request::InitTensor(r) => r.tensor = self.tensor(&r.tensor),
            Request::MemsetTensor(r) => r.tensor = self.tensor(&r.tensor),
            Request::CopyTensor(r) => (r.src, r.dst) = (self.tensor(&r.src), self.tensor(&r.dst)),
            Request::GraphCompute(graph) => {
                let nodes: Vec<[u8; 8]> = graph.nodes().iter().map(u64::to_le_bytes).collect();
                let tensors: Vec<[u8; TENSOR_RECORD]> =
                    graph.tensors().iter().map(|t| self.tensor(&t).encode()).collect();
                let translated = GraphCompute::new(graph.device(), &nodes, &tensors).expect("as many as recorded");
                let translated = graph.uid().map_or(translated, |uid| translated.with_uid(uid));
                Request::GraphCompute(translated).encode(&mut frame);
                return frame;
            }
            _ => {}
        }
        request.encode(&mut frame);
        frame
    }
}

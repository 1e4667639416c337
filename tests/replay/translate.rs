//! Translation of recorded buffer handles and addresses to those that this crate's server returned for the same requests.

use fanout::rpc::wire::{RequestHeader, RpcCommand, TENSOR_RECORD, TensorRecord};
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

    /// Translates the record at an offset of a body. Other fields than its buffer and address keep their bytes, so the records
    /// of all versions can be translated.
    fn translate_record(&self, body: &mut [u8], at: usize) {
        let bytes: &mut [u8; TENSOR_RECORD] = body[at..].first_chunk_mut().expect("a whole record");
        let mut record = TensorRecord::decode(bytes);
        if let Some(b) = self.buffers.get(&record.buffer) {
            let offset = record.data.wrapping_sub(b.recorded_base);
            assert!(offset <= b.size, "{} lies {offset} bytes into a buffer of {}", record.name(), b.size);
            (record.buffer, record.data) = (b.ours, b.our_base + offset);
            *bytes = record.encode();
        }
    }

    /// The frame of a recorded request with translated handles and addresses. `has_uid`: GRAPH_COMPUTE has a uid.
    pub(crate) fn request(&self, command: RpcCommand, body: &[u8], has_uid: bool) -> Vec<u8> {
        let mut body = body.to_vec();
        match command {
            RpcCommand::BufferGetBase | RpcCommand::FreeBuffer | RpcCommand::BufferClear => {
                let handle = body.first_chunk_mut().expect("a handle");
                *handle = self.handle(u64::from_le_bytes(*handle)).to_le_bytes();
            }
            RpcCommand::SetTensor
            | RpcCommand::SetTensorHash
            | RpcCommand::GetTensor
            | RpcCommand::InitTensor
            | RpcCommand::MemsetTensor => self.translate_record(&mut body, 0),
            RpcCommand::CopyTensor => [0, TENSOR_RECORD].iter().for_each(|&at| self.translate_record(&mut body, at)),
            RpcCommand::GraphCompute => {
                // Device, uid, number of nodes, their ids, number of tensors.
                let counts = if has_uid { 4 + 8 } else { 4 };
                let nodes = u32::from_le_bytes(body[counts..counts + 4].try_into().expect("4 bytes")) as usize;
                let first = counts + 4 + 8 * nodes + 4;
                (first..body.len()).step_by(TENSOR_RECORD).for_each(|at| self.translate_record(&mut body, at));
            }
            RpcCommand::SetTensor2d | RpcCommand::GetTensor2d | RpcCommand::CommAllreduce => {
                panic!("no recording has {} so far: translate its record", command.name())
            }
            // The others have neither handle nor record.
            _ => {}
        }
        let mut frame = RequestHeader { command, size: body.len() as u64 }.encode().to_vec();
        frame.extend(body);
        frame
    }
}

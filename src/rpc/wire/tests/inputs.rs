//! Seeded messages of every command, and the sizes of their fields.

use crate::rpc::wire::*;
use fastrand::Rng;

pub(crate) const LIMITS: Limits = Limits { max_nodes: 64, max_tensors: 128, max_body: 1 << 20 };

/// What requests borrow.
pub(crate) struct Store {
    pub(crate) nodes: Vec<[u8; 8]>,
    pub(crate) tensors: Vec<[u8; TENSOR_RECORD]>,
    pub(crate) srcs: [[u8; TENSOR_RECORD]; MAX_SRC],
    pub(crate) data: Vec<u8>,
}

impl Store {
    pub(crate) fn new(rng: &mut Rng, nodes: usize, tensors: usize, data: usize) -> Store {
        Store {
            nodes: (0..nodes).map(|_| rng.u64(..).to_le_bytes()).collect(),
            tensors: (0..tensors).map(|_| record(rng).encode()).collect(),
            srcs: std::array::from_fn(|_| record(rng).encode()),
            data: std::iter::repeat_with(|| rng.u8(..)).take(data).collect(),
        }
    }
}

pub(crate) fn record(rng: &mut Rng) -> TensorRecord {
    TensorRecord {
        id: rng.u64(..),
        dtype: rng.u32(..),
        buffer: rng.u64(..),
        ne: std::array::from_fn(|_| rng.u32(..)),
        nb: std::array::from_fn(|_| rng.u32(..)),
        op: rng.u32(..),
        op_params: std::array::from_fn(|_| rng.i32(..)),
        flags: rng.i32(..),
        src: std::array::from_fn(|_| rng.u64(..)),
        view_src: rng.u64(..),
        view_offs: rng.u64(..),
        data: rng.u64(..),
        name: std::array::from_fn(|_| rng.u8(..)),
        use_count: rng.i32(..),
    }
}

pub(crate) fn request<'a>(command: Command, rng: &mut Rng, store: &'a Store) -> Request<'a> {
    let device = rng.u32(..);
    let (size, offset, remote_ptr) = (rng.u64(..), rng.u64(..), rng.u64(..));
    let value = rng.u8(..);
    let tensor = record(rng);
    match command {
        Command::AllocBuffer => Request::AllocBuffer(AllocBuffer { device, size }),
        Command::GetAlignment => Request::GetAlignment(GetAlignment { device }),
        Command::GetMaxSize => Request::GetMaxSize(GetMaxSize { device }),
        Command::BufferGetBase => Request::BufferGetBase(BufferGetBase { remote_ptr }),
        Command::FreeBuffer => Request::FreeBuffer(FreeBuffer { remote_ptr }),
        Command::BufferClear => Request::BufferClear(BufferClear { remote_ptr, value }),
        Command::SetTensor => {
            let head = SetTensorHead { tensor, cache: rng.bool(), offset };
            Request::SetTensor(SetTensor { head, data: &store.data })
        }
        Command::SetTensorHash => Request::SetTensorHash(SetTensorHash { tensor, offset, hash: rng.u64(..) }),
        Command::GetTensor => Request::GetTensor(GetTensor { tensor, offset, size }),
        Command::CopyTensor => Request::CopyTensor(CopyTensor { src: tensor, dst: record(rng) }),
        Command::GraphCompute => {
            Request::GraphCompute(GraphCompute::new(device, &store.nodes, &store.tensors).expect("few enough"))
        }
        Command::GetDeviceMemory => Request::GetDeviceMemory(GetDeviceMemory { device }),
        Command::InitTensor => Request::InitTensor(InitTensor { tensor }),
        Command::GetAllocSize => Request::GetAllocSize(GetAllocSize { device, tensor, srcs: &store.srcs }),
        Command::Hello => Request::Hello(Hello { conn_caps: Some(std::array::from_fn(|_| rng.u8(..))) }),
        Command::DeviceCount => Request::DeviceCount(DeviceCount {}),
        Command::GraphRecompute => Request::GraphRecompute(GraphRecompute { device }),
        Command::MemsetTensor => Request::MemsetTensor(MemsetTensor { tensor, offset, size, value }),
    }
}

/// The whole frame of `request`, split into its header and its body.
pub(crate) fn frame(request: &Request<'_>) -> ([u8; REQUEST_HEADER], Vec<u8>) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    let body = bytes.split_off(REQUEST_HEADER);
    (bytes.try_into().expect("split at the header"), body)
}

/// Fields of a request that can be missing, with their bytes.
pub(crate) fn request_fields(command: Command, store: &Store) -> Vec<(&'static str, usize)> {
    match command {
        Command::AllocBuffer => vec![("device", 4), ("size", 8)],
        Command::BufferGetBase | Command::FreeBuffer => vec![("remote_ptr", 8)],
        Command::BufferClear => vec![("remote_ptr", 8), ("value", 1)],
        Command::SetTensor => vec![("tensor", 296), ("cache_flag", 1), ("offset", 8)],
        Command::SetTensorHash => vec![("tensor", 296), ("offset", 8), ("hash", 8)],
        Command::GetTensor => vec![("tensor", 296), ("offset", 8), ("size", 8)],
        Command::CopyTensor => vec![("src", 296), ("dst", 296)],
        Command::GraphCompute => vec![
            ("device", 4),
            ("n_nodes", 4),
            ("nodes", 8 * store.nodes.len()),
            ("n_tensors", 4),
            ("tensors", 296 * store.tensors.len()),
        ],
        Command::GetAlignment | Command::GetMaxSize | Command::GetDeviceMemory | Command::GraphRecompute => {
            vec![("device", 4)]
        }
        Command::InitTensor => vec![("tensor", 296)],
        Command::GetAllocSize => vec![("device", 4), ("tensor", 296), ("srcs", 2960)],
        Command::Hello => vec![("conn_caps", 24)],
        Command::DeviceCount => vec![],
        Command::MemsetTensor => vec![("tensor", 296), ("offset", 8), ("size", 8), ("value", 1)],
    }
}

/// One response to each command that has one.
pub(crate) fn responses<'a>(rng: &mut Rng, data: &'a [u8]) -> Vec<Response<'a>> {
    let version = Version { major: rng.u8(..), minor: rng.u8(..), patch: rng.u8(..) };
    vec![
        Response::AllocBuffer(AllocBufferReply { remote_ptr: rng.u64(..), remote_size: rng.u64(..) }),
        Response::GetAlignment(rng.u64(..)),
        Response::GetMaxSize(rng.u64(..)),
        Response::BufferGetBase(rng.u64(..)),
        Response::SetTensorHash(rng.bool()),
        Response::GetTensor(data),
        Response::CopyTensor(rng.bool()),
        Response::GetDeviceMemory(DeviceMemoryReply { free: rng.u64(..), total: rng.u64(..) }),
        Response::GetAllocSize(rng.u64(..)),
        Response::Hello(HelloReply {
            version,
            conn_caps: Some(std::array::from_fn(|_| rng.u8(..))),
            greeting: rng.u8(..),
        }),
        Response::DeviceCount(rng.u32(..)),
    ]
}

/// Fields of a response that can be missing, with their bytes.
pub(crate) fn response_fields(command: Command) -> &'static [(&'static str, usize)] {
    match command {
        Command::AllocBuffer => &[("remote_ptr", 8), ("remote_size", 8)],
        Command::GetAlignment => &[("alignment", 8)],
        Command::GetMaxSize => &[("max_size", 8)],
        Command::BufferGetBase => &[("base", 8)],
        Command::SetTensorHash | Command::CopyTensor => &[("result", 1)],
        Command::GetDeviceMemory => &[("free", 8), ("total", 8)],
        Command::GetAllocSize => &[("alloc_size", 8)],
        Command::Hello => &[("major", 1), ("minor", 1), ("patch", 1), ("padding", 1), ("conn_caps", 24)],
        Command::DeviceCount => &[("device_count", 4)],
        _ => &[],
    }
}

/// The error for a message of these fields that ends after `len` bytes; `None` if all of them are there.
pub(crate) fn truncation(fields: &[(&'static str, usize)], len: usize) -> Option<WireError> {
    let mut start = 0;
    for &(what, size) in fields {
        if len < start + size {
            return Some(WireError::Truncated { what, need: size as u64, have: (len - start) as u64 });
        }
        start += size;
    }
    None
}

/// Changes `bytes` as a careless or hostile peer might.
pub(crate) fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
    for _ in 0..rng.usize(0..4) {
        let at = rng.usize(0..=bytes.len());
        match rng.u8(0..6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.u8(..)),
            2 => bytes.extend((0..rng.usize(0..40)).map(|_| rng.u8(..))),
            3 => {
                let value: u64 = [0, 1, 0xffff_ffff, 1 << 31, u64::MAX, 1 << 63, rng.u64(..)][rng.usize(0..7)];
                let width = [4, 8][rng.usize(0..2)];
                for (byte, new) in bytes.iter_mut().skip(at).zip(&value.to_le_bytes()[..width]) {
                    *byte = *new;
                }
            }
            _ => {
                // Headers and counts decide most: aim at the first 32 bytes often.
                let end = if rng.bool() { bytes.len() } else { bytes.len().min(32) };
                if let Some(byte) = bytes[..end].get_mut(rng.usize(0..end.max(1))) {
                    *byte ^= 1 << rng.u8(0..8);
                }
            }
        }
    }
}

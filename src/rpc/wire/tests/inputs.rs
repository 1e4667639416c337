//! Generators of random messages of each command from a seed, and lists of their fields with sizes.

use crate::rpc::wire::*;
use fastrand::Rng;

pub(crate) const LIMITS: Limits = Limits { max_nodes: 64, max_tensors: 128, max_body: 1 << 20 };

/// Data that requests borrow.
pub(crate) struct RequestBuffers {
    pub(crate) nodes: Vec<[u8; 8]>,
    pub(crate) tensors: Vec<[u8; TENSOR_RECORD]>,
    pub(crate) srcs: [[u8; TENSOR_RECORD]; MAX_SRC],
    pub(crate) data: Vec<u8>,
}

impl RequestBuffers {
    pub(crate) fn new(rng: &mut Rng, nodes: usize, tensors: usize, data: usize) -> RequestBuffers {
        RequestBuffers {
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

pub(crate) fn request<'a>(command: RpcCommand, rng: &mut Rng, buffers: &'a RequestBuffers) -> Request<'a> {
    let device = rng.u32(..);
    let (size, offset, remote_ptr) = (rng.u64(..), rng.u64(..), rng.u64(..));
    let value = rng.u8(..);
    let tensor = record(rng);
    match command {
        RpcCommand::AllocBuffer => Request::AllocBuffer(AllocBuffer { device, size }),
        RpcCommand::GetAlignment => Request::GetAlignment(GetAlignment { device }),
        RpcCommand::GetMaxSize => Request::GetMaxSize(GetMaxSize { device }),
        RpcCommand::BufferGetBase => Request::BufferGetBase(BufferGetBase { remote_ptr }),
        RpcCommand::FreeBuffer => Request::FreeBuffer(FreeBuffer { remote_ptr }),
        RpcCommand::BufferClear => Request::BufferClear(BufferClear { remote_ptr, value }),
        RpcCommand::SetTensor => {
            let head = SetTensorHead { tensor, cache: rng.bool(), offset };
            Request::SetTensor(SetTensor { head, data: &buffers.data })
        }
        RpcCommand::SetTensorHash => Request::SetTensorHash(SetTensorHash { tensor, offset, hash: rng.u64(..) }),
        RpcCommand::GetTensor => Request::GetTensor(GetTensor { tensor, offset, size }),
        RpcCommand::CopyTensor => Request::CopyTensor(CopyTensor { src: tensor, dst: record(rng) }),
        RpcCommand::GraphCompute => {
            Request::GraphCompute(GraphCompute::new(device, &buffers.nodes, &buffers.tensors).expect("few enough"))
        }
        RpcCommand::GetDeviceMemory => Request::GetDeviceMemory(GetDeviceMemory { device }),
        RpcCommand::InitTensor => Request::InitTensor(InitTensor { tensor }),
        RpcCommand::GetAllocSize => Request::GetAllocSize(GetAllocSize { device, tensor, srcs: &buffers.srcs }),
        RpcCommand::Hello => Request::Hello(Hello { conn_caps: Some(std::array::from_fn(|_| rng.u8(..))) }),
        RpcCommand::DeviceCount => Request::DeviceCount(DeviceCount {}),
        RpcCommand::GraphRecompute => Request::GraphRecompute(GraphRecompute { device, uid: None }),
        RpcCommand::MemsetTensor => Request::MemsetTensor(MemsetTensor { tensor, offset, size, value }),
        RpcCommand::SetTensor2d => {
            let head = SetTensor2dHead { tensor, offset, size, n_copies: rng.u64(..), stride: rng.u64(..) };
            Request::SetTensor2d(SetTensor2d { head, data: &buffers.data })
        }
        RpcCommand::GetTensor2d => {
            let (n_copies, stride) = (rng.u64(..), rng.u64(..));
            Request::GetTensor2d(GetTensor2d { tensor, offset, size, n_copies, stride })
        }
        RpcCommand::CommInit => Request::CommInit(CommInit {
            device,
            rank: rng.u32(..),
            world: rng.u32(..),
            port: rng.u32(..),
            host: std::array::from_fn(|_| rng.u8(..)),
        }),
        RpcCommand::CommAllreduce => Request::CommAllreduce(CommAllreduce { device, tensor }),
        RpcCommand::CommFree => Request::CommFree(CommFree { device }),
    }
}

/// The encoded `request`, split into header and body.
pub(crate) fn frame(request: &Request<'_>) -> ([u8; REQUEST_HEADER], Vec<u8>) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    let body = bytes.split_off(REQUEST_HEADER);
    (bytes.try_into().expect("split at the header"), body)
}

/// Fields of a request that truncation can cut off, with their lengths in bytes.
pub(crate) fn request_fields(command: RpcCommand, buffers: &RequestBuffers) -> Vec<(&'static str, usize)> {
    match command {
        RpcCommand::AllocBuffer => vec![("device", 4), ("size", 8)],
        RpcCommand::BufferGetBase | RpcCommand::FreeBuffer => vec![("remote_ptr", 8)],
        RpcCommand::BufferClear => vec![("remote_ptr", 8), ("value", 1)],
        RpcCommand::SetTensor => vec![("tensor", 296), ("cache", 1), ("offset", 8)],
        RpcCommand::SetTensorHash => vec![("tensor", 296), ("offset", 8), ("hash", 8)],
        RpcCommand::GetTensor => vec![("tensor", 296), ("offset", 8), ("size", 8)],
        RpcCommand::CopyTensor => vec![("src", 296), ("dst", 296)],
        RpcCommand::GraphCompute => vec![
            ("device", 4),
            ("n_nodes", 4),
            ("nodes", 8 * buffers.nodes.len()),
            ("n_tensors", 4),
            ("tensors", 296 * buffers.tensors.len()),
        ],
        RpcCommand::GetAlignment
        | RpcCommand::GetMaxSize
        | RpcCommand::GetDeviceMemory
        | RpcCommand::CommFree
        | RpcCommand::GraphRecompute => {
            vec![("device", 4)]
        }
        RpcCommand::InitTensor => vec![("tensor", 296)],
        RpcCommand::GetAllocSize => vec![("device", 4), ("tensor", 296), ("srcs", 2960)],
        RpcCommand::Hello => vec![("conn_caps", 24)],
        RpcCommand::DeviceCount => vec![],
        RpcCommand::MemsetTensor => vec![("tensor", 296), ("offset", 8), ("size", 8), ("value", 1)],
        RpcCommand::SetTensor2d | RpcCommand::GetTensor2d => {
            vec![("tensor", 296), ("offset", 8), ("size", 8), ("n_copies", 8), ("stride", 8)]
        }
        RpcCommand::CommInit => vec![("device", 4), ("rank", 4), ("world", 4), ("port", 4), ("host", 64)],
        RpcCommand::CommAllreduce => vec![("device", 4), ("tensor", 296)],
    }
}

/// One response of each command that has one.
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
            extension_byte: rng.u8(..),
        }),
        Response::DeviceCount(rng.u32(..)),
        Response::GetTensor2d(data),
        Response::CommInit(rng.bool()),
    ]
}

/// Fields of a response that truncation can cut off, with their lengths in bytes.
pub(crate) fn response_fields(command: RpcCommand) -> &'static [(&'static str, usize)] {
    match command {
        RpcCommand::AllocBuffer => &[("remote_ptr", 8), ("remote_size", 8)],
        RpcCommand::GetAlignment => &[("alignment", 8)],
        RpcCommand::GetMaxSize => &[("max_size", 8)],
        RpcCommand::BufferGetBase => &[("base", 8)],
        RpcCommand::SetTensorHash | RpcCommand::CopyTensor | RpcCommand::CommInit => &[("result", 1)],
        RpcCommand::GetDeviceMemory => &[("free", 8), ("total", 8)],
        RpcCommand::GetAllocSize => &[("alloc_size", 8)],
        RpcCommand::Hello => &[("major", 1), ("minor", 1), ("patch", 1), ("padding", 1), ("conn_caps", 24)],
        RpcCommand::DeviceCount => &[("device_count", 4)],
        _ => &[],
    }
}

/// The expected error for a message with these fields that ends after `len` bytes; `None` if it is complete.
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

/// Applies up to three random mutations to `bytes`: cut, insert, append, overwrite with an extreme number, flip a bit.
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
                // Half of the flips hit the first 32 bytes, where headers and counts are: these reach most error paths.
                let end = if rng.bool() { bytes.len() } else { bytes.len().min(32) };
                if let Some(byte) = bytes[..end].get_mut(rng.usize(0..end.max(1))) {
                    *byte ^= 1 << rng.u8(0..8);
                }
            }
        }
    }
}

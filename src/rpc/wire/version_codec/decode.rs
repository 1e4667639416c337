//! Decoder of requests of all versions, for the server: from the numbers and layouts of a version to the newest requests.
//!
//! What a version lacks gets the value by which the newest version does what the older one did: the device is 0, every listed
//! node is computed, readers of a tensor are uncounted (which forbids fusing it away), and parameters that its servers did not
//! read are as if they were absent.

use std::collections::HashSet;

use super::{
    ADDED_OPS, ADDED_UNARY_KINDS, AllocSizeForm, HelloForm, NotExpressible, REMOVED_OPS, VersionCodec, long_names,
};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::codec::Reader;
use crate::rpc::wire::{
    AllocBuffer, BodySize, CAPS_BYTES, CommAllreduce, CopyTensor, GetAlignment, GetAllocSize, GetDeviceMemory,
    GetMaxSize, GetTensor, GetTensor2d, GraphCompute, GraphRecompute, Hello, InitTensor, Limits, MAX_SRC, MemsetTensor,
    Request, RpcCommand, SetTensor, SetTensor2d, SetTensor2dHead, SetTensorHash, SetTensorHead, TENSOR_RECORD,
    TensorRecord, WireError,
};

/// Bytes of the longest SET_TENSOR of all codecs before its data.
pub(crate) const MAX_SET_TENSOR_HEAD: usize = long_names::LONG_RECORD + 1 + 8;

/// Bytes of the longest SET_TENSOR_2D of all codecs before its data.
pub(crate) const MAX_SET_TENSOR_2D_HEAD: usize = long_names::LONG_RECORD + 4 * 8;

/// A number that no version gives to an op. Decoded records with an unknown op have it.
const UNKNOWN_OP: u32 = u32::MAX;

/// A number that no version gives to a kind of UNARY.
const UNKNOWN_KIND: i32 = -1;

/// Index of the parameter of SCALE that is its bias.
const SCALE_BIAS: usize = 1;

/// Index of the parameter of GROUP_NORM that is its epsilon.
const GROUP_NORM_EPS: usize = 1;

/// Indices of the parameters of FLASH_ATTN_EXT that are the cap of the scores and the precision.
const FLASH_ATTN_SOFTCAP: usize = 2;
const FLASH_ATTN_PRECISION: usize = 3;

/// Index of the parameter of ROPE that is the number of channels before the rotated ones.
const ROPE_OFFSET: usize = 15;

/// Index of the parameter of ROPE that is its mode.
const ROPE_MODE: usize = 2;

/// Records of the sources in GET_ALLOC_SIZE, for versions that do not send them.
static NO_SOURCES: [[u8; TENSOR_RECORD]; MAX_SRC] = [[0; TENSOR_RECORD]; MAX_SRC];

impl VersionCodec {
    /// The command with this number; `None` if the version has none.
    pub(crate) fn command(&self, number: u8) -> Option<RpcCommand> {
        RpcCommand::ALL.iter().copied().find(|&command| self.command_number(command) == Some(number))
    }

    /// Allowed lengths of the body of a request.
    pub(crate) fn request_body(&self, command: RpcCommand) -> BodySize {
        let device = if self.has_device_field { size_of::<u32>() } else { 0 };
        let bytes = match command {
            RpcCommand::AllocBuffer => device + 8,
            RpcCommand::GetAlignment | RpcCommand::GetMaxSize | RpcCommand::GetDeviceMemory => device,
            RpcCommand::SetTensor => return BodySize::AtLeast(self.set_tensor_head_len() as u64),
            RpcCommand::SetTensorHash | RpcCommand::GetTensor => self.record_len + 8 + 8,
            RpcCommand::CopyTensor => 2 * self.record_len,
            // The numbers of nodes and tensors are in the body.
            RpcCommand::GraphCompute if !self.has_device_field => return BodySize::AtLeast(4 + 4),
            RpcCommand::GetAllocSize if self.alloc_size == AllocSizeForm::Tensor => device + self.record_len,
            RpcCommand::Hello => match self.hello_form {
                HelloForm::Caps => CAPS_BYTES,
                HelloForm::Empty | HelloForm::Absent => 0,
            },
            RpcCommand::GraphRecompute => device + if self.graph_uid { 8 } else { 0 },
            _ => {
                // The rest of the length has no room for a record.
                let record = TENSOR_RECORD as u64;
                let with_records = |bytes| bytes % record + bytes / record * self.record_len as u64;
                return match command.request() {
                    BodySize::Exact(bytes) => BodySize::Exact(with_records(bytes)),
                    BodySize::AtLeast(bytes) => BodySize::AtLeast(with_records(bytes)),
                    other => other,
                };
            }
        };
        BodySize::Exact(bytes as u64)
    }

    /// The checked length of a request's body: see [`RpcCommand::request_size`].
    ///
    /// # Errors
    /// As [`RpcCommand::request_size`].
    pub(crate) fn body_len(&self, command: RpcCommand, size: u64, limits: &Limits) -> Result<usize, WireError> {
        command.request_size_of_form(self.request_body(command), size, limits)
    }

    /// Bytes of a SET_TENSOR before its data.
    pub(crate) const fn set_tensor_head_len(&self) -> usize {
        self.record_len + if self.cache_flag { 1 } else { 0 } + 8
    }

    /// Bytes of a SET_TENSOR_2D before its data.
    pub(crate) const fn set_tensor_2d_head_len(&self) -> usize {
        self.record_len + 4 * 8
    }

    /// Decodes the head of a SET_TENSOR_2D, of [`VersionCodec::set_tensor_2d_head_len`] bytes.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing.
    pub(crate) fn decode_set_tensor_2d_head(&self, bytes: &[u8]) -> Result<SetTensor2dHead, WireError> {
        self.read_set_tensor_2d_head(&mut Reader::new(bytes))
    }

    /// Decodes the head of a SET_TENSOR, of [`VersionCodec::set_tensor_head_len`] bytes.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing or invalid.
    pub(crate) fn decode_set_tensor_head(&self, bytes: &[u8]) -> Result<SetTensorHead, WireError> {
        self.read_set_tensor_head(&mut Reader::new(bytes))
    }

    /// Decodes the body of a request, as [`Request::decode`] does for the newest version. A graph keeps the numbers of its
    /// version in its bytes, and translates a record when it is read.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing, invalid or over `limits`.
    pub(crate) fn decode<'a>(
        &'static self,
        command: RpcCommand,
        body: &'a [u8],
        limits: &Limits,
    ) -> Result<Request<'a>, WireError> {
        let mut reader = Reader::new(body);
        let r = &mut reader;
        let request = match command {
            RpcCommand::AllocBuffer => {
                Request::AllocBuffer(AllocBuffer { device: self.read_device(r)?, size: r.u64("size")? })
            }
            RpcCommand::GetAlignment => Request::GetAlignment(GetAlignment { device: self.read_device(r)? }),
            RpcCommand::GetMaxSize => Request::GetMaxSize(GetMaxSize { device: self.read_device(r)? }),
            RpcCommand::GetDeviceMemory => Request::GetDeviceMemory(GetDeviceMemory { device: self.read_device(r)? }),
            RpcCommand::SetTensor => {
                Request::SetTensor(SetTensor { head: self.read_set_tensor_head(r)?, data: r.rest() })
            }
            RpcCommand::SetTensorHash => Request::SetTensorHash(SetTensorHash {
                tensor: self.read_record(r, "tensor")?,
                offset: r.u64("offset")?,
                hash: r.u64("hash")?,
            }),
            RpcCommand::GetTensor => Request::GetTensor(GetTensor {
                tensor: self.read_record(r, "tensor")?,
                offset: r.u64("offset")?,
                size: r.u64("size")?,
            }),
            RpcCommand::CopyTensor => {
                Request::CopyTensor(CopyTensor { src: self.read_record(r, "src")?, dst: self.read_record(r, "dst")? })
            }
            RpcCommand::InitTensor => Request::InitTensor(InitTensor { tensor: self.read_record(r, "tensor")? }),
            RpcCommand::MemsetTensor => Request::MemsetTensor(MemsetTensor {
                tensor: self.read_record(r, "tensor")?,
                offset: r.u64("offset")?,
                size: r.u64("size")?,
                value: r.u8("value")?,
            }),
            RpcCommand::GraphCompute => Request::GraphCompute(GraphCompute::read_fields(r, limits, self)?),
            RpcCommand::GraphRecompute => Request::GraphRecompute(GraphRecompute {
                device: self.read_device(r)?,
                uid: if self.graph_uid { Some(r.u64("uid")?) } else { None },
            }),
            RpcCommand::GetAllocSize => {
                let (device, tensor) = (self.read_device(r)?, self.read_record(r, "tensor")?);
                let srcs = match self.alloc_size {
                    AllocSizeForm::Tensor => &NO_SOURCES,
                    AllocSizeForm::TensorAndSources if self.record_len == TENSOR_RECORD => {
                        bytemuck::cast_ref(r.array::<{ MAX_SRC * TENSOR_RECORD }>("srcs")?)
                    }
                    // The server does not need them, so they are not translated.
                    AllocSizeForm::TensorAndSources => {
                        r.bytes("srcs", MAX_SRC * self.record_len)?;
                        &NO_SOURCES
                    }
                };
                Request::GetAllocSize(GetAllocSize { device, tensor, srcs })
            }
            RpcCommand::Hello => Request::Hello(Hello {
                conn_caps: match self.hello_form {
                    HelloForm::Caps => Some(*r.array("conn_caps")?),
                    HelloForm::Empty | HelloForm::Absent => None,
                },
            }),
            RpcCommand::SetTensor2d => {
                Request::SetTensor2d(SetTensor2d { head: self.read_set_tensor_2d_head(r)?, data: r.rest() })
            }
            RpcCommand::GetTensor2d => {
                let (tensor, [offset, size, n_copies, stride]) = self.read_rows(r)?;
                Request::GetTensor2d(GetTensor2d { tensor, offset, size, n_copies, stride })
            }
            RpcCommand::CommAllreduce => Request::CommAllreduce(CommAllreduce {
                device: self.read_device(r)?,
                tensor: self.read_record(r, "tensor")?,
            }),
            RpcCommand::BufferGetBase
            | RpcCommand::FreeBuffer
            | RpcCommand::BufferClear
            | RpcCommand::DeviceCount
            | RpcCommand::CommInit
            | RpcCommand::CommFree => return Request::decode(command, body, limits),
        };
        reader.finish(command.name())?;
        Ok(request)
    }

    fn read_set_tensor_head(&self, r: &mut Reader<'_>) -> Result<SetTensorHead, WireError> {
        let tensor = self.read_record(r, "tensor")?;
        let cache = self.cache_flag && r.bool("cache_flag")?;
        Ok(SetTensorHead { tensor, cache, offset: r.u64("offset")? })
    }

    fn read_set_tensor_2d_head(&self, r: &mut Reader<'_>) -> Result<SetTensor2dHead, WireError> {
        let (tensor, [offset, size, n_copies, stride]) = self.read_rows(r)?;
        Ok(SetTensor2dHead { tensor, offset, size, n_copies, stride })
    }

    fn read_rows(&self, r: &mut Reader<'_>) -> Result<(TensorRecord, [u64; 4]), WireError> {
        let tensor = self.read_record(r, "tensor")?;
        Ok((tensor, [r.u64("offset")?, r.u64("size")?, r.u64("n_copies")?, r.u64("stride")?]))
    }

    pub(in crate::rpc::wire) fn read_device(&self, r: &mut Reader<'_>) -> Result<u32, WireError> {
        if self.has_device_field { r.u32("device") } else { Ok(0) }
    }

    fn read_record(&self, r: &mut Reader<'_>, what: &'static str) -> Result<TensorRecord, WireError> {
        Ok(self.decode_record(r.bytes(what, self.record_len)?))
    }

    /// Decodes a record of `record_len` bytes, with its numbers as they are.
    pub(in crate::rpc::wire) fn decode_raw_record(&self, bytes: &[u8]) -> TensorRecord {
        if let Ok(whole) = bytes.try_into() {
            return TensorRecord::decode(whole);
        }
        if let Ok(long) = bytes.try_into() {
            return TensorRecord::decode(&long_names::shorten(long));
        }
        let mut padded = [0; TENSOR_RECORD];
        padded[..self.record_len].copy_from_slice(bytes);
        TensorRecord::decode(&padded)
    }

    /// Decodes a record of `record_len` bytes, and translates it to the newest version.
    pub(in crate::rpc::wire) fn decode_record(&self, bytes: &[u8]) -> TensorRecord {
        let mut record = self.decode_raw_record(bytes);
        if self.newest {
            return record;
        }
        let op = self.op(record.op);
        record.op = op.map_or(UNKNOWN_OP, OpCode::to_wire);
        match op {
            Some(OpCode::Unary) => {
                record.op_params[0] = self.unary_kind(record.op_params[0]).unwrap_or(UNKNOWN_KIND);
            }
            Some(OpCode::Scale) if !self.semantics.scale_bias => record.op_params[SCALE_BIAS] = 0,
            Some(OpCode::GroupNorm) if !self.semantics.group_norm_eps => {
                record.op_params[GROUP_NORM_EPS] = 1e-6_f32.to_bits() as i32;
            }
            Some(OpCode::Rope) if !self.semantics.rope_offset => record.op_params[ROPE_OFFSET] = 0,
            Some(OpCode::SoftMax) if !self.semantics.sinks => record.src[2..].fill(0),
            Some(OpCode::FlashAttnExt) => {
                if !self.semantics.sinks {
                    record.src[4..].fill(0);
                }
                if !self.semantics.softcap {
                    record.op_params[FLASH_ATTN_PRECISION] = std::mem::take(&mut record.op_params[FLASH_ATTN_SOFTCAP]);
                }
            }
            _ => {}
        }
        if !self.compute_flag {
            record.flags |= TensorRecord::FLAG_COMPUTE;
        }
        if !self.use_count {
            record.use_count = 0;
        }
        record
    }

    /// The op with this number; `None` if the version has none, or if the newest version no longer has it.
    pub(crate) fn op(&self, number: u32) -> Option<OpCode> {
        let (removed, next) = self.removed_ops();
        // Where the removed ops end, in this version's numbers.
        let end = if removed == 0 { 0 } else { self.op_number(next)? };
        let number = match number {
            n if n >= (OpCode::ALL.len() as u32) + removed => return None,
            n if n < end.saturating_sub(removed) => n,
            n if n < end => return None,
            n => n - removed,
        };
        let later = &ADDED_OPS[..self.missing_ops];
        let added_before = |number: u32| later.iter().filter(|op| op.to_wire() <= number).count() as u32;
        OpCode::from_wire(skip_added(number, added_before))
    }

    /// The number of UNARY's kind in the newest version, given that in this version; `None` if the version has none.
    pub(crate) fn unary_kind(&self, number: i32) -> Option<i32> {
        let later = &ADDED_UNARY_KINDS[..self.missing_unary_kinds];
        let added_before = |number: u32| later.iter().filter(|kind| kind.wire_number() as u32 <= number).count() as u32;
        let number = u32::try_from(number).ok().filter(|&n| n < UnaryKind::ALL.len() as u32)?;
        let number = skip_added(number, added_before) as i32;
        UnaryKind::ALL.get(number as usize).map(|_| number)
    }

    /// Checks that the newest version has the ops of all nodes of a graph, with the meaning that they have in this version.
    ///
    /// # Errors
    /// [`NotExpressible`] names the op or the parameter of the first node that has no counterpart.
    pub(crate) fn check_nodes(&self, graph: &GraphCompute<'_>) -> Result<(), NotExpressible> {
        if self.newest {
            return Ok(());
        }
        let mut nodes = None;
        for record in graph.tensors().iter_raw() {
            let Err(what) = self.check_raw_node(&record) else { continue };
            // The op of a leaf is irrelevant. Few graphs have a record that fails, so the set is built only then.
            let nodes = nodes.get_or_insert_with(|| graph.nodes().iter().collect::<HashSet<u64>>());
            if nodes.contains(&record.id) {
                return Err(self.not_expressible(what));
            }
        }
        Ok(())
    }

    /// Checks a record of this version as if it were a node. Returns what is not expressible in the newest version.
    fn check_raw_node(&self, record: &TensorRecord) -> Result<(), String> {
        let number = record.op;
        let Some(op) = self.op(number) else {
            let (removed, next) = self.removed_ops();
            let first = self.op_number(next).map_or(0, |end| end - removed);
            let name = number.checked_sub(first).and_then(|at| REMOVED_OPS.get(at as usize)).filter(|_| removed > 0);
            return Err(match name {
                Some(name) => format!("op {number} ({name}) that this server could run"),
                None => format!("op {number}"),
            });
        };
        match op {
            OpCode::Unary if self.unary_kind(record.op_params[0]).is_none() => {
                Err(format!("kind {} of {op}", record.op_params[0]))
            }
            OpCode::Glu if !self.has_glu(record.op_params[0]) => Err(format!("kind {} of {op}", record.op_params[0])),
            OpCode::Rope if !self.semantics.rope_modes.contains(&record.op_params[ROPE_MODE]) => {
                Err(format!("mode {} of {op}", record.op_params[ROPE_MODE]))
            }
            _ => Ok(()),
        }
    }
}

/// The newest number of what has `number` in a version: later additions before it have shifted it. `added_before` counts the
/// additions up to a newest number.
fn skip_added(number: u32, added_before: impl Fn(u32) -> u32) -> u32 {
    let mut newest = number;
    loop {
        // Grows towards the least fixed point, which is no addition itself: then the number before it would be one, too.
        let next = number + added_before(newest);
        if next == newest {
            return newest;
        }
        newest = next;
    }
}

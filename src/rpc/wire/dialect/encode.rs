//! Requests in the bytes of an older version.

use super::{AllocSizeForm, Dialect, HelloForm, Unsayable};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::{Command, REQUEST_HEADER, Request, SetTensor, SetTensorHead, TensorRecord};
use crate::tensor::DType;

impl Dialect {
    /// Appends a whole frame.
    ///
    /// # Errors
    /// [`Unsayable`], and nothing is appended, if the version lacks the command, or the op or type of a record.
    pub(crate) fn encode(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        if self.current {
            request.encode(out);
            return Ok(());
        }
        let start = out.len();
        let framed = self.frame(request, out);
        if framed.is_err() {
            out.truncate(start);
        }
        framed
    }

    /// Appends the frame of a SET_TENSOR up to its data: see [`SetTensorHead::encode`].
    ///
    /// # Errors
    /// [`Unsayable`], and nothing is appended, if the version lacks the type, or no receiver could take that much.
    pub(crate) fn encode_head(&self, head: &SetTensorHead, data_len: u64, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        let large = || self.no(format!("{} of {data_len} bytes", Command::SetTensor));
        if self.current {
            return head.encode(data_len, out).map_err(|_| large());
        }
        let start = out.len();
        let request = Request::SetTensor(SetTensor { head: head.clone(), data: &[] });
        self.encode(&request, out)?;
        let len = size(out, start, data_len);
        isize::try_from(len).map(drop).map_err(|_| large()).inspect_err(|_| out.truncate(start))
    }

    fn frame(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        let command = request.command();
        let start = out.len();
        out.push(self.number(command).ok_or_else(|| self.no(command.name()))?);
        out.extend_from_slice(&[0; REQUEST_HEADER - 1]);
        self.body(request, out)?;
        size(out, start, 0);
        Ok(())
    }

    fn body(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        match request {
            Request::AllocBuffer(r) => {
                self.device(r.device, out)?;
                out.extend_from_slice(&r.size.to_le_bytes());
            }
            Request::GetAlignment(r) => self.device(r.device, out)?,
            Request::GetMaxSize(r) => self.device(r.device, out)?,
            Request::GetDeviceMemory(r) => self.device(r.device, out)?,
            Request::GraphRecompute(r) => self.device(r.device, out)?,
            Request::BufferGetBase(r) => out.extend_from_slice(&r.remote_ptr.to_le_bytes()),
            Request::FreeBuffer(r) => out.extend_from_slice(&r.remote_ptr.to_le_bytes()),
            Request::BufferClear(r) => {
                out.extend_from_slice(&r.remote_ptr.to_le_bytes());
                out.push(r.value);
            }
            Request::SetTensor(r) => {
                self.record(&r.head.tensor, out)?;
                if self.cache_flag {
                    out.push(u8::from(r.head.cache));
                }
                out.extend_from_slice(&r.head.offset.to_le_bytes());
                out.extend_from_slice(r.data);
            }
            Request::SetTensorHash(r) => {
                self.record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.hash.to_le_bytes());
            }
            Request::GetTensor(r) => {
                self.record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.size.to_le_bytes());
            }
            Request::CopyTensor(r) => {
                self.record(&r.src, out)?;
                self.record(&r.dst, out)?;
            }
            Request::InitTensor(r) => self.record(&r.tensor, out)?,
            Request::MemsetTensor(r) => {
                self.record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.size.to_le_bytes());
                out.push(r.value);
            }
            Request::GraphCompute(graph) => {
                self.device(graph.device(), out)?;
                out.extend_from_slice(&(graph.nodes().len() as u32).to_le_bytes());
                graph.nodes().iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
                out.extend_from_slice(&(graph.tensors().len() as u32).to_le_bytes());
                graph.tensors().iter().try_for_each(|record| self.record(&record, out))?;
            }
            Request::GetAllocSize(r) => {
                self.device(r.device, out)?;
                self.record(&r.tensor, out)?;
                if self.alloc_size == AllocSizeForm::TensorAndSources {
                    r.srcs().iter().try_for_each(|record| self.record(&record, out))?;
                }
            }
            Request::Hello(r) => match self.hello {
                HelloForm::Caps => out.extend_from_slice(&r.conn_caps.unwrap_or_default()),
                HelloForm::Empty | HelloForm::Absent => {}
            },
            Request::DeviceCount(_) => {}
        }
        Ok(())
    }

    fn device(&self, device: u32, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        match device {
            _ if self.devices => out.extend_from_slice(&device.to_le_bytes()),
            0 => {}
            _ => return Err(self.no(format!("device {device}"))),
        }
        Ok(())
    }

    fn record(&self, record: &TensorRecord, out: &mut Vec<u8>) -> Result<(), Unsayable> {
        let mut record = record.clone();
        match DType::from_wire(record.dtype) {
            Some(dtype) if self.has_type(dtype) => {}
            Some(dtype) => return Err(self.no(dtype.name())),
            None => return Err(self.no(format!("type {}", record.dtype))),
        }
        let op = OpCode::from_wire(record.op).ok_or_else(|| self.no(format!("op {}", record.op)))?;
        record.op = self.op(op).ok_or_else(|| self.no(op.name()))?;
        let kind = record.op_params[0];
        match op {
            OpCode::Unary => {
                let unary = usize::try_from(kind).ok().and_then(|kind| UnaryKind::ALL.get(kind));
                record.op_params[0] =
                    unary.and_then(|unary| self.kind(unary)).ok_or_else(|| self.no(format!("kind {kind} of {op}")))?;
            }
            OpCode::Glu if !self.has_glu(kind) => return Err(self.no(format!("kind {kind} of {op}"))),
            _ => {}
        }
        if !self.compute_flag {
            record.flags &= !TensorRecord::FLAG_COMPUTE;
        }
        if !self.use_count {
            record.use_count = 0;
        }
        out.extend_from_slice(&record.encode());
        Ok(())
    }
}

/// Writes the size of a body into its header: what follows that, and so much that is yet to come.
fn size(out: &mut [u8], start: usize, more: u64) -> u64 {
    let size = more.saturating_add((out.len() - start - REQUEST_HEADER) as u64);
    out[start + 1..start + REQUEST_HEADER].copy_from_slice(&size.to_le_bytes());
    size
}

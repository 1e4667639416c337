//! Encoder of requests for servers of older versions.

use super::{AllocSizeForm, HelloForm, NotExpressible, VersionCodec};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::{REQUEST_HEADER, Request, RpcCommand, SetTensor, SetTensorHead, TensorRecord};
use crate::tensor::DType;

impl VersionCodec {
    /// Appends the frame of a request: header and body.
    ///
    /// # Errors
    /// [`NotExpressible`] if the version lacks the command, or the op or type of a record. Then nothing is appended.
    pub(crate) fn encode(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        if self.newest {
            match request {
                // A graph without a uid is not stored, which is uid 0 in the layout of 8.0.
                Request::GraphCompute(graph) if graph.uid().is_none() => {
                    Request::GraphCompute(graph.with_uid(0)).encode(out);
                }
                _ => request.encode(out),
            }
            return Ok(());
        }
        let start = out.len();
        let framed = self.encode_frame(request, out);
        if framed.is_err() {
            out.truncate(start);
        }
        framed
    }

    /// Appends the frame of a SET_TENSOR without its data: see [`SetTensorHead::encode`].
    ///
    /// # Errors
    /// [`NotExpressible`] if the version lacks the type, or if `data_len` exceeds the limit of all receivers. Then nothing is
    /// appended.
    pub(crate) fn encode_set_tensor_head(
        &self,
        head: &SetTensorHead,
        data_len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), NotExpressible> {
        let too_large = || self.not_expressible(format!("{} of {data_len} bytes", RpcCommand::SetTensor));
        if self.newest {
            return head.encode(data_len, out).map_err(|_| too_large());
        }
        let start = out.len();
        let request = Request::SetTensor(SetTensor { head: head.clone(), data: &[] });
        self.encode(&request, out)?;
        let len = write_body_size(out, start, data_len);
        isize::try_from(len).map(drop).map_err(|_| too_large()).inspect_err(|_| out.truncate(start))
    }

    fn encode_frame(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        let command = request.command();
        let start = out.len();
        out.push(self.command_number(command).ok_or_else(|| self.not_expressible(command.name()))?);
        out.extend_from_slice(&[0; REQUEST_HEADER - 1]);
        self.encode_body(request, out)?;
        write_body_size(out, start, 0);
        Ok(())
    }

    fn encode_body(&self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        match request {
            Request::AllocBuffer(r) => {
                self.encode_device(r.device, out)?;
                out.extend_from_slice(&r.size.to_le_bytes());
            }
            Request::GetAlignment(r) => self.encode_device(r.device, out)?,
            Request::GetMaxSize(r) => self.encode_device(r.device, out)?,
            Request::GetDeviceMemory(r) => self.encode_device(r.device, out)?,
            Request::GraphRecompute(r) => {
                self.encode_device(r.device, out)?;
                self.encode_uid(r.uid, out);
            }
            Request::BufferGetBase(r) => out.extend_from_slice(&r.remote_ptr.to_le_bytes()),
            Request::FreeBuffer(r) => out.extend_from_slice(&r.remote_ptr.to_le_bytes()),
            Request::BufferClear(r) => {
                out.extend_from_slice(&r.remote_ptr.to_le_bytes());
                out.push(r.value);
            }
            Request::SetTensor(r) => {
                self.encode_record(&r.head.tensor, out)?;
                if self.cache_flag {
                    out.push(u8::from(r.head.cache));
                }
                out.extend_from_slice(&r.head.offset.to_le_bytes());
                out.extend_from_slice(r.data);
            }
            Request::SetTensorHash(r) => {
                self.encode_record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.hash.to_le_bytes());
            }
            Request::GetTensor(r) => {
                self.encode_record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.size.to_le_bytes());
            }
            Request::CopyTensor(r) => {
                self.encode_record(&r.src, out)?;
                self.encode_record(&r.dst, out)?;
            }
            Request::InitTensor(r) => self.encode_record(&r.tensor, out)?,
            Request::MemsetTensor(r) => {
                self.encode_record(&r.tensor, out)?;
                out.extend_from_slice(&r.offset.to_le_bytes());
                out.extend_from_slice(&r.size.to_le_bytes());
                out.push(r.value);
            }
            Request::GraphCompute(graph) => {
                self.encode_device(graph.device(), out)?;
                self.encode_uid(graph.uid(), out);
                out.extend_from_slice(&(graph.nodes().len() as u32).to_le_bytes());
                graph.nodes().iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
                out.extend_from_slice(&(graph.tensors().len() as u32).to_le_bytes());
                graph.tensors().iter().try_for_each(|record| self.encode_record(&record, out))?;
            }
            Request::GetAllocSize(r) => {
                self.encode_device(r.device, out)?;
                self.encode_record(&r.tensor, out)?;
                if self.alloc_size == AllocSizeForm::TensorAndSources {
                    r.srcs().iter().try_for_each(|record| self.encode_record(&record, out))?;
                }
            }
            Request::Hello(r) => match self.hello_form {
                HelloForm::Caps => out.extend_from_slice(&r.conn_caps.unwrap_or_default()),
                HelloForm::Empty | HelloForm::Absent => {}
            },
            Request::DeviceCount(_) => {}
            Request::SetTensor2d(r) => {
                self.encode_record(&r.head.tensor, out)?;
                encode_numbers([r.head.offset, r.head.size, r.head.n_copies, r.head.stride], out);
                out.extend_from_slice(r.data);
            }
            Request::GetTensor2d(r) => {
                self.encode_record(&r.tensor, out)?;
                encode_numbers([r.offset, r.size, r.n_copies, r.stride], out);
            }
            Request::CommInit(r) => {
                self.encode_device(r.device, out)?;
                [r.rank, r.world, r.port].iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
                out.extend_from_slice(&r.host);
            }
            Request::CommAllreduce(r) => {
                self.encode_device(r.device, out)?;
                self.encode_record(&r.tensor, out)?;
            }
            Request::CommFree(r) => self.encode_device(r.device, out)?,
        }
        Ok(())
    }

    fn encode_device(&self, device: u32, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        match device {
            _ if self.has_device_field => out.extend_from_slice(&device.to_le_bytes()),
            0 => {}
            _ => return Err(self.not_expressible(format!("device {device}"))),
        }
        Ok(())
    }

    /// The number of a stored graph, where the version has one. 0: the server does not store the graph.
    fn encode_uid(&self, uid: Option<u64>, out: &mut Vec<u8>) {
        if self.graph_uid {
            out.extend_from_slice(&uid.unwrap_or(0).to_le_bytes());
        }
    }

    fn encode_record(&self, record: &TensorRecord, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        let mut record = record.clone();
        match DType::from_wire(record.dtype) {
            Some(dtype) if self.has_type(dtype) => {}
            Some(dtype) => return Err(self.not_expressible(dtype.name())),
            None => return Err(self.not_expressible(format!("type {}", record.dtype))),
        }
        let op = OpCode::from_wire(record.op).ok_or_else(|| self.not_expressible(format!("op {}", record.op)))?;
        record.op = self.op_number(op).ok_or_else(|| self.not_expressible(op.name()))?;
        let kind = record.op_params[0];
        match op {
            OpCode::Unary => {
                let unary = usize::try_from(kind).ok().and_then(|kind| UnaryKind::ALL.get(kind));
                record.op_params[0] = unary
                    .and_then(|unary| self.unary_number(unary))
                    .ok_or_else(|| self.not_expressible(format!("kind {kind} of {op}")))?;
            }
            OpCode::Glu if !self.has_glu(kind) => return Err(self.not_expressible(format!("kind {kind} of {op}"))),
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

fn encode_numbers(numbers: [u64; 4], out: &mut Vec<u8>) {
    numbers.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
}

/// Writes the length of a body into the header at `start`: the bytes behind the header, and `more` bytes that the caller sends
/// later. Returns the length.
fn write_body_size(out: &mut [u8], start: usize, more: u64) -> u64 {
    let size = more.saturating_add((out.len() - start - REQUEST_HEADER) as u64);
    out[start + 1..start + REQUEST_HEADER].copy_from_slice(&size.to_le_bytes());
    size
}

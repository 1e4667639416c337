//! Translation of requests of the newest version for servers of older ones.

use super::layout::{Field, fields};
use super::{NotExpressible, VersionCodec};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::frame::write_body_size;
use crate::rpc::wire::tensor::PackedRecord;
use crate::rpc::wire::{
    GraphRecompute, REQUEST_HEADER, Request, RpcCommand, SetTensor, SetTensorHead, TENSOR_RECORD, TensorRecord,
};
use crate::tensor::DType;

impl VersionCodec {
    /// Appends the frame of a request: header and body.
    ///
    /// # Errors
    /// [`NotExpressible`] if the version lacks the command, or the op or type of a record. Then nothing is appended.
    pub(crate) fn encode(self, request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        let start = out.len();
        match request {
            // A graph without a uid is not stored, which is uid 0 in the layout of 8.0.
            Request::GraphCompute(graph) => Request::GraphCompute(graph.with_uid(graph.uid().unwrap_or(0))).encode(out),
            Request::GraphRecompute(GraphRecompute { device, uid: None }) if !self.is_newest() => {
                Request::GraphRecompute(GraphRecompute { device: *device, uid: Some(0) }).encode(out);
            }
            _ => request.encode(out),
        }
        if self.is_newest() {
            return Ok(());
        }
        let newest = out.split_off(start);
        let translated = self.translate_frame(request, &newest[REQUEST_HEADER..], out);
        if translated.is_err() {
            out.truncate(start);
        }
        translated
    }

    /// Appends the frame of a SET_TENSOR without its data: see [`SetTensorHead::encode`].
    ///
    /// # Errors
    /// [`NotExpressible`] if the version lacks the type, or if `data_len` exceeds the limit of all receivers. Then nothing is
    /// appended.
    pub(crate) fn encode_set_tensor_head(
        self,
        head: &SetTensorHead,
        data_len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), NotExpressible> {
        let start = out.len();
        let request = Request::SetTensor(SetTensor { head: head.clone(), data: &[] });
        self.encode(&request, out)?;
        let len = write_body_size(out, start, data_len);
        let too_large = || self.not_expressible(format!("{} of {data_len} bytes", RpcCommand::SetTensor));
        isize::try_from(len).map(drop).map_err(|_| too_large()).inspect_err(|_| out.truncate(start))
    }

    fn translate_frame(
        self,
        request: &Request<'_>,
        mut newest: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), NotExpressible> {
        let (command, start) = (request.command(), out.len());
        out.push(self.command_number(command).ok_or_else(|| self.not_expressible(command.name()))?);
        out.extend_from_slice(&[0; REQUEST_HEADER - 1]);
        for &field in fields(command) {
            let (field_bytes, rest) = newest.split_at(VersionCodec::NEWEST.field_len(field, TENSOR_RECORD));
            newest = rest;
            let bytes = &field_bytes[..self.field_len(field, TENSOR_RECORD)];
            match field {
                Field::Record | Field::Sources => self.encode_records(bytes, out)?,
                Field::Device if bytes.is_empty() && field_bytes != [0; 4] => {
                    return Err(self.not_expressible(format!("device {}", field_bytes[0])));
                }
                _ => out.extend_from_slice(bytes),
            }
        }
        if let Request::GraphCompute(graph) = request {
            let (ids, records) = newest.split_at(newest.len() - graph.tensors().len() * TENSOR_RECORD);
            out.extend_from_slice(ids);
            self.encode_records(records, out)?;
        } else {
            out.extend_from_slice(newest);
        }
        write_body_size(out, start, 0);
        Ok(())
    }

    fn encode_records(self, records: &[u8], out: &mut Vec<u8>) -> Result<(), NotExpressible> {
        let start = out.len();
        out.extend_from_slice(records);
        out[start..].chunks_exact_mut(TENSOR_RECORD).try_for_each(|bytes| self.encode_record(PackedRecord::at(bytes)))
    }

    /// Translates a record of the newest version to this one.
    fn encode_record(self, record: &mut PackedRecord) -> Result<(), NotExpressible> {
        match DType::from_wire(record.dtype) {
            Some(dtype) if self.has_type(dtype) => {}
            Some(dtype) => return Err(self.not_expressible(dtype.name())),
            None => return Err(self.not_expressible(format!("type {}", { record.dtype }))),
        }
        let op = OpCode::from_wire(record.op);
        let op = op.ok_or_else(|| self.not_expressible(format!("op {}", { record.op })))?;
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
        if !self.has_compute_flag() {
            record.flags &= !TensorRecord::FLAG_COMPUTE;
        }
        if !self.has_use_count() {
            record.use_count = 0;
        }
        Ok(())
    }
}

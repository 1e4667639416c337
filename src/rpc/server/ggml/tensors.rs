//! Requests that read or write tensor data: SET_TENSOR, SET_TENSOR_HASH, GET_TENSOR, COPY_TENSOR, MEMSET_TENSOR, INIT_TENSOR.

use std::time::Instant;

use log::debug;

use super::prefault::MIN_UPLOAD_BYTES;
use super::session::GgmlSession;
use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::rpc::server::counters::DataSource;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::handle_table::LocatedTensor;
use crate::rpc::server::session::host_staged_copy;
use crate::rpc::server::tensor_cache::{CacheReader, EntryKey, TensorCache};
use crate::rpc::wire::{
    CopyTensor, GetTensor, InitTensor, MemsetTensor, Response, SET_TENSOR_HEAD, SetTensorHash, SetTensorHead,
};
use crate::tensor::TensorDesc;

/// Chunk size of the download of a large tensor, in bytes. While a chunk is sent, the device reads the next one.
const DOWNLOAD_CHUNK_BYTES: u64 = 1 << 20;

impl GgmlSession<'_> {
    /// Fills a region with `value`; an empty region is allowed.
    pub(super) fn fill(&mut self, device: u32, region: Region, value: u8) -> Result<(), SessionError> {
        if region.bytes() > 0 {
            self.queues.get(device)?.fill(region, value)?;
        }
        Ok(())
    }

    pub(super) fn memset_tensor(&mut self, request: &MemsetTensor) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, request.size)?);
        self.fill(device, region, request.value)
    }

    /// INIT_TENSOR: clears the padding that the device needs after a tensor, as far as it lies in the buffer.
    pub(super) fn init_tensor(&mut self, request: &InitTensor) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let device = tensor.entry.device;
        let extent = tensor.desc.extent() as u64;
        let reserved = self.resources.device(device)?.alloc_size(&tensor.desc);
        let reserved = reserved.min(tensor.entry.buffer.bytes() - tensor.start);
        let region = tensor.region(extent, reserved.saturating_sub(extent))?;
        self.fill(device, region, 0)
    }

    /// SET_TENSOR with a body of `len` bytes: streams its data to the device and, if the client requests it, to the tensor
    /// cache.
    pub(super) fn set_tensor(&mut self, len: usize) -> Result<(), SessionError> {
        let head = SetTensorHead::decode(&self.connection.read_array()?)?;
        let len = (len - SET_TENSOR_HEAD) as u64;
        let tensor = self.resources.handles.locate(&head.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(head.offset, len)?);
        if len == 0 {
            return Ok(());
        }
        let cache = self.resources.server.tensor_cache.as_ref().filter(|_| head.cache);
        let mut cache_writer = cache.and_then(|cache| cache.begin_write(self.cache_owner, len));
        let desc = tensor.desc;
        let whole = (head.offset == 0 && len == desc.extent() as u64).then_some(&desc);
        if len >= MIN_UPLOAD_BYTES {
            self.prefault.record_upload(device, &region)?;
        }
        let queue = self.queues.get(device)?;
        queue.charge_upload(len, self.resources.server.config.reply_timeout)?;
        queue.upload_from(region, whole, |chunk| {
            self.connection.read_exact(chunk)?;
            cache_writer.iter_mut().for_each(|writer| writer.update(chunk));
            Ok(())
        })?;
        if let Some(writer) = cache_writer {
            writer.commit();
        }
        self.connection.audit().count_data(DataSource::Client, len);
        Ok(())
    }

    /// SET_TENSOR_HASH: fills a tensor from the tensor cache, and replies whether the data was found.
    pub(super) fn set_tensor_hash(&mut self, request: &SetTensorHash) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let extent = tensor.desc.extent() as u64;
        // The message has no length: the data is the rest of the tensor after `offset`.
        let len = extent.saturating_sub(request.offset);
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, len)?);
        let whole = (request.offset == 0).then_some(tensor.desc);
        let found = self.fill_cached(device, region, whole.as_ref(), request.hash)?;
        self.reply(&Response::SetTensorHash(found))
    }

    /// Fills a region with the cached data of `hash`, and returns whether it was found. After `false` the content of the region
    /// is undefined: the client sends the data next.
    fn fill_cached(
        &mut self,
        device: u32,
        region: Region,
        tensor: Option<&TensorDesc>,
        hash: u64,
    ) -> Result<bool, SessionError> {
        let cache = self.resources.server.tensor_cache.as_ref().filter(|_| region.bytes() > 0);
        let Some(cache) = cache else { return Ok(false) };
        let key = EntryKey { owner: self.cache_owner, fnv: hash };
        let (bytes, cached) = (region.bytes(), cache.lookup(key, region.bytes()));
        self.connection.audit().count_cache_lookup(cached.is_some());
        let Some(cached) = cached else { return Ok(false) };
        let queue = self.queues.get(device)?;
        queue.charge_upload(region.bytes(), self.resources.server.config.reply_timeout)?;
        let found = upload_cached(cache, key, cached, &mut **queue, region, tensor)?;
        if found {
            self.connection.audit().count_data(DataSource::Cache, bytes);
            debug!("{}: tensor data {hash:016x} loaded from the cache", self.resources.peer);
        }
        Ok(found)
    }

    /// GET_TENSOR: downloads and sends the data in chunks, so that the transfers overlap. The chunks are small if host memory
    /// is short.
    pub(super) fn get_tensor(&mut self, request: &GetTensor) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, request.size)?);
        if request.size == 0 {
            return self.reply(&Response::GetTensor(&[]));
        }
        let timeout = self.resources.server.config.reply_timeout;
        let (queue, connection) = (self.queues.get(device)?, &mut self.connection);
        let (piece, _charge) = self.resources.memory.reply_piece(request.size, DOWNLOAD_CHUNK_BYTES);
        let mut download = |at: u64| queue.download(region.subregion(at, piece.min(request.size - at))?);
        let mut next = Some(download(0)?);
        let mut at = 0;
        while let Some(chunk) = next.take() {
            let after = at + piece.min(request.size - at);
            if after < request.size {
                next = Some(download(after)?);
            }
            let bytes = chunk.wait(Some(Instant::now() + timeout))?;
            if at == 0 {
                connection.begin_response(request.size, &bytes)?;
            } else {
                connection.send_bytes(&bytes)?;
            }
            at = after;
        }
        Ok(())
    }

    /// COPY_TENSOR: copies within a device, directly between devices, or through the host, in this order of preference. Replies
    /// false if the sizes differ or the device cannot copy.
    pub(super) fn copy_tensor(&mut self, request: &CopyTensor) -> Result<(), SessionError> {
        let handles = &self.resources.handles;
        let (src, dst) = (handles.locate(&request.src)?, handles.locate(&request.dst)?);
        let whole = |tensor: &LocatedTensor<'_>| tensor.region(0, tensor.desc.extent() as u64);
        let (from, to) = (whole(&src)?, whole(&dst)?);
        let (src_device, dst_device) = (src.entry.device, dst.entry.device);
        let copied = if from.bytes() != to.bytes() {
            false
        } else if from.bytes() == 0 {
            true
        } else if src_device == dst_device {
            self.queues.get(dst_device)?.copy_from(from, to, None)?.is_submitted()
        } else {
            let ready = self.queues.get(src_device)?.mark();
            let queue = self.queues.get(dst_device)?;
            let copied = queue.copy_from(from.clone(), to.clone(), Some(&ready))?.is_submitted();
            if copied {
                // Later work of the source's queue may overwrite the source, so it must wait for the copy.
                let read = queue.mark();
                self.queues.get(src_device)?.wait(&read)?;
            } else {
                let timeout = self.resources.server.config.reply_timeout;
                let [src_queue, dst_queue] = self.queues.get_pair(src_device, dst_device)?;
                let memory = &self.resources.memory;
                host_staged_copy::copy((&mut **src_queue, &from), (&mut **dst_queue, &to), memory, timeout)?;
            }
            true
        };
        self.reply(&Response::CopyTensor(copied))
    }
}

/// Uploads data from the tensor cache. Returns false if the file cannot be read or its content does not match `key`: then the
/// file is removed from the cache, and the content of the region is undefined.
///
/// # Errors
/// Errors of the queue.
fn upload_cached(
    cache: &TensorCache,
    key: EntryKey,
    mut cached: CacheReader,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
) -> Result<bool, DeviceError> {
    let read = match queue.upload_from(region, tensor, |chunk| cached.read(chunk)) {
        Ok(()) => cached.verify(),
        Err(UploadError::Source(e)) => Err(e),
        Err(UploadError::Device(e)) => return Err(e),
    };
    if let Err(e) = read {
        cache.remove_invalid(key, &e);
        return Ok(false);
    }
    Ok(true)
}

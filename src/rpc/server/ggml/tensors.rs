//! Bytes of tensors: SET_TENSOR, SET_TENSOR_HASH, GET_TENSOR, COPY_TENSOR, MEMSET_TENSOR, INIT_TENSOR.

use std::time::Instant;

use log::debug;

use super::session::GgmlSession;
use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::handle_table::Located;
use crate::rpc::server::session::{host_staged_copy, upload};
use crate::rpc::server::tensor_cache::{Cache, CacheReader};
use crate::rpc::wire::{
    CopyTensor, GetTensor, InitTensor, MemsetTensor, Response, SET_TENSOR_HEAD, SetTensorHash, SetTensorHead,
};
use crate::tensor::TensorDesc;

/// Pieces in which a large tensor is read: while one is sent, the device reads the next.
const PIECE: u64 = 1 << 20;

impl GgmlSession<'_> {
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

    /// Clears what a device reserves behind a tensor's last byte, as far as it lies in the buffer.
    pub(super) fn init_tensor(&mut self, request: &InitTensor) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let device = tensor.entry.device;
        let extent = tensor.desc.extent() as u64;
        let reserved = self.resources.device(device)?.alloc_size(&tensor.desc);
        let reserved = reserved.min(tensor.entry.buffer.bytes() - tensor.start);
        let region = tensor.region(extent, reserved.saturating_sub(extent))?;
        self.fill(device, region, 0)
    }

    /// Streams the data behind a SET_TENSOR's head to its place.
    pub(super) fn set_tensor(&mut self, len: usize) -> Result<(), SessionError> {
        let head = SetTensorHead::decode(&self.connection.array::<SET_TENSOR_HEAD>()?)?;
        let len = (len - SET_TENSOR_HEAD) as u64;
        let tensor = self.resources.handles.locate(&head.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(head.offset, len)?);
        if len == 0 {
            return Ok(());
        }
        let cache = self.resources.server.tensor_cache.as_ref().filter(|_| head.cache);
        let mut keeper = cache.and_then(|cache| cache.keep(len));
        let whole = tensor.desc;
        let whole = (head.offset == 0 && len == whole.extent() as u64).then_some(&whole);
        self.prefault.uploaded(device, &region)?;
        upload::receive(&mut self.connection, self.queues.get(device)?, region, whole, |piece| {
            if let Some(keeper) = &mut keeper {
                keeper.update(piece);
            }
        })?;
        if let Some(keeper) = keeper {
            keeper.commit();
        }
        Ok(())
    }

    pub(super) fn set_tensor_hash(&mut self, request: &SetTensorHash) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let extent = tensor.desc.extent() as u64;
        // The message has no length: it is the rest of the tensor.
        let len = extent.saturating_sub(request.offset);
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, len)?);
        let whole = (request.offset == 0).then_some(tensor.desc);
        let found = self.fill_cached(device, region, whole.as_ref(), request.hash)?;
        self.reply(&Response::SetTensorHash(found))
    }

    /// Fills a region with cached data. `false` may leave other bytes in it: the client writes it next.
    fn fill_cached(
        &mut self,
        device: u32,
        region: Region,
        tensor: Option<&TensorDesc>,
        hash: u64,
    ) -> Result<bool, SessionError> {
        let cache = self.resources.server.tensor_cache.as_ref().filter(|_| region.bytes() > 0);
        let Some(cache) = cache else { return Ok(false) };
        let Some(hit) = cache.find(hash, region.bytes()) else { return Ok(false) };
        let found = load_cached(cache, hash, hit, self.queues.get(device)?, region, tensor)?;
        if found {
            debug!("{}: {hash:016x} comes from the cache", self.resources.peer);
        }
        Ok(found)
    }

    pub(super) fn get_tensor(&mut self, request: &GetTensor) -> Result<(), SessionError> {
        let tensor = self.resources.handles.locate(&request.tensor)?;
        let (device, region) = (tensor.entry.device, tensor.region(request.offset, request.size)?);
        if request.size == 0 {
            return self.reply(&Response::GetTensor(&[]));
        }
        let timeout = self.resources.server.config.device_timeout;
        let (queue, connection) = (self.queues.get(device)?, &mut self.connection);
        let mut piece = |at: u64| queue.download(region.part(at, PIECE.min(request.size - at))?);
        let mut next = Some(piece(0)?);
        let mut at = 0;
        while let Some(ticket) = next.take() {
            let after = at + PIECE.min(request.size - at);
            if after < request.size {
                next = Some(piece(after)?);
            }
            let bytes = ticket.wait(Some(Instant::now() + timeout))?;
            if at == 0 {
                connection.send_first(request.size, &bytes)?;
            } else {
                connection.send_bytes(&bytes)?;
            }
            at = after;
        }
        Ok(())
    }

    pub(super) fn copy_tensor(&mut self, request: &CopyTensor) -> Result<(), SessionError> {
        let handles = &self.resources.handles;
        let (src, dst) = (handles.locate(&request.src)?, handles.locate(&request.dst)?);
        let whole = |tensor: &Located<'_>| tensor.region(0, tensor.desc.extent() as u64);
        let (from, to) = (whole(&src)?, whole(&dst)?);
        let (reads, writes) = (src.entry.device, dst.entry.device);
        let copied = if from.bytes() != to.bytes() {
            false
        } else if from.bytes() == 0 {
            true
        } else if reads == writes {
            self.queues.get(writes)?.copy_from(from, to, None)?.is_submitted()
        } else {
            let ready = self.queues.get(reads)?.mark();
            let queue = self.queues.get(writes)?;
            let copied = queue.copy_from(from.clone(), to.clone(), Some(&ready))?.is_submitted();
            if copied {
                // The source may be overwritten only after the copy has read it.
                let read = queue.mark();
                self.queues.get(reads)?.wait(&read)?;
            } else {
                let timeout = self.resources.server.config.device_timeout;
                let [a, b] = self.queues.two(reads, writes)?;
                host_staged_copy::copy((a, &from), (b, &to), timeout)?;
            }
            true
        };
        self.reply(&Response::CopyTensor(copied))
    }
}

/// Uploads what was found in the tensor cache. False when the file is not what was once written: it is dropped from the cache,
/// and the region holds anything.
///
/// # Errors
/// Those of the queue.
fn load_cached(
    cache: &Cache,
    hash: u64,
    mut hit: CacheReader,
    queue: &mut dyn Queue,
    region: Region,
    tensor: Option<&TensorDesc>,
) -> Result<bool, DeviceError> {
    let read = match queue.upload_from(region, tensor, |piece| hit.read(piece)) {
        Ok(()) => hit.verify(),
        Err(UploadError::Source(e)) => Err(e),
        Err(UploadError::Device(e)) => return Err(e),
    };
    if let Err(e) = read {
        cache.drop_file(hash, &e);
        return Ok(false);
    }
    Ok(true)
}

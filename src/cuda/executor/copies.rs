//! Copies between CUDA regions, of one device or two.

use super::{CudaExecutor, memory};
use crate::cuda::context::{DeviceContext, TransferBlock};
use crate::cuda::copy::{self, SEGMENT};
use crate::cuda::events::Stream;
use crate::cuda::memory::DeviceMemory;
use crate::device::{DeviceError, Region};
use std::sync::Arc;

impl CudaExecutor {
    /// Submits a copy between CUDA regions. Overlapping ranges go through temporary memory.
    pub(in crate::cuda) fn copy(&mut self, src: &Region, dst: &Region) -> Result<(), DeviceError> {
        if src.bytes() == 0 {
            return Ok(());
        }
        let (from, to) = ((memory(src)?, src.offset()), (memory(dst)?, dst.offset()));
        let (bytes, stream) = (src.bytes(), self.stream()?);
        let source = from.0.context();
        let is_local = source.gpu.ordinal == self.context.gpu.ordinal;
        let is_peer = !is_local && self.context.peers.has(source.gpu.ordinal);
        let mut read = self.row_access(src, 0..bytes, false)?;
        if !is_local {
            // Weights of another device are converted there, and copies through the host read them there.
            read.stream = self.source_stream(source)?;
        }
        // A thread that has a lock must not wait for pinned memory: others wait for the lock with blocks of it.
        let through_host = !is_local && !is_peer;
        let blocks = if through_host { self.staging_blocks(bytes)? } else { Vec::new() };
        // After that wait, which ends with an event.
        self.retain((src.clone(), dst.clone()))?;
        let _rows = self.lock_rows(&[read, self.row_access(dst, 0..bytes, true)?])?;
        if is_peer {
            // The copy is on this device's stream, after the conversion.
            self.wait_for_conversion(from.0, &stream)?;
            return copy::copy_peer(&stream, from, to, bytes);
        }
        if !is_local {
            return self.copy_through_host(from, to, bytes, blocks);
        }
        let overlap = from.0.address() == to.0.address() && from.1 < to.1 + bytes && to.1 < from.1 + bytes;
        if !overlap {
            return copy::copy_within_device(&stream, from, to, bytes);
        }
        if from.1 == to.1 {
            return Ok(());
        }
        let reservations = (self.budget.reserve(bytes)?, self.context.budget.reserve(bytes)?);
        let temporary = Arc::new((DeviceMemory::uninitialized(&self.context, bytes, &stream)?, reservations));
        self.events.retain_until(self.numbers.next(), Box::new(Arc::clone(&temporary)));
        copy::copy_within_device(&stream, from, (&temporary.0, 0), bytes)?;
        copy::copy_within_device(&stream, (&temporary.0, 0), to, bytes)
    }

    /// One block of pinned memory, or two if there is a second one.
    fn staging_blocks(&mut self, bytes: u64) -> Result<Vec<TransferBlock>, DeviceError> {
        let size = bytes.min(SEGMENT as u64) as usize;
        let mut blocks = vec![self.upload_block(size)?];
        if bytes > SEGMENT as u64 {
            blocks.extend(self.try_upload_block(size));
        }
        Ok(blocks)
    }

    fn copy_through_host(
        &mut self,
        from: (&DeviceMemory, u64),
        to: (&DeviceMemory, u64),
        bytes: u64,
        blocks: Vec<TransferBlock>,
    ) -> Result<(), DeviceError> {
        let from_stream = self.source_stream(from.0.context())?;
        let (retained, done) = copy::copy_through_host((&from_stream, &*self.stream()?), from, to, bytes, blocks);
        if done.is_err() {
            // No event orders the block's release behind a copy into it.
            from_stream.wait_out(|| self.context.poll_queues());
            self.context.bind()?;
        }
        self.retain_block(retained)?;
        done
    }

    /// The stream on another device for copies from there.
    fn source_stream(&mut self, source: &DeviceContext) -> Result<Arc<Stream>, DeviceError> {
        if let Some(stream) = self.source_streams.get(&source.gpu.ordinal) {
            return Ok(Arc::clone(stream));
        }
        let stream = Arc::new(Stream::new(source.primary())?);
        self.source_streams.insert(source.gpu.ordinal, Arc::clone(&stream));
        self.context.bind()?;
        Ok(stream)
    }
}

//! Copies between CUDA regions, of one device or two.

use super::{CudaExecutor, memory};
use crate::cuda::context::DeviceContext;
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
        self.retain((src.clone(), dst.clone()))?;
        let (from, to) = ((memory(src)?, src.offset()), (memory(dst)?, dst.offset()));
        let (bytes, stream) = (src.bytes(), self.stream()?);
        let source = from.0.context();
        if source.gpu.ordinal != self.context.gpu.ordinal {
            if self.context.peers.has(source.gpu.ordinal) {
                return copy::copy_peer(&stream, from, to, bytes);
            }
            return self.copy_through_host(from, to, bytes);
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

    fn copy_through_host(
        &mut self,
        from: (&DeviceMemory, u64),
        to: (&DeviceMemory, u64),
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let from_stream = self.source_stream(from.0.context())?;
        let size = (bytes as usize).min(SEGMENT);
        let mut blocks = vec![self.upload_block(size)?];
        if bytes > SEGMENT as u64 {
            blocks.extend(self.try_upload_block(size));
        }
        let (retained, done) = copy::copy_through_host((&from_stream, &*self.stream()?), from, to, bytes, blocks);
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

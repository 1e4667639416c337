//! Uploads and downloads of regions, through pinned memory.

use super::{CudaExecutor, memory};
use crate::cuda::commands::{Download, Downloaded};
use crate::cuda::context::TransferBlock;
use crate::cuda::copy::{self, SEGMENT, SHARED_SEGMENT, UploadSegment};
use crate::cuda::pinned::is_pinned;
use crate::device::{DeviceError, Region, UploadSource};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

impl CudaExecutor {
    /// As `upload_block`, but never blocks. A thread that has a block must not wait for another one: all blocks could be with such queues.
    pub(super) fn try_upload_block(&self, bytes: usize) -> Option<TransferBlock> {
        self.context.upload_memory.acquire_share(&self.uploads, bytes)
    }

    /// A block of pinned memory for uploads and copies through the host. Blocks while the queue has its share, or others have all:
    /// until copies that run are done.
    pub(super) fn upload_block(&mut self, bytes: usize) -> Result<TransferBlock, DeviceError> {
        let (context, events, uploads) =
            (Arc::clone(&self.context), Arc::clone(&self.events), Arc::clone(&self.uploads));
        if let Some(block) = context.upload_memory.acquire_share(&uploads, bytes) {
            return Ok(block);
        }
        // Blocks are released after an event.
        self.record()?;
        let mut block = None;
        let acquire = || {
            self.timeline.poll();
            block = context.upload_memory.acquire_share(&uploads, bytes);
            if block.is_none() {
                // The queue's own copies are done, so others have all.
                context.poll_queues();
                block = context.upload_memory.acquire_share(&uploads, bytes);
            }
            Ok(block.is_some())
        };
        let check = || self.timeline.failure().map_or_else(|| events.check(), Err);
        events.wait_until(acquire, check)?;
        context.bind()?;
        block.ok_or_else(|| DeviceError::Bug("no block of pinned memory".to_owned()))
    }

    /// Uploads a region.
    pub(in crate::cuda) fn upload(&mut self, dst: &Region, mut src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.retain(dst.clone())?;
        let mut until = self.numbers.next();
        self.forget_overwritten(dst)?;
        // Unpacking waits for other streams, and other queues wait for pinned memory: so it comes before a block of it is taken.
        drop(self.lock_rows(&[self.row_access(dst, 0..dst.bytes(), true)?])?);
        let stream = self.stream()?;
        // Uploads of at most one segment are staged even from pinned memory: the host copy is faster than waiting for the stream.
        if let UploadSource::Borrowed(bytes) = &src
            && bytes.len() > SEGMENT
            && is_pinned(bytes)
        {
            return self.upload_pinned(dst, bytes);
        }
        let mut at = 0;
        while at < dst.bytes() {
            let n = (dst.bytes() - at).min(SEGMENT as u64) as usize;
            let mut segment = match self.segment.take() {
                Some(shared) if shared.has_room(n) => shared,
                full => {
                    if let Some(full) = full {
                        self.retain_block(full)?;
                    }
                    let size = n.max(SHARED_SEGMENT);
                    UploadSegment::new(self.upload_block(size)?, size)
                }
            };
            let filled = segment.fill(n, |piece| match &mut src {
                UploadSource::Borrowed(bytes) => {
                    let (next, rest) = bytes.split_at(piece.len());
                    piece.copy_from_slice(next);
                    *bytes = rest;
                    Ok(())
                }
                UploadSource::Writer(fill) => fill(piece).map_err(DeviceError::from),
            });
            // The source of the bytes may have read them from another GPU, which made that GPU's context current.
            let copied = filled.and_then(|()| self.context.bind()).and_then(|()| {
                // Each segment ends with an event, and so does a wait for pinned memory.
                self.retain_again(&mut until, dst.clone());
                let _rows = self.lock_rows(&[self.row_access(dst, at..at + n as u64, true)?])?;
                segment.submit(&stream, (memory(dst)?, dst.offset() + at), n)
            });
            if segment.is_shared() {
                self.segment = Some(segment);
            } else {
                self.retain_block(segment)?;
            }
            copied?;
            at += n as u64;
        }
        Ok(())
    }

    /// Retains pinned memory until the work so far is done, and records the event after it: other queues wait for that memory,
    /// and this one may have no point for long.
    pub(super) fn retain_block(&mut self, block: impl Any + Send) -> Result<(), DeviceError> {
        self.events.retain_until(self.numbers.next(), Box::new(block));
        self.record().map(drop)
    }

    /// Copies pinned bytes without staging, and blocks until the copy is done, because the bytes are only borrowed.
    fn upload_pinned(&mut self, dst: &Region, bytes: &[u8]) -> Result<(), DeviceError> {
        // An abort or a failure of earlier work ends this wait, before any copy reads the bytes.
        self.wait_for_stream()?;
        // The bytes are borrowed until the wait below ends: with the copy, or with a lost device. Then pinned memory is not released
        // any more (`bind_for_release`) while the device may read it.
        let rows = self.lock_rows(&[self.row_access(dst, 0..dst.bytes(), true)?])?;
        copy::upload_pinned(&*self.stream()?, memory(dst)?, dst.offset(), bytes)?;
        drop(rows);
        let done = self.record().and_then(|seq| self.events.wait_reached(seq, || Ok(())));
        if done.is_err() {
            self.stream()?.wait_out(|| self.context.poll_queues());
        }
        done?;
        self.context.bind()
    }

    /// Downloads regions into one block with one event after all copies, that of a point. Without pinned memory for all, downloads
    /// them in pieces and blocks.
    pub(in crate::cuda) fn download(&mut self, download: Download) -> Result<(), DeviceError> {
        let Download { srcs, ranges, result, point } = download;
        self.retain(srcs.clone())?;
        let mut until = self.numbers.next();
        let rows = srcs.iter().map(|src| self.row_access(src, 0..src.bytes(), false)).collect::<Result<Vec<_>, _>>()?;
        // As for uploads, before a block of pinned memory is taken.
        drop(self.lock_rows(&rows)?);
        let end = ranges.last().map_or(0, |range| range.end);
        let (context, downloads) = (Arc::clone(&self.context), Arc::clone(&self.downloads));
        let mut block = context.download_memory.acquire_share(&downloads, end);
        if block.is_none() && (end as u64) <= context.download_memory.budget.limit() {
            // After the earlier work of this queue, reads that were dropped, or that another thread takes, release theirs.
            self.wait_for_stream()?;
            block = context.download_memory.acquire_share(&downloads, end);
        }
        let Some(mut block) = block else {
            let bytes = srcs.iter().map(|src| self.download_in_pieces(src)).collect::<Result<_, _>>()?;
            let _ = result.set(Downloaded::Bytes(bytes));
            return self.mark(point);
        };
        let stream = self.stream()?;
        // Conversions and waits end with an event.
        self.retain_again(&mut until, srcs.clone());
        let rows = self.lock_rows(&rows)?;
        let mut parts = srcs.iter().zip(&ranges).filter(|(_, range)| !range.is_empty());
        let copied = parts.try_for_each(|(src, range)| {
            copy::download(&stream, (memory(src)?, src.offset()), &mut block, range.clone())
        });
        drop(rows);
        let _ = result.set(Downloaded::Block(block));
        // Retain the block even if a copy failed: earlier copies into it may be running.
        self.events.retain_until(self.numbers.next(), Box::new(result));
        copied?;
        self.mark(point)
    }

    /// Downloads a region through blocks for uploads: one piece arrives while the one before is copied to the result.
    fn download_in_pieces(&mut self, src: &Region) -> Result<Vec<u8>, DeviceError> {
        let (mut out, mut pieces) = (Vec::new(), VecDeque::with_capacity(2));
        for at in (0..src.bytes()).step_by(SEGMENT) {
            let n = (src.bytes() - at).min(SEGMENT as u64) as usize;
            let mut free = self.try_upload_block(n);
            while free.is_none() && !pieces.is_empty() {
                self.finish_piece(&mut pieces, &mut out)?;
                self.timeline.poll();
                free = self.try_upload_block(n);
            }
            let mut block = free.map_or_else(|| self.upload_block(n), Ok)?;
            let rows = self.lock_rows(&[self.row_access(src, at..at + n as u64, false)?])?;
            let copied = copy::download(&*self.stream()?, (memory(src)?, src.offset() + at), &mut block, 0..n);
            drop(rows);
            let block = Arc::new(block);
            self.events.retain_until(self.numbers.next(), Box::new(Arc::clone(&block)));
            copied?;
            pieces.push_back((self.record()?, block, n));
            if pieces.len() == 2 {
                self.finish_piece(&mut pieces, &mut out)?;
            }
        }
        while !pieces.is_empty() {
            self.finish_piece(&mut pieces, &mut out)?;
        }
        Ok(out)
    }

    /// Waits for the oldest piece of a download.
    fn finish_piece(
        &mut self,
        pieces: &mut VecDeque<(u64, Arc<TransferBlock>, usize)>,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let Some((seq, block, n)) = pieces.pop_front() else { return Ok(()) };
        self.events.wait_reached(seq, || self.events.check())?;
        out.extend_from_slice(block.block.slice(n).unwrap_or_default());
        self.context.bind()
    }
}

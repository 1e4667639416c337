//! Handler for LOAD: fills a span with a slice of a tensor in a GGUF file on the server's own disk. The tensor is identified by
//! the digest of all of its bytes.

use std::time::Instant;

use super::error::ExtendedError;
use super::session::ExtendedSession;
use super::spans;
use super::transfers::tensor_of_shape;
use crate::device::{Region, TRANSFER_CHUNK_BYTES};
use crate::rpc::server::counters::DataSource;
use crate::rpc::server::gguf_index::{GgufIndex, IndexedTensor, LoadTarget, WantedTensor};
use crate::rpc::server::log_limits::{LogKind, LogLimits};
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::ext::{ExtResponse, Load};
use crate::tensor::TensorDesc;

/// Host memory of a LOAD: the buffer through which a file is hashed, and the staging buffer of a small upload.
const READ_BYTES: u64 = 2 * TRANSFER_CHUNK_BYTES;

/// Counts of a session's LOADs, for the log.
#[derive(Default)]
pub(super) struct LoadCounts {
    found: u64,
    bytes: u64,
    missed: u64,
}

impl LoadCounts {
    fn count(&mut self, found: bool, bytes: u64) {
        if found {
            self.found += 1;
            self.bytes += bytes;
        } else {
            self.missed += 1;
        }
    }

    /// Logs the counts, unless there were no LOADs.
    pub(super) fn log(&self, logs: &LogLimits, peer: PeerAddr) {
        let LoadCounts { found, bytes, missed } = self;
        if found + missed > 0 {
            let text = format_args!(
                "{peer}: {found} tensors ({} MiB) were loaded from this server's disk, {missed} were not found there",
                bytes >> 20
            );
            logs.log(peer, LogKind::LoadTotals, text);
        }
    }
}

impl ExtendedSession<'_> {
    /// Serves a LOAD. To verify the digest, all of the tensor is read and hashed, also for a small slice: its cost in time is
    /// that of a LOAD of the whole tensor. Its cost in memory does not depend on the tensor.
    pub(super) fn load_by_digest(&mut self, request: &Load<'_>) -> Result<(), SessionError> {
        let bytes = request.span.len;
        request.runs.check_bounds(request.bytes).map_err(ExtendedError::from)?;
        if request.runs.bytes() != bytes {
            return Err(ExtendedError::SliceLength { slice: request.runs.bytes(), span: bytes }.into());
        }
        let (device, region) = spans::resolve_span(&self.resources.handles, &request.span)?;
        let tensor = request.shape.map(|shape| tensor_of_shape(&shape, bytes)).transpose()?;
        self.queues.get_on_device(request.queue, device)?;
        let found = match &self.resources.server.gguf_index {
            // Nothing is read for an empty slice.
            Some(index) if bytes > 0 => match &index.find(request.bytes, &request.digest)[..] {
                // Replied before anything is waited for: the time must not depend on the files that there are.
                [] => false,
                candidates => match self.resources.memory.wait(READ_BYTES) {
                    Ok(_charge) => self.load_from_index(index, candidates, request, &region, tensor.as_ref())?,
                    Err(e) => {
                        let peer = self.resources.peer;
                        let text = format_args!("{peer}: cannot load a tensor from disk: {e}");
                        self.resources.server.logs.log(peer, LogKind::RefusedLoad, text);
                        false
                    }
                },
            },
            _ => false,
        };
        self.load_counts.count(found, bytes);
        if found {
            self.connection.audit().count_data(DataSource::Models, bytes);
        }
        Ok(self.reply(&ExtResponse::Load(found))?)
    }

    /// Loads the slice of the first of `candidates` that has the right bytes into `region`. Returns whether there is one.
    ///
    /// Confidentiality: a client may read only bytes for which it has sent the right digest. If no other work of the
    /// session can run meanwhile (`unobserved`), candidates are written to the device while they are hashed, and bytes with a
    /// wrong digest are overwritten with zeros. Otherwise each candidate is read twice: hashed first, then written.
    fn load_from_index(
        &mut self,
        index: &GgufIndex,
        candidates: &[IndexedTensor],
        request: &Load<'_>,
        region: &Region,
        tensor: Option<&TensorDesc>,
    ) -> Result<bool, SessionError> {
        let server = self.resources.server;
        let (timeout, watch) = (server.config.reply_timeout, self.connection.watch());
        let unobserved = self.queues.wait_all_idle(Instant::now() + timeout)?;
        let wanted = WantedTensor { name: request.name, digest: request.digest, runs: request.runs };
        let mut exposed = false;
        let found = self.queues.get(request.queue)?.submit(|queue| {
            let mut target = LoadTarget { queue, region, tensor, unobserved, written: false };
            let should_continue = || !server.lifecycle.is_stopping() && !watch.has_hung_up();
            let found = index.load(candidates, &wanted, &mut target, &should_continue);
            exposed = target.written && found != Ok(true);
            if exposed && found.is_ok() {
                queue.fill(region.clone(), 0)?;
                queue.mark().wait(Some(Instant::now() + timeout))?;
                exposed = false;
            }
            found
        });
        if exposed {
            self.free_exposed_buffer(request.span.buffer)?;
        }
        Ok(found? == Some(true))
    }

    /// Frees a buffer that contains bytes which the client must not read, after the queue that wrote them has failed. Zeroing
    /// them on another queue is not safe: that queue cannot wait for the last write of the failed one.
    fn free_exposed_buffer(&mut self, buffer: u64) -> Result<(), SessionError> {
        Ok(self.resources.free(buffer)?)
    }
}

//! LOAD: a tensor from the server's own disk, by its digest.

use std::time::Instant;

use log::info;

use super::session::ExtendedSession;
use super::spans;
use super::transfers::tensor;
use crate::device::Region;
use crate::rpc::server::gguf_index::{GgufIndex, Place, Wanted};
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::ext::{Answer, Load};
use crate::tensor::TensorDesc;

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

    /// Logs the sum, if there was anything.
    pub(super) fn log(&self, peer: PeerAddr) {
        let LoadCounts { found, bytes, missed } = self;
        if found + missed > 0 {
            info!(
                "{peer}: {found} tensors of {} MiB came from this server's disk, {missed} were not there",
                bytes >> 20
            );
        }
    }
}

impl ExtendedSession<'_> {
    pub(super) fn load(&mut self, request: &Load<'_>) -> Result<(), SessionError> {
        let bytes = request.span.len;
        let (device, region) = spans::region(&self.resources.handles, &request.span)?;
        let tensor = request.shape.map(|shape| tensor(&shape, bytes)).transpose()?;
        self.queues.on(request.queue, device)?;
        let found = match &self.resources.server.models {
            Some(models) if bytes > 0 => self.search(models, request, &region, tensor.as_ref())?,
            _ => false,
        };
        self.loads.count(found, bytes);
        Ok(self.answer(&Answer::Load(found))?)
    }

    /// Looks for the bytes. None of the client's queues may see any before they are known to be those that the client knows:
    /// they are written at once only while nothing else of the session is at work, and otherwise when a first reading has told
    /// what they are. Of wrong ones nothing is left.
    fn search(
        &mut self,
        models: &GgufIndex,
        request: &Load<'_>,
        region: &Region,
        tensor: Option<&TensorDesc>,
    ) -> Result<bool, SessionError> {
        let server = self.resources.server;
        let timeout = server.config.device_timeout;
        let alone = self.queues.rest(Instant::now() + timeout)?;
        let wanted = Wanted { name: request.name, digest: request.digest };
        let mut shown = false;
        let found = self.queues.get(request.queue)?.submit(|queue| {
            let mut place = Place { queue, region, tensor, alone, touched: false };
            let found = models.load(&wanted, &mut place, &|| !server.lifecycle.is_stopping());
            shown = place.touched && found != Ok(true);
            if shown && found.is_ok() {
                queue.fill(region.clone(), 0)?;
                queue.mark().wait(Some(Instant::now() + timeout))?;
                shown = false;
            }
            found
        });
        if shown {
            self.hide(request.span.buffer)?;
        }
        Ok(found? == Some(true))
    }

    /// Takes a buffer from the client: bytes lie in it that it may not see, and the queue that wrote them has failed. No other
    /// queue could tell when the last of them is written, and zero them after it.
    fn hide(&mut self, buffer: u64) -> Result<(), SessionError> {
        Ok(self.resources.free(buffer)?)
    }
}

//! LOAD: a tensor from the server's own disk.

use std::time::Instant;

use log::info;

use super::super::models::{Models, Place, Wanted};
use super::transfers::tensor;
use super::{Greeted, Refusal};
use crate::device::Region;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::ext::{Answer, Load};
use crate::tensor::TensorDesc;

/// What came of a session's LOADs.
#[derive(Default)]
pub(super) struct Loads {
    found: u64,
    bytes: u64,
    missed: u64,
}

impl Loads {
    fn count(&mut self, found: bool, bytes: u64) {
        if found {
            self.found += 1;
            self.bytes += bytes;
        } else {
            self.missed += 1;
        }
    }

    /// Logs the sum, if there was anything.
    pub(super) fn tell(&self, peer: PeerAddr) {
        let Loads { found, bytes, missed } = self;
        if found + missed > 0 {
            info!(
                "{peer}: {found} tensors of {} MiB came from this server's disk, {missed} were not there",
                bytes >> 20
            );
        }
    }
}

impl Greeted<'_> {
    pub(super) fn load(&mut self, request: &Load<'_>) -> Result<(), Refusal> {
        let bytes = request.span.len;
        let (device, region) = self.holdings.span(&request.span)?;
        let tensor = request.shape.map(|shape| tensor(&shape, bytes)).transpose()?;
        self.queues.on(request.queue, device)?;
        let found = match &self.holdings.shared.models {
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
        models: &Models,
        request: &Load<'_>,
        region: &Region,
        tensor: Option<&TensorDesc>,
    ) -> Result<bool, Refusal> {
        let shared = self.holdings.shared;
        let patience = shared.config.device_timeout;
        let alone = self.queues.rest(Instant::now() + patience)?;
        let wanted = Wanted { name: request.name, digest: request.digest };
        let mut shown = false;
        let found = self.queues.get(request.queue)?.submit(|queue| {
            let mut place = Place { queue, region, tensor, alone, touched: false };
            let found = models.load(&wanted, &mut place, &|| !shared.stopping());
            shown = place.touched && found != Ok(true);
            if shown && found.is_ok() {
                queue.fill(region.clone(), 0)?;
                queue.mark().wait(Some(Instant::now() + patience))?;
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
    fn hide(&mut self, buffer: u64) -> Result<(), Refusal> {
        self.holdings.handles.remove(buffer)?;
        self.graphs.forget(buffer);
        Ok(())
    }
}

//! LOAD: a tensor from the server's own disk.

use std::net::SocketAddr;
use std::time::Instant;

use log::info;

use super::super::models::{Models, Outcome, Place, Wanted};
use super::transfers::tensor;
use super::{Greeted, Refusal};
use crate::device::Region;
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
    pub(super) fn tell(&self, peer: SocketAddr) {
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

    /// Looks for the bytes. Until they are known to be those that the client knows, none of its queues may see them; and if
    /// they are not, nothing is left of them.
    fn search(
        &mut self,
        models: &Models,
        request: &Load<'_>,
        region: &Region,
        tensor: Option<&TensorDesc>,
    ) -> Result<bool, Refusal> {
        let shared = self.holdings.shared;
        let until = Instant::now() + shared.config.device_timeout;
        for other in self.queues.iter().filter(|open| open.number() != request.queue) {
            other.submit(|queue| queue.mark().wait(Some(until)))?;
        }
        let wanted = Wanted { name: request.name, digest: request.digest };
        let outcome = self.queues.get(request.queue)?.submit(|queue| {
            let outcome = models.load(&wanted, Place { queue, region, tensor }, &|| !shared.stopping())?;
            if outcome == Outcome::Spoilt {
                queue.fill(region.clone(), 0)?;
                let cleared = Instant::now() + shared.config.device_timeout;
                queue.mark().wait(Some(cleared))?;
            }
            Ok(outcome)
        })?;
        Ok(outcome == Some(Outcome::Found))
    }
}

//! Handlers for copies between servers: ISSUE_TOKENS, RECEIVE_FROM_PEER, SEND_TO_PEER, PROBE_PEER, PEER_WRITE.

use super::session::ExtendedSession;
use super::spans;
use crate::rpc::server::counters::DataSource;
use crate::rpc::server::peers::PeerSender;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::wire::ext::{ExtResponse, IssueTokens, PeerWrite, ProbePeer, ReceiveFromPeer, SendToPeer};

impl ExtendedSession<'_> {
    pub(super) fn issue_tokens(&mut self, request: &IssueTokens) -> Result<(), SessionError> {
        let issued = self.tokens.issue(request.count)?;
        Ok(self.reply(&ExtResponse::IssueTokens(&issued))?)
    }

    /// Binds a transfer token to a span. The queue waits until another server has written the span with PEER_WRITEs.
    pub(super) fn receive_from_peer(&mut self, request: &ReceiveFromPeer) -> Result<(), SessionError> {
        let (device, region) = spans::resolve_span(&self.resources.handles, &request.span)?;
        let open_queue = self.queues.get_on_device(request.queue, device)?;
        let (ledger, token, len) = (&self.tokens, request.token, region.bytes());
        ledger.check_unused(&token)?;
        let receiver = match open_queue.receiver.take() {
            Some(receiver) => receiver,
            None => {
                let timeout = self.resources.server.config.reply_timeout;
                let on_failure = Box::new(open_queue.completions.ordered_failure_callback());
                ledger.new_receiver(self.resources.device(device)?, timeout, on_failure)
            }
        };
        let received = open_queue.submit(|queue| ledger.receive(&receiver, queue, region, token))?;
        open_queue.receiver = Some(receiver);
        if received.is_none() {
            ledger.discard(token, len);
        }
        Ok(())
    }

    /// Sends a span to another server, in order with the queue's work.
    pub(super) fn send_to_peer(&mut self, request: &SendToPeer<'_>) -> Result<(), SessionError> {
        let (device, region) = spans::resolve_span(&self.resources.handles, &request.span)?;
        let open_queue = self.queues.get_on_device(request.queue, device)?;
        let (token, address) = (request.token, request.address);
        let sender = open_queue.peer_sender.take();
        let mut sender = sender
            .unwrap_or_else(|| PeerSender::new(&self.resources.budget, open_queue.completions.failure_callback()));
        open_queue.submit(|queue| sender.send(&mut self.peer_pool, queue, &region, token, address))?;
        open_queue.peer_sender = Some(sender);
        Ok(())
    }

    /// Replies whether this server may dial an address and reaches it.
    pub(super) fn probe_peer(&mut self, request: &ProbePeer<'_>) -> Result<(), SessionError> {
        let result = self.peer_pool.probe(request.address, &|| self.connection.watch().has_hung_up());
        Ok(self.reply(&ExtResponse::ProbePeer(result.as_ref().copied().map_err(String::as_str)))?)
    }

    /// Redeems a transfer token: bytes from another server.
    pub(super) fn peer_write(&self, request: &PeerWrite<'_>) -> Result<(), SessionError> {
        self.resources.server.transfer_tokens.redeem(&request.token, request.at, request.data)?;
        // The session of the destination is another one.
        self.resources.server.statistics.counters.count_data(DataSource::Peer, request.data.len() as u64);
        Ok(())
    }
}

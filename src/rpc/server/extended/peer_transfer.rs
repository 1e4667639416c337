//! Transfers between servers: TICKETS, RECEIVE, SEND, REACH, PUT.

use super::session::ExtendedSession;
use super::spans;
use crate::rpc::server::peers::Outbound;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::transfer_tokens;
use crate::rpc::wire::ext::{Answer, Put, Reach, Receive, Send, TicketList, Tickets};

impl ExtendedSession<'_> {
    pub(super) fn tickets(&mut self, request: &Tickets) -> Result<(), SessionError> {
        let issued = self.tokens.issue(request.count)?;
        Ok(self.answer(&Answer::Tickets(TicketList(&issued)))?)
    }

    pub(super) fn receive(&mut self, request: &Receive<'_>) -> Result<(), SessionError> {
        let (device, region) = spans::region(&self.resources.handles, &request.span)?;
        let open = self.queues.on(request.queue, device)?;
        let (tokens, tickets) = (&self.tokens, request.tickets.0);
        tokens.check(region.bytes(), tickets)?;
        let inbound = match open.inbound.take() {
            Some(inbound) => inbound,
            None => tokens.inbound(self.resources.device(device)?, self.resources.server.config.device_timeout),
        };
        let received = open.submit(|queue| tokens.receive(&inbound, queue, region, tickets))?;
        open.inbound = Some(inbound);
        if received.is_none() {
            tokens.discard(tickets);
        }
        Ok(())
    }

    pub(super) fn send(&mut self, request: &Send<'_>) -> Result<(), SessionError> {
        let (device, region) = spans::region(&self.resources.handles, &request.span)?;
        let open = self.queues.on(request.queue, device)?;
        let (tickets, address) = (request.tickets.0, request.address);
        transfer_tokens::count(region.bytes(), tickets.len())?;
        let outbound = open.outbound.take();
        let mut outbound =
            outbound.unwrap_or_else(|| Outbound::new(&self.resources.budget, open.completions.failing()));
        open.submit(|queue| outbound.send(&mut self.pool, queue, &region, tickets, address))?;
        open.outbound = Some(outbound);
        Ok(())
    }

    pub(super) fn reach(&mut self, request: &Reach<'_>) -> Result<(), SessionError> {
        let reached = self.pool.reach(request.address);
        Ok(self.answer(&Answer::Reach(reached.as_ref().copied().map_err(String::as_str)))?)
    }

    pub(super) fn put(&self, request: &Put<'_>) -> Result<(), SessionError> {
        Ok(self.resources.server.transfer_tokens.put(&request.ticket, request.data)?)
    }
}

//! Bytes that come from other servers, and go there: TICKETS, RECEIVE, SEND, REACH, PUT.

use super::super::{peers::Outbound, tickets};
use super::{Greeted, Refusal};
use crate::rpc::wire::ext::{Answer, Put, Reach, Receive, Send, TicketList, Tickets};

impl Greeted<'_> {
    pub(super) fn tickets(&mut self, request: &Tickets) -> Result<(), Refusal> {
        let issued = self.book.issue(request.count)?;
        Ok(self.answer(&Answer::Tickets(TicketList(&issued)))?)
    }

    pub(super) fn receive(&mut self, request: &Receive<'_>) -> Result<(), Refusal> {
        let (device, region) = self.holdings.span(&request.span)?;
        let open = self.queues.on(request.queue, device)?;
        let (book, tickets) = (&self.book, request.tickets.0);
        book.check(region.bytes(), tickets)?;
        let inbound = match open.inbound.take() {
            Some(inbound) => inbound,
            None => book.inbound(self.holdings.device(device)?, self.holdings.shared.config.device_timeout),
        };
        let received = open.submit(|queue| book.receive(&inbound, queue, region, tickets))?;
        open.inbound = Some(inbound);
        if received.is_none() {
            book.discard(tickets);
        }
        Ok(())
    }

    pub(super) fn send(&mut self, request: &Send<'_>) -> Result<(), Refusal> {
        let (device, region) = self.holdings.span(&request.span)?;
        let open = self.queues.on(request.queue, device)?;
        let (tickets, address) = (request.tickets.0, request.address);
        tickets::count(region.bytes(), tickets.len())?;
        let outbound = open.outbound.take();
        let mut outbound = outbound.unwrap_or_else(|| Outbound::new(&self.holdings.account, open.answers.failing()));
        open.submit(|queue| outbound.send(&mut self.pool, queue, &region, tickets, address))?;
        open.outbound = Some(outbound);
        Ok(())
    }

    pub(super) fn reach(&mut self, request: &Reach<'_>) -> Result<(), Refusal> {
        let reached = self.pool.reach(request.address);
        Ok(self.answer(&Answer::Reach(reached.as_ref().copied().map_err(String::as_str)))?)
    }

    pub(super) fn put(&self, request: &Put<'_>) -> Result<(), Refusal> {
        Ok(self.holdings.shared.tickets.put(&request.ticket, request.data)?)
    }
}

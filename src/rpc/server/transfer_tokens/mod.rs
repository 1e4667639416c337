//! Tickets: who may put bytes into a session's memory, where, and once.
//!
//! A [`TokenTable`] for the whole server, since tickets of one session are used on connections of others. A session has a [`TokenLedger`]:
//! it is issued tickets, and says where their bytes go ([`TokenLedger::receive`]). Whoever comes with a ticket has it taken from the
//! table before anything else happens, and the bytes go to the [`Receiver`] of the queue that waits for them; where nobody
//! waits for them yet they are kept, and the session pays for that. Bytes that nobody wants any more, because their queue has
//! failed or was closed, are dropped: who brings them need not know, and brings others' bytes on the same connection.
//!
//! A ticket is found by hashing with a key of this process and then compared, which may tell how long the look-up took, and
//! nothing of the 128 random bits: without the key nobody knows which guess comes near another ticket.

mod error;
mod ledger;
mod payload;
mod receiver;
mod table;

pub(super) use error::{TokenError, count};
pub(super) use ledger::TokenLedger;
pub(super) use receiver::{PendingReceives, Receiver};
pub(super) use table::TokenTable;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::cpu::{CpuDevice, Path};
    use crate::device::{Account, Device, DeviceError, PIECE};

    /// Bytes that are of no use are found to be so while their ticket's RECEIVE comes.
    #[test]
    fn a_ticket_that_is_armed_before_it_is_spoilt_fails_its_queue() {
        let device = CpuDevice::new("CPU", 1, Path::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let (table, account) = (Arc::new(TokenTable::default()), Account::new(1 << 20));
        let mut queue = device.queue(&account).unwrap();
        let book = TokenLedger::new(&table, &account);
        let tickets = book.issue(2).unwrap();
        let inbound = book.inbound(&device, Duration::from_secs(600));
        let region = device.alloc(1, &account).unwrap().whole();
        book.receive(&inbound, &mut *queue, region, &tickets[..1]).unwrap();
        let have = table.spoil(&tickets[0], TokenError::Length { expected: PIECE, have: 0 });
        assert!(matches!(have, TokenError::Length { .. }));
        let failed = queue.mark().wait(Some(std::time::Instant::now() + Duration::from_secs(60)));
        assert!(matches!(failed, Err(DeviceError::Source(_))), "{failed:?}");
        assert!(matches!(table.put(&tickets[0], &[1]), Err(TokenError::Unknown)));
        // The other one is as good as before.
        assert!(table.put(&tickets[1], &[1]).is_ok());
    }
}

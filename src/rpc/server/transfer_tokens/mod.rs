//! Transfer tokens: single-use capability tokens to write bytes into a session's memory (receiving side of copies between
//! servers).
//!
//! ```text
//! ISSUE_TOKENS      → TokenLedger::issue                 the destination's client passes the tokens to the source server
//! RECEIVE_FROM_PEER → TokenLedger::receive → Receiver    binds a token to a region; the queue waits for the bytes
//! PEER_WRITE        → TokenTable::redeem   → Receiver    writes the next bytes of a transfer; the last ones use up its token
//! ```
//!
//! - A token is for one region. Its bytes arrive in pieces of 256 KiB, in order, on one connection.
//! - One [`TokenTable`] serves the whole server, because the source server redeems a token on a connection of its own.
//! - Each session has a [`TokenLedger`], which issues its tokens and binds them to regions.
//! - Each receiving queue has a [`Receiver`], which writes the bytes to its device. Bytes that arrive before their
//!   RECEIVE_FROM_PEER are buffered in host memory, and charged to the session that issued the token.
//! - If the receiving queue fails (its tokens are abandoned) or its session ends (they are revoked), bytes that arrive later are
//!   dropped without an error.
//!   The source server did nothing wrong, and the same connection may carry bytes for other queues and sessions.
//!
//! Timing attacks: tokens are looked up in a hash map with a random key of this process. The duration of a lookup therefore
//! reveals nothing about the 128 random bits of another token: without the key, an attacker cannot choose a guess that hashes
//! or compares similarly.
//!
//! The sending side of such copies is in `peers`; the requests are decoded in `extended/peer_transfer.rs`. Start reading at
//! `table.rs`.

mod error;
mod ledger;
mod receiver;
mod table;

pub(super) use error::TokenError;
pub(super) use ledger::{SessionTransfers, TokenLedger};
pub(super) use receiver::Receiver;
pub(super) use table::TokenTable;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::device::{
        Budget, Device, DeviceError, ForwardDevice, ForwardQueue, MemoryBudget, Queue, QueueAborter, Region,
        TRANSFER_CHUNK_BYTES, UploadSource,
    };
    use crate::rpc::server::host_memory::HostMemory;
    use crate::rpc::server::limits::Config;
    use crate::rpc::server::tenants::{ClientBudget, Resource, Tenants};
    use crate::rpc::transport::PeerAddr;
    use crate::tensor::TensorDesc;

    fn threads() -> Arc<ClientBudget> {
        Arc::new(Tenants::new(&Config::default()).budget(PeerAddr::Local(0), Resource::TransferThreads))
    }

    /// The bytes of a transfer come in order and once, also from a sender with two connections.
    #[test]
    fn a_piece_out_of_order_fails_the_queue_and_ends_the_transfer() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let (table, budget) = (Arc::new(TokenTable::default()), MemoryBudget::new(1 << 22));
        let memory = HostMemory::new(Budget::new(1 << 30), 0, Duration::ZERO).admit().unwrap();
        let piece = vec![1; TRANSFER_CHUNK_BYTES as usize];
        for (at, len) in [(0, piece.len()), (2 * TRANSFER_CHUNK_BYTES, 1), (TRANSFER_CHUNK_BYTES, 2)] {
            for is_early in [true, false] {
                let mut queue = device.queue(&budget).unwrap();
                let ledger = TokenLedger::new(&table, &budget, &memory, &threads());
                let tokens = ledger.issue(2).unwrap();
                let receiver = ledger.new_receiver(&device, Duration::from_secs(600), Box::new(|_| {}));
                let region = device.alloc(TRANSFER_CHUNK_BYTES + 1, &budget).unwrap().whole();
                let mut receive = || ledger.receive(&receiver, &mut *queue, region.clone(), tokens[0]);
                if !is_early {
                    receive().unwrap();
                }
                table.redeem(&tokens[0], 0, &piece).unwrap();
                let error = table.redeem(&tokens[0], at, &piece[..len]);
                if is_early && at == TRANSFER_CHUNK_BYTES {
                    assert!(error.is_ok(), "the length is not known yet");
                } else {
                    assert!(matches!(error, Err(TokenError::Piece { .. })), "{at}: {error:?}");
                }
                if is_early {
                    _ = receive();
                }
                let failed = queue.mark().wait(Some(Instant::now() + Duration::from_secs(60)));
                assert!(matches!(failed, Err(DeviceError::Source(_))), "{at}: {failed:?}");
                // The other token remains valid.
                assert!(table.redeem(&tokens[1], 0, &[1]).is_ok());
                assert!(memory.held() > 0);
                drop((ledger, receiver));
                assert_eq!(
                    (memory.held(), table.len()),
                    (0, 0),
                    "tokens and their bytes are charged until they are removed"
                );
            }
        }
    }

    /// Bytes of one session may arrive after its end, on a connection that carries bytes for others.
    #[test]
    fn bytes_for_an_ended_session_are_dropped_without_an_error() {
        let device = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let (table, budget) = (Arc::new(TokenTable::default()), MemoryBudget::new(1 << 20));
        let memory = HostMemory::new(Budget::new(1 << 30), 0, Duration::ZERO).admit().unwrap();
        let mut queue = device.queue(&budget).unwrap();
        let ledger = TokenLedger::new(&table, &budget, &memory, &threads());
        let tokens = ledger.issue(4).unwrap();
        let receiver = ledger.new_receiver(&device, Duration::from_secs(600), Box::new(|_| {}));
        let region = device.alloc(2, &budget).unwrap().whole();
        for token in &tokens[..2] {
            ledger.receive(&receiver, &mut *queue, region.clone(), *token).unwrap();
        }
        ledger.discard(tokens[2], 2);
        table.redeem(&tokens[0], 0, &[1, 2]).unwrap();
        drop((receiver, ledger));
        assert_eq!((memory.held(), table.len()), (0, 0));
        assert!(matches!(table.redeem(&tokens[0], 0, &[1, 2]), Err(TokenError::Unknown)), "used up");
        for token in &tokens[1..] {
            assert!(table.redeem(token, 0, &[1, 2]).is_ok(), "revoked");
        }
        assert!(matches!(table.redeem(&[0; 16], 0, &[1]), Err(TokenError::Unknown)), "never issued");
    }

    /// A device whose uploads block: each passes the gate when it begins, and fails when it has passed the gate again.
    #[derive(Debug)]
    struct BlockingDevice {
        inner: Arc<dyn Device>,
        gate: Arc<Barrier>,
        /// Number of calls of the aborters of its queues.
        aborts: Arc<AtomicUsize>,
    }

    struct BlockingQueue {
        inner: Box<dyn Queue>,
        gate: Arc<Barrier>,
        aborts: Arc<AtomicUsize>,
    }

    impl ForwardDevice for BlockingDevice {
        fn inner(&self) -> &dyn Device {
            &*self.inner
        }

        fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
            let (gate, aborts) = (Arc::clone(&self.gate), Arc::clone(&self.aborts));
            Ok(Box::new(BlockingQueue { inner: self.inner.queue(budget)?, gate, aborts }))
        }
    }

    impl ForwardQueue for BlockingQueue {
        fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
            Ok(&mut *self.inner)
        }

        fn upload(&mut self, _: Region, _: Option<&TensorDesc>, _: UploadSource<'_>) -> Result<(), DeviceError> {
            self.gate.wait();
            self.gate.wait();
            Err(DeviceError::Ended)
        }

        fn aborter(&mut self) -> Option<QueueAborter> {
            let aborts = Arc::clone(&self.aborts);
            Some(QueueAborter::new(move || _ = aborts.fetch_add(1, Ordering::Relaxed)))
        }
    }

    /// The hang-up watch of all sessions closes receivers: it must not wait for an upload of one of them.
    #[test]
    fn a_receiver_is_closed_while_an_upload_blocks() {
        let inner = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 20).unwrap() as Arc<dyn Device>;
        let (gate, aborts) = (Arc::new(Barrier::new(2)), Arc::new(AtomicUsize::new(0)));
        let device = BlockingDevice { inner, gate: Arc::clone(&gate), aborts: Arc::clone(&aborts) };
        let device = Arc::new(device) as Arc<dyn Device>;
        let (table, budget) = (Arc::new(TokenTable::default()), MemoryBudget::new(1 << 20));
        let memory = HostMemory::new(Budget::new(1 << 30), 0, Duration::ZERO).admit().unwrap();
        let mut queue = device.queue(&budget).unwrap();
        let ledger = TokenLedger::new(&table, &budget, &memory, &threads());
        let tokens = ledger.issue(1).unwrap();
        let receiver = ledger.new_receiver(&device, Duration::from_secs(600), Box::new(|_| {}));
        let region = device.alloc(1, &budget).unwrap().whole();
        ledger.receive(&receiver, &mut *queue, region, tokens[0]).unwrap();
        std::thread::scope(|scope| {
            let redeemed = scope.spawn(|| table.redeem(&tokens[0], 0, &[1]));
            gate.wait();
            ledger.transfers().close();
            assert!(receiver.0.is_closed());
            assert_eq!(aborts.load(Ordering::Relaxed), 1, "the close ends the upload");
            gate.wait();
            assert!(redeemed.join().unwrap().is_ok(), "the source server did nothing wrong");
        });
        let failed = queue.mark().wait(Some(Instant::now() + Duration::from_secs(60)));
        assert!(failed.is_err(), "{failed:?}");
    }
}

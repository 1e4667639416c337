//! Messages that several ranks send at once over a connection that splits, delays and stalls writes.

use crate::poison::lock;
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::rpc::transport::memory::{self, LinkConditions};

/// A link that is attached to the returned end of a connection, for the parts of two ranks, with the receiving half of its own
/// end.
fn attached(seed: u64, budget: &Arc<MemoryBudget>) -> (Arc<GroupLink>, Receiver, (Receiver, Sender)) {
    let (own, peer) = memory::pair(LinkConditions { seed, cut_after: None });
    let link = GroupLink::new("peer:1", 1..=1, 2, budget);
    let (receiver, sender) = own.split();
    let mut state = lock(&link.state);
    (state.writer, state.is_attached) = (Writer::Idle(sender), true);
    drop(state);
    (link, receiver, peer.split())
}

const STALL: Duration = Duration::from_secs(60);

/// Head of a message: the rank, its number, and the length of the data.
fn head(rank: u8, number: u8, len: usize) -> Vec<u8> {
    [&[rank, number][..], &(len as u32).to_le_bytes()].concat()
}

/// Each rank sends the next but one message once one was received, as the ranks of a group do.
#[test]
fn messages_of_two_ranks_arrive_whole_and_in_order() {
    const MESSAGES: u8 = 12;
    for seed in 0..40 {
        let budget = MemoryBudget::new(1 << 24);
        let (link, receiver, (mut peer, _sender)) = attached(seed, &budget);
        thread::scope(|scope| {
            let serve = scope.spawn(|| link.serve(receiver, STALL));
            let received = [(); 2].map(|()| mpsc::channel::<()>());
            let (acknowledge, ranks): (Vec<_>, Vec<_>) = received.into_iter().unzip();
            for (rank, received) in (0..).zip(ranks) {
                let link = &link;
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed * 2 + u64::from(rank));
                    for number in 0..MESSAGES {
                        if number >= 2 {
                            received.recv().unwrap();
                        }
                        let data = vec![rank ^ number; rng.usize(..100_000)];
                        assert!(link.send(&head(rank, number, data.len()), &data).is_ok());
                    }
                });
            }
            let (mut next, deadline) = ([0; 2], Deadline::after(STALL));
            while next != [MESSAGES; 2] {
                let mut head = [0; 6];
                peer.read_exact(&mut head, &deadline).unwrap();
                let [rank, number, len @ ..] = head;
                let mut data = vec![0; u32::from_le_bytes(len) as usize];
                peer.read_exact(&mut data, &deadline).unwrap();
                assert_eq!(number, next[usize::from(rank)], "seed {seed}, rank {rank}");
                assert!(data.iter().all(|&byte| byte == rank ^ number), "seed {seed}, rank {rank}");
                next[usize::from(rank)] += 1;
                // The rank may have sent its last message.
                let _ = acknowledge[usize::from(rank)].send(());
            }
            assert!(link.close(b"last".to_vec(), true));
            assert!(link.send(b"more", b"").is_ok(), "dropped");
            let mut last = [0; 4];
            peer.read_exact(&mut last, &deadline).unwrap();
            assert_eq!((&last, peer.read_into(&mut [0], &deadline).unwrap()), (b"last", 0), "seed {seed}");
            drop((peer, _sender));
            assert_eq!(serve.join().unwrap(), Ok(()));
        });
        assert_eq!(budget.used(), 0, "seed {seed}");
    }
}

/// A server that does not receive fails the group, and costs no more memory than the backlog.
#[test]
fn the_backlog_is_limited() {
    let budget = MemoryBudget::new(1 << 24);
    let (link, _receiver, _peer) = attached(7, &budget);
    let data = vec![0; 100_000];
    let sent = (0..100).find_map(|number| link.send(&head(0, number, data.len()), &data).err().map(|e| (number, e)));
    let Some((number, SendError::Peer(why))) = sent else { panic!("the backlog has no limit") };
    assert!(why.contains("does not receive"), "{why}");
    assert_eq!(usize::from(number), 2 * MAX_BACKLOG_PARTS);
    assert!(budget.used() <= 2 * MAX_BACKLOG_PARTS as u64 * 100_006, "{}", budget.used());
    let small = MemoryBudget::new(100);
    let (link, _receiver, _peer) = attached(7, &small);
    assert!(matches!(link.send(b"head", &data), Err(SendError::Memory(DeviceError::OutOfMemory { .. }))));
    assert!(matches!(link.send(b"head", &data), Err(SendError::Peer(_))), "no message can follow");
}

/// The last message follows the parts in the backlog if a rank has left, else only the rest of a message that was begun.
#[test]
fn parts_in_the_backlog_are_sent_when_a_rank_leaves_and_dropped_when_one_fails() {
    for (seed, with_parts) in (0..40).map(|seed| (seed, seed % 2 == 0)) {
        let budget = MemoryBudget::new(1 << 24);
        let (link, receiver, (mut peer, sender)) = attached(seed, &budget);
        let data = vec![1; 100_000];
        for number in 0..4 {
            assert!(link.send(&head(0, number, data.len()), &data).is_ok());
        }
        assert!(link.close(b"last".to_vec(), with_parts));
        thread::scope(|scope| {
            let serve = scope.spawn(|| link.serve(receiver, STALL));
            let (mut all, mut bytes, deadline) = (Vec::new(), [0; 4096], Deadline::after(STALL));
            loop {
                match peer.read_into(&mut bytes, &deadline).unwrap() {
                    0 => break,
                    n => all.extend_from_slice(&bytes[..n]),
                }
            }
            let parts = if with_parts { 4 } else { 1 };
            assert_eq!((all.len(), all.ends_with(b"last")), (100_006 * parts + 4, true), "seed {seed}");
            drop((peer, sender));
            assert_eq!(serve.join().unwrap(), Ok(()));
        });
    }
}

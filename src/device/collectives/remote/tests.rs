//! Ranks of other processes: the order of parts, and failures.

use super::super::RemoteRanks;
use super::*;
use crate::device::collectives::tests::{publish, reduce, text};
use std::sync::Mutex;

/// Records what is sent to other processes. The member is dropped while the next part is sent.
#[derive(Default)]
struct Sent(Mutex<Vec<String>>, Mutex<Option<GroupMember>>);

impl RemoteRanks for Sent {
    fn send(&self, rank: usize, round: u64, part: &CollectivePart, bytes: &[u8]) -> Result<(), DeviceError> {
        drop(self.1.lock().unwrap().take());
        self.0.lock().unwrap().push(format!("{rank}/{round}: {part}, {bytes:?}"));
        Ok(())
    }

    fn report_failure(&self, error: &DeviceError) {
        self.0.lock().unwrap().push(error.to_string());
    }
}

/// A group whose first `local` ranks are of this process.
fn group_with_remote_ranks<const N: usize>(local: usize) -> ([GroupMember; N], GroupHandle, Arc<Sent>) {
    let sent = Arc::new(Sent::default());
    let addresses: Vec<_> = (0..N).map(|rank| (rank >= local).then_some("peer:1")).collect();
    let budget = MemoryBudget::new(1 << 20);
    let (members, handle) = CollectiveGroup::with_remote_ranks(&addresses, 4096, &budget, sent.clone()).unwrap();
    (members.try_into().unwrap(), handle, sent)
}

fn receive(member: &GroupMember, round: u64, n: usize, value: u8) -> bool {
    let fill = |bytes: &mut [u8]| {
        bytes.fill(value);
        Ok::<_, ()>(())
    };
    member.publish_received(round, &reduce(n), 0..4 * n, fill).is_ok()
}

#[test]
fn parts_of_one_server_may_overtake_those_of_another() {
    let ([a, b, c], handle, sent) = group_with_remote_ranks(1);
    for round in 0..10_u8 {
        let number = u64::from(round);
        publish(&a, &reduce(1), round).unwrap();
        // Rank 1 has had all parts of this round, the last of which has not arrived here.
        if round == 0 {
            assert!(receive(&b, number, 1, 100));
        }
        assert!(receive(&b, number + 1, 1, 101 + round));
        assert_eq!(a.poll(), Ok(false));
        assert!(receive(&c, number, 1, 200 + round));
        assert_eq!(a.poll(), Ok(true));
        assert_eq!([0, 1, 2].map(|rank| a.part(rank).unwrap()[0]), [round, 100 + round, 200 + round]);
    }
    assert!(handle.failure().is_none());
    assert_eq!(sent.0.lock().unwrap()[1], "0/1: ALL_REDUCE of F32 [1, 1, 1, 1], [1, 1, 1, 1]");
}

#[test]
fn a_part_out_of_order_fails_the_group_of_its_rank() {
    type Steps = fn(&[GroupMember; 3]) -> bool;
    let cases: [(Steps, &str); 5] = [
        (|[_, b, _]| receive(b, 1, 1, 0), "a part of round 1, but its next round is 0"),
        (|[_, b, _]| receive(b, 0, 1, 0) && receive(b, 0, 1, 0), "a part of round 0, but its next round is 1"),
        // Rank 0 has not published in round 0, so rank 1 cannot have combined it.
        (|[_, b, _]| receive(b, 0, 1, 0) && receive(b, 1, 1, 0), "before it can have had all of the round before"),
        (
            |[a, b, _]| {
                publish(a, &reduce(1), 0).is_ok() && receive(b, 0, 1, 0) && receive(b, 1, 1, 0) && receive(b, 2, 1, 0)
            },
            "before it can have had all of the round before",
        ),
        (|[_, b, _]| receive(b, 0, 1 << 20, 0), "more than was announced"),
    ];
    for (steps, want) in cases {
        let (members, handle, sent) = group_with_remote_ranks(1);
        assert!(!steps(&members), "{want}");
        let error = handle.failure().unwrap().to_string();
        assert!(error.starts_with("rank 1 (peer:1) has failed: ") && error.contains(want), "{error}");
        assert_eq!(sent.0.lock().unwrap().last(), Some(&error));
        assert_eq!(text(publish(&members[0], &reduce(1), 0)), error);
        assert!(!receive(&members[2], 0, 1, 0));
    }
}

#[test]
fn a_missing_part_of_another_process_is_named_at_its_deadline() {
    let ([a, _b, c], handle, _) = group_with_remote_ranks(1);
    handle.fail_if_overdue(Duration::ZERO);
    assert!(handle.failure().is_none(), "no rank waits");
    publish(&a, &reduce(1), 1).unwrap();
    assert!(receive(&c, 0, 1, 1));
    handle.fail_if_overdue(Duration::from_secs(600));
    assert!(handle.failure().is_none());
    while handle.failure().is_none() {
        handle.fail_if_overdue(Duration::ZERO);
    }
    assert!(handle.failure().unwrap().to_string().starts_with("rank 1 (peer:1) has failed: "));
}

/// A part is counted before it is sent, so that another rank may leave meanwhile. The report ends the connections.
#[test]
fn a_rank_that_leaves_is_reported_after_the_parts_that_are_being_sent() {
    let ([a, b, c], handle, sent) = group_with_remote_ranks(2);
    publish(&a, &reduce(1), 1).unwrap();
    assert!(receive(&c, 0, 1, 3));
    *sent.1.lock().unwrap() = Some(a);
    publish(&b, &reduce(1), 2).unwrap();
    assert_eq!(b.poll(), Ok(true), "the round was complete");
    assert!(matches!(handle.failure(), Some(DeviceError::RankLeft { rank: 0, .. })));
    let sent = sent.0.lock().unwrap();
    assert!(
        matches!(&sent[..], [a, b, left] if a.starts_with("0/0") && b.starts_with("1/0") && left.contains("left")),
        "{sent:?}"
    );
}

//! Rounds of a group: failures, members that leave, ranks that disagree, and the reuse of the exchange buffers.

use super::*;
use crate::ops::collective::CollectiveKind;
use crate::tensor::{DType, TensorDesc};
use std::sync::mpsc;

const REDUCE: CollectiveKind = CollectiveKind::AllReduce;

fn desc(n: usize) -> TensorDesc {
    TensorDesc::contiguous(DType::F32, [n, 1, 1, 1]).unwrap()
}

/// The part of an ALL_REDUCE of `n` floats.
pub(super) fn reduce(n: usize) -> CollectivePart {
    CollectivePart::new(REDUCE, &desc(n), &desc(n))
}

/// A part of `part` floats of an ALL_GATHER of `whole` floats.
fn gather(part: usize, whole: usize) -> CollectivePart {
    CollectivePart::new(CollectiveKind::AllGather { axis: 0 }, &desc(part), &desc(whole))
}

fn group<const N: usize>() -> [GroupMember; N] {
    let mut members = CollectiveGroup::members(N, 4096, &MemoryBudget::new(1 << 20)).unwrap();
    members.iter_mut().enumerate().for_each(|(rank, member)| member.set_device(&format!("CPU{rank}")));
    members.try_into().unwrap()
}

pub(super) fn publish(member: &GroupMember, part: &CollectivePart, value: u8) -> Result<(), DeviceError> {
    member.publish(part, |bytes| bytes.fill(value))
}

pub(super) fn text(result: Result<impl fmt::Debug, DeviceError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_group_has_1_to_64_ranks() {
    let budget = MemoryBudget::new(1 << 20);
    for (ranks, valid) in [(0, false), (1, true), (64, true), (65, false)] {
        assert_eq!(CollectiveGroup::members(ranks, 4096, &budget).is_ok(), valid, "{ranks}");
    }
}

/// A rank that is two rounds behind in combining keeps its parts: whatever the order of the ranks, each reads the parts of its
/// own round.
#[test]
fn buffers_are_reused_in_any_order_of_ranks() {
    for seed in 0..100 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let ranks = rng.usize(1..6);
        let members = CollectiveGroup::members(ranks, 4096, &MemoryBudget::new(1 << 20)).unwrap();
        // By rank: the rounds combined, and whether the next round is published.
        let mut states = vec![(0u8, false); ranks];
        let bytes = |round: u8| 4 * (1 + usize::from(round) % 7);
        while states.iter().any(|&(round, _)| round < 20) {
            let rank = rng.usize(0..ranks);
            let (member, state) = (&members[rank], &mut states[rank]);
            match *state {
                (20, _) => {}
                (round, false) => {
                    publish(member, &reduce(bytes(round) / 4), (100 * rank) as u8 + round).unwrap();
                    state.1 = true;
                }
                (round, true) if member.poll().unwrap() => {
                    for other in 0..ranks {
                        let part = member.part(other).unwrap();
                        assert_eq!(*part, vec![(100 * other) as u8 + round; bytes(round)][..], "seed {seed}");
                    }
                    *state = (round + 1, false);
                }
                (round, true) => {
                    assert!(member.part(0).is_err(), "a part of an incomplete round");
                    assert!(text(publish(member, &reduce(1), 0)).contains("has not combined round"), "{round}");
                }
            }
        }
    }
}

#[test]
fn the_last_rank_reaches_the_awaited_point() {
    let [a, b, c] = group();
    publish(&a, &reduce(1), 1).unwrap();
    assert_eq!(a.poll_briefly(|| true), Ok(false));
    let (point, (tx, rx)) = (a.await_point().unwrap(), mpsc::channel());
    point.on_reached(move |outcome| tx.send(outcome).unwrap()).detach();
    publish(&b, &reduce(1), 2).unwrap();
    assert_eq!((a.poll(), rx.try_recv()), (Ok(false), Err(mpsc::TryRecvError::Empty)));
    publish(&c, &reduce(1), 3).unwrap();
    assert_eq!(rx.try_recv(), Ok(Ok(())));
    assert_eq!(a.poll_briefly(|| true), Ok(true));
    assert!(a.await_point().is_none() && c.await_point().is_none());
    assert_eq!([&a, &b, &c].map(|m| m.part(1).unwrap()[0]), [2; 3]);
}

#[test]
fn failures_name_the_rank_and_reach_every_rank() {
    type Break = fn(GroupMember);
    let cases: [(Break, &str); 2] = [
        (drop, "rank 1 (CPU1) has left the group"),
        (|b| b.fail(&DeviceError::Misuse("a test")), "rank 1 (CPU1) has failed: misuse: a test"),
    ];
    for (fail, want) in cases {
        let [a, b, c] = group();
        publish(&a, &reduce(1), 1).unwrap();
        let point = a.await_point().unwrap();
        fail(b);
        assert_eq!(point.wait(None).unwrap_err().to_string(), want);
        // A later failure, and a part that does not belong to the round, do not replace the first.
        c.fail(&DeviceError::Ended);
        for result in [a.poll().map(drop), publish(&c, &gather(1, 2), 1), publish(&c, &reduce(1), 1)] {
            assert_eq!(text(result), want);
        }
        assert!(a.await_point().is_none());
    }
}

/// A rank may leave once all have published: the others still combine that round.
#[test]
fn a_complete_round_survives_a_member_that_leaves() {
    let [a, b] = group();
    publish(&a, &reduce(1), 1).unwrap();
    publish(&b, &reduce(1), 2).unwrap();
    drop(b);
    assert_eq!(a.poll(), Ok(true));
    assert_eq!(a.part(1).unwrap()[0], 2);
    assert_eq!(text(publish(&a, &reduce(1), 1)), "rank 1 (CPU1) has left the group");
}

#[test]
fn ranks_that_disagree_fail_with_both_collectives() {
    let axis_1 = CollectivePart::new(CollectiveKind::AllGather { axis: 1 }, &desc(2), &desc(2));
    for (first, second, want) in [
        (
            reduce(4),
            reduce(5),
            "rank 0 (CPU0) runs ALL_REDUCE of F32 [4, 1, 1, 1], rank 1 (CPU1) runs ALL_REDUCE of F32 [5",
        ),
        (reduce(4), gather(2, 4), "rank 1 (CPU1) runs ALL_GATHER of F32 [4, 1, 1, 1] along axis 0"),
        (gather(1, 2), axis_1, "along axis 0, rank 1 (CPU1) runs ALL_GATHER of F32 [2, 1, 1, 1] along axis 1"),
        (gather(2, 4), gather(3, 4), "the parts have 5 elements along the axis together, not 4"),
        (gather(2, 4), gather(1, 4), "the parts have 3 elements along the axis together, not 4"),
    ] {
        let [a, b] = group();
        publish(&a, &first, 0).unwrap();
        let point = a.await_point().unwrap();
        let got = text(publish(&b, &second, 0));
        assert!(got.contains(want) && got.starts_with("the ranks of a group disagree: "), "{got}");
        assert_eq!((text(a.poll()), point.wait(None).unwrap_err().to_string()), (got.clone(), got));
    }
    let [a, b] = group();
    publish(&a, &gather(1, 4), 0).unwrap();
    publish(&b, &gather(3, 4), 0).unwrap();
    assert_eq!((a.poll(), a.part(1).unwrap().len()), (Ok(true), 12));
}

#[test]
fn a_piece_of_another_extent_fails_the_group() {
    let scatter = |piece| CollectivePart::new(CollectiveKind::ReduceScatter { axis: 0 }, &desc(5), &desc(piece));
    let [a, b] = group();
    publish(&a, &scatter(2), 0).unwrap();
    publish(&b, &scatter(3), 0).unwrap();
    assert_eq!(a.poll(), Ok(true));
    let [a, _b] = group();
    let error = text(publish(&a, &scatter(3), 0));
    assert!(error.contains("rank 0 has 3 elements along the axis, not 2"), "{error}");
}

#[test]
fn exchange_memory_is_reserved_for_the_largest_part() {
    let budget = MemoryBudget::new(1 << 16);
    for (part_bytes, pages) in [(0, 0), (1, 1), (4096, 1), (4097, 2)] {
        let members = CollectiveGroup::members(2, part_bytes, &budget).unwrap();
        assert_eq!(budget.used(), 4 * 4096 * pages, "{part_bytes}");
        let largest = 1024 * pages as usize;
        if pages > 0 {
            members.iter().for_each(|member| publish(member, &reduce(largest), 0).unwrap());
        }
        assert!(matches!(publish(&members[0], &reduce(largest + 1), 0), Err(DeviceError::Misuse(_))));
        assert_eq!(budget.used(), 4 * 4096 * pages, "{part_bytes}");
        drop(members);
        assert_eq!(budget.used(), 0);
    }
    for part_bytes in [20_000, u64::MAX] {
        assert!(matches!(CollectiveGroup::members(2, part_bytes, &budget), Err(DeviceError::OutOfMemory { .. })));
    }
}

//! Groups of ranks in one process. Invariants: a rank gets the parts of all ranks of its round, unchanged, or the group's failure,
//! which is the same for all ranks; no round without the parts of all ranks is complete; a rank that leaves fails no round that was
//! complete; every wait ends.

use crate::device::{CollectiveGroup, CollectivePart, DeviceError, GroupMember, MemoryBudget};
use crate::ops::collective::CollectiveKind;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::orders::spawn;
use crate::tensor::{DType, TensorDesc};
use shuttle::rand::{Rng, thread_rng};
use std::ops::Range;

const RANKS: usize = 3;

fn part(elements: usize) -> CollectivePart {
    let desc = TensorDesc::contiguous(DType::F32, [elements, 1, 1, 1]).expect("a shape");
    CollectivePart::new(CollectiveKind::AllReduce, &desc, &desc)
}

/// What a rank publishes in a round.
fn content(rank: usize, round: u64) -> u8 {
    rank as u8 * 16 + round as u8 + 1
}

/// The result of rounds: the one that failed, with the error.
pub(crate) type Rounds = Result<(), (u64, DeviceError)>;

/// Runs rounds as a device does: publishes, waits, and reads the parts of all ranks.
pub(crate) fn run_rounds(member: &GroupMember, rounds: Range<u64>) -> Rounds {
    for round in rounds {
        run_round(member, round, 2).map_err(|e| (round, e))?;
    }
    Ok(())
}

fn run_round(member: &GroupMember, round: u64, elements: usize) -> Result<(), DeviceError> {
    member.publish(&part(elements), |bytes| bytes.fill(content(member.rank(), round)))?;
    while !member.poll_briefly(|| false)? {
        if let Some(point) = member.await_point() {
            // A failure is the group's.
            let _ = point.wait(None);
        }
    }
    for rank in 0..member.ranks() {
        let bytes = member.part(rank).expect("a part of a complete round");
        assert_eq!(*bytes, [content(rank, round); 8], "part of rank {rank} in round {round}");
    }
    Ok(())
}

fn group() -> (Vec<GroupMember>, Arc<MemoryBudget>) {
    let budget = MemoryBudget::new(1 << 20);
    (CollectiveGroup::members(RANKS, 8, &budget).expect("a group"), budget)
}

/// All ranks run their rounds, and leave.
pub(super) fn rounds() {
    let (members, budget) = group();
    let threads: Vec<_> = members.into_iter().map(|member| spawn(move || run_rounds(&member, 0..3))).collect();
    threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), Ok(())));
    assert_eq!(budget.used(), 0, "exchange memory at the end");
}

/// One rank leaves or fails before a round, or its part does not fit; or its member is dropped before it begins.
pub(super) fn failure() {
    let (members, _) = group();
    let (failing, round) = (thread_rng().gen_range(0..RANKS), thread_rng().gen_range(0..2));
    let behaviour = thread_rng().gen_range(0..3);
    // Rounds in which the failing rank has published.
    let published = Arc::new(AtomicU64::new(0));
    let threads = members.into_iter().map(|member| {
        let published = Arc::clone(&published);
        spawn(move || {
            if member.rank() != failing {
                return run_rounds(&member, 0..3);
            }
            let before = run_rounds(&member, 0..round);
            published.store(round, Ordering::Relaxed);
            match behaviour {
                0 => drop(member),
                1 => member.fail(&DeviceError::Deadline("a device")),
                _ => {
                    let failed = run_round(&member, round, 1);
                    assert!(matches!(failed, Err(DeviceError::RanksDisagree(_))), "{failed:?}");
                }
            }
            before
        })
    });
    let threads: Vec<_> = threads.collect();
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(results[failing], Ok(()), "rounds before the failure");
    let mut failures = results.iter().enumerate().filter(|(rank, _)| *rank != failing).map(|(_, result)| {
        let Err((at, error)) = result else { panic!("a round without all parts was complete") };
        assert_eq!(*at, published.load(Ordering::Relaxed), "the round that fails");
        error
    });
    let first = failures.next().expect("two others");
    let expected = match first {
        DeviceError::RankLeft { rank, .. } => behaviour == 0 && *rank == failing,
        DeviceError::RankFailed { rank, .. } => behaviour == 1 && *rank == failing,
        DeviceError::RanksDisagree(_) => behaviour == 2,
        _ => false,
    };
    assert!(expected, "{first}");
    assert!(failures.all(|other| other == first), "the ranks get different failures");
}

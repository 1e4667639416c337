//! Budgets. Invariants: what is reserved never exceeds the limit of a budget or of its parent; all of it is given back at the end.

use crate::device::Budget;
use crate::sync::Arc;
use crate::sync::orders::spawn;

/// Reservations in two children of one parent, by three threads, that grow, shrink and end.
pub(super) fn children_of_one_parent() {
    let parent = Budget::new(10);
    let children = [6, 8].map(|limit| Budget::within(&parent, limit));
    let check = {
        let (parent, children) = (Arc::clone(&parent), children.clone());
        move || {
            assert!(parent.used() <= 10 && children[0].used() <= 6 && children[1].used() <= 8);
        }
    };
    let threads: Vec<_> = [(0, 4), (1, 5), (1, 2)]
        .into_iter()
        .map(|(child, amount)| {
            let (budget, check) = (Arc::clone(&children[child]), check.clone());
            spawn(move || {
                let reservation = budget.reserve(amount);
                check();
                if let Ok(mut reservation) = reservation {
                    let before = reservation.bytes();
                    let grown = reservation.grow(2).is_ok();
                    assert_eq!(reservation.bytes(), if grown { before + 2 } else { before });
                    check();
                    reservation.shrink_to(1);
                    check();
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!([parent.used(), children[0].used(), children[1].used()], [0; 3], "reserved at the end");
    assert!(parent.peak() <= 10);
    assert!(children[1].reserve(8).is_ok(), "all of it can be reserved again");
}

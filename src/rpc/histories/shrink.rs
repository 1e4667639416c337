//! Shrinks a history that fails: removes operations while it still fails.

use std::time::{Duration, Instant};

use super::operations::History;

/// Most attempts.
const MAX_ATTEMPTS: usize = 60;

/// Time after which no further attempt begins: a leak takes seconds to show.
const MAX_TIME: Duration = Duration::from_secs(60);

/// The shortest failing part of a history that was found, with its failure.
pub(super) fn shrink(
    history: &History,
    failure: String,
    mut run: impl FnMut(&History) -> Result<(), String>,
) -> (History, String) {
    let (mut best, mut failure) = (history.clone(), failure);
    let (mut attempts, since) = (0, Instant::now());
    let may_go_on = |attempts| attempts < MAX_ATTEMPTS && since.elapsed() < MAX_TIME;
    // Halves first, then smaller parts, down to single operations.
    let mut len = best.operations.len().div_ceil(2);
    while len > 0 {
        let mut at = 0;
        let mut has_shrunk = false;
        while at < best.operations.len() && may_go_on(attempts) {
            attempts += 1;
            let mut shorter = best.clone();
            shorter.operations.drain(at..(at + len).min(best.operations.len()));
            match run(&shorter) {
                // The next operations have moved to `at`.
                Err(other) => (best, failure, has_shrunk) = (shorter, other, true),
                Ok(()) => at += len,
            }
        }
        if !may_go_on(attempts) {
            break;
        }
        // Removing one operation may make another one removable.
        len = if len == 1 && has_shrunk { 1 } else { len / 2 };
    }
    (best, failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_shrinks_to_the_operations_that_fail() {
        let history = History::of_seed(3);
        let count = history.operations.len();
        let needed = [2, count / 2, count - 1];
        let fails = |history: &History| {
            let has = |number| history.operations.iter().any(|(n, _)| *n == number);
            if needed.into_iter().all(has) { Err("all three".to_owned()) } else { Ok(()) }
        };
        let (shortest, failure) = shrink(&history, "first".to_owned(), fails);
        let left: Vec<_> = shortest.operations.iter().map(|(number, _)| *number).collect();
        assert_eq!((left, failure.as_str()), (needed.to_vec(), "all three"));
    }
}

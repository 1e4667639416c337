//! Merging of neighbouring symbols, the core of BPE and of SentencePiece as llama.cpp encodes it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A run of characters that is a token, or a part of one. Merged symbols form a list of those that are left.
struct Symbol {
    start: usize,
    /// Length in bytes; 0 once the symbol is merged into its left neighbour.
    len: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// A pair of neighbours, ordered by rank, then by position.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    left: usize,
    right: usize,
    /// Bytes of both when the pair was found: another number now means that one of them has changed.
    len: usize,
}

/// Cuts `text` into characters, and joins pairs of neighbours for which `rank` has a rank: lowest rank first, and the leftmost pair among
/// equals. Returns what is left when no pair has a rank.
pub(super) fn merge<'t>(text: &'t str, mut rank: impl FnMut(&'t str, &'t str) -> Option<u32>) -> Vec<&'t str> {
    let mut symbols: Vec<Symbol> = text
        .char_indices()
        .enumerate()
        .map(|(at, (start, c))| Symbol { start, len: c.len_utf8(), before: at.checked_sub(1), after: Some(at + 1) })
        .collect();
    if let Some(last) = symbols.last_mut() {
        last.after = None;
    }
    let mut queue = BinaryHeap::new();
    let mut find =
        |symbols: &[Symbol], queue: &mut BinaryHeap<Reverse<Pair>>, left: Option<usize>, right: Option<usize>| {
            let (Some(left), Some(right)) = (left, right) else { return };
            let (start, middle) = (symbols[left].start, symbols[right].start);
            let end = middle + symbols[right].len;
            if let Some(rank) = rank(&text[start..middle], &text[middle..end]) {
                queue.push(Reverse(Pair { rank, left, right, len: end - start }));
            }
        };
    for right in 1..symbols.len() {
        find(&symbols, &mut queue, Some(right - 1), Some(right));
    }
    while let Some(Reverse(Pair { left, right, len, .. })) = queue.pop() {
        if symbols[left].len == 0 || symbols[right].len == 0 || symbols[left].len + symbols[right].len != len {
            continue;
        }
        symbols[left].len = len;
        symbols[right].len = 0;
        let after = symbols[right].after;
        symbols[left].after = after;
        if let Some(after) = after {
            symbols[after].before = Some(left);
        }
        let before = symbols[left].before;
        find(&symbols, &mut queue, before, Some(left));
        find(&symbols, &mut queue, Some(left), after);
    }
    symbols
        .iter()
        .filter(|symbol| symbol.len > 0)
        .map(|symbol| &text[symbol.start..symbol.start + symbol.len])
        .collect()
}

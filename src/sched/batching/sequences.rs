//! The sequences of a group, and the tokens of its next batch.

use super::cells::{CellError, KvCells, SequenceTag};
use std::collections::{BTreeMap, VecDeque};

/// A sequence of a group. Numbers are not given twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SequenceId(u64);

/// The tokens of a batch, by sequence and, within one, in the order of positions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TokenBatch {
    /// Ids.
    pub tokens: Vec<u32>,
    /// By token: its position in its sequence.
    pub positions: Vec<u32>,
    /// By token: the tag of its sequence.
    pub tags: Vec<u32>,
    /// By token: the cell of the KV cache that it writes.
    pub cells: Vec<u32>,
    /// The tokens for which logits are needed, in the order of the batch: the last ones of sequences with no more tokens.
    pub outputs: Vec<BatchOutput>,
    /// Cells that attention must read: the first ones.
    pub seen: usize,
    /// Tokens of the group's sequences that later batches have.
    pub waiting: usize,
}

/// A token of a batch whose logits are needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchOutput {
    /// Index in the batch.
    pub index: usize,
    /// Its sequence.
    pub sequence: SequenceId,
    /// Its position in the sequence.
    pub position: usize,
}

/// Sequences that share a KV cache and are evaluated together.
///
/// After a failed run the state of the cache is unknown: make a new group, and let the sequences join again with all their tokens.
#[derive(Clone, Debug)]
pub struct SequenceGroup {
    cells: KvCells,
    tokens: usize,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
}

#[derive(Clone, Debug)]
struct Sequence {
    tag: SequenceTag,
    /// Tokens that are not in a batch yet.
    waiting: VecDeque<u32>,
}

impl SequenceGroup {
    /// A group without sequences, with a KV cache of `cells` cells in blocks of `block` ([`KvCells::new`]), and batches of at most
    /// `tokens` tokens, but at least 1. If more sequences than `tokens` decode, the batches have the tokens of those that joined first;
    /// the others wait until some of these leave.
    pub fn new(cells: usize, block: usize, tokens: usize) -> SequenceGroup {
        SequenceGroup { cells: KvCells::new(cells, block), tokens: tokens.max(1), sequences: BTreeMap::new(), next: 0 }
    }

    /// Adds a sequence that begins with `tokens` and has at most `positions` tokens.
    ///
    /// # Errors
    /// [`CellError::Full`], also for more tokens than `positions`.
    pub fn join(&mut self, tokens: &[u32], positions: usize) -> Result<SequenceId, CellError> {
        let tag = self.cells.join(positions.max(tokens.len()))?;
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, Sequence { tag, waiting: tokens.iter().copied().collect() });
        Ok(id)
    }

    /// Appends a token to a sequence, for the next batch.
    ///
    /// # Errors
    /// [`CellError::BeyondReservation`], [`CellError::Unknown`].
    pub fn push(&mut self, id: SequenceId, token: u32) -> Result<(), CellError> {
        let sequence = self.sequences.get_mut(&id).ok_or(CellError::Unknown)?;
        let position = self.cells.length(sequence.tag) + sequence.waiting.len();
        self.cells.check_position(sequence.tag, position)?;
        sequence.waiting.push_back(token);
        Ok(())
    }

    /// Removes a sequence; its cells are free for others.
    pub fn leave(&mut self, id: SequenceId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.cells.leave(sequence.tag);
        }
    }

    /// Shortens a sequence to its first `length` evaluated tokens, and removes its tokens that are in no batch yet.
    pub fn truncate(&mut self, id: SequenceId, length: usize) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.waiting.clear();
            self.cells.truncate(sequence.tag, length);
        }
    }

    /// Number of tokens of a sequence that were in batches; 0 after it has left.
    pub fn length(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, |sequence| self.cells.length(sequence.tag))
    }

    /// Whether a sequence decodes: at most one of its tokens waits, and others were evaluated. It then waits for each batch, so
    /// batches should have few tokens of prompts.
    pub fn is_decoding(&self) -> bool {
        self.sequences.values().any(|sequence| sequence.waiting.len() <= 1 && self.cells.length(sequence.tag) > 0)
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Cells that are not reserved to a sequence.
    pub fn unreserved(&self) -> usize {
        self.cells.unreserved()
    }

    /// The next batch, with at most `prompts` tokens of prompts, but at least 1; `None` if no token waits.
    ///
    /// First the sequences with one waiting token: none of them waits for the prompt of another. The rest of
    /// the batch is for prompts, in the order in which the sequences joined, one after the other, so that the first one soon decodes.
    pub fn next_batch(&mut self, prompts: usize) -> Option<TokenBatch> {
        let (mut batch, mut left) = (TokenBatch::default(), self.tokens);
        let has_one = |sequence: &Sequence| sequence.waiting.len() == 1;
        for (&id, sequence) in self.sequences.iter_mut().filter(|(_, sequence)| has_one(sequence)) {
            left -= take(&mut batch, &mut self.cells, (id, sequence), left.min(1));
        }
        left = left.min(prompts.max(1));
        for (&id, sequence) in self.sequences.iter_mut().filter(|(_, sequence)| !has_one(sequence)) {
            left -= take(&mut batch, &mut self.cells, (id, sequence), left);
        }
        batch.seen = self.cells.seen();
        batch.waiting = self.sequences.values().map(|sequence| sequence.waiting.len()).sum();
        (!batch.tokens.is_empty()).then_some(batch)
    }
}

/// Moves up to `most` waiting tokens of a sequence into a batch; returns their number.
fn take(
    batch: &mut TokenBatch,
    cells: &mut KvCells,
    (id, sequence): (SequenceId, &mut Sequence),
    most: usize,
) -> usize {
    let before = batch.tokens.len();
    while batch.tokens.len() < before + most {
        let Some(&token) = sequence.waiting.front() else { break };
        // Cannot fail: `join` and `push` admit no token beyond the reservation.
        let Ok((position, cell)) = cells.append(sequence.tag) else { break };
        sequence.waiting.pop_front();
        batch.tokens.push(token);
        batch.positions.push(position as u32);
        batch.tags.push(sequence.tag.number());
        batch.cells.push(cell);
        if sequence.waiting.is_empty() {
            batch.outputs.push(BatchOutput { index: batch.tokens.len() - 1, sequence: id, position });
        }
    }
    batch.tokens.len() - before
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;

    const ALL: usize = usize::MAX;

    fn tokens(batch: Option<TokenBatch>) -> (Vec<u32>, Vec<usize>) {
        let batch = batch.unwrap();
        (batch.tokens, batch.outputs.iter().map(|output| output.index).collect())
    }

    #[test]
    fn decoding_sequences_are_in_every_batch_and_prompts_fill_the_rest() {
        let mut group = SequenceGroup::new(64, 1, 6);
        let a = group.join(&[1, 2, 3, 4, 5, 6, 7], 16).unwrap();
        assert!(!group.is_decoding());
        assert_eq!(tokens(group.next_batch(ALL)), (vec![1, 2, 3, 4, 5, 6], vec![]));
        assert_eq!(tokens(group.next_batch(ALL)), (vec![7], vec![0]));
        assert_eq!(group.next_batch(ALL), None);
        group.push(a, 8).unwrap();
        let b = group.join(&[20, 21, 22, 23], 16).unwrap();
        let c = group.join(&[30, 31], 16).unwrap();
        assert!(group.is_decoding());
        assert_eq!(tokens(group.next_batch(3)), (vec![8, 20, 21, 22], vec![0]), "3 of prompts");
        group.push(a, 9).unwrap();
        let batch = group.next_batch(ALL).unwrap();
        assert_eq!((&*batch.tokens, &*batch.positions), (&[9, 23, 30, 31][..], &[8, 3, 0, 1][..]));
        let outputs: Vec<_> =
            batch.outputs.iter().map(|output| (output.index, output.sequence, output.position)).collect();
        assert_eq!(outputs, [(0, a, 8), (1, b, 3), (3, c, 1)]);
        group.leave(a);
        group.push(c, 32).unwrap();
        assert_eq!(tokens(group.next_batch(ALL)), (vec![32], vec![0]));
        assert_eq!((group.sequences(), group.length(a), group.length(c)), (2, 0, 3));
    }

    #[test]
    fn a_batch_of_many_sequences_has_at_most_its_limit_of_tokens() {
        let mut group = SequenceGroup::new(64, 1, 2);
        let ids: Vec<_> = (0..3).map(|token| group.join(&[token], 4).unwrap()).collect();
        assert_eq!(tokens(group.next_batch(ALL)), (vec![0, 1], vec![0, 1]));
        group.push(ids[0], 9).unwrap();
        assert_eq!(tokens(group.next_batch(ALL)), (vec![9, 2], vec![0, 1]));
    }

    #[test]
    fn tokens_beyond_the_promise_are_refused() {
        let mut group = SequenceGroup::new(4, 1, 8);
        assert_eq!(group.join(&[1; 5], 2), Err(CellError::Full { wanted: 5, left: 4, capacity: 4 }));
        let a = group.join(&[1, 2], 3).unwrap();
        group.push(a, 3).unwrap();
        assert_eq!(group.push(a, 4), Err(CellError::BeyondReservation { position: 3, reserved: 3 }));
        assert_eq!(tokens(group.next_batch(ALL)).0, [1, 2, 3]);
        group.truncate(a, 1);
        assert_eq!(group.length(a), 1);
        group.push(a, 5).unwrap();
        assert_eq!(group.next_batch(ALL).unwrap().positions, [1]);
        group.leave(a);
        assert_eq!(group.push(a, 1), Err(CellError::Unknown));
    }
}

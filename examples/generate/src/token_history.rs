//! The tokens of a sequence in the batches in which they were evaluated.

/// The tokens of a sequence, and the batches from which they can be evaluated again.
///
/// A replay repeats every batch, also one whose end was cut off later: a shorter batch would round differently, so that the KV
/// cache would not get the same bits.
#[derive(Debug, Default)]
pub struct TokenHistory {
    batches: Vec<TokenBatch>,
    length: usize,
}

/// Tokens that were evaluated together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// Position of the first token. The sequence was cut off there if it was longer.
    pub start: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
}

impl TokenHistory {
    /// Appends a batch.
    pub fn push(&mut self, tokens: &[u32]) {
        self.batches.push(TokenBatch { start: self.length, tokens: tokens.to_vec() });
        self.length += tokens.len();
    }

    /// Shortens the sequence to its first `length` tokens.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
        while self.batches.pop_if(|batch| batch.start >= length).is_some() {}
    }

    /// The batches, in the order of their evaluation.
    pub fn batches(&self) -> &[TokenBatch] {
        &self.batches
    }

    /// The tokens of the sequence.
    pub fn tokens(&self) -> Vec<u32> {
        let mut sequence: Vec<u32> = Vec::with_capacity(self.length);
        for batch in &self.batches {
            sequence.truncate(batch.start);
            sequence.extend(&batch.tokens);
        }
        sequence.truncate(self.length);
        sequence
    }

    /// Number of tokens at the start of the sequence that are also the start of `tokens`.
    pub fn common_prefix(&self, tokens: &[u32]) -> usize {
        self.tokens().iter().zip(tokens).take_while(|(before, now)| before == now).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortened_sequence_keeps_the_batches_that_its_tokens_come_from() {
        let mut history = TokenHistory::default();
        let batch = |start, tokens: &[u32]| TokenBatch { start, tokens: tokens.to_vec() };
        history.push(&[1, 2, 3, 4]);
        history.push(&[5]);
        history.push(&[6]);
        assert_eq!(history.common_prefix(&[1, 2, 3, 4, 5, 7]), 5);
        history.truncate(5);
        assert_eq!(history.batches(), [batch(0, &[1, 2, 3, 4]), batch(4, &[5])]);
        history.truncate(3);
        assert_eq!(history.common_prefix(&[1, 2, 3, 4]), 3, "the fourth token was cut off");
        history.push(&[8, 9]);
        assert_eq!(history.batches(), [batch(0, &[1, 2, 3, 4]), batch(3, &[8, 9])]);
        assert_eq!(history.common_prefix(&[1, 2, 3, 8, 9, 9]), 5);
        history.truncate(0);
        assert_eq!((history.batches(), history.common_prefix(&[1])), (&[][..], 0));
    }
}

//! Differences between byte strings: the runs of bytes that differ from a base at the same position, and the new length.
//!
//! Format: the length of the result, and then for each run the number of unchanged bytes before it, its length and its bytes.
//! All numbers are in LEB128. The bytes behind the last run are unchanged. Positions are not shifted: after an insertion in the
//! middle, all bytes behind it differ.

/// Number of unchanged bytes that end a run. Fewer cost less inside of the run than between two runs.
const MIN_UNCHANGED: usize = 4;

/// Encodes how `target` differs from `base`. `None` if that takes more than `max_len` bytes.
pub(super) fn encode(base: &[u8], target: &[u8], max_len: usize) -> Option<Vec<u8>> {
    let base = &base[..base.len().min(target.len())];
    let mut out = Vec::new();
    push_number(&mut out, target.len());
    let mut at = 0;
    while out.len() <= max_len {
        let start = at + common_prefix(&base[at.min(base.len())..], &target[at..]);
        if start == target.len() {
            return Some(out);
        }
        let end = run_end(base, target, start);
        push_number(&mut out, start - at);
        push_number(&mut out, end - start);
        out.extend_from_slice(&target[start..end]);
        at = end;
    }
    None
}

/// Rebuilds the target of a difference that [`encode`] returned for the same base.
pub(super) fn apply(base: &[u8], mut difference: &[u8]) -> Vec<u8> {
    let len = take_number(&mut difference);
    let mut target = Vec::with_capacity(len);
    target.extend_from_slice(&base[..base.len().min(len)]);
    target.resize(len, 0);
    let mut at = 0;
    while !difference.is_empty() {
        at += take_number(&mut difference);
        let len = take_number(&mut difference);
        let (run, rest) = difference.split_at(len);
        target[at..at + run.len()].copy_from_slice(run);
        at += run.len();
        difference = rest;
    }
    target
}

/// Length of the target of a difference.
pub(super) fn target_len(mut difference: &[u8]) -> usize {
    take_number(&mut difference)
}

/// Length of the common prefix. Most bytes are equal, so whole chunks are compared first.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    const CHUNK: usize = 32;
    let chunks = a.chunks_exact(CHUNK).zip(b.chunks_exact(CHUNK));
    let equal = CHUNK * chunks.take_while(|(a, b)| a == b).count();
    equal + a[equal..].iter().zip(&b[equal..]).take_while(|(a, b)| a == b).count()
}

/// End of the run of changed bytes that begins at `start`. `base` is not longer than `target`.
fn run_end(base: &[u8], target: &[u8], start: usize) -> usize {
    let mut unchanged = 0;
    for at in start..base.len() {
        unchanged = if base[at] == target[at] { unchanged + 1 } else { 0 };
        if unchanged == MIN_UNCHANGED {
            return at + 1 - unchanged;
        }
    }
    if base.len() == target.len() { target.len() - unchanged } else { target.len() }
}

fn push_number(out: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Decodes a number, and advances `input` past it.
fn take_number(input: &mut &[u8]) -> usize {
    let len = input.iter().take_while(|&&byte| byte & 0x80 != 0).count() + 1;
    let (bytes, rest) = input.split_at(len);
    *input = rest;
    bytes.iter().rev().fold(0, |number, &byte| number << 7 | usize::from(byte & 0x7f))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    /// Checks that a difference restores its target, and that one byte less would not do. Returns its length.
    #[track_caller]
    fn round_trip(base: &[u8], target: &[u8]) -> usize {
        let difference = encode(base, target, usize::MAX).unwrap();
        assert!(apply(base, &difference) == target);
        let len = difference.len();
        assert!(encode(base, target, len).as_ref() == Some(&difference) && encode(base, target, len - 1).is_none());
        len
    }

    #[test]
    fn differences_restore_their_targets() {
        let base: Vec<u8> = (0..1000).map(|i| (i % 251) as u8).collect();
        let changed = |at: &[usize]| {
            let mut bytes = base.clone();
            at.iter().for_each(|&at| bytes[at] ^= 1);
            bytes
        };
        let cases: [(&str, Vec<u8>, usize); 10] = [
            ("equal", base.clone(), 2),
            ("empty", Vec::new(), 1),
            ("the first byte", changed(&[0]), 2 + 3),
            ("the last byte", changed(&[999]), 2 + 4),
            ("two bytes of one run", changed(&[500, 504]), 2 + 3 + 5),
            ("two runs", changed(&[500, 505]), 2 + 4 + 3),
            ("cut off", base[..300].to_vec(), 2),
            ("extended", [&base[..], b"new"].concat(), 2 + 3 + 3),
            ("the last byte and extended", [&changed(&[999])[..], b"new"].concat(), 2 + 3 + 4),
            ("inserted in front", [b"new", &base[..]].concat(), 2 + 3 + 1003),
        ];
        for (name, target, len) in cases {
            assert_eq!(round_trip(&base, &target), len, "{name}");
            round_trip(&[], &target);
        }
    }

    #[test]
    fn random_edits_are_restored() {
        let mut rng = Rng::with_seed(8);
        // Few values, so that bytes are often equal by chance.
        let random = |rng: &mut Rng, max_len| -> Vec<u8> { (0..rng.usize(0..max_len)).map(|_| rng.u8(0..3)).collect() };
        for _ in 0..2000 {
            let base = random(&mut rng, 400);
            let mut target = base.clone();
            for _ in 0..rng.usize(0..6) {
                let at = rng.usize(0..=target.len());
                let end = rng.usize(at..=target.len().min(at + 40));
                target.splice(at..end, random(&mut rng, 40));
            }
            round_trip(&base, &target);
        }
    }
}

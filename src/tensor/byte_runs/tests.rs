use super::*;
use crate::tensor::DType;
use ByteRunsError::{Exhausted, NoSuchSlice, NotContiguous, NotTwoDimensional, OutOfBounds, Overlap, TooLarge};

/// The bytes of a slice, block by block.
fn slice_bytes(tensor: &TensorDesc, slice: &[Range<usize>; DIMS], bytes: &[u8]) -> Vec<u8> {
    let (block, [nb0, nb1, nb2, nb3]) = (tensor.dtype().block_len(), tensor.nb());
    let mut out = Vec::new();
    for i3 in slice[3].clone() {
        for i2 in slice[2].clone() {
            for i1 in slice[1].clone() {
                for i0 in slice[0].start / block..slice[0].end / block {
                    let at = i0 * nb0 + i1 * nb1 + i2 * nb2 + i3 * nb3;
                    out.extend_from_slice(&bytes[at..at + nb0]);
                }
            }
        }
    }
    out
}

fn random_bytes(rng: &mut fastrand::Rng, len: usize) -> Vec<u8> {
    (0..len).map(|_| rng.u8(..)).collect()
}

#[test]
fn slices_of_rows_blocks_and_matrices_are_two_dimensional() {
    let all = usize::MAX; // the end of the dimension
    #[rustfmt::skip]
    let cases = [
        // Type, shape; slice; offset, length, stride and number of the runs. A block of q4_0 has 18 bytes, of q6_K 210.
        (DType::F32, [5, 4, 1, 1], [0..all, 0..all, 0..all, 0..all], [0, 80, 80, 1]),
        (DType::F32, [5, 4, 1, 1], [0..all, 1..3, 0..all, 0..all], [20, 40, 40, 1]),
        (DType::F32, [5, 4, 1, 1], [2..4, 0..all, 0..all, 0..all], [8, 8, 20, 4]),
        (DType::F32, [5, 4, 1, 1], [2..4, 1..3, 0..all, 0..all], [28, 8, 20, 2]),
        (DType::F32, [5, 4, 1, 1], [2..3, 1..3, 0..all, 0..all], [28, 4, 20, 2]),
        (DType::F32, [5, 4, 1, 1], [2..4, 3..4, 0..all, 0..all], [68, 8, 8, 1]),
        (DType::Q4_0, [128, 6, 1, 1], [32..96, 0..all, 0..all, 0..all], [18, 36, 72, 6]),
        (DType::Q4_0, [128, 6, 1, 1], [0..all, 4..6, 0..all, 0..all], [288, 144, 144, 1]),
        (DType::Q6_K, [512, 3, 1, 1], [256..512, 0..all, 0..all, 0..all], [210, 210, 420, 3]),
        // Matrices of experts: rows, blocks and whole matrices.
        (DType::Q4_0, [64, 6, 8, 1], [0..all, 2..4, 0..all, 0..all], [72, 72, 216, 8]),
        (DType::Q4_0, [64, 6, 8, 1], [0..32, 0..all, 0..all, 0..all], [0, 18, 36, 48]),
        (DType::Q4_0, [64, 6, 8, 1], [0..all, 0..all, 2..7, 0..all], [432, 1080, 1080, 1]),
        (DType::Q4_0, [64, 6, 8, 1], [0..32, 1..3, 5..6, 0..all], [1116, 18, 36, 2]),
        (DType::Q4_0, [64, 6, 8, 2], [0..32, 0..all, 0..all, 0..all], [0, 18, 36, 96]),
        (DType::Q4_0, [64, 6, 8, 2], [0..all, 0..all, 3..5, 0..all], [648, 432, 1728, 2]),
        // A vector, and dimensions of one element.
        (DType::F32, [7, 1, 1, 1], [3..5, 0..all, 0..all, 0..all], [12, 8, 8, 1]),
        (DType::F32, [1, 7, 1, 3], [0..all, 3..5, 0..all, 0..all], [12, 8, 28, 3]),
        // Nothing.
        (DType::F32, [5, 4, 1, 1], [2..2, 0..all, 0..all, 0..all], [0, 0, 0, 0]),
        (DType::F32, [5, 0, 1, 1], [0..all, 0..all, 0..all, 0..all], [0, 0, 0, 0]),
    ];
    let mut rng = fastrand::Rng::with_seed(51);
    for (dtype, ne, slice, [offset, run_bytes, stride, count]) in cases {
        let tensor = TensorDesc::contiguous(dtype, ne).unwrap();
        let slice = std::array::from_fn(|d: usize| slice[d].start..slice[d].end.min(ne[d]));
        let runs = ByteRuns::of_slice(&tensor, &slice).unwrap();
        assert_eq!(runs, ByteRuns { offset, run_bytes, stride, count }, "{dtype:?} {ne:?} {slice:?}");
        let part = TensorDesc::contiguous(dtype, slice.each_ref().map(|range| range.len())).unwrap();
        assert_eq!((runs.bytes(), runs.is_empty()), (part.dense_bytes() as u64, part.is_empty()));
        let bytes = random_bytes(&mut rng, tensor.extent());
        let slices = runs.slices(&bytes).unwrap().collect::<Vec<_>>().concat();
        assert_eq!(slices, slice_bytes(&tensor, &slice, &bytes), "{dtype:?} {ne:?} {slice:?}");
    }
}

#[test]
fn slices_that_a_tensor_does_not_have_are_errors() {
    let tensor = TensorDesc::contiguous(DType::Q4_0, [64, 6, 8, 2]).unwrap();
    let no_slice = |dim, start, end, ne, block| {
        ByteRuns::of_slice(&tensor, &with(dim, start..end)).err() == Some(NoSuchSlice { dim, start, end, ne, block })
    };
    fn with(dim: usize, range: Range<usize>) -> [Range<usize>; DIMS] {
        let mut slice = [0..64, 0..6, 0..8, 0..2];
        slice[dim] = range;
        slice
    }
    assert!(no_slice(0, 0, 96, 64, 32) && no_slice(0, 16, 64, 64, 32) && no_slice(0, 0, 40, 64, 32));
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 4..3;
    assert!(no_slice(1, backwards.start, backwards.end, 6, 1) && no_slice(3, 2, 3, 2, 1) && no_slice(2, 9, 9, 8, 1));
    for slice in [[0..32, 1..3, 0..8, 0..2], [0..32, 0..6, 1..3, 0..2], [0..64, 1..3, 1..3, 0..2]] {
        assert_eq!(ByteRuns::of_slice(&tensor, &slice), Err(NotTwoDimensional), "{slice:?}");
    }
    let strided = TensorDesc::strided(DType::F32, [4, 4, 1, 1], [4, 32, 128, 128]).unwrap();
    assert_eq!(ByteRuns::of_slice(&strided, &[0..4, 0..1, 0..1, 0..1]), Err(NotContiguous));
}

#[test]
fn numbers_that_overflow_or_overlap_are_refused() {
    let max = u64::MAX;
    for ([offset, run_bytes, stride, count], overlaps) in [
        ([0, 2, 1, 1], true),
        ([0, max, max - 1, 0], true),
        ([1, max, max, 1], false),
        ([0, 1, max, 2], false),
        ([0, 0, 1 << 32, 1 << 32], false),
        ([max, 1, 1, 1], false),
        ([8, 1, 2, max / 2], false),
    ] {
        let error =
            if overlaps { Overlap { run_bytes, stride } } else { TooLarge { offset, run_bytes, stride, count } };
        assert_eq!(ByteRuns::new(offset, run_bytes, stride, count), Err(error));
    }
    // The largest numbers that fit.
    for ([offset, run_bytes, stride, count], bytes, end) in [
        ([0, max, max, 1], max, max),
        ([max, 0, 0, max], 0, 0),
        ([0, 0, 1, max], 0, 0),
        ([0, max, max, 0], 0, 0),
        ([max - 1, 1, 1, 1], 1, max),
        ([1, 1, 2, max / 2], max / 2, max - 1),
    ] {
        let runs = ByteRuns::new(offset, run_bytes, stride, count).unwrap();
        assert_eq!((runs.bytes(), runs.end()), (bytes, end));
        assert_eq!(runs.ranges().next().map(|range| range.start), (bytes > 0).then_some(offset));
        assert!(runs.check_bounds(end).is_ok());
        assert_eq!(runs.check_bounds(end.saturating_sub(1)).is_err(), end > 0);
    }
}

#[test]
fn ranges_and_readers_return_the_runs_in_order() {
    let mut rng = fastrand::Rng::with_seed(52);
    for round in 0..500 {
        let (offset, run_bytes, count) = (rng.u64(0..20), rng.u64(0..20), rng.u64(0..8));
        let runs = ByteRuns::new(offset, run_bytes, run_bytes + rng.u64(0..3) * rng.u64(0..20), count).unwrap();
        let starts = (0..count).map(|run| offset + run * runs.stride());
        let mut want: Vec<Range<u64>> = starts.map(|start| start..start + run_bytes).collect();
        want.retain(|range| !range.is_empty());
        if runs.stride() == run_bytes && !runs.is_empty() {
            want = Vec::from([Range { start: offset, end: offset + runs.bytes() }]);
        }
        assert_eq!(runs.ranges().collect::<Vec<_>>(), want, "{runs:?}");
        assert_eq!(want.last().map_or(0, |last| last.end), runs.end());
        assert_eq!(want.iter().map(|range| range.end - range.start).sum::<u64>(), runs.bytes());

        let tensor = random_bytes(&mut rng, runs.end() as usize + round % 3);
        let want: Vec<u8> = want.iter().flat_map(|r| &tensor[r.start as usize..r.end as usize]).copied().collect();
        assert_eq!(runs.slices(&tensor).unwrap().collect::<Vec<_>>().concat(), want);
        let mut reader = runs.reader(&tensor).unwrap();
        let mut read = vec![0; want.len()];
        let mut rest = &mut read[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(rng.usize(0..=rest.len()));
            reader.read(now).unwrap();
            rest = later;
        }
        assert_eq!(read, want, "{runs:?}");
        assert_eq!(reader.read(&mut [0]), Err(Exhausted));
        if let Some(short) = (runs.end() as usize).checked_sub(1) {
            let error = OutOfBounds { end: runs.end(), bytes: short as u64 };
            assert_eq!(runs.reader(&tensor[..short]).err(), Some(error.clone()));
            assert_eq!(runs.slices(&tensor[..short]).err(), Some(error));
        }
    }
}

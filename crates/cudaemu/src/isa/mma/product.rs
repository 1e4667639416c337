//! Products of row-major matrices: `c += a · b` with `a` of m × k and `b` of k × n, where `n` is a multiple of 8.

/// Columns that are summed side by side, in vector registers of the host.
const WIDTH: usize = 8;

/// Floating-point elements (each exact in `f32`), summed in `f64`.
#[inline(always)]
pub(super) fn floats<const B: usize>(a: &[f32], b: &[f32; B], c: &mut [f64], n: usize, k: usize) {
    let b = b.map(f64::from);
    multiply(a, &b, c, n, k, |x, y, sum| sum + f64::from(x) * y);
}

/// Small integers, summed in `f32`: its 24 bits hold any sum of 64 products of bytes.
#[inline(always)]
pub(super) fn integers<const B: usize>(a: &[f32], b: &[f32; B], c: &mut [f32], n: usize, k: usize) {
    multiply(a, b, c, n, k, |x, y, sum| sum + x * y);
}

/// Multiplies two rows of A at a time, so that their chains of additions overlap.
#[inline(always)]
fn multiply<T: Copy>(a: &[f32], b: &[T], c: &mut [T], n: usize, k: usize, add: impl Fn(f32, T, T) -> T) {
    for (rows, sums) in a.chunks_exact(2 * k).zip(c.chunks_exact_mut(2 * n)) {
        let ((first, second), (sums, more_sums)) = (rows.split_at(k), sums.split_at_mut(n));
        let blocks = sums.as_chunks_mut::<WIDTH>().0.iter_mut().zip(more_sums.as_chunks_mut::<WIDTH>().0);
        for (block, (sums, more_sums)) in blocks.enumerate() {
            let (mut one, mut two) = (*sums, *more_sums);
            for (step, (&x, &z)) in first.iter().zip(second).enumerate() {
                let Some(y) = b[step * n + block * WIDTH..].first_chunk::<WIDTH>() else { continue };
                for column in 0..WIDTH {
                    one[column] = add(x, y[column], one[column]);
                    two[column] = add(z, y[column], two[column]);
                }
            }
            (*sums, *more_sums) = (one, two);
        }
    }
}

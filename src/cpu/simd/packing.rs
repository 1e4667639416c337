//! Columns as the kernels read them.

/// Most elements that are packed at once: a whole number of blocks of every type.
pub(crate) const PIECE: usize = 1024;

/// Elements that share a scale in [`Packing::Codes`].
const BLOCK: usize = 32;

/// How the columns of a product are laid out.
///
/// Columns are padded with zeros, to whole vectors or, for codes, to 256 elements: the kernels know no other length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Packing {
    /// f32 values.
    Floats,
    /// One i8 code per element, then one f32 scale per 32 elements, then the f32 sum of each `sub` values (which meets
    /// the bias of the weights' sub-blocks). `sub` is 32, or 16 with each eight sums in the order 0 2 4 6 1 3 5 7, in
    /// which the kernels hold the scales of 16-element sub-blocks.
    Codes { sub: usize },
}

impl Packing {
    /// Elements of a column of `k`, with its padding.
    pub(crate) fn padded(self, k: usize) -> usize {
        k.next_multiple_of(match self {
            Packing::Floats => 8,
            Packing::Codes { .. } => 256,
        })
    }

    /// Bytes of a column of `k` elements: a multiple of 32.
    pub(crate) fn column_bytes(self, k: usize) -> usize {
        let n = self.padded(k);
        match self {
            Packing::Floats => n.saturating_mul(4),
            Packing::Codes { sub } => n.saturating_add(n / BLOCK * 4).saturating_add(n / sub * 4),
        }
    }

    /// Packs the elements from `first` on, a multiple of [`PIECE`], of a column of `k`: all that are left, or a piece.
    /// `write(offset, bytes)` gets the parts of the packed column, which together leave no byte of it out.
    pub(crate) fn pack(self, k: usize, first: usize, values: &[f32], mut write: impl FnMut(usize, &[u8])) {
        debug_assert!(first.is_multiple_of(PIECE) && values.len() == PIECE.min(k - first), "a piece");
        let n = self.padded(k);
        match self {
            Packing::Floats => {
                write(first * 4, bytemuck::cast_slice(values));
                let padding = n - k;
                if first + values.len() == k && padding > 0 {
                    write(k * 4, &[0; 32][..padding * 4]);
                }
            }
            Packing::Codes { sub } => {
                let mut padded = [0f32; PIECE];
                padded[..values.len()].copy_from_slice(values);
                let len = values.len().next_multiple_of(256);
                let (mut codes, mut scales, mut sums) = ([0i8; PIECE], [0f32; PIECE / BLOCK], [0f32; PIECE / 16]);
                for (b, block) in padded[..len].as_chunks::<BLOCK>().0.iter().enumerate() {
                    let codes: &mut [i8; BLOCK] = &mut codes.as_chunks_mut().0[b];
                    let d = quantise(block, codes);
                    let [low, high] = sums_of_codes(codes).map(|sum| sum as f32 * d);
                    scales[b] = d;
                    if sub == BLOCK {
                        sums[b] = low + high;
                    } else {
                        // Blocks 4g to 4g + 3: first halves, then second halves.
                        sums[b / 4 * 8 + b % 4] = low;
                        sums[b / 4 * 8 + b % 4 + 4] = high;
                    }
                }
                write(first, bytemuck::cast_slice(&codes[..len]));
                write(n + first / BLOCK * 4, bytemuck::cast_slice(&scales[..len / BLOCK]));
                write(n + n / BLOCK * 4 + first / sub * 4, bytemuck::cast_slice(&sums[..len / sub]));
            }
        }
    }
}

/// Codes -127 to 127 of 32 values, and their scale. A value that is not finite makes the scale not finite.
#[inline]
fn quantise(values: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> f32 {
    // Magnitudes compare as integers, where NaN is largest. In lanes, so that it vectorises.
    let mut lanes = [0i32; 8];
    for chunk in values.as_chunks::<8>().0 {
        for l in 0..8 {
            lanes[l] = lanes[l].max((chunk[l].to_bits() & 0x7fff_ffff) as i32);
        }
    }
    let largest = f32::from_bits(lanes.iter().fold(0, |max, &m| max.max(m)) as u32);
    // Below, the inverse would overflow; products with such columns are zero for all purposes.
    let inverse = if largest > 1e-35 && largest.is_finite() { 127.0 / largest } else { 0.0 };
    // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits.
    const ROUND: f32 = 12_582_912.0;
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = (x * inverse + ROUND).to_bits() as i8;
    }
    largest / 127.0
}

/// Sums of the first and the second 16 codes.
#[inline]
fn sums_of_codes(codes: &[i8; BLOCK]) -> [i32; 2] {
    let halves = codes.as_chunks::<16>().0;
    [0, 1].map(|h| halves[h].iter().map(|&q| i32::from(q)).sum())
}

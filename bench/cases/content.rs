//! What leaves are filled with, as bytes.

use super::Content;
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use std::error::Error;

/// Values of a pattern that fills leaves, over and over: whole blocks of every type.
const PATTERN: usize = 1 << 16;

fn encode(dtype: DType, values: &[f32]) -> Result<Vec<u8>, &'static str> {
    let mut bytes = vec![0; dtype.row_bytes(values.len()).ok_or("whole blocks")?];
    quantiser(dtype).ok_or("a type that f32 converts to")?(values, &mut bytes);
    Ok(bytes)
}

/// Bytes that fill a tensor when repeated.
pub fn pattern(content: &Content, dtype: DType, ne: [usize; 4]) -> Result<Vec<u8>, Box<dyn Error>> {
    let index = |i: usize| match dtype {
        DType::I64 => (i as u64).to_le_bytes().to_vec(),
        _ => (i as u32).to_le_bytes().to_vec(),
    };
    Ok(match content {
        Content::Values => {
            let mut rng = fastrand::Rng::with_seed(1);
            let values: Vec<f32> = (0..PATTERN).map(|_| (0..4).map(|_| rng.f32() - 0.5).sum::<f32>() * 1.7).collect();
            encode(dtype, &values)?
        }
        Content::Indices(list) => list.iter().flat_map(|&i| index(i)).collect(),
        Content::Mask => {
            let [kv, n, ..] = ne;
            let row = |q: usize| (0..kv).map(move |i| if i <= kv - n + q { 0.0 } else { f32::NEG_INFINITY });
            encode(dtype, &(0..n).flat_map(row).collect::<Vec<_>>())?
        }
    })
}

//! Conversions between rows of any type and f32.
use super::DType;
/// Bytes of whole blocks to f32.
pub type Dequantise = fn(&[u8], &mut [f32]);
/// f32 to bytes of whole blocks.
pub type Quantise = fn(&[f32], &mut [u8]);
/// The conversion from a type.
pub fn dequantiser(t: DType) -> Option<Dequantise> {
    match t {
        DType::F32 => {
            Some(|b, o| b.chunks_exact(4).zip(o).for_each(|(b, o)| *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
        }
        DType::F16 => Some(|b, o| {
            b.chunks_exact(2).zip(o).for_each(|(b, o)| *o = half::f16::from_le_bytes([b[0], b[1]]).to_f32())
        }),
        DType::BF16 => Some(|b, o| {
            b.chunks_exact(2).zip(o).for_each(|(b, o)| *o = half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
        }),
        _ => None,
    }
}
/// The conversion to a type.
pub fn quantiser(t: DType) -> Option<Quantise> {
    match t {
        DType::F32 => {
            Some(|v, o| v.iter().zip(o.chunks_exact_mut(4)).for_each(|(v, o)| o.copy_from_slice(&v.to_le_bytes())))
        }
        DType::F16 => Some(|v, o| {
            v.iter()
                .zip(o.chunks_exact_mut(2))
                .for_each(|(v, o)| o.copy_from_slice(&half::f16::from_f32(*v).to_le_bytes()))
        }),
        DType::BF16 => Some(|v, o| {
            v.iter()
                .zip(o.chunks_exact_mut(2))
                .for_each(|(v, o)| o.copy_from_slice(&half::bf16::from_f32(*v).to_le_bytes()))
        }),
        _ => None,
    }
}

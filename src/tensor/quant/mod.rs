use super::DType;
pub type Dequantise = fn(&[u8], &mut [f32]);
pub type Quantise = fn(&[f32], &mut [u8]);
pub fn dequantiser(_: DType) -> Option<Dequantise> {
    None
}
pub fn quantiser(_: DType) -> Option<Quantise> {
    None
}

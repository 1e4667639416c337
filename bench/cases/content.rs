//! Fills the leaves of a case's graph: random values, indices or masks, encoded in the tensor's type, or random bytes if it has no encoder.

use super::Content;
use fanout::device::{DeviceError, Queue, Region, UploadSource};
use fanout::graph::{Graph, TensorId};
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;

/// Number of values in the pattern that is repeated to fill a leaf: a multiple of every type's block length.
const PATTERN: usize = 1 << 16;

fn encode(dtype: DType, values: &[f32]) -> Result<Vec<u8>, &'static str> {
    let mut bytes = vec![0; dtype.row_bytes(values.len()).ok_or("the values are not whole blocks")?];
    quantiser(dtype).ok_or("f32 does not convert to the type")?(values, &mut bytes);
    Ok(bytes)
}

/// Writes the leaves of a graph to `slots`, the regions bound to its slots.
pub fn fill(
    queue: &mut dyn Queue,
    slots: &[Region],
    graph: &Graph,
    contents: &[(TensorId, Content)],
) -> Result<(), Box<dyn Error>> {
    // Cache of the pattern by type, because quantising it takes time. All leaves of a type hold the same values.
    let mut values = HashMap::new();
    for (id, content) in contents {
        let tensor = graph.tensor(*id).ok_or("the leaf is not in the graph")?;
        let (place, desc) = (tensor.place.ok_or("the leaf has no memory")?, &tensor.desc);
        let slot = slots.get(place.slot as usize).ok_or("the leaf's slot is not bound")?;
        let region = slot.subregion(place.offset as u64, desc.extent() as u64)?;
        let cached = values.entry(desc.dtype());
        let own;
        let bytes = match (content, cached) {
            (Content::Values, Entry::Occupied(cached)) => &*cached.into_mut(),
            (Content::Values, Entry::Vacant(none)) => &*none.insert(pattern(content, desc.dtype(), desc.ne())?),
            _ => {
                own = pattern(content, desc.dtype(), desc.ne())?;
                &own
            }
        };
        repeat(queue, region, bytes)?;
    }
    Ok(())
}

/// Fills a region with repetitions of a pattern. The pattern is uploaded once and repeated by copies on the device, because the upload of
/// a whole model takes minutes.
fn repeat(queue: &mut dyn Queue, region: Region, pattern: &[u8]) -> Result<(), DeviceError> {
    let bytes = region.bytes();
    let mut filled = bytes.min(pattern.len() as u64);
    queue.upload(region.subregion(0, filled)?, None, UploadSource::Borrowed(&pattern[..filled as usize]))?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        let copied = queue.copy_from(region.subregion(0, more)?, region.subregion(filled, more)?, None)?;
        if !copied.is_submitted() {
            return Err(DeviceError::Bug("a device that cannot copy its own memory".to_owned()));
        }
        filled += more;
    }
    Ok(())
}

/// The bytes of a content, encoded in `dtype`; repeated, they fill the tensor.
fn pattern(content: &Content, dtype: DType, ne: [usize; 4]) -> Result<Vec<u8>, Box<dyn Error>> {
    let index = |i: usize| match dtype {
        DType::I64 => (i as u64).to_le_bytes().to_vec(),
        _ => (i as u32).to_le_bytes().to_vec(),
    };
    Ok(match content {
        Content::Values => {
            let mut rng = fastrand::Rng::with_seed(1);
            if quantiser(dtype).is_none() {
                // Any bytes are blocks. Their values may be infinite.
                let bytes = dtype.row_bytes(PATTERN).ok_or("the pattern is not whole blocks")?;
                return Ok(std::iter::repeat_with(|| rng.u8(..)).take(bytes).collect());
            }
            let values: Vec<f32> = (0..PATTERN).map(|_| (0..4).map(|_| rng.f32() - 0.5).sum::<f32>() * 1.7).collect();
            encode(dtype, &values)?
        }
        &Content::Between(low, high) => {
            let mut rng = fastrand::Rng::with_seed(1);
            encode(dtype, &(0..PATTERN).map(|_| low + (high - low) * rng.f32()).collect::<Vec<_>>())?
        }
        Content::Indices(list) => list.iter().flat_map(|&i| index(i)).collect(),
        Content::Mask => {
            let [kv, n, ..] = ne;
            let row = |q: usize| (0..kv).map(move |i| if i <= kv - n + q { 0.0 } else { f32::NEG_INFINITY });
            encode(dtype, &(0..n).flat_map(row).collect::<Vec<_>>())?
        }
    })
}

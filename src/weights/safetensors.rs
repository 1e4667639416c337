//! Safetensors files: the tensors that the header lists, as the parser of the crate `safetensors` validates it.

use crate::gguf::TensorInfo;
use crate::tensor::DType;
use safetensors::{Dtype, SafeTensors};

/// Bytes of the header's length, with which a file begins.
const LENGTH_BYTES: usize = 8;

/// A header is invalid, or a tensor cannot be described.
pub(super) enum HeaderError {
    Invalid(String),
    Unsupported { tensor: String, reason: String },
}

/// Whether a file begins as a safetensors file: with the length of the header, and an object of JSON. A GGUF file of 123 tensors has the
/// same byte there.
pub(super) fn is_safetensors(file: &[u8]) -> bool {
    !file.starts_with(b"GGUF") && file.get(LENGTH_BYTES) == Some(&b'{')
}

/// The tensors of a file, in the order of their bytes. Shapes, which the file lists slowest dimension first, are reversed.
pub(super) fn tensors(file: &[u8]) -> Result<Vec<TensorInfo>, HeaderError> {
    let (header, metadata) = SafeTensors::read_metadata(file).map_err(|e| HeaderError::Invalid(e.to_string()))?;
    let data = LENGTH_BYTES + header;
    let describe = |name: String| {
        let unsupported = |reason| HeaderError::Unsupported { tensor: name.clone(), reason };
        let info =
            metadata.info(&name).ok_or_else(|| HeaderError::Invalid(format!("{name:?} is not in the header")))?;
        let dtype = dtype(info.dtype).ok_or_else(|| unsupported(format!("elements of type {:?}", info.dtype)))?;
        let mut ne = [1; 4];
        if info.shape.len() > ne.len() || info.shape.contains(&0) {
            return Err(unsupported(format!("the shape {:?}, which is not 1 to 4 dimensions above 0", info.shape)));
        }
        ne.iter_mut().zip(info.shape.iter().rev()).for_each(|(to, &from)| *to = from);
        let (start, end) = info.data_offsets;
        Ok(TensorInfo { dtype, ne, bytes: data + start..data + end, name })
    };
    metadata.offset_keys().into_iter().map(describe).collect()
}

/// The element type with the same values; `None` for types that devices do not have.
fn dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::super::ModelFile;
    use super::*;

    /// A file with this header, and `data` bytes that count from 0.
    fn file(header: &str, data: u8) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &(0..data).collect::<Vec<u8>>()].concat()
    }

    #[test]
    fn tensors_of_all_parts_have_types_shapes_and_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = |number| folder.path().join(format!("m-0000{number}-of-00002.safetensors"));
        let first = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},
            "a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}"#;
        std::fs::write(path(1), file(first, 28)).unwrap();
        let second = |name: &str| format!(r#"{{"{name}":{{"dtype":"I8","shape":[],"data_offsets":[0,1]}}}}"#);
        std::fs::write(path(2), file(&second("c"), 1)).unwrap();
        let model = ModelFile::open(path(2)).unwrap();
        let weights = model.weights().unwrap();
        let found: Vec<_> = weights
            .iter()
            .map(|weight| (weight.name(), weight.desc().dtype(), weight.desc().ne(), weight.bytes().to_vec()))
            .collect();
        let expected = [
            ("a", DType::BF16, [2, 1, 1, 1], (0..4).collect()),
            ("b", DType::F32, [3, 2, 1, 1], (4..28).collect()),
            ("c", DType::I8, [1, 1, 1, 1], vec![0]),
        ];
        assert_eq!(found, expected);
        std::fs::write(path(2), file(&second("a"), 1)).unwrap();
        let error = ModelFile::open(path(1)).unwrap().weights().unwrap_err().to_string();
        assert!(error.ends_with("\"a\" is also in another part of the split model"), "{error}");
    }

    #[test]
    fn a_gguf_file_with_a_brace_at_its_number_of_tensors_is_gguf() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let tensors = (0..u32::from(b'{')).map(|number| format!("t{number}"));
        let gguf = tensors.fold(crate::gguf::Writer::new(), |file, name| file.tensor(&name, &[1], DType::F32));
        let gguf = gguf.to_bytes().unwrap();
        assert_eq!(gguf[LENGTH_BYTES], b'{');
        std::fs::write(&path, gguf).unwrap();
        assert_eq!(ModelFile::open(path).unwrap().weights().unwrap().iter().count(), usize::from(b'{'));
    }

    #[test]
    fn tensors_that_devices_do_not_have_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        let cases = [
            (
                r#""w":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}"#,
                "\"w\" cannot be used: elements of type F8_E4M3",
            ),
            (
                r#""w":{"dtype":"I8","shape":[1,1,1,1,4],"data_offsets":[0,4]}"#,
                "\"w\" cannot be used: the shape [1, 1, 1, 1, 4]",
            ),
            (r#""w":{"dtype":"I8","shape":[4],"data_offsets":[0,5]}"#, "m.safetensors: "),
        ];
        for (tensor, text) in cases {
            std::fs::write(&path, file(&format!("{{{tensor}}}"), 4)).unwrap();
            let error = ModelFile::open(&path).unwrap().weights().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        // Every cut of a valid file is an error.
        let whole = file(r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4);
        assert!(tensors(&whole).is_ok());
        assert!((0..whole.len()).all(|end| tensors(&whole[..end]).is_err()));
    }
}

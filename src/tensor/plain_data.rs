//! Numbers of the host as bytes of tensors.

use half::slice::HalfFloatSliceExt;

/// Numbers whose memory is, as it is, data of a tensor: `f32`, `f64`, [`half::f16`], [`half::bf16`], `u8`, and integers of the types
/// I8 to I64.
pub trait PlainData: sealed::Bytes {}

mod sealed {
    /// The methods of [`super::PlainData`], which no other crate can implement.
    pub trait Bytes: Copy + 'static {
        fn bytes(values: &[Self]) -> &[u8];
        fn bytes_mut(values: &mut [Self]) -> &mut [u8];
    }
}

/// The bytes of numbers, as uploads and inputs of runs take them.
pub fn bytes_of<T: PlainData>(values: &[T]) -> &[u8] {
    T::bytes(values)
}

/// As [`bytes_of`], to be written.
pub(crate) fn bytes_of_mut<T: PlainData>(values: &mut [T]) -> &mut [u8] {
    T::bytes_mut(values)
}

macro_rules! plain_data {
    ($($ty:ty: $values:ident => $read:expr, $write:expr;)*) => {
        $(
            impl PlainData for $ty {}

            impl sealed::Bytes for $ty {
                fn bytes($values: &[$ty]) -> &[u8] {
                    bytemuck::cast_slice($read)
                }

                fn bytes_mut($values: &mut [$ty]) -> &mut [u8] {
                    bytemuck::cast_slice_mut($write)
                }
            }
        )*
    };
}

plain_data! {
    u8: values => values, values;
    i8: values => values, values;
    i16: values => values, values;
    i32: values => values, values;
    i64: values => values, values;
    f32: values => values, values;
    f64: values => values, values;
    half::f16: values => values.reinterpret_cast(), values.reinterpret_cast_mut();
    half::bf16: values => values.reinterpret_cast(), values.reinterpret_cast_mut();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_little_endian_bytes() {
        assert_eq!(bytes_of(&[1i32, -1]), [1, 0, 0, 0, 255, 255, 255, 255]);
        assert_eq!(bytes_of(&[half::f16::from_f32(1.0)]), [0, 0x3c]);
        assert_eq!(bytes_of::<f32>(&[]), [0u8; 0]);
        let mut read = [half::bf16::ZERO; 2];
        bytes_of_mut(&mut read).copy_from_slice(&[0, 0, 0x80, 0x3f]);
        assert_eq!(read, [half::bf16::ZERO, half::bf16::ONE]);
    }
}

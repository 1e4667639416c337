//! Metadata: a map from keys to typed values.

use std::fmt;

use thiserror::Error;

use super::GgufError;
use super::error::{GgufFault, Shortened};
use super::reader::{PartName, Reader};

/// The type of a value. The discriminant is the type's number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
    /// 8-bit number.
    U8,
    /// 8-bit number with sign.
    I8,
    /// 16-bit number.
    U16,
    /// 16-bit number with sign.
    I16,
    /// 32-bit number.
    U32,
    /// 32-bit number with sign.
    I32,
    /// Single-precision number.
    F32,
    /// True or false.
    Bool,
    /// UTF-8 text.
    Text,
    /// Values of one type.
    Array,
    /// 64-bit number.
    U64,
    /// 64-bit number with sign.
    I64,
    /// Double-precision number.
    F64,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::Text,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    fn read(reader: &mut Reader<'_>, what: impl PartName) -> Result<ValueType, GgufError> {
        let start = reader.clone();
        let number = reader.u32(what)?;
        let kind = usize::try_from(number).ok().and_then(|n| ValueType::ALL.get(n).copied());
        kind.ok_or_else(|| start.error(what, GgufFault::ValueType(number)))
    }

    /// Bytes of a value in the file; of text or an array, at least.
    fn bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::Text => 8,
            ValueType::Array => 12,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// An integer of any of the file's widths, signed or unsigned.
    Int(i128),
    /// A floating-point number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    Text(&'a str),
    /// Values of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Reads a type and a value of it.
    pub(super) fn read(reader: &mut Reader<'a>, what: impl PartName) -> Result<Value<'a>, GgufError> {
        match ValueType::read(reader, what)? {
            ValueType::Array => Array::read(reader, what).map(Value::Array),
            kind => Value::read_scalar(reader, what, kind),
        }
    }

    /// Reads a value of a scalar type or a text.
    fn read_scalar(reader: &mut Reader<'a>, what: impl PartName, kind: ValueType) -> Result<Value<'a>, GgufError> {
        let start = reader.clone();
        Ok(match kind {
            ValueType::U8 => Value::Int(u8::from_le_bytes(reader.array(what)?).into()),
            ValueType::I8 => Value::Int(i8::from_le_bytes(reader.array(what)?).into()),
            ValueType::U16 => Value::Int(u16::from_le_bytes(reader.array(what)?).into()),
            ValueType::I16 => Value::Int(i16::from_le_bytes(reader.array(what)?).into()),
            ValueType::U32 => Value::Int(u32::from_le_bytes(reader.array(what)?).into()),
            ValueType::I32 => Value::Int(i32::from_le_bytes(reader.array(what)?).into()),
            ValueType::U64 => Value::Int(u64::from_le_bytes(reader.array(what)?).into()),
            ValueType::I64 => Value::Int(i64::from_le_bytes(reader.array(what)?).into()),
            ValueType::F32 => Value::Float(f32::from_le_bytes(reader.array(what)?).into()),
            ValueType::F64 => Value::Float(f64::from_le_bytes(reader.array(what)?)),
            ValueType::Bool => match reader.array(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(start.error(what, GgufFault::Bool(other))),
            },
            ValueType::Text => Value::Text(reader.text(what)?),
            ValueType::Array => return Err(start.error(what, GgufFault::Nested)),
        })
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(n) => write!(f, "{n}"),
            Value::Float(x) => write!(f, "{x}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Text(text) => Shortened(text).fmt(f),
            Value::Array(array) => write!(f, "{} values of type {:?}", array.len, array.kind),
        }
    }
}

/// An array of values, borrowed from the file. The values were checked when the file was parsed, and are decoded by
/// [`Array::values`].
#[derive(Clone, Debug, PartialEq)]
pub struct Array<'a> {
    kind: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn read(reader: &mut Reader<'a>, what: impl PartName) -> Result<Array<'a>, GgufError> {
        let start = reader.clone();
        let kind = ValueType::read(reader, what)?;
        if kind == ValueType::Array {
            return Err(start.error(what, GgufFault::Nested));
        }
        let len = reader.count(what, kind.bytes())?;
        let mut data = reader.clone();
        if matches!(kind, ValueType::Text | ValueType::Bool) {
            for _ in 0..len {
                Value::read_scalar(reader, what, kind)?;
            }
        } else {
            reader.bytes(what, len as u64 * kind.bytes())?;
        }
        let bytes = data.bytes(what, (reader.offset() - data.offset()) as u64)?;
        Ok(Array { kind, len, bytes })
    }

    /// The number of values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Decodes the values, in order.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (kind, mut reader) = (self.kind, Reader::new(self.bytes, 0));
        (0..self.len).map_while(move |_| Value::read_scalar(&mut reader, "array", kind).ok())
    }
}

/// A metadata key is missing, or its value has the wrong type.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum KeyError {
    /// A required key is missing.
    #[error("the file has no {key}, which this model needs")]
    Missing {
        /// The key.
        key: String,
    },
    /// The value has another type or is out of range.
    #[error("{key}: expected {expected}, found {found}")]
    WrongType {
        /// The key.
        key: String,
        /// The expected type and range.
        expected: String,
        /// The value in the file.
        found: String,
    },
}

/// The metadata of a file: values by key. Each accessor returns `None` for an absent key, and [`KeyError::WrongType`] for a
/// value of another type or out of range.
#[derive(Clone, Debug, Default)]
pub struct Metadata<'a> {
    /// Sorted by key.
    entries: Vec<(&'a str, Value<'a>)>,
}

impl<'a> Metadata<'a> {
    /// Sorts the entries of a file. Returns the first duplicate key as the error.
    pub(super) fn new(mut entries: Vec<(&'a str, Value<'a>)>) -> Result<Metadata<'a>, &'a str> {
        entries.sort_by_key(|&(key, _)| key);
        match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(pair[0].0),
            None => Ok(Metadata { entries }),
        }
    }

    /// All entries, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = &(&'a str, Value<'a>)> {
        self.entries.iter()
    }

    /// The value of a key, of any type.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let at = self.entries.binary_search_by_key(&key, |&(key, _)| key).ok()?;
        Some(&self.entries[at].1)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        fit: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, KeyError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong_type =
            || KeyError::WrongType { key: key.to_owned(), expected: expected.to_owned(), found: value.to_string() };
        fit(value).ok_or_else(wrong_type).map(Some)
    }

    /// A whole number from 0 to 2^32 - 1.
    pub fn int(&self, key: &str) -> Result<Option<u32>, KeyError> {
        let fit = |value: &Value<'_>| if let Value::Int(n) = value { u32::try_from(*n).ok() } else { None };
        self.typed(key, "a whole number from 0 to 4294967295", fit)
    }

    /// A finite number.
    pub fn float(&self, key: &str) -> Result<Option<f32>, KeyError> {
        let fit = |value: &Value<'_>| match *value {
            Value::Float(x) if (x as f32).is_finite() => Some(x as f32),
            Value::Int(n) => Some(n as f32),
            _ => None,
        };
        self.typed(key, "a finite number", fit)
    }

    /// True or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, KeyError> {
        self.typed(key, "true or false", |value| if let Value::Bool(b) = *value { Some(b) } else { None })
    }

    /// Text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>, KeyError> {
        self.typed(key, "text", |value| if let Value::Text(text) = *value { Some(text) } else { None })
    }

    /// An array of texts.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, KeyError> {
        self.array(key, "an array of texts", |value| if let Value::Text(text) = value { Some(text) } else { None })
    }

    /// An array of finite numbers.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, KeyError> {
        let fit = |value| match value {
            Value::Float(x) if (x as f32).is_finite() => Some(x as f32),
            _ => None,
        };
        self.array(key, "an array of finite floating-point numbers", fit)
    }

    /// An array of whole numbers from 0 to 2^32 - 1.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<u32>>, KeyError> {
        let fit = |value| if let Value::Int(n) = value { u32::try_from(n).ok() } else { None };
        self.array(key, "an array of whole numbers from 0 to 4294967295", fit)
    }

    fn array<T>(
        &self,
        key: &str,
        expected: &str,
        fit: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, KeyError> {
        self.typed(key, expected, |value| match value {
            Value::Array(array) => array.values().map(&fit).collect(),
            _ => None,
        })
    }
}

/// Turns the absence of a key into an error.
///
/// # Errors
/// [`KeyError::Missing`] for `None`.
pub fn required<T>(key: &str, value: Option<T>) -> Result<T, KeyError> {
    value.ok_or_else(|| KeyError::Missing { key: key.to_owned() })
}

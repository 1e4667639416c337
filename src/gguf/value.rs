//! Metadata: typed values under names.

use std::fmt;

use thiserror::Error;

use super::GgufError;
use super::error::{Fault, Shown};
use super::read::{Reader, What};

/// The type of a value, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
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

impl Kind {
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::Text,
        Kind::Array,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    fn read(reader: &mut Reader<'_>, what: impl What) -> Result<Kind, GgufError> {
        let start = reader.clone();
        let number = reader.u32(what)?;
        let kind = usize::try_from(number).ok().and_then(|n| Kind::ALL.get(n).copied());
        kind.ok_or_else(|| start.error(what, Fault::ValueType(number)))
    }

    /// Bytes of a value in the file; of text or an array, at least.
    fn bytes(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 | Kind::Text => 8,
            Kind::Array => 12,
        }
    }
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// A whole number, whatever its width; every one in the file fits.
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
    pub(super) fn read(reader: &mut Reader<'a>, what: impl What) -> Result<Value<'a>, GgufError> {
        match Kind::read(reader, what)? {
            Kind::Array => Array::read(reader, what).map(Value::Array),
            kind => Value::of(reader, what, kind),
        }
    }

    /// Reads a value of a type that is no array.
    fn of(reader: &mut Reader<'a>, what: impl What, kind: Kind) -> Result<Value<'a>, GgufError> {
        let start = reader.clone();
        Ok(match kind {
            Kind::U8 => Value::Int(u8::from_le_bytes(reader.array(what)?).into()),
            Kind::I8 => Value::Int(i8::from_le_bytes(reader.array(what)?).into()),
            Kind::U16 => Value::Int(u16::from_le_bytes(reader.array(what)?).into()),
            Kind::I16 => Value::Int(i16::from_le_bytes(reader.array(what)?).into()),
            Kind::U32 => Value::Int(u32::from_le_bytes(reader.array(what)?).into()),
            Kind::I32 => Value::Int(i32::from_le_bytes(reader.array(what)?).into()),
            Kind::U64 => Value::Int(u64::from_le_bytes(reader.array(what)?).into()),
            Kind::I64 => Value::Int(i64::from_le_bytes(reader.array(what)?).into()),
            Kind::F32 => Value::Float(f32::from_le_bytes(reader.array(what)?).into()),
            Kind::F64 => Value::Float(f64::from_le_bytes(reader.array(what)?)),
            Kind::Bool => match reader.array(what)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(start.error(what, Fault::Bool(other))),
            },
            Kind::Text => Value::Text(reader.text(what)?),
            Kind::Array => return Err(start.error(what, Fault::Nested)),
        })
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(n) => write!(f, "{n}"),
            Value::Float(x) => write!(f, "{x}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Text(text) => Shown(text).fmt(f),
            Value::Array(array) => write!(f, "{} values of type {:?}", array.len, array.kind),
        }
    }
}

/// An array, left in the file: its values are read when somebody asks, and were checked when the file was.
#[derive(Clone, Debug, PartialEq)]
pub struct Array<'a> {
    kind: Kind,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn read(reader: &mut Reader<'a>, what: impl What) -> Result<Array<'a>, GgufError> {
        let start = reader.clone();
        let kind = Kind::read(reader, what)?;
        if kind == Kind::Array {
            return Err(start.error(what, Fault::Nested));
        }
        let len = reader.count(what, kind.bytes())?;
        let mut data = reader.clone();
        if matches!(kind, Kind::Text | Kind::Bool) {
            for _ in 0..len {
                Value::of(reader, what, kind)?;
            }
        } else {
            reader.bytes(what, len as u64 * kind.bytes())?;
        }
        let bytes = data.bytes(what, (reader.at() - data.at()) as u64)?;
        Ok(Array { kind, len, bytes })
    }

    /// How many values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values.
    pub fn values(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (kind, mut reader) = (self.kind, Reader::new(self.bytes, 0));
        (0..self.len).map_while(move |_| Value::of(&mut reader, "array", kind).ok())
    }
}

/// A key of the metadata that is not there, or not as it should be.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum KeyError {
    /// A key that is needed.
    #[error("the file has no {key}, which this model needs")]
    Missing {
        /// Its name.
        key: String,
    },
    /// A value of another type, or out of range.
    #[error("{key}: expected {expected}, found {found}")]
    Unfit {
        /// Its name.
        key: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
}

/// Values by name.
#[derive(Clone, Debug, Default)]
pub struct Metadata<'a> {
    /// Sorted by key.
    entries: Vec<(&'a str, Value<'a>)>,
}

impl<'a> Metadata<'a> {
    /// From entries as they stand in the file; the key that is there twice, if any is.
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

    /// The value of a key.
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
        let unfit = || KeyError::Unfit { key: key.to_owned(), expected: expected.to_owned(), found: value.to_string() };
        fit(value).ok_or_else(unfit).map(Some)
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

/// The value of a key that must be there.
pub fn required<T>(key: &str, value: Option<T>) -> Result<T, KeyError> {
    value.ok_or_else(|| KeyError::Missing { key: key.to_owned() })
}

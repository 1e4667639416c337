//! GGUF files made to order, for the tests of all that is read from one.

use fanout::tensor::DType;
use std::collections::BTreeMap;

/// A GGUF file under construction.
#[derive(Clone, Default)]
pub struct File {
    entries: BTreeMap<String, Vec<u8>>,
    tensors: Vec<(String, Vec<u64>, DType)>,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl File {
    /// With an entry of any type: its number, then its bytes.
    pub fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> File {
        self.entries.insert(key.to_owned(), [&kind.to_le_bytes(), value].concat());
        self
    }

    pub fn without(mut self, key: &str) -> File {
        assert!(self.entries.remove(key).is_some(), "{key} was never there");
        self
    }

    pub fn int(self, key: &str, value: u32) -> File {
        self.entry(key, 4, &value.to_le_bytes())
    }

    pub fn float(self, key: &str, value: f32) -> File {
        self.entry(key, 6, &value.to_le_bytes())
    }

    pub fn flag(self, key: &str, value: bool) -> File {
        self.entry(key, 7, &[value.into()])
    }

    pub fn text(self, key: &str, value: &str) -> File {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    pub fn array(self, key: &str, kind: u32, count: usize, values: &[u8]) -> File {
        let head = [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes()].concat();
        self.entry(key, 9, &[&head, values].concat())
    }

    pub fn texts<T: AsRef<str>>(self, key: &str, values: &[T]) -> File {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| put_text(&mut bytes, value.as_ref()));
        self.array(key, 8, values.len(), &bytes)
    }

    pub fn floats(self, key: &str, values: &[f32]) -> File {
        self.array(key, 6, values.len(), &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn ints(self, key: &str, values: &[i32]) -> File {
        self.array(key, 5, values.len(), &values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn tensor(mut self, name: &str, ne: &[u64], dtype: DType) -> File {
        self.tensors.push((name.to_owned(), ne.to_vec(), dtype));
        self
    }

    /// The file's bytes; the tensors hold zeros.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            put_text(&mut out, key);
            out.extend(value);
        }
        let mut at = 0u64;
        for (name, ne, dtype) in &self.tensors {
            put_text(&mut out, name);
            out.extend((ne.len() as u32).to_le_bytes());
            ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(dtype.to_wire().to_le_bytes());
            out.extend(at.to_le_bytes());
            let elements = ne.iter().product::<u64>() as usize;
            at = (at + dtype.row_bytes(elements).unwrap() as u64).next_multiple_of(32);
        }
        if at > 0 {
            out.resize(out.len().next_multiple_of(32) + at as usize, 0);
        }
        out
    }
}

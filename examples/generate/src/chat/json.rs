//! JSON as Python's `json.dumps` writes it: other separators, indentation and numbers than serde_json's.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// Largest depth of nested lists and maps: their serialisation is recursive, and a template can nest them without limit.
const MAX_DEPTH: usize = 128;

/// The keyword arguments of `json.dumps` that templates use.
struct Layout {
    /// Text for each level of indentation; `None`: everything on one line.
    indent: Option<String>,
    /// Between items, and between a key and its value.
    separators: (String, String),
    /// Escapes all characters beyond ASCII.
    ascii: bool,
}

impl Layout {
    /// The layout for the arguments of a call, with transformers' defaults.
    fn from_arguments(arguments: &Kwargs) -> Result<Layout, Error> {
        let indent: Option<Value> = arguments.get("indent")?;
        let indent = match indent.filter(|indent| !indent.is_none()) {
            Some(text) if text.as_str().is_some() => Some(text.to_string()),
            Some(spaces) => Some(" ".repeat(usize::from(u8::try_from(spaces)?))),
            None => None,
        };
        let separators: Option<Value> = arguments.get("separators")?;
        let separators = match separators.filter(|separators| !separators.is_none()) {
            Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
            None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
        };
        let ascii: Option<bool> = arguments.get("ensure_ascii")?;
        arguments.assert_all_used()?;
        Ok(Layout { indent, separators, ascii: ascii.unwrap_or(false) })
    }
}

/// The filter `tojson`: `json.dumps` without escapes for HTML.
pub(super) fn tojson(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let formatter = PythonFormatter { layout: Layout::from_arguments(&arguments)?, depth: 0, is_empty: true };
    let mut json = LimitedText(Vec::new());
    let failed = |e: &dyn std::error::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    value.serialize(&mut Serializer::with_formatter(&mut json, formatter)).map_err(|e| failed(&e))?;
    Ok(Value::from_safe_string(String::from_utf8(json.0).map_err(|e| failed(&e))?))
}

/// Limit of a text in bytes. A template can make one of any length from few values: by long separators, or by indents of deep lists.
const MAX_JSON_BYTES: usize = 4 << 20;

/// A text that does not grow beyond its limit.
struct LimitedText(Vec<u8>);

impl Write for LimitedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_JSON_BYTES {
            return Err(io::Error::other(format!("tojson: more than {MAX_JSON_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct PythonFormatter {
    layout: Layout,
    depth: usize,
    /// Whether the innermost list or map has no items so far.
    is_empty: bool,
}

impl PythonFormatter {
    fn begin<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        if self.depth > MAX_DEPTH {
            return Err(io::Error::other(format!("more than {MAX_DEPTH} nested lists and maps")));
        }
        out.write_all(bracket)
    }

    fn end<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket)
    }

    fn begin_item<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.layout.separators.0.as_bytes())?;
        }
        self.new_line(out)
    }

    fn new_line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        let Some(indent) = &self.layout.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }
    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }
    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }
    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }
    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.begin_item(out, first)
    }
    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.layout.separators.1.as_bytes())
    }
    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, text: &str) -> io::Result<()> {
        if !self.layout.ascii {
            return out.write_all(text.as_bytes());
        }
        for c in text.chars() {
            match c {
                '\0'..='\x7e' => write!(out, "{c}")?,
                _ => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(out, "\\u{unit:04x}"))?,
            }
        }
        Ok(())
    }
}

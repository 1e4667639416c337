//! printf formatting: the text of the device's `printf` and of failed assertions.
//!
//! `vprintf(format, arguments)` receives its arguments packed as C's varargs on the device: 4-byte integers; `long`, pointers
//! and doubles of 8 bytes, each aligned to its size; narrower types promoted. The format is C's. A malformed conversion is
//! printed literally, as the CUDA manual specifies ("Formatted Output").

mod number;

use std::borrow::Cow;

/// Maximum width and precision. A larger one makes the conversion malformed, because its padding would exhaust memory.
const LONGEST: usize = 1 << 15;

/// A parsed format.
#[derive(Clone, Debug, Default)]
pub(crate) struct Format {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum Piece {
    Text(Vec<u8>),
    Conversion(Conversion),
}

/// A conversion such as `%-08.3lld`.
#[derive(Clone, Copy, Debug, Default)]
struct Conversion {
    flags: Flags,
    width: Count,
    precision: Count,
    size: Size,
    /// The conversion letter.
    kind: u8,
}

/// Flags of a conversion.
#[derive(Clone, Copy, Debug, Default)]
struct Flags {
    /// `-`: left-justified.
    left: bool,
    /// `+`
    plus: bool,
    /// ` `: a space in place of a plus sign.
    space: bool,
    /// `#`
    alternative: bool,
    /// `0`
    zeros: bool,
}

/// A width or precision.
#[derive(Clone, Copy, Debug, Default)]
enum Count {
    #[default]
    Absent,
    Fixed(usize),
    /// `*`: taken from an argument.
    Argument,
}

/// Length modifier of an integer conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Size {
    /// `hh`
    Byte,
    /// `h`
    Short,
    #[default]
    Int,
    /// `l`, `ll`, `z`, `j`, `t`
    Long,
}

/// Reads the packed arguments in order.
struct Arguments<'a> {
    bytes: &'a [u8],
    next: usize,
}

impl Arguments<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let start = self.next.next_multiple_of(N);
        self.next = start + N;
        self.bytes.get(start..start + N)?.try_into().ok()
    }

    fn int(&mut self) -> Option<i32> {
        self.take().map(i32::from_le_bytes)
    }

    fn long(&mut self) -> Option<i64> {
        self.take().map(i64::from_le_bytes)
    }
}

impl Format {
    /// Parses a format (without its terminating zero).
    pub(crate) fn parse(format: &[u8]) -> Self {
        let (mut pieces, mut text, mut rest) = (Vec::new(), Vec::new(), format);
        while let Some((&first, after)) = rest.split_first() {
            if first != b'%' {
                text.push(first);
                rest = after;
            } else if let Some(b'%') = after.first() {
                text.push(b'%');
                rest = &after[1..];
            } else if let Some((conversion, after)) = Conversion::parse(after) {
                pieces.push(Piece::Text(std::mem::take(&mut text)));
                pieces.push(Piece::Conversion(conversion));
                rest = after;
            } else {
                text.push(b'%');
                rest = after;
            }
        }
        pieces.push(Piece::Text(text));
        Self { pieces }
    }

    /// Bytes of packed arguments that the format reads.
    pub(crate) fn argument_bytes(&self) -> usize {
        self.arguments().iter().fold(0usize, |end, &bytes| end.next_multiple_of(bytes) + bytes)
    }

    /// Bytes of each argument that the format reads, including widths and precisions given by `*`.
    pub(crate) fn arguments(&self) -> Vec<usize> {
        let mut arguments = Vec::new();
        for piece in &self.pieces {
            if let Piece::Conversion(conversion) = piece {
                let counts = [conversion.width, conversion.precision];
                arguments.extend(counts.iter().filter(|count| matches!(count, Count::Argument)).map(|_| 4));
                arguments.push(conversion.argument_bytes());
            }
        }
        arguments
    }

    /// Renders the text with arguments from `bytes`; `read` returns the string at a device address, or `None` if it is not
    /// readable. A conversion without argument prints nothing.
    pub(crate) fn render(&self, bytes: &[u8], read: &mut dyn FnMut(u64) -> Option<Vec<u8>>) -> String {
        let mut arguments = Arguments { bytes, next: 0 };
        let mut out = Vec::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => out.extend_from_slice(text),
                Piece::Conversion(conversion) => {
                    out.extend(conversion.render(&mut arguments, read).unwrap_or_default())
                }
            }
        }
        String::from_utf8_lossy(&out).into_owned()
    }
}

impl Conversion {
    /// Parses the conversion after a `%`; returns it and the rest of the format.
    fn parse(mut rest: &[u8]) -> Option<(Self, &[u8])> {
        let mut it = Self::default();
        while let Some((&flag, after)) = rest.split_first() {
            match flag {
                b'-' => it.flags.left = true,
                b'+' => it.flags.plus = true,
                b' ' => it.flags.space = true,
                b'#' => it.flags.alternative = true,
                b'0' => it.flags.zeros = true,
                _ => break,
            }
            rest = after;
        }
        (it.width, rest) = count(rest)?;
        if let Some(after) = rest.strip_prefix(b".") {
            (it.precision, rest) = count(after)?;
            if matches!(it.precision, Count::Absent) {
                it.precision = Count::Fixed(0);
            }
        }
        for (prefix, size) in [
            (&b"hh"[..], Size::Byte),
            (b"h", Size::Short),
            (b"ll", Size::Long),
            (b"l", Size::Long),
            (b"z", Size::Long),
            (b"j", Size::Long),
            (b"t", Size::Long),
        ] {
            if let Some(after) = rest.strip_prefix(prefix) {
                (it.size, rest) = (size, after);
                break;
            }
        }
        let (&kind, rest) = rest.split_first()?;
        it.kind = kind;
        b"diouxXcspfFeEgGaA".contains(&kind).then_some((it, rest))
    }

    fn argument_bytes(&self) -> usize {
        match self.kind {
            b'c' => 4,
            b'd' | b'i' | b'o' | b'u' | b'x' | b'X' if self.size != Size::Long => 4,
            _ => 8,
        }
    }

    fn render(self, arguments: &mut Arguments<'_>, read: &mut dyn FnMut(u64) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        let mut flags = self.flags;
        let width = match self.width {
            Count::Absent => 0,
            Count::Fixed(width) => width,
            Count::Argument => {
                let width = arguments.int()?;
                flags.left |= width < 0;
                (width.unsigned_abs() as usize).min(LONGEST)
            }
        };
        let precision = match self.precision {
            Count::Absent => None,
            Count::Fixed(precision) => Some(precision),
            // As in C, a negative precision counts as none.
            Count::Argument => usize::try_from(arguments.int()?).ok().map(|precision| precision.min(LONGEST)),
        };
        let kind = self.kind;
        let (prefix, body, zeros) = match kind {
            b'c' => (String::new(), vec![arguments.int()? as u8], false),
            b's' => {
                let mut text = match arguments.long()? as u64 {
                    0 => b"(null)".to_vec(),
                    address => read(address).unwrap_or_else(|| b"(unreadable)".to_vec()),
                };
                text.truncate(precision.unwrap_or(usize::MAX));
                (String::new(), text, false)
            }
            b'p' => match arguments.long()? {
                0 => (String::new(), b"(nil)".to_vec(), false),
                address => (String::from("0x"), format!("{address:x}").into_bytes(), true),
            },
            b'd' | b'i' => {
                let value = self.signed(arguments)?;
                let body = number::digits(value.unsigned_abs(), b'u', precision);
                (number::sign(value < 0, flags), body.into_bytes(), precision.is_none())
            }
            b'o' | b'u' | b'x' | b'X' => {
                let value = self.unsigned(arguments)?;
                let mut body = number::digits(value, kind, precision);
                let mut prefix = String::new();
                match kind {
                    b'o' if flags.alternative && !body.starts_with('0') => body.insert(0, '0'),
                    b'x' | b'X' if flags.alternative && value != 0 => prefix = format!("0{}", kind as char),
                    _ => {}
                }
                (prefix, body.into_bytes(), precision.is_none())
            }
            _ => {
                let value = f64::from_bits(arguments.long()? as u64);
                let (prefix, body) = number::float(value, kind, precision, flags);
                (prefix, body.into_bytes(), value.is_finite())
            }
        };
        let missing = width.saturating_sub(prefix.len() + body.len());
        let mut out = Vec::with_capacity(prefix.len() + body.len() + missing);
        let fill = |out: &mut Vec<u8>, byte: u8| out.resize(out.len() + missing, byte);
        if !(flags.left || flags.zeros && zeros) {
            fill(&mut out, b' ');
        }
        out.extend_from_slice(prefix.as_bytes());
        if !flags.left && flags.zeros && zeros {
            fill(&mut out, b'0');
        }
        out.extend_from_slice(&body);
        if flags.left {
            fill(&mut out, b' ');
        }
        Some(out)
    }

    fn signed(&self, arguments: &mut Arguments<'_>) -> Option<i64> {
        Some(match self.size {
            Size::Byte => i64::from(arguments.int()? as i8),
            Size::Short => i64::from(arguments.int()? as i16),
            Size::Int => i64::from(arguments.int()?),
            Size::Long => arguments.long()?,
        })
    }

    fn unsigned(&self, arguments: &mut Arguments<'_>) -> Option<u64> {
        Some(match self.size {
            Size::Byte => u64::from(arguments.int()? as u8),
            Size::Short => u64::from(arguments.int()? as u16),
            Size::Int => u64::from(arguments.int()? as u32),
            Size::Long => arguments.long()? as u64,
        })
    }
}

/// Parses a width or precision; returns it and the rest, or `None` if it is too large.
fn count(text: &[u8]) -> Option<(Count, &[u8])> {
    if let Some(rest) = text.strip_prefix(b"*") {
        return Some((Count::Argument, rest));
    }
    let (mut value, mut rest, mut given) = (0, text, false);
    while let Some((&digit, after)) = rest.split_first().filter(|(digit, _)| digit.is_ascii_digit()) {
        value = value * 10 + usize::from(digit - b'0');
        if value > LONGEST {
            return None;
        }
        (rest, given) = (after, true);
    }
    Some((if given { Count::Fixed(value) } else { Count::Absent }, rest))
}

/// The message of a failed assertion, in CUDA's wording.
pub(crate) fn assertion(
    message: &[u8],
    file: &[u8],
    line: u32,
    function: &[u8],
    block: [u32; 3],
    thread: [u32; 3],
) -> String {
    let [message, file, function]: [Cow<'_, str>; 3] = [message, file, function].map(String::from_utf8_lossy);
    let ([bx, by, bz], [tx, ty, tz]) = (block, thread);
    format!(
        "{file}:{line}: {function}: block: [{bx},{by},{bz}], thread: [{tx},{ty},{tz}] Assertion `{message}` failed."
    )
}

#[cfg(test)]
mod tests;

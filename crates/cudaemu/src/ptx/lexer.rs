//! Lexer: tokens of PTX (PTX ISA, "Syntax").

use super::Error;

/// A token and its position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    /// Its kind.
    pub(super) kind: TokenKind<'a>,
    /// Offset of the first byte.
    pub(super) start: usize,
    /// Offset after the last byte.
    pub(super) end: usize,
    /// Line, from 1.
    pub(super) line: u32,
}

/// Kinds of token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TokenKind<'a> {
    /// A name or opcode: `%r1`, `$L__BB0_1`, `add`, `_`.
    Name(&'a str),
    /// A dot and the word after it, including parts joined by `::`; the text is without the first dot: `u32`, `L2::128B`.
    DotWord(&'a str),
    /// An integer; unsigned if it has the suffix `U` or exceeds the signed range.
    Int {
        /// Its bits.
        bits: u64,
        /// Whether it is a `.u64`; otherwise it is a `.s64`.
        unsigned: bool,
    },
    /// `0f3F800000`
    F32(u32),
    /// `0d3FF0000000000000`, or a decimal literal with a point or exponent.
    F64(f64),
    /// `"…"`, without the quotes.
    Text(&'a str),
    /// Punctuation or an operator.
    Punct(&'static str),
    /// The end of the file.
    End,
}

/// Longer ones first, so that the longest match wins.
const PUNCTUATION: [&str; 33] = [
    "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "(", ")", "[", "]", "{", "}", "<", ">", ",", ";", ":", "=", "+",
    "-", "*", "/", "%", "&", "|", "^", "~", "!", "?", "@", ".",
];

/// Splits a text into tokens, on demand.
#[derive(Debug)]
pub(super) struct Lexer<'a> {
    /// The whole text.
    pub(super) text: &'a str,
    at: usize,
    line: u32,
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$'
}

impl<'a> Lexer<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0, line: 1 }
    }

    fn byte(&self, ahead: usize) -> u8 {
        self.text.as_bytes().get(self.at.saturating_add(ahead)).copied().unwrap_or(0)
    }

    /// Whether the byte before this one belongs to a name.
    fn follows_name(&self) -> bool {
        self.at.checked_sub(1).and_then(|i| self.text.as_bytes().get(i)).is_some_and(|&b| is_name(b))
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(self.text, self.at, self.line, message))
    }

    /// Skips bytes while they satisfy the predicate; returns the text from `start` on.
    fn take(&mut self, start: usize, satisfies: impl Fn(u8) -> bool) -> &'a str {
        while self.at < self.text.len() && satisfies(self.byte(0)) {
            self.at += 1;
        }
        self.text.get(start..self.at).unwrap_or_default()
    }

    /// The next token.
    pub(super) fn next(&mut self) -> Result<Token<'a>, Error> {
        self.blanks()?;
        let (start, line) = (self.at, self.line);
        let kind = self.kind(start)?;
        Ok(Token { kind, start, end: self.at, line })
    }

    /// Skips white space, comments and old debug data (`@@DWARF …` up to the end of the line).
    fn blanks(&mut self) -> Result<(), Error> {
        loop {
            match (self.byte(0), self.byte(1)) {
                (b'\n', _) => {
                    self.line = self.line.saturating_add(1);
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r' | 0x0b | 0x0c, _) => self.at += 1,
                (b'/', b'/') | (b'@', b'@') => _ = self.take(self.at, |b| b != b'\n'),
                (b'/', b'*') => {
                    let Some(length) = self.rest().get(2..).and_then(|rest| rest.find("*/")) else {
                        return self.error("expected `*/` at the end of this comment, found the end of the file");
                    };
                    let comment = self.rest().get(..length + 4).unwrap_or_default();
                    let lines = comment.bytes().filter(|&b| b == b'\n').count();
                    self.line = self.line.saturating_add(u32::try_from(lines).unwrap_or(u32::MAX));
                    self.at += comment.len();
                }
                _ => return Ok(()),
            }
        }
    }

    fn kind(&mut self, start: usize) -> Result<TokenKind<'a>, Error> {
        let first = self.byte(0);
        match first {
            _ if start >= self.text.len() => Ok(TokenKind::End),
            b'0'..=b'9' => self.number(start),
            // After a name, a dot and digits are a modifier: `.1d`.
            b'.' if self.byte(1).is_ascii_digit() && !self.follows_name() => self.number(start),
            b'a'..=b'z' | b'A'..=b'Z' | b'_' | b'$' => {
                self.at += 1;
                match self.take(start, is_name) {
                    "$" => self.error("expected a name after `$`"),
                    name => Ok(TokenKind::Name(name)),
                }
            }
            b'%' if is_name(self.byte(1)) => {
                self.at += 1;
                Ok(TokenKind::Name(self.take(start, is_name)))
            }
            b'.' if self.byte(1).is_ascii_alphanumeric() || self.byte(1) == b'_' => {
                self.at += 1;
                let mut word = self.take(start + 1, is_name);
                while self.rest().starts_with("::") && is_name(self.byte(2)) {
                    self.at += 2;
                    word = self.take(start + 1, is_name);
                }
                Ok(TokenKind::DotWord(word))
            }
            b'"' => self.string(),
            _ => match PUNCTUATION.iter().find(|mark| self.rest().starts_with(**mark)) {
                Some(mark) => {
                    self.at += mark.len();
                    Ok(TokenKind::Punct(mark))
                }
                None => {
                    let found = self.rest().chars().next().unwrap_or_default();
                    self.error(format!("expected PTX, found the character {found:?}"))
                }
            },
        }
    }

    /// `"…"` on one line; a backslash escapes the next character.
    fn string(&mut self) -> Result<TokenKind<'a>, Error> {
        let mut length = 1;
        loop {
            match self.byte(length) {
                b'"' => break,
                b'\\' if !matches!(self.byte(length + 1), 0 | b'\n') => length += 2,
                0 | b'\n' => return self.error("expected `\"` at the end of this string, found the end of the line"),
                _ => length += 1,
            }
        }
        let text = self.rest().get(1..length).unwrap_or_default();
        self.at += length + 1;
        Ok(TokenKind::Text(text))
    }

    /// PTX ISA, "Constants": integers are `.s64`, or `.u64` with the suffix or if they exceed the signed range.
    fn number(&mut self, start: usize) -> Result<TokenKind<'a>, Error> {
        let kind = match (self.byte(0), self.byte(1)) {
            (b'0', b'x' | b'X') => self.digits(2, 16)?,
            (b'0', b'b' | b'B') => self.digits(2, 2)?,
            (b'0', b'f' | b'F') => TokenKind::F32(self.bits(8)? as u32),
            (b'0', b'd' | b'D') => TokenKind::F64(f64::from_bits(self.bits(16)?)),
            (b'0', b'0'..=b'9') if !self.is_decimal_float() => self.digits(1, 8)?,
            _ if self.is_decimal_float() => {
                let mut text = self.take(start, |b| b.is_ascii_digit() || b == b'.');
                if matches!(self.byte(0), b'e' | b'E') {
                    self.at += if matches!(self.byte(1), b'+' | b'-') { 2 } else { 1 };
                    text = self.take(start, |b| b.is_ascii_digit());
                }
                match text.parse() {
                    Ok(value) => TokenKind::F64(value),
                    Err(_) => return self.error(format!("expected a floating-point number, found `{text:.60}`")),
                }
            }
            _ => self.digits(0, 10)?,
        };
        if is_name(self.byte(0)) {
            let text = self.take(start, is_name);
            return self.error(format!("expected a number, found `{text:.60}`"));
        }
        Ok(kind)
    }

    /// Whether a point or an exponent follows the decimal digits from here.
    fn is_decimal_float(&self) -> bool {
        let after = self.rest().trim_start_matches(|c: char| c.is_ascii_digit());
        after.starts_with(['.', 'e', 'E'])
    }

    /// An integer of base `radix` after a prefix of `prefix` bytes.
    fn digits(&mut self, prefix: usize, radix: u32) -> Result<TokenKind<'a>, Error> {
        let start = self.at + prefix;
        self.at = start;
        let text = self.take(start, |b| (b as char).is_digit(radix));
        let Ok(bits) = u64::from_str_radix(text, radix) else {
            return self.error(match text {
                "" => format!("expected digits of base {radix} after the prefix of a number"),
                _ => format!("expected an integer of at most 64 bits, found `{text:.60}`"),
            });
        };
        let suffix = self.byte(0) == b'U';
        self.at += usize::from(suffix);
        Ok(TokenKind::Int { bits, unsigned: suffix || bits > i64::MAX as u64 })
    }

    /// The bits of a float in exactly `count` hexadecimal digits, after `0f` or `0d`.
    fn bits(&mut self, count: usize) -> Result<u64, Error> {
        self.at += 2;
        let text = self.take(self.at, |b| b.is_ascii_hexdigit());
        match u64::from_str_radix(text, 16) {
            Ok(bits) if text.len() == count => Ok(bits),
            _ => self
                .error(format!("expected {count} hexadecimal digits of a floating-point number, found `{text:.60}`")),
        }
    }
}

/// The token's text in error messages.
impl std::fmt::Display for TokenKind<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => write!(f, "`{name:.60}`"),
            Self::DotWord(word) => write!(f, "`.{word:.60}`"),
            Self::Int { bits, .. } => write!(f, "the number {bits}"),
            Self::F32(bits) => write!(f, "the number 0f{bits:08X}"),
            Self::F64(value) => write!(f, "the number {value:?}"),
            Self::Text(_) => f.write_str("a string"),
            Self::Punct(mark) => write!(f, "`{mark}`"),
            Self::End => f.write_str("the end of the file"),
        }
    }
}

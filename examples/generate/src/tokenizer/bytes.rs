//! Tokens for bytes: GPT-2's printable character for each byte, and SentencePiece's `<0x0A>`.

use std::collections::HashMap;

/// GPT-2's character for each byte: printable Latin-1 characters stand for themselves, and the characters from U+0100 on for the
/// remaining bytes in order.
pub(super) fn characters_of_bytes() -> [char; 256] {
    let mut others = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        byte @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(byte),
        // There are more characters than bytes.
        _ => others.next().unwrap_or_default(),
    })
}

/// The inverse of [`characters_of_bytes`].
pub(super) fn bytes_of_characters() -> HashMap<char, u8> {
    characters_of_bytes().into_iter().zip(0..=255).collect()
}

/// The byte that a text such as `<0x0A>` stands for.
pub(super) fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

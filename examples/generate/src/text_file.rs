//! Text files of limited size that the command line names.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a text of up to `max_bytes` from a file, which may also be a pipe. Errors ask for `expected`: "a file with a chat template",
/// for example.
///
/// # Errors
/// The file cannot be read, is too long, or is no text.
pub fn read_text_file(path: &Path, max_bytes: usize, expected: &str) -> io::Result<String> {
    let mut bytes = Vec::new();
    // The length of the file is not used, because a pipe has none. One more byte shows that the file is too long.
    File::open(path)?.take(max_bytes as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > max_bytes {
        return Err(io::Error::other(format!("longer than {max_bytes} bytes: give {expected}")));
    }
    String::from_utf8(bytes).map_err(|_| io::Error::other(format!("no text in UTF-8: give {expected}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_up_to_their_limit_if_they_are_text() {
        let path = std::env::temp_dir().join(format!("fanout-text-{}", std::process::id()));
        let cases: [(&[u8], Result<&str, &str>); 4] = [
            (b"", Ok("")),
            ("t\u{e4}x".as_bytes(), Ok("t\u{e4}x")),
            (b"texts", Err("longer than 4 bytes: give a text")),
            (b"\xff", Err("no text in UTF-8: give a text")),
        ];
        for (bytes, want) in cases {
            std::fs::write(&path, bytes).unwrap();
            let got = read_text_file(&path, 4, "a text").map_err(|error| error.to_string());
            assert_eq!(got.as_deref().map_err(String::as_str), want);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read_text_file(&path, 4, "a text").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

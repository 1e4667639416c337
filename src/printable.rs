//! Texts from outside (peers, files, arguments), as they are shown on a terminal or in a log: without characters that control the
//! terminal or forge lines.

/// Whether a character could end a line, control a terminal, or change the direction of the text after it.
pub fn breaks_lines(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

/// A text as one line: characters that [`breaks_lines`] names are escaped as in Rust's literals.
pub fn printable_line(text: &str) -> String {
    escape(text, breaks_lines)
}

/// A text of several lines. Control characters other than line breaks and tabs are escaped. Marks of the direction stay: languages
/// that are written from right to left use them.
pub fn printable_text(text: &str) -> String {
    escape(text, |c| c.is_control() && !matches!(c, '\n' | '\t'))
}

/// JSON, whose texts may contain control characters above U+001F and marks of the direction: they are escaped as in JSON, too.
pub fn printable_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if breaks_lines(c) && c != '\n' {
            // All of them have 16 bits.
            out += &format!("\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

fn escape(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_escaped(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_json_controls_the_terminal() {
        let json = "{\n  \"a\": \"\u{9b}2J\u{202e} é\"\n}";
        assert_eq!(printable_json(json), "{\n  \"a\": \"\\u009b2J\\u202e é\"\n}");
    }

    #[test]
    fn no_text_controls_the_terminal() {
        for (text, line, lines) in [
            ("a\u{1b}[2Jb\nc", "a\\u{1b}[2Jb\\nc", "a\\u{1b}[2Jb\nc"),
            ("\u{9b}\r\u{7}", "\\u{9b}\\r\\u{7}", "\\u{9b}\\r\\u{7}"),
            ("\u{202e} é\t\u{200f}", "\\u{202e} é\\t\\u{200f}", "\u{202e} é\t\u{200f}"),
            ("", "", ""),
        ] {
            assert_eq!((&*printable_line(text), &*printable_text(text)), (line, lines), "{text:?}");
        }
    }
}

//! Standard output and standard error on one terminal or in one file: generated text goes to the former, all else to the latter.
//!
//! Text appears token by token, so a message may arrive while a line of text is incomplete. It then starts on a new line. Progress
//! bars are taken off the terminal while a message is written.
//!
//! Texts from outside (a model, a template, a server, an argument) do not control the terminal: messages are single lines, whose
//! control characters are escaped, and text is escaped if standard output is a terminal.

use std::fmt;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::{LazyLock, Mutex, PoisonError};

use fanout::io_hint::io_hint;
use fanout::printable::{printable_line, printable_text};
use indicatif::{MultiProgress, ProgressDrawTarget};

/// The state of the streams, which are global in a process, too.
static STREAMS: LazyLock<Mutex<Streams>> = LazyLock::new(|| {
    let shared = shown_together(&io::stdout(), &io::stderr()).unwrap_or(false);
    Mutex::new(Streams { shared, on_terminal: io::stdout().is_terminal(), text_in_line: false, kept: None })
});

/// All progress bars. They are drawn only if standard error is a terminal.
static BARS: LazyLock<MultiProgress> = LazyLock::new(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()));

/// Where the text stands, as far as it matters for messages.
struct Streams {
    /// Whether text and messages appear in one place.
    shared: bool,
    /// Whether text appears on a terminal.
    on_terminal: bool,
    /// Whether the last line of text is incomplete, and nothing was written after it.
    text_in_line: bool,
    /// The messages since [`keep_messages`].
    kept: Option<Vec<u8>>,
}

impl Streams {
    fn write_text(&mut self, out: &mut dyn Write, text: &[u8]) -> io::Result<()> {
        if let Some(last) = text.last() {
            self.text_in_line = *last != b'\n';
        }
        if self.on_terminal {
            // Each write is a text of its own, so that no character is cut.
            out.write_all(printable_text(&String::from_utf8_lossy(text)).as_bytes())
        } else {
            out.write_all(text)
        }
    }

    fn write_message(&mut self, out: &mut dyn Write, message: &[u8]) -> io::Result<()> {
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(message);
            return Ok(());
        }
        if std::mem::take(&mut self.text_in_line) && self.shared {
            out.write_all(b"\n")?;
        }
        out.write_all(message)
    }
}

/// Whether both streams are the same terminal, file or pipe. Text in a pipe beside messages on a terminal counts, too: the program
/// after the pipe, such as `tee`, probably writes the text to the same terminal.
fn shown_together(text: &impl AsFd, messages: &(impl AsFd + IsTerminal)) -> io::Result<bool> {
    let metadata = |stream: &dyn AsFd| File::from(stream.as_fd().try_clone_to_owned()?).metadata();
    let (text, other) = (metadata(text)?, metadata(messages)?);
    let same = (text.dev(), text.ino()) == (other.dev(), other.ino());
    Ok(same || messages.is_terminal() && text.file_type().is_fifo())
}

/// Standard output, for generated text.
#[derive(Debug)]
pub struct TextWriter;

impl Write for TextWriter {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        streams.write_text(&mut io::stdout(), text).map_err(output_error)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush().map_err(output_error)
    }
}

/// The error of a failed write, for users.
fn output_error(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write to standard output: {error}{}", io_hint(&error)))
}

/// Standard error, for messages: each call of `write_all` is a message of its own and must end with a line break.
#[derive(Debug)]
pub struct MessageWriter;

impl Write for MessageWriter {
    fn write(&mut self, message: &[u8]) -> io::Result<usize> {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        // Text before the message must be on the terminal first. If its pipe is closed, the message says so.
        let _ = io::stdout().flush();
        BARS.suspend(|| streams.write_message(&mut io::stderr(), message))?;
        Ok(message.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints a message of the program, as one line. A failed write is ignored: there is no other place to report it.
pub fn message(text: impl fmt::Display) {
    let _ = MessageWriter.write_all(format!("generate: {}\n", printable_line(&text.to_string())).as_bytes());
}

/// Prints lines that need no program name: a report, for example.
pub fn lines(text: impl fmt::Display) {
    let _ = MessageWriter.write_all(printable_text(&text.to_string()).as_bytes());
}

/// Keeps all messages from now on instead of printing them, until [`take_kept_messages`]: for programs that print them only if they fail.
pub fn keep_messages() {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner).kept = Some(Vec::new());
}

/// The messages since [`keep_messages`]. Later ones are printed again.
pub fn take_kept_messages() -> Vec<u8> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner).kept.take().unwrap_or_default()
}

/// The progress bars of the process.
pub fn bars() -> &'static MultiProgress {
    &BARS
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use super::*;

    #[test]
    fn a_message_starts_on_a_line_of_its_own_if_text_is_shown_beside_it() {
        // The streams share a place or not; what is written: text (T) and messages (M); what the place shows.
        let cases: [(bool, &[&str], &str); 6] = [
            (true, &["T one", "M lost", "T two", "T  three", "M back"], "one\nlost\ntwo three\nback\n"),
            (true, &["T one\n", "M lost", "M back"], "one\nlost\nback\n"),
            (true, &["M first", "T one", "T ", "M lost"], "first\none\nlost\n"),
            (true, &["T one", "T ", "T \n", "M lost"], "one\nlost\n"),
            (false, &["T one", "M lost", "T two"], "onelost\ntwo"),
            (false, &["M lost", "M back"], "lost\nback\n"),
        ];
        for (shared, writes, expected) in cases {
            let mut streams = Streams { shared, on_terminal: false, text_in_line: false, kept: None };
            let mut shown = Vec::new();
            for write in writes {
                match write.split_at(2) {
                    ("T ", text) => streams.write_text(&mut shown, text.as_bytes()).unwrap(),
                    (_, text) => streams.write_message(&mut shown, format!("{text}\n").as_bytes()).unwrap(),
                }
            }
            assert_eq!(String::from_utf8(shown).unwrap(), expected, "{writes:?}");
        }
    }

    #[test]
    fn text_controls_no_terminal_and_reaches_files_unchanged() {
        let text = "a\u{1b}[2J\tb\n";
        for (on_terminal, expected) in [(true, "a\\u{1b}[2J\tb\n"), (false, text)] {
            let mut streams = Streams { shared: true, on_terminal, text_in_line: false, kept: None };
            let mut shown = Vec::new();
            streams.write_text(&mut shown, text.as_bytes()).unwrap();
            assert_eq!((String::from_utf8(shown).unwrap().as_str(), streams.text_in_line), (expected, false));
        }
    }

    #[test]
    fn kept_messages_do_not_appear_in_the_text() {
        let mut streams = Streams { shared: true, on_terminal: false, text_in_line: false, kept: Some(Vec::new()) };
        let mut shown = Vec::new();
        streams.write_text(&mut shown, b"one").unwrap();
        streams.write_message(&mut shown, b"lost\n").unwrap();
        streams.write_message(&mut shown, b"back\n").unwrap();
        streams.write_text(&mut shown, b" two").unwrap();
        assert_eq!((&*shown, streams.kept.as_deref()), (&b"one two"[..], Some(&b"lost\nback\n"[..])));
    }

    #[test]
    fn streams_are_compared_by_what_they_are_connected_to() {
        let null = || File::options().write(true).open("/dev/null").unwrap();
        let (_reader, pipe) = io::pipe().unwrap();
        let (one, other) = (null(), null());
        assert!(shown_together(&one, &other).unwrap());
        assert!(!shown_together(&pipe, &one).unwrap());
        let same = File::from(std::os::fd::OwnedFd::from(pipe.try_clone().unwrap()));
        assert!(shown_together(&pipe, &same).unwrap());
    }
}

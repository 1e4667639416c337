//! Texts that end a reply (`--stop`). They can begin in one token and end in another, so text that may be their start is held back.

/// The reply so far, up to a stop text.
#[derive(Debug)]
pub struct StopTexts<'a> {
    texts: &'a [String],
    /// The end of the reply that may be the start of a stop text.
    held: String,
    found: bool,
}

impl<'a> StopTexts<'a> {
    /// A reply without text.
    pub fn new(texts: &'a [String]) -> StopTexts<'a> {
        StopTexts { texts, held: String::new(), found: false }
    }

    /// Appends text to the reply. Returns what can be printed of it.
    pub fn push(&mut self, text: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held += text;
        if let Some(at) = self.texts.iter().filter_map(|stop| self.held.find(stop)).min() {
            self.found = true;
            return std::mem::take(&mut self.held)[..at].to_owned();
        }
        let held = |stop: &String| {
            (1..stop.len()).rev().find(|&n| stop.is_char_boundary(n) && self.held.ends_with(&stop[..n]))
        };
        let start = self.held.len() - self.texts.iter().filter_map(held).max().unwrap_or_default();
        let rest = self.held.split_off(start);
        std::mem::replace(&mut self.held, rest)
    }

    /// Whether the reply has ended.
    pub fn is_found(&self) -> bool {
        self.found
    }

    /// What was held back when the reply has ended for another reason.
    pub fn finish(self) -> String {
        if self.found { String::new() } else { self.held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_ends_where_a_stop_text_begins() {
        // Stop texts, the text of each token, and what is printed for each and at the end.
        type Texts = &'static [&'static str];
        let cases: [(Texts, Texts, Texts, bool); 7] = [
            (&[], &["a", "b"], &["a", "b", ""], false),
            (&["User:"], &["Hi.\n", "Us", "er", ": x", "y"], &["Hi.\n", "", "", "", "", ""], true),
            (&["User:"], &["Us", "ual"], &["", "Usual", ""], false),
            (&["aab"], &["aa", "a", "b"], &["", "a", "", ""], true),
            (&["zz", "bc"], &["abcz", "z"], &["a", "", ""], true),
            (&["###"], &["x##"], &["x", "##"], false),
            (&["éé"], &["é", "x"], &["", "éx", ""], false),
        ];
        for (stops, tokens, printed, found) in cases {
            let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
            let mut reply = StopTexts::new(&stops);
            let mut all: Vec<String> = tokens.iter().map(|token| reply.push(token)).collect();
            assert_eq!(reply.is_found(), found, "{stops:?} {tokens:?}");
            all.push(reply.finish());
            assert_eq!(all, printed, "{stops:?} {tokens:?}");
        }
    }
}

//! The report of `rpc-server doctor`: a line of text for each finding at once, or JSON at the end.

use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;

use fanout::io_hint::io_hint;
use fanout::printable::{printable_json, printable_line};
use serde::Serialize;

use crate::{fail, print};

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// No problem.
    Ok,
    /// A part that works, but slower than it could, or that will fail under load.
    Warning,
    /// A part that does not work.
    Problem,
}

/// Longest message, in characters: a server's texts are as long as it likes.
const MAX_MESSAGE: usize = 600;

/// The result of one check.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Finding {
    /// `this machine`, or the server.
    subject: String,
    check: &'static str,
    level: Level,
    message: String,
    /// The next step, with the command if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
    /// Measured values: bytes and seconds where the name says nothing else.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    values: BTreeMap<&'static str, f64>,
}

impl Finding {
    fn new(check: &'static str, level: Level, mut message: String, remedy: Option<String>) -> Finding {
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE) {
            message.truncate(end);
            message.push('…');
        }
        Finding { subject: String::new(), check, level, message, remedy, values: BTreeMap::new() }
    }

    pub(super) fn ok(check: &'static str, message: impl Into<String>) -> Finding {
        Finding::new(check, Level::Ok, message.into(), None)
    }

    pub(super) fn warning(check: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding::new(check, Level::Warning, message.into(), Some(remedy.into()))
    }

    pub(super) fn problem(check: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding::new(check, Level::Problem, message.into(), Some(remedy.into()))
    }

    /// Adds a measured value to the finding.
    pub(super) fn with(mut self, name: &'static str, value: f64) -> Finding {
        self.values.insert(name, value);
        self
    }

    #[cfg(test)]
    pub(super) fn is_ok(&self) -> bool {
        self.level == Level::Ok
    }

    #[cfg(test)]
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The finding for users.
    fn text(&self) -> String {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Problem => "PROBLEM",
        };
        // Messages contain texts of other machines.
        let mut text = format!("  {level:<8} {}: {}\n", self.check, printable_line(&self.message));
        if let Some(remedy) = &self.remedy {
            text += &format!("           -> {}\n", printable_line(remedy));
        }
        text
    }
}

/// All findings.
pub(super) struct Report {
    as_json: bool,
    subject: String,
    findings: Vec<Finding>,
    /// Why nothing can be printed any more.
    broken: Option<io::Error>,
}

impl Report {
    pub(super) fn new(as_json: bool) -> Report {
        Report { as_json, subject: String::new(), findings: Vec::new(), broken: None }
    }

    /// The subject of the findings that follow.
    pub(super) fn begin(&mut self, subject: &str) {
        subject.clone_into(&mut self.subject);
        if !self.as_json {
            self.print(&format!("{}\n", printable_line(subject)));
        }
    }

    pub(super) fn add(&mut self, mut finding: Finding) {
        self.subject.clone_into(&mut finding.subject);
        if !self.as_json {
            self.print(&finding.text());
        }
        self.findings.push(finding);
    }

    fn print(&mut self, text: &str) {
        if self.broken.is_none() {
            self.broken = print(text).err();
        }
    }

    fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// The summary. Success if there is no problem.
    pub(super) fn finish(mut self) -> ExitCode {
        let (problems, warnings) = (self.count(Level::Problem), self.count(Level::Warning));
        if self.as_json {
            let json = serde_json::json!({ "problems": problems, "warnings": warnings, "findings": self.findings });
            self.print(&format!("{}\n", printable_json(&format!("{json:#}"))));
        } else {
            let plural = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
            self.print(&format!("{}, {}\n", plural(problems, "problem"), plural(warnings, "warning")));
        }
        match self.broken {
            Some(e) => fail(&format!("cannot write to standard output: {e}{}", io_hint(&e))),
            None if problems == 0 => ExitCode::SUCCESS,
            None => ExitCode::FAILURE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_name_their_subject_and_next_step() {
        let mut report = Report::new(true);
        report.begin("this machine");
        report.add(Finding::ok("clock", "fine").with("seconds", 0.5));
        report.begin("gpu-1:50052");
        report.add(Finding::problem("version", "a\u{1b}[2J", "update"));
        let long = Finding::ok("version", "x".repeat(MAX_MESSAGE + 1)).message;
        assert_eq!(long, "x".repeat(MAX_MESSAGE) + "…");
        let [ok, problem] = &report.findings[..] else { panic!("two findings: {:?}", report.findings) };
        assert_eq!(ok.text(), "  ok       clock: fine\n");
        assert_eq!(problem.text(), "  PROBLEM  version: a\\u{1b}[2J\n           -> update\n");
        let json = serde_json::json!([ok, problem]);
        let want = serde_json::json!([
            {"subject": "this machine", "check": "clock", "level": "ok", "message": "fine", "values": {"seconds": 0.5}},
            {"subject": "gpu-1:50052", "check": "version", "level": "problem", "message": "a\u{1b}[2J", "remedy": "update"},
        ]);
        assert_eq!(json, want);
        assert_eq!((report.count(Level::Ok), report.count(Level::Warning), report.count(Level::Problem)), (1, 0, 1));
    }
}

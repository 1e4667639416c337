//! The program itself, as a process.
#![allow(clippy::unwrap_used, reason = "a test says what it needs by failing")]

use std::process::Command;

/// Besides, this makes `cargo test` build the program, which scripts run then (FANOUT_BUILT).
#[test]
fn help_names_the_options() {
    let output = Command::new(env!("CARGO_BIN_EXE_generate")).arg("--help").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("--tokens"), "{text}");
}

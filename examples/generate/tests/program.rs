//! Runs the built program as a process.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::process::Command;

/// This test also makes `cargo test` build the program, which scripts then run without building it (`FANOUT_BUILT`).
#[test]
fn help_names_the_options() {
    let output = Command::new(env!("CARGO_BIN_EXE_generate")).arg("--help").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("--tokens"), "{text}");
}

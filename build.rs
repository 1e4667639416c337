//! Tells the crate its version with the revision it is built from, for `rpc-server --version`.

use std::process::Command;

/// What git prints on one line, or `None` outside a checkout.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Each commit and checkout is logged there. A path that does not exist would rerun this script at every build.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|p| std::path::Path::new(p).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    let version = env!("CARGO_PKG_VERSION");
    // A crate built outside a checkout (from crates.io) has no revision: its version says it all.
    let version = git(&["rev-parse", "--short=9", "HEAD"]).map_or(version.to_owned(), |r| format!("{version} ({r})"));
    println!("cargo::rustc-env=FANOUT_VERSION={version}");
}

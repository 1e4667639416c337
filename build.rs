//! Tells the crate its version with the revision it is built from, and embeds the PTX of the CUDA kernels.
//!
//! With `FANOUT_BUILD_PTX=1` the PTX is compiled anew first (`scripts/build-ptx.sh kernels`); otherwise what is committed
//! under `kernels/ptx` is taken as it is.

use flate2::{Compression, write::ZlibEncoder};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

/// What git prints on one line, or `None` outside a checkout.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Each commit and checkout is logged there. A path that does not exist would rerun this script at every build.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|p| Path::new(p).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    let version = env!("CARGO_PKG_VERSION");
    // A crate built outside a checkout (from crates.io) has no revision: its version says it all.
    let version = git(&["rev-parse", "--short=9", "HEAD"]).map_or(version.to_owned(), |r| format!("{version} ({r})"));
    println!("cargo::rustc-env=FANOUT_VERSION={version}");
    println!("cargo::rerun-if-env-changed=FANOUT_BUILD_PTX");
    if env::var("FANOUT_BUILD_PTX").is_ok_and(|v| v == "1") {
        println!("cargo::rerun-if-changed=kernels");
        let done = Command::new("scripts/build-ptx.sh").arg("kernels").status().expect("scripts/build-ptx.sh starts");
        assert!(done.success(), "scripts/build-ptx.sh kernels failed");
    }
    embed_kernels();
}

/// Writes `kernels.rs`: the table of all PTX files, compressed, with the entries of each and the bytes of their arguments.
fn embed_kernels() {
    let folder = Path::new("kernels/ptx");
    println!("cargo::rerun-if-changed={}", folder.display());
    let out = env::var("OUT_DIR").expect("cargo sets it");
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("kernels/ptx is there")
        .map(|entry| entry.expect("it can be read").path())
        .filter(|path| path.extension().is_some_and(|e| e == "ptx"))
        .collect();
    files.sort();
    let mut table = "pub(super) static IMAGES: &[Image] = &[\n".to_owned();
    for path in files {
        let name = path.file_stem().and_then(|n| n.to_str()).expect("a name in ASCII");
        let (stem, target) = name.split_once(".sm_").expect("STEM.sm_TARGET.ptx");
        let target: u32 = target.parse().expect("a target's number");
        let text = fs::read_to_string(&path).expect("PTX is text");
        let entries = entries(&text).map_err(|e| format!("{}: {e}", path.display())).expect("PTX of kernels/*.cu");
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
        packed.write_all(text.as_bytes()).expect("memory takes all");
        fs::write(format!("{out}/{name}.z"), packed.finish().expect("memory takes all"))
            .expect("OUT_DIR can be written");
        let _ = writeln!(
            table,
            "    Image {{ stem: {stem:?}, target: {target}, packed: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.z\")), entries: &{entries:?} }},"
        );
    }
    table.push_str("];\n");
    fs::write(format!("{out}/kernels.rs"), table).expect("OUT_DIR can be written");
}

/// Names of a file's entries, each with the bytes of its one parameter, a struct.
fn entries(ptx: &str) -> Result<Vec<(String, u32)>, String> {
    let mut found = Vec::new();
    for entry in ptx.split(".visible .entry ").skip(1) {
        let (name, rest) = entry.split_once('(').ok_or("an entry without parameters")?;
        let (params, _) = rest.split_once(')').ok_or("an entry whose parameters do not end")?;
        let one = || format!("{name} must take one struct by value, not ({})", params.trim());
        let (_, size) = params.trim().split_once(".b8 ").and_then(|(_, p)| p.split_once('[')).ok_or_else(one)?;
        let size = size.strip_suffix(']').and_then(|s| s.parse().ok()).ok_or_else(one)?;
        found.push((name.to_owned(), size));
    }
    if found.is_empty() { Err("no entry".to_owned()) } else { Ok(found) }
}

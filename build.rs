//! Build script: sets the version that the crate reports, and embeds the PTX of the CUDA kernels.
//!
//! With `FANOUT_BUILD_PTX=1`, the PTX is recompiled first (`scripts/build-ptx.sh kernels`); otherwise the committed files in
//! `kernels/ptx` are embedded. Without the feature `cuda`, no file of `kernels/` is read.
//! `tests/revision.rs` compiles this file separately, without features, and runs it in temporary repositories.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let package = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-env=FANOUT_VERSION={}", version(&package));
    #[cfg(feature = "cuda")]
    kernels::embed();
}

/// An environment variable that cargo sets for every build script.
fn variable(name: &str) -> String {
    env::var(name).expect("cargo sets this variable")
}

/// The package's version, in release builds followed by the revision if the package is the root of a git checkout:
/// `0.1.0 (1a2b3c4d5)`. Debug builds have no revision, because each commit would compile the crate again.
///
/// Only the `.git` of the package itself is queried. git would also search the parent folders, and find the repository into
/// which the package is vendored. A package unpacked from a registry has no revision, even at the root of a repository; it is
/// recognised by `.cargo_vcs_info.json`, which cargo adds to each published package.
fn version(package: &Path) -> String {
    let version = variable("CARGO_PKG_VERSION");
    let git_dir = package.join(".git"); // in worktrees and submodules this is a file, which git follows
    if variable("PROFILE") != "release" || !git_dir.exists() || package.join(".cargo_vcs_info.json").exists() {
        return version;
    }
    // git appends a line to this log at each commit and checkout. The path must exist: cargo reruns the script at every build
    // for a missing path.
    if let Some(log) = git(&git_dir, &["rev-parse", "--git-path", "logs/HEAD"]).filter(|path| Path::new(path).exists())
    {
        println!("cargo::rerun-if-changed={log}");
    }
    match git(&git_dir, &["rev-parse", "--short=9", "HEAD"]) {
        Some(revision) => format!("{version} ({revision})"),
        None => version,
    }
}

/// Runs git on this repository and returns its output line; `None` if git is missing or fails. `--git-dir` overrides `GIT_DIR`,
/// which is set if a hook of another repository runs the build.
fn git(git_dir: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("--git-dir").arg(git_dir).args(args).output().ok()?;
    let line = output.status.success().then_some(output.stdout)?;
    Some(String::from_utf8(line).ok()?.trim().to_owned())
}

#[cfg(feature = "cuda")]
mod kernels {
    use flate2::{Compression, write::ZlibEncoder};
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::Command;
    use std::{env, fs};

    /// Writes `kernels.rs`: the table of all PTX files, compressed, with the entries of each and the sizes of their arguments
    /// in bytes.
    pub(super) fn embed() {
        println!("cargo::rerun-if-env-changed=FANOUT_BUILD_PTX");
        if env::var("FANOUT_BUILD_PTX").is_ok_and(|v| v == "1") {
            // The inputs of the PTX; scripts/verified.sh has the same list.
            for input in ["kernels", "src/tensor/table.rs", "scripts/build_ptx.py", "scripts/type_table.py"] {
                println!("cargo::rerun-if-changed={input}");
            }
            let done = Command::new("scripts/build-ptx.sh").arg("kernels").status();
            let done = done.expect("scripts/build-ptx.sh can be started");
            assert!(done.success(), "scripts/build-ptx.sh kernels failed");
        }
        let folder = Path::new("kernels/ptx");
        println!("cargo::rerun-if-changed={}", folder.display());
        let out = super::variable("OUT_DIR");
        let mut files: Vec<_> = fs::read_dir(folder)
            .expect("kernels/ptx exists")
            .map(|entry| entry.expect("entries of kernels/ptx can be read").path())
            .filter(|path| path.extension().is_some_and(|e| e == "ptx"))
            .collect();
        files.sort();
        let mut table = "pub(super) static IMAGES: &[PtxImage] = &[\n".to_owned();
        for path in files {
            let name = path.file_stem().and_then(|n| n.to_str()).expect("the name is ASCII");
            let (stem, target) = name.split_once(".sm_").expect("the name is STEM.sm_TARGET.ptx");
            let target: u32 = target.parse().expect("the target is a number");
            let text = fs::read_to_string(&path).expect("PTX is text");
            let entries = entries(&text).map_err(|e| format!("{}: {e}", path.display())).expect("PTX of kernels/*.cu");
            let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
            packed.write_all(text.as_bytes()).expect("writing to memory cannot fail");
            fs::write(format!("{out}/{name}.z"), packed.finish().expect("writing to memory cannot fail"))
                .expect("OUT_DIR can be written");
            let _ = writeln!(
                table,
                "    PtxImage {{ stem: {stem:?}, target: {target}, packed: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.z\")), entries: &{entries:?} }},"
            );
        }
        table.push_str("];\n");
        fs::write(format!("{out}/kernels.rs"), table).expect("OUT_DIR can be written");
    }

    /// Names of the entries of a PTX file, each with the size in bytes of its parameter, a single struct.
    fn entries(ptx: &str) -> Result<Vec<(String, u32)>, String> {
        let mut found = Vec::new();
        for entry in ptx.split(".visible .entry ").skip(1) {
            let (name, rest) = entry.split_once('(').ok_or("an entry has no parameter list")?;
            let (params, _) = rest.split_once(')').ok_or("the parameter list of an entry is not closed")?;
            let one = || format!("{name} must take one struct by value, not ({})", params.trim());
            let (_, size) = params.trim().split_once(".b8 ").and_then(|(_, p)| p.split_once('[')).ok_or_else(one)?;
            let size = size.strip_suffix(']').and_then(|s| s.parse().ok()).ok_or_else(one)?;
            found.push((name.to_owned(), size));
        }
        if found.is_empty() { Err("the file has no entry".to_owned()) } else { Ok(found) }
    }
}

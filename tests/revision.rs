//! The build script reports the revision of fanout's own checkout, and of no other repository.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Runs a program and returns its output; fails the test if the program fails.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// The build script as a program, compiled without features: it then needs the standard library alone.
fn build_script(folder: &Path) -> PathBuf {
    let program = folder.join("build-script");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc).args(["--edition", "2024", "-o"]).arg(&program).arg(source));
    program
}

/// git in a folder, without the settings of this user and of the repository that this test runs in.
fn git(folder: &Path, args: &[&str]) -> String {
    let mut git = Command::new("git");
    git.current_dir(folder).args(["-c", "user.name=test", "-c", "user.email=test@localhost"]).args(args);
    run(git.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").env_remove("GIT_INDEX_FILE"))
}

/// A new repository with one commit, and the short hash of it.
fn repository(folder: &Path) -> String {
    fs::create_dir_all(folder).unwrap();
    git(folder, &["init", "--quiet"]);
    git(folder, &["commit", "--quiet", "--allow-empty", "--message", "first"]);
    git(folder, &["rev-parse", "--short=9", "HEAD"])
}

/// The script's lines for the package in this folder: the version, and what the script watches besides itself.
fn report(script: &Path, package: &Path, git_dir: Option<&Path>) -> (String, Vec<String>) {
    let mut command = Command::new(script);
    command.current_dir(package).env("CARGO_MANIFEST_DIR", package).env("CARGO_PKG_VERSION", "1.2.3");
    match git_dir {
        Some(git_dir) => command.env("GIT_DIR", git_dir),
        None => command.env_remove("GIT_DIR"),
    };
    let output = run(&mut command);
    let value = |prefix: &str| output.lines().filter_map(|line| line.strip_prefix(prefix).map(str::to_owned)).collect();
    let versions: Vec<String> = value("cargo::rustc-env=FANOUT_VERSION=");
    let watched: Vec<String> = value("cargo::rerun-if-changed=");
    assert_eq!((versions.len(), watched.first().map(String::as_str)), (1, Some("build.rs")), "{output}");
    (versions[0].clone(), watched[1..].to_vec())
}

#[test]
fn the_revision_is_that_of_the_packages_own_checkout() {
    if Command::new("git").arg("--version").output().is_err() {
        eprintln!("not tested: there is no git here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = build_script(folder.path());
    let none = ("1.2.3".to_owned(), Vec::<String>::new());

    let own = folder.path().join("own");
    let revision = repository(&own);
    let (version, watched) = report(&script, &own, None);
    assert_eq!(version, format!("1.2.3 ({revision})"));
    // A commit changes the version, and the script runs again.
    assert!(watched.len() == 1 && fs::read_to_string(&watched[0]).unwrap().contains("first"), "{watched:?}");

    let foreign = folder.path().join("foreign");
    repository(&foreign);
    let vendored = foreign.join("vendor/fanout");
    fs::create_dir_all(&vendored).unwrap();
    assert_eq!(report(&script, &vendored, None), none, "vendored");
    // A hook of the foreign repository runs the build.
    assert_eq!(report(&script, &vendored, Some(&foreign.join(".git"))), none, "vendored, from a hook");
    assert_eq!(report(&script, &own, Some(&foreign.join(".git"))).0, version, "own, from a foreign hook");

    // A package from a registry, unpacked where another repository begins.
    fs::write(foreign.join(".cargo_vcs_info.json"), "{}").unwrap();
    assert_eq!(report(&script, &foreign, None), none, "unpacked");

    // A worktree has a file in the place of `.git`.
    let worktree = folder.path().join("worktree");
    git(&own, &["worktree", "add", "--quiet", "--detach", worktree.to_str().unwrap()]);
    let (version, watched) = report(&script, &worktree, None);
    assert_eq!((version, watched.len()), (format!("1.2.3 ({revision})"), 1));

    let submodule = foreign.join("submodule");
    git(
        &foreign,
        &["-c", "protocol.file.allow=always", "submodule", "--quiet", "add", own.to_str().unwrap(), "submodule"],
    );
    assert_eq!(report(&script, &submodule, None).0, format!("1.2.3 ({revision})"));
}

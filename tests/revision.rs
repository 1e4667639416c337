//! The build script puts the revision of fanout's own checkout into the version, and never the revision of another repository.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Runs a program and returns its output; fails the test if the program fails.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Compiles the build script as a program, without features: it then needs only the standard library.
fn build_script(folder: &Path) -> PathBuf {
    let program = folder.join("build-script");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    run(Command::new(rustc).args(["--edition", "2024", "-o"]).arg(&program).arg(source));
    program
}

/// Runs git in a folder, independently of the user's identity and of the repository that runs this test.
fn git(folder: &Path, args: &[&str]) -> String {
    let mut git = Command::new("git");
    git.current_dir(folder).args(["-c", "user.name=test", "-c", "user.email=test@localhost"]).args(args);
    run(git.env_remove("GIT_DIR").env_remove("GIT_WORK_TREE").env_remove("GIT_INDEX_FILE"))
}

/// Creates a repository with one commit. Returns the short hash of the commit.
fn repository(folder: &Path) -> String {
    fs::create_dir_all(folder).unwrap();
    git(folder, &["init", "--quiet"]);
    git(folder, &["commit", "--quiet", "--allow-empty", "--message", "first"]);
    git(folder, &["rev-parse", "--short=9", "HEAD"])
}

/// Runs the script for a package. Returns the version, and the watched files (`rerun-if-changed`) other than `build.rs`.
fn report(script: &Path, package: &Path, git_dir: Option<&Path>) -> (String, Vec<String>) {
    report_of_profile("release", script, package, git_dir)
}

/// As [`report`], in a build of the profile.
fn report_of_profile(profile: &str, script: &Path, package: &Path, git_dir: Option<&Path>) -> (String, Vec<String>) {
    let mut command = Command::new(script);
    command
        .current_dir(package)
        .env("CARGO_MANIFEST_DIR", package)
        .env("CARGO_PKG_VERSION", "1.2.3")
        .env("PROFILE", profile);
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
fn the_version_has_the_revision_of_the_packages_own_checkout() {
    if Command::new("git").arg("--version").output().is_err() {
        eprintln!("skipped: git is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let script = build_script(folder.path());
    let none = ("1.2.3".to_owned(), Vec::<String>::new());

    let own = folder.path().join("own");
    let revision = repository(&own);
    let (version, watched) = report(&script, &own, None);
    assert_eq!(version, format!("1.2.3 ({revision})"));
    // The script watches a file that each commit changes, so a commit updates the version.
    assert!(watched.len() == 1 && fs::read_to_string(&watched[0]).unwrap().contains("first"), "{watched:?}");
    assert_eq!(report_of_profile("debug", &script, &own, None), none);

    let foreign = folder.path().join("foreign");
    repository(&foreign);
    let vendored = foreign.join("vendor/fanout");
    fs::create_dir_all(&vendored).unwrap();
    assert_eq!(report(&script, &vendored, None), none, "vendored");
    // GIT_DIR is set, as in a build that a git hook of the foreign repository runs.
    assert_eq!(report(&script, &vendored, Some(&foreign.join(".git"))), none, "vendored, from a hook");
    assert_eq!(report(&script, &own, Some(&foreign.join(".git"))).0, version, "own, from a foreign hook");

    // A package from a registry, unpacked into the root of another repository.
    fs::write(foreign.join(".cargo_vcs_info.json"), "{}").unwrap();
    assert_eq!(report(&script, &foreign, None), none, "unpacked");

    // In a worktree `.git` is a file.
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

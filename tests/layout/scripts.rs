//! Scripts: `--help` prints the usage and starts no program. scripts/verified.sh skips a check if the hash of its inputs is
//! unchanged, so its lists of inputs must be complete.

use super::{all_sources, root};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn scripts() -> Vec<PathBuf> {
    let files = fs::read_dir(root().join("scripts")).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|e| e == "sh")).collect()
}

/// Runs a script with `trap` first on the PATH: the stubs there record which programs the script starts.
fn run(script: &Path, argument: &str, trap: &Path) -> Output {
    let path = format!("{}:{}", trap.display(), std::env::var("PATH").unwrap_or_default());
    Command::new(script).arg(argument).current_dir(trap).env("PATH", path).output().unwrap()
}

#[test]
fn scripts_print_help_and_start_nothing() {
    let trap = tempfile::tempdir().unwrap();
    let started = trap.path().join("started");
    // Stubs of the programs that build, download or install.
    for program in ["cargo", "rustup", "rustc", "pip", "cmake", "git"] {
        let stub = trap.path().join(program);
        fs::write(&stub, format!("#!/bin/sh\necho {program} >>'{}'\nexit 1\n", started.display())).unwrap();
        fs::set_permissions(&stub, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let scripts = scripts();
    assert!(scripts.len() >= 10);
    // These scripts pass their options to Python. The tests must also run without Python, and then skip them.
    let python = Command::new("python3").arg("--version").output().is_ok();
    let needs_python = |script: &Path| script.ends_with("build-ptx.sh") || script.ends_with("roofline.sh");
    for script in scripts.into_iter().filter(|script| python || !needs_python(script)) {
        let name = script.display();
        for option in ["--help", "-h"] {
            let output = run(&script, option, trap.path());
            let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
            assert!(output.status.success(), "{name} {option}: {}", String::from_utf8_lossy(&output.stderr));
            assert!(text.starts_with("usage: ") && text.contains("--help"), "{name} {option} prints\n{text}");
        }
        let output = run(&script, "--no-such-option", trap.path());
        let text = String::from_utf8_lossy(&output.stderr).to_lowercase();
        assert_eq!(output.status.code(), Some(2), "{name} --no-such-option does not exit with status 2: {text}");
        assert!(text.contains("usage: "), "{name} --no-such-option prints\n{text}");
        assert!(!started.exists(), "{name} starts {}", fs::read_to_string(&started).unwrap());
    }
}

/// CI does not run the first tier of scripts/test.sh, which has builds of its own: a test that it names must exist all the same.
#[test]
fn commands_name_tests_that_exist() {
    let mut files = scripts();
    files.extend([".ci/run", "CONTRIBUTING.md", "docs/cuda.md"].map(|file| root().join(file)));
    let mut found = 0;
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        // `-- --test` is an option of a benchmark, before the end of its command.
        let named = text.split("--test ").skip(1).filter_map(|rest| rest.split_whitespace().next());
        for test in named.filter(|&word| word != ";;") {
            let file = file.display();
            assert!(root().join(format!("tests/{test}/main.rs")).exists(), "{file}: there is no test {test}");
            found += 1;
        }
    }
    assert!(found >= 10, "{found}");
    let first = fs::read_to_string(root().join("scripts/test.sh")).unwrap();
    let filters: Vec<_> = first.lines().filter_map(|line| line.split_once("--test cuda -- ")).collect();
    assert_eq!(filters.len(), 1);
    let model = fs::read_to_string(root().join("tests/cuda/programmatic.rs")).unwrap();
    assert!(model.contains(&format!("#[test]\nfn {}", filters[0].1)), "scripts/test.sh: no test {}", filters[0].1);
}

/// scripts/loop_counts.py fails if a count in the recorded table is too high, too low or missing, and names the loop.
#[test]
fn counts_of_loops_are_compared_with_the_recorded_ones() {
    if Command::new("python3").arg("--version").output().is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join("tests/loop_counts/x86_64.txt")).unwrap();
    let (before, count) = text.split_once("avx512_quants::micro_kernel").unwrap().1.split_once("2x1=").unwrap();
    let dtype = before.split_whitespace().next().unwrap();
    let count = count.split_whitespace().next().unwrap();
    let old = format!("{before}2x1={count}");
    let scaled = |by: f64| format!("{before}2x1={:.2}", count.parse::<f64>().unwrap() * by);
    let cases = [
        (old.clone(), None),
        (scaled(1.03), None),
        (scaled(0.9), Some("2x1: ")),
        (scaled(1.1), Some("2x1: ")),
        (format!("{before}9x9=1.00 2x1={count}"), Some("9x9: in the table, but not found")),
        (before.to_owned(), Some("2x1: not in the table")),
    ];
    for (new, error) in cases {
        let recorded = folder.path().join("recorded.txt");
        fs::write(&recorded, text.replacen(&old, &new, 1)).unwrap();
        let mut script = Command::new("python3");
        script.arg(root().join("scripts/loop_counts.py")).arg("--compare").arg(&recorded);
        let output = script.arg(root().join("tests/loop_counts/x86_64.txt")).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), error.is_none(), "{new}: {shown}");
        let named = format!("avx512_quants::micro_kernel of {dtype}, tile {}", error.unwrap_or_default());
        let told = shown.contains(&named) && shown.contains("--renew");
        assert!(error.is_none() || told, "{new}: the message is\n{shown}");
    }
}

/// The inputs that scripts/verified.sh lists for a check.
fn listed_inputs(check: &str) -> BTreeSet<String> {
    let script = fs::read_to_string(root().join("scripts/verified.sh")).unwrap();
    let start = format!("\n{check}=(");
    let (_, rest) = script.split_once(&start).unwrap_or_else(|| panic!("scripts/verified.sh has no array {check}"));
    rest.split_once(')').unwrap().0.split_whitespace().map(str::to_owned).collect()
}

/// The vector kernels use no module of the crate that is not listed.
#[test]
fn the_hash_of_the_aarch64_tests_covers_their_inputs() {
    let listed = listed_inputs("aarch64");
    let script = fs::read_to_string(root().join("scripts/aarch64.sh")).unwrap();
    let filters = script.split_once("set -- cpu::").unwrap().1.lines().next().unwrap().trim_end_matches("; fi");
    let tested: Vec<String> =
        format!("cpu::{filters}").split(' ').map(|filter| format!("src/{}", filter.replace("::", "/"))).collect();
    assert!(tested.len() >= 3, "{tested:?}");
    let is_listed = |path: &str| {
        listed.iter().any(|listed| format!("{path}/").starts_with(&format!("{}/", listed.trim_end_matches(".rs"))))
    };
    for path in &tested {
        assert!(is_listed(path), "scripts/verified.sh does not list {path}, an input of the AArch64 tests");
    }
    let mut uses = 0;
    for (file, path) in all_sources().into_iter().filter(|(name, _)| is_listed(name.trim_end_matches(".rs"))) {
        let text = fs::read_to_string(path).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
            // One path, or several in braces.
            let paths = line.split("crate::").skip(1).flat_map(|path| match path.strip_prefix('{') {
                Some(list) => list.split(", ").collect::<Vec<_>>(),
                None => vec![path],
            });
            for path in paths {
                let mut names =
                    path.split(|c: char| !c.is_ascii_alphanumeric() && !"_:".contains(c)).next().unwrap().split("::");
                let path = format!("src/{}/{}", names.next().unwrap_or_default(), names.next().unwrap_or_default());
                assert!(is_listed(&path), "{file} uses {path}, which scripts/verified.sh does not list");
                uses += 1;
            }
        }
    }
    assert!(uses > 50, "{uses}");
}

/// A Python script and the scripts in its folder that it imports, directly or indirectly.
fn with_imports(script: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut next = vec![script.to_owned()];
    while let Some(script) = next.pop() {
        let text = fs::read_to_string(root().join(&script)).unwrap();
        let names = text.lines().filter_map(|line| line.strip_prefix("import ").or(line.strip_prefix("from ")));
        let beside = names.filter_map(|rest| rest.split_whitespace().next()).map(|name| format!("scripts/{name}.py"));
        let new: Vec<_> = beside.filter(|path| root().join(path).exists() && !found.contains(path)).collect();
        next.extend(new);
        found.insert(script);
    }
    found
}

/// Inputs of the roofline's counts: the PTX, its launches, the cases, the emulator, and the script that records them.
#[test]
fn the_hash_of_the_roofline_covers_its_inputs() {
    let listed = listed_inputs("roofline");
    let code = [
        "kernels/ptx",
        "src/cuda/columns.rs",
        "src/cuda/ops",
        "src/cuda/private_results.rs",
        "src/cuda/program_builder.rs",
        "src/graph/fuse",
        "src/graph/fuse.rs",
    ];
    let others = [
        "bench/cases",
        "bench/roofline-counts.rs",
        "bench/roofline/counts.json",
        "crates/cudaemu/src",
        "scripts/roofline.py",
        "scripts/emulate.sh",
    ];
    for path in code.into_iter().chain(others) {
        assert!(listed.contains(path), "scripts/verified.sh does not list {path}, an input of the roofline's counts");
        assert!(root().join(path).exists(), "{path} does not exist");
    }
}

/// Inputs of the PTX: the Python driver of the compiler, its imports, every repository file that they name, and the kernels.
#[test]
fn the_hash_of_the_ptx_covers_its_inputs() {
    let listed = listed_inputs("ptx");
    let mut needed: BTreeSet<String> = ["kernels", "scripts/build-ptx.sh"].map(str::to_owned).into();
    for script in with_imports("scripts/build_ptx.py") {
        let text = fs::read_to_string(root().join(&script)).unwrap();
        let quoted = text.split('"').filter(|word| word.contains('/') && !word.contains(char::is_whitespace));
        needed.extend(quoted.filter(|word| !word.starts_with('/') && root().join(word).exists()).map(str::to_owned));
        needed.insert(script);
    }
    assert!(needed.contains("crates/cudaemu/kernels") && needed.contains("scripts/build_ptx.py"), "{needed:?}");
    for path in needed {
        let covered = listed.iter().any(|input| Path::new(&path).starts_with(input));
        assert!(covered, "scripts/verified.sh does not list {path}, an input of the PTX");
    }
    for input in listed {
        assert!(root().join(&input).exists(), "scripts/verified.sh lists {input}, which does not exist");
    }
}

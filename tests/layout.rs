//! The house rules that the compiler does not hold: one stem per op family in every room, files of a size to read.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

#[path = "layout/steps.rs"]
mod steps;

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn all_sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in ["src", "bin", "tests", "bench", "examples"] {
        sources(&root().join(dir), &mut found);
    }
    found
}

/// A `#[path]` names a file of its own folder or below: modules that several crates or tests need are a crate's.
#[test]
fn paths_of_modules_stay_in_their_folder() {
    // The emulator's tests share files of their own folder `tests`.
    let emulator = root().join("crates/cudaemu/tests");
    for dir in ["src", "bin", "tests", "bench", "examples", "crates"] {
        let mut files = Vec::new();
        sources(&root().join(dir), &mut files);
        for file in files.iter().filter(|file| !file.starts_with(&emulator)) {
            let text = fs::read_to_string(file).unwrap();
            for line in text.lines().filter(|line| line.trim_start().starts_with(&["#[", "path"].concat())) {
                let path = line.split('"').nth(1).unwrap_or_default();
                let stays =
                    !path.is_empty() && !Path::new(path).is_absolute() && !path.split('/').any(|part| part == "..");
                assert!(stays, "{}: {line}", file.display());
            }
        }
    }
}

#[test]
fn files_stay_short_enough_to_read() {
    let mut files = all_sources();
    for folder in ["kernels", "kernels/common"] {
        let folder = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        files.extend(folder.filter(|path| path.extension().is_some_and(|e| e == "cu" || e == "cuh")));
    }
    for path in files {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 550, "{} has {lines} lines: make a folder of the same name", path.display());
    }
}

/// `unsafe` stands only where the design allows it.
#[test]
fn unsafe_code_stays_in_its_modules() {
    let allowed = [
        "src/device/mapped",
        "src/device/host",
        "src/cpu/memory",
        "src/cpu/pool",
        "src/cpu/simd",
        "src/cuda/driver",
        "src/cuda/memory",
        "src/cuda/events",
        "src/cuda/copy",
        "src/cuda/capture",
        "src/cuda/kernel",
        "bench/ops/peaks",
        "tests/sched_cost/counting",
    ];
    for path in all_sources() {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(&path).unwrap();
        let lifts = ["allow(", "expect("].iter().any(|word| text.contains(&[*word, "unsafe_code"].concat()));
        assert!(!lifts || allowed.iter().any(|a| name.starts_with(a)), "{name} lifts the ban on unsafe code");
    }
}

/// Layers call downwards only.
#[test]
fn rooms_know_only_what_is_below_them() {
    let rules: &[(&str, &[&str])] = &[
        (
            "src/tensor",
            &[
                "crate::ops",
                "crate::graph",
                "crate::device",
                "crate::cpu",
                "crate::cuda",
                "crate::rpc",
                "crate::registry",
            ],
        ),
        (
            "src/gguf",
            &[
                "crate::ops",
                "crate::graph",
                "crate::device",
                "crate::sched",
                "crate::cpu",
                "crate::cuda",
                "crate::rpc",
                "crate::registry",
            ],
        ),
        ("src/ops", &["crate::graph", "crate::device", "crate::cpu", "crate::cuda", "crate::rpc", "crate::registry"]),
        ("src/graph", &["crate::device", "crate::sched", "crate::cpu", "crate::cuda", "crate::rpc", "crate::registry"]),
        ("src/device", &["crate::sched", "crate::cpu", "crate::cuda", "crate::rpc", "crate::registry"]),
        ("src/cpu", &["crate::sched", "crate::rpc", "crate::registry", "crate::cuda", "std::net", "socket2"]),
        ("src/cuda", &["crate::sched", "crate::rpc", "crate::registry", "crate::cpu", "std::net", "socket2"]),
        ("src/fallback", &["crate::sched", "crate::rpc", "crate::registry", "crate::cpu", "crate::cuda", "std::net"]),
        ("src/sched", &["crate::cpu", "crate::cuda", "crate::fallback", "crate::rpc", "crate::registry", "std::net"]),
        ("src/rpc/wire", &["std::net", "std::io", "socket2", "crate::cpu", "crate::device", "crate::graph"]),
        ("src/rpc/server", &["crate::cpu", "crate::cuda", "crate::fallback", "crate::registry", "CUDA"]),
    ];
    for path in all_sources() {
        let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(&path).unwrap();
        // Unit tests may reach for a real device.
        let text = text.split("#[cfg(test)]").next().unwrap();
        for (room, forbidden) in rules.iter().filter(|(room, _)| name.starts_with(room)) {
            for word in *forbidden {
                assert!(!text.contains(word), "{name} in {room} mentions {word}");
            }
        }
    }
}

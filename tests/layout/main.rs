//! The house rules that the compiler does not hold: layers, tables of types and ops that match the tree, files of a size to read,
//! scripts that say how they are called.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod attributes;
mod backends;
mod layers;
mod paths;
mod rooms;
mod scripts;
mod steps;

use layers::Room;
use paths::Sources;
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

/// The files of Rust in the repository, each with its name from the root.
fn all_sources() -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for dir in ["src", "bin", "tests", "bench", "examples", "crates", "fuzz/fuzz_targets"] {
        sources(&root().join(dir), &mut found);
    }
    let named = |path: PathBuf| (path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/"), path);
    found.into_iter().map(named).collect()
}

#[test]
fn files_stay_short_enough_to_read() {
    let mut files = all_sources();
    for folder in ["kernels", "kernels/common"] {
        let folder = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let kernels = folder.filter(|path| path.extension().is_some_and(|e| e == "cu" || e == "cuh"));
        files.extend(kernels.map(|path| (path.display().to_string(), path)));
    }
    for (name, path) in files {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 550, "{name} has {lines} lines: make a folder of the same name");
    }
}

/// A `#[path]` names a file of its own folder or below: modules that several crates or tests need are a crate's.
#[test]
fn paths_of_modules_stay_in_their_folder() {
    for (name, path) in all_sources() {
        for file in attributes::module_paths(&fs::read_to_string(path).unwrap()) {
            let stays = !Path::new(&file).is_absolute() && !file.split('/').any(|part| part == "..");
            assert!(stays, "{name}: the module of {file} lies outside of its folder");
        }
    }
}

/// `unsafe` stands only where the design allows it.
#[test]
fn unsafe_code_stays_in_its_modules() {
    let mut allowed: Vec<String> = [
        "src/device/mapped",
        "src/device/host",
        "src/cpu/memory",
        "src/cpu/pool",
        "src/cpu/simd",
        "src/cuda/memory",
        "src/cuda/events",
        "src/cuda/copy",
        "src/cuda/capture",
        "src/cuda/kernel",
        "bench/ops/peaks",
        "tests/sched_cost/counting",
    ]
    .map(str::to_owned)
    .into();
    allowed.extend(backends::backends(rooms::ROOMS).iter().map(|name| format!("src/{name}/driver")));
    // The emulator has a list of its own (crates/cudaemu/tests/layout).
    for (name, path) in all_sources().into_iter().filter(|(name, _)| !name.starts_with("crates/cudaemu/")) {
        let lifts = attributes::lifts_the_ban(&fs::read_to_string(&path).unwrap());
        assert!(!lifts || allowed.iter().any(|a| name.starts_with(&**a)), "{name} lifts the ban on unsafe code");
    }
}

/// The module of a file, from `folder` on.
fn module_of<'a>(name: &'a str, folder: &str) -> Option<Vec<&'a str>> {
    let path = name.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let mut module: Vec<_> = path.split('/').collect();
    module.pop_if(|last| ["mod", "lib", "main"].contains(last));
    Some(module)
}

/// The dependencies of Cargo.toml, as code names them, but for those that every room may use.
fn named_dependencies() -> Vec<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let mut inside = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[dependencies]" || line.starts_with("[target.") && line.ends_with(".dependencies]");
        } else if let Some((name, _)) = line.split_once(" = ").filter(|_| inside) {
            found.push(name.replace('-', "_"));
        }
    }
    found.retain(|name| !rooms::EVERYWHERE.contains(&name.as_str()));
    found
}

/// The table of rooms with those of backends.
fn all_rooms() -> Vec<Room> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    backends::with_backends(rooms::ROOMS, &backends::backends(rooms::ROOMS), &manifest)
}

/// Layers call downwards only, in tests as elsewhere.
#[test]
fn rooms_use_only_what_the_table_allows() {
    let crates = named_dependencies();
    assert!(crates.iter().any(|name| name == "crossbeam"), "Cargo.toml lists no dependency: {crates:?}");
    let mut library = Sources::default();
    for (name, path) in all_sources() {
        let Some(module) = module_of(&name, "src") else { continue };
        let text = fs::read_to_string(path).unwrap();
        for (room, word) in rooms::UNSAID {
            let within = module.join("::").starts_with(room);
            assert!(!within || !text.contains(word), "{name} in {room} mentions {word}");
        }
        library.add(&name, &module, &text);
    }
    assert!(library.mentions.len() > 5000, "only {} paths found in src", library.mentions.len());
    let all = all_rooms();
    let mut faults = layers::faults_of_table(&library, &all, rooms::GUARDS, &crates);
    faults.extend(layers::violations(&library, &all, rooms::GUARDS, &crates));
    let listed = |name: &str| rooms::ROOMS.iter().any(|room| room.name == name);
    faults.extend(layers::unused(&library, &all, rooms::GUARDS, &crates, listed));
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// The same for the programs: each uses a part of the library.
#[test]
fn programs_use_only_what_the_table_allows() {
    let all = all_rooms();
    let mut faults = Vec::new();
    for program in rooms::PROGRAMS {
        let mut sources = Sources::default();
        for (name, path) in all_sources() {
            let Some(module) = module_of(&name, program.name) else { continue };
            sources.add(&name, &module, &fs::read_to_string(path).unwrap());
        }
        assert!(!sources.mentions.is_empty(), "the row {} names no folder", program.name);
        faults.extend(layers::violations_of_program(&sources, program, "fanout", &all));
        faults.extend(layers::unused_by_program(&sources, program, "fanout", &all));
    }
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

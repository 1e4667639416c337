//! Checks of the repository that the compiler does not make: layers (`layer_table`, `layers`), tables of types and ops that
//! match the tree (`contributing_steps`), file sizes, scripts with help texts (`scripts`), and the script that
//! tests on a real GPU, with stubs in place of its programs (`gpu_script`).
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test

mod attributes;
mod backends;
mod contributing_steps;
mod error_sources;
mod gpu_script;
mod layer_table;
mod layers;
mod program_table;
mod roofline;
mod scripts;
mod source_paths;

use layers::Layer;
use source_paths::Sources;
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

/// The Rust files of the repository, each with its path from the root.
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
        assert!(lines <= 550, "{name} has {lines} lines, more than 550: split it into a folder of the same name");
    }
}

/// A `#[path]` attribute must name a file in its own folder or below. Modules that several crates or tests need belong in a
/// crate. Not so in crates/orders, which compiles files of the core with other locks.
#[test]
fn paths_of_modules_stay_in_their_folder() {
    for (name, path) in all_sources().into_iter().filter(|(name, _)| !name.starts_with("crates/orders/")) {
        for file in attributes::module_paths(&fs::read_to_string(path).unwrap()) {
            let stays = !Path::new(&file).is_absolute() && !file.split('/').any(|part| part == "..");
            assert!(stays, "{name}: the path {file} of a module leads out of its folder");
        }
    }
}

/// Files of the core that crates/orders compiles use locks, threads and time only through `crate::sync`: its scheduler knows no others.
#[test]
fn the_core_uses_the_locks_of_sync() {
    let files: Vec<_> = all_sources()
        .into_iter()
        .filter(|(name, _)| name.starts_with("crates/orders/"))
        .flat_map(|(_, path)| attributes::module_paths(&fs::read_to_string(path).unwrap()))
        .filter_map(|file| file.split_once("src/").map(|(_, file)| format!("src/{file}")))
        .filter(|file| file != "src/poison.rs")
        .flat_map(|file| {
            // A `mod.rs` brings the other files of its folder.
            let folder = file.strip_suffix("mod.rs").map(str::to_owned);
            let siblings = folder.into_iter().flat_map(|folder| {
                fs::read_dir(root().join(&folder))
                    .unwrap()
                    .map(move |entry| format!("{folder}{}", entry.unwrap().file_name().into_string().unwrap()))
            });
            let siblings = siblings.filter(|name| name.ends_with(".rs") && !name.ends_with("/tests.rs"));
            std::iter::once(file.clone()).chain(siblings.collect::<Vec<_>>())
        })
        .collect();
    let covered = |room: &str| files.iter().any(|file| file.starts_with(room));
    for room in [
        "src/device/collectives/",
        "src/device/command_channel",
        "src/device/queue_threads",
        "src/device/timeline",
        "src/rpc/connection/",
        "src/rpc/server/admission",
        "src/rpc/server/extended/",
        "src/rpc/server/groups/",
        "src/rpc/server/peers/",
    ] {
        assert!(covered(room), "crates/orders compiles no file of {room}");
    }
    for file in files {
        let text = fs::read_to_string(root().join(&file)).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for other in
            ["std::sync", "std::thread", "std::hint", "std::{", "SystemTime", "crossbeam", "Instant::now", ".elapsed()"]
        {
            assert!(!code.contains(other), "{file} uses {other} instead of crate::sync");
        }
    }
}

/// `unsafe` is allowed only in the listed files.
#[test]
fn unsafe_code_stays_in_its_modules() {
    let mut allowed: Vec<String> = [
        "src/device/mapped",
        "src/device/host",
        "src/cpu/memory",
        "src/cpu/pool",
        "src/cpu/simd",
        "src/cuda/memory",
        "src/cuda/pinned",
        "src/cuda/peer",
        "src/cuda/events",
        "src/cuda/copy",
        "src/cuda/graph_exec",
        "src/cuda/kernel",
        "src/cuda/modules",
        "bench/ops/peaks",
        "bin/doctor/ggml",
        "bin/hangup",
        "bin/socket_activation",
        "tests/sched_cost/counting",
    ]
    .map(str::to_owned)
    .into();
    allowed.extend(backends::backends(&layer_table::layers()).iter().map(|name| format!("src/{name}/driver")));
    // The emulator has its own list (crates/cudaemu/tests/layout).
    for (name, path) in all_sources().into_iter().filter(|(name, _)| !name.starts_with("crates/cudaemu/")) {
        let lifts = attributes::allows_unsafe_code(&fs::read_to_string(&path).unwrap());
        assert!(
            !lifts || allowed.iter().any(|a| name.starts_with(&**a)),
            "{name} allows unsafe code, but is not in the list"
        );
    }
}

/// The module path of a file, relative to `folder`.
fn module_of<'a>(name: &'a str, folder: &str) -> Option<Vec<&'a str>> {
    let path = name.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
    let mut module: Vec<_> = path.split('/').collect();
    module.pop_if(|last| ["mod", "lib", "main"].contains(last));
    Some(module)
}

/// The dependencies of Cargo.toml by their names in code, except those that every layer may use.
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
    found.retain(|name| !layer_table::ALLOWED_EVERYWHERE.contains(&name.as_str()));
    found
}

/// The table of layers, including those of backends.
fn all_layers() -> Vec<Layer> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    backends::with_backends(&layer_table::layers(), &backends::backends(&layer_table::layers()), &manifest)
}

/// A layer uses only lower layers, in tests too.
#[test]
fn layers_use_only_what_the_table_allows() {
    let crates = named_dependencies();
    assert!(crates.iter().any(|name| name == "crossbeam"), "Cargo.toml lists no dependency: {crates:?}");
    let mut library = Sources::default();
    for (name, path) in all_sources() {
        let Some(module) = module_of(&name, "src") else { continue };
        let text = fs::read_to_string(path).unwrap();
        for (layer, word) in layer_table::FORBIDDEN_WORDS {
            let within = module.join("::").starts_with(layer);
            assert!(!within || !text.contains(word), "{name} in {layer} mentions {word}");
        }
        library.add(&name, &module, &text);
    }
    assert!(library.mentions.len() > 5000, "only {} paths found in src", library.mentions.len());
    let everywhere = |name: &String| layer_table::ALLOWED_EVERYWHERE.contains(&name.as_str());
    library.mentions.retain(|mention| !mention.path.iter().take(2).any(everywhere));
    let all = all_layers();
    let mut errors = layers::table_errors(&library, &all, layer_table::GUARDED_PATHS, &crates);
    errors.extend(layers::violations(&library, &all, layer_table::GUARDED_PATHS, &crates));
    let rows = layer_table::layers();
    let listed = |name: &str| rows.iter().any(|layer| layer.name == name);
    errors.extend(layers::unused(&library, &all, layer_table::GUARDED_PATHS, &crates, listed));
    assert!(errors.is_empty(), "\n{}\n", errors.join("\n"));
}

/// Each program uses only the layers of the library in its row.
#[test]
fn programs_use_only_what_the_table_allows() {
    let all = all_layers();
    let mut errors = Vec::new();
    for program in program_table::PROGRAMS {
        let mut sources = Sources::default();
        for (name, path) in all_sources() {
            let Some(module) = module_of(&name, program.name) else { continue };
            sources.add(&name, &module, &fs::read_to_string(path).unwrap());
        }
        assert!(!sources.mentions.is_empty(), "the row {} names no folder", program.name);
        errors.extend(layers::violations_of_program(&sources, program, "fanout", &all));
        errors.extend(layers::unused_by_program(&sources, program, "fanout", &all));
    }
    assert!(errors.is_empty(), "\n{}\n", errors.join("\n"));
}

/// The package has one program. `cargo install` would install every other one, too, also those that cargo finds by their paths;
/// measuring programs are in the package of `bench`.
#[test]
fn cargo_install_installs_the_server_alone() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let programs: Vec<_> = manifest.split("[[bin]]\n").skip(1).map(|rest| rest.lines().next().unwrap()).collect();
    assert_eq!(programs, ["name = \"rpc-server\""]);
    for path in ["src/main.rs", "src/bin"] {
        assert!(!root().join(path).exists(), "{path} is a program");
    }
}

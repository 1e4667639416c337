//! The rooms of backends, by rule: a new backend needs no row of the table.
//!
//! A backend is a module `NAME` that `src/registry/backend/NAME.rs` enumerates and opens. Unless the table has a row for it, it may
//! use what every backend builds on and the dependencies that the feature `NAME` of Cargo.toml turns on; the registry may use
//! it; `unsafe` may stand in its module `driver`.

use super::root;
use crate::layers::Room;
use std::fs;

/// What every backend may use, if it needs it.
const BASE: &[&str] = &["setters", "tensor", "ops", "graph", "device", "io"];

/// The backends without a row.
pub(crate) fn backends(rooms: &[Room]) -> Vec<String> {
    let files = fs::read_dir(root().join("src/registry/backend")).unwrap();
    let stems = files.map(|file| file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned());
    let is_module = |name: &String| ["", ".rs"].iter().any(|end| root().join(format!("src/{name}{end}")).exists());
    let mut found: Vec<_> = stems.filter(is_module).filter(|name| rooms.iter().all(|room| room.name != name)).collect();
    found.sort_unstable();
    found
}

/// The table with the rooms of backends, below the registry.
pub(crate) fn with_backends(rooms: &[Room], backends: &[String], manifest: &str) -> Vec<Room> {
    let mut all = rooms.to_vec();
    let registry = all.iter_mut().find(|room| room.name == "registry").unwrap();
    let names: Vec<&'static str> = backends.iter().map(|name| &*name.clone().leak()).collect();
    registry.may_use = [registry.may_use, &names].concat().leak();
    let at = all.iter().position(|room| room.name == "registry").unwrap();
    let room = |&name: &&'static str| {
        let may_use = BASE.iter().copied().chain(dependencies(manifest, name).into_iter().map(|name| &*name.leak()));
        Room { name, may_use: may_use.collect::<Vec<_>>().leak(), tests_also: &[] }
    };
    all.splice(at..at, names.iter().map(room));
    all
}

/// The dependencies that a feature turns on, as code names them.
fn dependencies(manifest: &str, feature: &str) -> Vec<String> {
    let features = manifest.split("\n[features]\n").nth(1).unwrap_or_default().split("\n[").next().unwrap_or_default();
    let line = features.lines().find_map(|line| line.strip_prefix(feature)?.strip_prefix(" = ["));
    let parts = line.unwrap_or_default().split('"');
    parts.filter_map(|part| part.strip_prefix("dep:")).map(|name| name.replace('-', "_")).collect()
}

mod tests {
    use super::*;
    use crate::layers::{faults_of_table, violations};
    use crate::paths::Sources;

    const ROOMS: &[Room] = &[
        Room { name: "device", may_use: &[], tests_also: &[] },
        Room { name: "cpu", may_use: &["device"], tests_also: &[] },
        Room { name: "registry", may_use: &["device", "cpu"], tests_also: &[] },
    ];
    const MANIFEST: &str =
        "[package]\n\n[features]\nnpu = [\"dep:npu-sys\", \"dep:zip\"]\nnpux = [\"dep:other\"]\n\n[lib]\n";

    #[test]
    fn a_new_backend_is_held_to_the_rule() {
        let mut rooms = with_backends(ROOMS, &["npu".to_owned()], MANIFEST);
        assert_eq!(rooms[2].may_use, [BASE, &["npu_sys", "zip"]].concat());
        assert_eq!(rooms[3].may_use, ["device", "cpu", "npu"]);
        // The made-up crate has not all rooms of the base.
        let known = ["device", "npu_sys", "zip"];
        rooms[2].may_use =
            rooms[2].may_use.iter().copied().filter(|name| known.contains(name)).collect::<Vec<_>>().leak();
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod device; mod cpu; mod npu; mod registry;");
        sources.add("src/npu.rs", &["npu"], "use crate::device::Device; use npu_sys::open; use crate::cpu::Cpu;");
        sources.add("src/registry.rs", &["registry"], "use crate::npu::Npu; use crate::cpu::Cpu; use zip::Zip;");
        sources.add("src/cpu.rs", &["cpu"], "use crate::npu::Npu;");
        let crates = ["npu_sys", "zip"].map(str::to_owned);
        assert_eq!(faults_of_table(&sources, &rooms, &[], &crates), [""; 0]);
        let expected = [
            "src/npu.rs:1: npu may not use cpu (`crate::cpu::Cpu`)",
            "src/registry.rs:1: registry may not use zip (`zip::Zip`)",
            "src/cpu.rs:1: cpu may not use npu (`crate::npu::Npu`)",
        ];
        assert_eq!(violations(&sources, &rooms, &[], &crates), expected);
    }

    #[test]
    fn the_backends_of_the_crate_are_found() {
        assert!(backends(&[]).contains(&"cpu".to_owned()) && backends(&[]).contains(&"cuda".to_owned()));
        assert_eq!(dependencies(&fs::read_to_string(root().join("Cargo.toml")).unwrap(), "cuda"), ["cudarc", "flate2"]);
    }
}

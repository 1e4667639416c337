//! Layers of backends, derived by a rule: a new backend needs no row in the table.
//!
//! A backend is a module `NAME` that `src/registry/backend/NAME.rs` enumerates and opens. Unless the table has a row for it,
//! the backend may use the base layers and the dependencies that the feature `NAME` of Cargo.toml enables; the registry may use
//! the backend; and its module `driver` may contain `unsafe`.

use super::root;
use crate::layers::Layer;
use std::fs;

/// Base layers: every backend may use them.
const BASE: &[&str] = &["setters", "tensor", "ops", "graph", "device", "io"];

/// The backends without a row.
pub(crate) fn backends(layers: &[Layer]) -> Vec<String> {
    let files = fs::read_dir(root().join("src/registry/backend")).unwrap();
    let stems = files.map(|file| file.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned());
    let is_module = |name: &String| ["", ".rs"].iter().any(|end| root().join(format!("src/{name}{end}")).exists());
    let mut found: Vec<_> =
        stems.filter(is_module).filter(|name| layers.iter().all(|layer| layer.name != name)).collect();
    found.sort_unstable();
    found
}

/// The table, with the layers of backends inserted below the registry.
pub(crate) fn with_backends(layers: &[Layer], backends: &[String], manifest: &str) -> Vec<Layer> {
    let mut all = layers.to_vec();
    let registry = all.iter_mut().find(|layer| layer.name == "registry").unwrap();
    let names: Vec<&'static str> = backends.iter().map(|name| &*name.clone().leak()).collect();
    registry.may_use = [registry.may_use, &names].concat().leak();
    let at = all.iter().position(|layer| layer.name == "registry").unwrap();
    let layer = |&name: &&'static str| {
        let may_use = BASE.iter().copied().chain(dependencies(manifest, name).into_iter().map(|name| &*name.leak()));
        Layer { name, may_use: may_use.collect::<Vec<_>>().leak(), tests_also: &[] }
    };
    all.splice(at..at, names.iter().map(layer));
    all
}

/// The dependencies that a feature enables, by their names in code.
fn dependencies(manifest: &str, feature: &str) -> Vec<String> {
    let features = manifest.split("\n[features]\n").nth(1).unwrap_or_default().split("\n[").next().unwrap_or_default();
    let line = features.lines().find_map(|line| line.strip_prefix(feature)?.strip_prefix(" = ["));
    let parts = line.unwrap_or_default().split('"');
    parts.filter_map(|part| part.strip_prefix("dep:")).map(|name| name.replace('-', "_")).collect()
}

mod tests {
    use super::*;
    use crate::layers::{table_errors, violations};
    use crate::source_paths::Sources;

    const LAYERS: &[Layer] = &[
        Layer { name: "device", may_use: &[], tests_also: &[] },
        Layer { name: "cpu", may_use: &["device"], tests_also: &[] },
        Layer { name: "registry", may_use: &["device", "cpu"], tests_also: &[] },
    ];
    const MANIFEST: &str =
        "[package]\n\n[features]\nnpu = [\"dep:npu-sys\", \"dep:zip\"]\nnpux = [\"dep:other\"]\n\n[lib]\n";

    #[test]
    fn a_new_backend_must_follow_the_rule() {
        let mut layers = with_backends(LAYERS, &["npu".to_owned()], MANIFEST);
        assert_eq!(layers[2].may_use, [BASE, &["npu_sys", "zip"]].concat());
        assert_eq!(layers[3].may_use, ["device", "cpu", "npu"]);
        // The invented crate does not have all base layers.
        let known = ["device", "npu_sys", "zip"];
        layers[2].may_use =
            layers[2].may_use.iter().copied().filter(|name| known.contains(name)).collect::<Vec<_>>().leak();
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod device; mod cpu; mod npu; mod registry;");
        sources.add("src/npu.rs", &["npu"], "use crate::device::Device; use npu_sys::open; use crate::cpu::Cpu;");
        sources.add("src/registry.rs", &["registry"], "use crate::npu::Npu; use crate::cpu::Cpu; use zip::Zip;");
        sources.add("src/cpu.rs", &["cpu"], "use crate::npu::Npu;");
        let crates = ["npu_sys", "zip"].map(str::to_owned);
        assert_eq!(table_errors(&sources, &layers, &[], &crates), [""; 0]);
        let expected = [
            "src/npu.rs:1: npu may not use cpu (`crate::cpu::Cpu`)",
            "src/registry.rs:1: registry may not use zip (`zip::Zip`)",
            "src/cpu.rs:1: cpu may not use npu (`crate::npu::Npu`)",
        ];
        assert_eq!(violations(&sources, &layers, &[], &crates), expected);
    }

    #[test]
    fn the_backends_of_the_crate_are_found() {
        assert!(backends(&[]).contains(&"cpu".to_owned()) && backends(&[]).contains(&"cuda".to_owned()));
        assert_eq!(dependencies(&fs::read_to_string(root().join("Cargo.toml")).unwrap(), "cuda"), ["cudarc", "flate2"]);
    }
}

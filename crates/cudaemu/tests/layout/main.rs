//! Layers of the crate: a module may use only the modules in its row of the table in `src/lib.rs`, and `unsafe` is allowed only
//! in the listed files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use imports::{CrateImports, Import};

/// A row of the table: a module, and the modules that it may use.
type Row = (String, BTreeSet<String>);

/// Prefixes of files that may contain `unsafe`. Tests and examples launch kernels, which is an unsafe call.
const UNSAFE_FILES: [&str; 7] = [
    "src/abi/",
    "src/isa/vector.rs",
    "src/mem/backing.rs",
    "src/mem/host_pointer.rs",
    "src/test.rs",
    "examples/",
    "tests/emulator/",
];

/// The Rust files of a folder, by their names within it.
fn sources(folder: &str) -> BTreeMap<String, String> {
    fn walk(base: &Path, folder: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(base, &path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(base).unwrap().to_string_lossy().replace('\\', "/");
                found.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
    }
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut found = BTreeMap::new();
    walk(&base, &base, &mut found);
    found
}

/// The words in backquotes of a table cell, without the brackets of links.
fn backquoted_names(cell: &str) -> impl Iterator<Item = String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned)
}

/// Parses the table of layers, from bottom to top, in the header of `lib.rs`: `//! | [`module`] | content | `module`, `module`
/// |`.
fn parse_layer_table(text: &str) -> Vec<Row> {
    let rows = text.lines().filter_map(|line| line.strip_prefix("//! | [`"));
    rows.map(|row| {
        let (name, rest) = row.split_once('`').unwrap();
        let cell = rest.trim_end().trim_end_matches('|').rsplit('|').next().unwrap();
        (name.to_owned(), backquoted_names(cell).collect())
    })
    .collect()
}

/// The imports that the table does not allow. Test code may use every module below its own.
fn violations(tree: &CrateImports, table: &[Row]) -> Vec<Import> {
    let place = |module: &str| table.iter().position(|(name, _)| name == module);
    let allowed = |import: &&Import| {
        let Some(at) = place(&import.from) else { return false };
        let below = place(&import.to).is_some_and(|to| to < at);
        table[at].1.contains(&import.to) || import.test && below
    };
    tree.imports.iter().filter(|import| !allowed(import)).cloned().collect()
}

#[test]
fn modules_use_only_what_the_table_of_layers_allows() {
    let sources = sources("src");
    let table = parse_layer_table(&sources["lib.rs"]);
    let mut below = BTreeSet::new();
    for (name, uses) in &table {
        assert!(uses.is_subset(&below), "{name} may only use modules below it in the table: {:?}", uses - &below);
        below.insert(name.clone());
    }
    let tree = imports::read_crate(&sources);
    assert_eq!(tree.modules, below, "the modules of the crate, and the rows of the table");
    let files: BTreeSet<String> = sources.into_keys().collect();
    assert_eq!(tree.files, files, "the files that modules name, and those in the folder");
    assert_eq!(violations(&tree, &table), []);
    let unused = table.iter().flat_map(|(from, uses)| uses.iter().map(move |to| (from, to)));
    let used = |from: &str, to: &str| tree.imports.iter().any(|i| !i.test && (&*i.from, &*i.to) == (from, to));
    let unused: Vec<_> = unused.filter(|(from, to)| !used(from, to)).collect();
    assert!(unused.is_empty(), "the table allows unused imports: {unused:?}");
}

#[test]
fn a_violation_is_found_at_any_place_in_a_file() {
    let table = parse_layer_table(
        "//! | [`low`] | numbers | |\n//! | [`middle`] | more | `low` |\n//! | [`high`] | all | `low`, `middle` |\n",
    );
    for (file, text, found) in [
        // Allowed imports.
        ("middle/mod.rs", "use crate::low::{a, b}; use std::fmt;", vec![]),
        ("middle/mod.rs", "fn f() { crate::low::g(); self::g(); crate::middle::g() }", vec![]),
        ("middle/mod.rs", "#[cfg(test)] mod tests { use super::*; use crate::low::a; }", vec![]),
        ("high/mod.rs", "use crate::{low::a, middle};", vec![]),
        ("low/mod.rs", "/// See [`crate::high`].\npub fn f() { log(\"super: high\") }", vec![]),
        // Imports.
        ("low/mod.rs", "use crate::high::a;", vec![("high", false)]),
        ("low/mod.rs", "use crate::{low::a, middle::{b, c as d}, high};", vec![("high", false), ("middle", false)]),
        ("low/mod.rs", "use super::high;", vec![("high", false)]),
        ("low/mod.rs", "use super::{high as h};", vec![("high", false)]),
        ("low/mod.rs", "use crate::*;", vec![("*", false)]),
        ("low/mod.rs", "fn f() { use crate::high::g; }", vec![("high", false)]),
        // Paths in code.
        ("low/mod.rs", "fn f() -> crate::high::T { 1 }", vec![("high", false)]),
        ("low/mod.rs", "fn f() { let x = g(|| crate::high::N + 1); }", vec![("high", false)]),
        ("low/mod.rs", "impl crate::high::Trait for T {}", vec![("high", false)]),
        ("low/mod.rs", "fn f() { vec![super::high::N]; }", vec![("high", false)]),
        ("low/mod.rs", "macro_rules! m { () => { $crate::high::f() } }", vec![("high", false)]),
        ("low/mod.rs", "macro_rules! m { () => { use $crate::{low, high}; } }", vec![("*", false)]),
        // After a module of tests, and in nested modules.
        ("low/mod.rs", "#[cfg(test)] mod tests {} use crate::high::a;", vec![("high", false)]),
        (
            "low/mod.rs",
            "mod inner { use super::super::high::a; mod deep { use super::super::a; } }",
            vec![("high", false)],
        ),
        ("low/mod.rs", "#[cfg(not(test))] use crate::high::a;", vec![("high", false)]),
        // Tests may use the layers below.
        ("low/mod.rs", "#[cfg(test)] mod tests { use crate::middle::a; }", vec![("middle", true)]),
        ("low/mod.rs", "#[cfg(all(test, unix))] use crate::high::a;", vec![("high", true)]),
        ("low/mod.rs", "impl T { #[cfg(test)] fn f() { crate::high::g() } }", vec![("high", true)]),
    ] {
        let mut sources =
            BTreeMap::from(["low", "middle", "high"].map(|name| (format!("{name}/mod.rs"), String::new())));
        sources.insert("lib.rs".into(), "mod low; mod middle; pub mod high;".into());
        sources.insert(file.into(), text.into());
        let wrong = violations(&imports::read_crate(&sources), &table);
        let wrong: Vec<_> = wrong.iter().map(|import| (&*import.to, import.test)).collect();
        assert_eq!(wrong, found, "{file}: {text}");
    }
}

#[test]
fn test_modules_in_separate_files_count_as_tests() {
    let table = parse_layer_table("//! | [`low`] | | |\n//! | [`odd`] | | |\n//! | [`high`] | | `low` |\n");
    let sources = [
        ("lib.rs", "mod low; mod odd; mod high;"),
        ("low.rs", ""),
        ("odd.rs", ""),
        ("high/mod.rs", "#[cfg(test)] mod tests; mod part;"),
        ("high/tests/mod.rs", "mod more;"),
        ("high/tests/more.rs", "use crate::odd;"),
        ("high/part.rs", "use crate::odd;"),
    ];
    let tree = imports::read_crate(&sources.map(|(name, text)| (name.to_owned(), text.to_owned())).into());
    let wrong = violations(&tree, &table);
    assert_eq!(wrong.iter().map(|import| (&*import.file, import.test)).collect::<Vec<_>>(), [("high/part.rs", false)]);
}

/// Whether a file disables the lint against unsafe code in any way.
fn allows_unsafe_code(text: &str) -> bool {
    struct Found(bool);
    impl syn::visit::Visit<'_> for Found {
        fn visit_attribute(&mut self, attribute: &syn::Attribute) {
            if let syn::Meta::List(list) = &attribute.meta {
                self.0 |= list.tokens.to_string().contains("unsafe_code");
            }
        }
    }
    let mut found = Found(false);
    syn::visit::Visit::visit_file(&mut found, &syn::parse_file(text).unwrap());
    found.0
}

#[test]
fn unsafe_code_stays_in_its_modules() {
    for (text, lifts) in [
        ("#![allow(unsafe_code)]", true),
        ("fn f() { #[expect(unsafe_code, reason = \"r\")] unsafe { g() } }", true),
        ("#[cfg_attr(unix, warn( unsafe_code ))] fn f() {}", true),
        ("/// allow(unsafe_code)\n#[allow(dead_code)] fn f() { \"allow(unsafe_code)\"; }", false),
    ] {
        assert_eq!(allows_unsafe_code(text), lifts, "{text}");
    }
    let mut lifting = BTreeSet::new();
    for folder in ["src", "tests", "benches", "examples"] {
        for (name, text) in sources(folder) {
            let file = format!("{folder}/{name}");
            if allows_unsafe_code(&text) {
                let place = UNSAFE_FILES.iter().find(|place| file.starts_with(**place));
                lifting.insert(*place.unwrap_or_else(|| panic!("{file} allows unsafe code, but is not in the list")));
            }
        }
    }
    assert_eq!(lifting, UNSAFE_FILES.into(), "the files that allow unsafe code, and the list of those that may");
}

#[test]
fn files_stay_short_enough_to_read() {
    for folder in ["src", "tests", "benches", "examples"] {
        for (name, text) in sources(folder) {
            let lines = text.lines().count();
            assert!(lines <= 550, "{folder}/{name} has {lines} lines: make a folder of the same name");
        }
    }
}

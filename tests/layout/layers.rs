//! Checks a crate's sources against a table of layers: each layer may use only what its row allows.

use crate::source_paths::{Mention, Sources};
use std::collections::BTreeSet;

/// A row of the table: a layer.
#[derive(Clone, Copy)]
pub(crate) struct Layer {
    /// Path of a module, for example `rpc::wire`. The layer contains the module and its submodules, except those with their own
    /// row.
    pub(crate) name: &'static str,
    /// Layers of the rows above, submodules of the layer itself, names of guarded paths, and crates.
    pub(crate) may_use: &'static [&'static str],
    /// Names that the unit tests of the layer may use in addition.
    pub(crate) tests_also: &'static [&'static str],
}

/// Paths outside of the crate that only some layers may use.
pub(crate) struct GuardedPaths {
    /// Name in the rows of the table.
    pub(crate) name: &'static str,
    /// The paths covered, each with everything below it. A path that ends with `*` covers all names with that prefix.
    pub(crate) paths: &'static [&'static str],
}

impl GuardedPaths {
    fn covers(&self, path: &str) -> bool {
        self.paths.iter().any(|guarded| match guarded.strip_suffix('*') {
            Some(start) => path.starts_with(start) || glob_over(path, start),
            None => below(path, guarded) || glob_over(path, guarded),
        })
    }
}

fn below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Whether `path` is a glob import that includes `guarded`.
fn glob_over(path: &str, guarded: &str) -> bool {
    path.strip_suffix('*').is_some_and(|start| guarded.starts_with(start))
}

/// The layer that contains a path from the crate's root: the row with the longest matching name.
fn layer_of<'a>(layers: &'a [Layer], path: &str) -> Option<&'a Layer> {
    layers.iter().filter(|layer| below(path, layer.name)).max_by_key(|layer| layer.name.len())
}

/// The layer that contains a resolved path, if the path is in the crate `name`. `None` for other crates, and for the crate's
/// root, which every layer may use.
fn layer_within<'a>(name: &str, layers: &'a [Layer], resolved: &[String]) -> Option<&'a Layer> {
    if resolved[0] == name { layer_of(layers, &resolved[1..].join("::")) } else { None }
}

/// A use by a layer of something that rows of the table can allow.
struct LayerUse<'a> {
    mention: &'a Mention,
    layer: &'a Layer,
    /// A layer, a guarded name or a crate.
    used: &'a str,
    in_test: bool,
}

/// All uses in the library's files that need permission. `crates` lists the crates that a layer may use only if its row names
/// them.
fn uses<'a>(
    sources: &'a Sources,
    layers: &'a [Layer],
    guards: &'a [GuardedPaths],
    crates: &'a [String],
) -> impl Iterator<Item = LayerUse<'a>> {
    sources.mentions.iter().filter_map(move |mention| {
        let resolved = sources.resolve(mention);
        let path = resolved.join("::");
        let named = layer_within("crate", layers, &resolved).map(|layer| layer.name);
        let named = named.or_else(|| crates.iter().find(|&name| *name == resolved[0]).map(String::as_str));
        let used = named.or_else(|| guards.iter().find(|guard| guard.covers(&path)).map(|guard| guard.name))?;
        // Code at the crate's root connects the layers and needs no permission.
        let layer = layer_of(layers, &mention.module.join("::"))?;
        Some(LayerUse { mention, layer, used, in_test: sources.in_test(mention) })
    })
}

/// All uses in the library's files that are not allowed.
pub(crate) fn violations(
    sources: &Sources,
    layers: &[Layer],
    guards: &[GuardedPaths],
    crates: &[String],
) -> Vec<String> {
    let rejected = uses(sources, layers, guards, crates).filter_map(|LayerUse { mention, layer, used, in_test }| {
        let allowed =
            layer.name == used || layer.may_use.contains(&used) || in_test && layer.tests_also.contains(&used);
        let user = if in_test { format!("a test of {}", layer.name) } else { layer.name.to_owned() };
        (!allowed).then(|| violation_text(mention, &user, used))
    });
    rejected.collect()
}

/// Unused permissions: entries of `may_use` without a use outside of tests, and entries of `tests_also` without a use in tests.
/// Only rows for which `listed` is true are checked, because the rule for backends may allow more than each backend needs. In a
/// layer that consists of tests, both lists count as one.
pub(crate) fn unused(
    sources: &Sources,
    layers: &[Layer],
    guards: &[GuardedPaths],
    crates: &[String],
    listed: impl Fn(&str) -> bool,
) -> Vec<String> {
    let found: BTreeSet<_> =
        uses(sources, layers, guards, crates).map(|found| (found.layer.name, found.used, found.in_test)).collect();
    let mut unused = Vec::new();
    for layer in layers.iter().filter(|layer| listed(layer.name)) {
        let only_tests = !found.iter().any(|&(name, _, in_test)| name == layer.name && !in_test);
        for (list, in_test, who) in
            [(layer.may_use, false, "no code outside of tests"), (layer.tests_also, true, "no test")]
        {
            let idle = list.iter().filter(|&&name| !found.contains(&(layer.name, name, in_test || only_tests)));
            unused.extend(idle.map(|name| format!("the row {} allows {name}, which {who} uses", layer.name)));
        }
    }
    unused
}

/// As [`violations`], for a program: its row lists the layers of `library` that it may use, each with its submodules.
pub(crate) fn violations_of_program(
    sources: &Sources,
    program: &Layer,
    library: &str,
    layers: &[Layer],
) -> Vec<String> {
    let rejected = sources.mentions.iter().filter_map(|mention| {
        let used = layer_within(library, layers, &sources.resolve(mention))?.name;
        let within = |list: &[&str]| list.iter().any(|layer| below(used, layer));
        let allowed = within(program.may_use) || sources.in_test(mention) && within(program.tests_also);
        (!allowed).then(|| violation_text(mention, program.name, used))
    });
    rejected.collect()
}

/// As [`unused`], for a program.
pub(crate) fn unused_by_program(sources: &Sources, program: &Layer, library: &str, layers: &[Layer]) -> Vec<String> {
    let uses =
        |mention| Some((layer_within(library, layers, &sources.resolve(mention))?.name, sources.in_test(mention)));
    let found: BTreeSet<_> = sources.mentions.iter().filter_map(uses).collect();
    let idle = |list: &'static [&str], in_test| {
        let used = |layer: &str| found.iter().any(|(used, tests)| *tests == in_test && below(used, layer));
        list.iter().filter(move |layer| !used(layer)).collect::<Vec<_>>()
    };
    let idle = [idle(program.may_use, false), idle(program.tests_also, true)].concat();
    idle.iter().map(|layer| format!("the row {} allows {layer}, which no code uses", program.name)).collect()
}

fn violation_text(mention: &Mention, user: &str, used: &str) -> String {
    format!("{}:{}: {user} may not use {used} (`{}`)", mention.file, mention.line, mention.path.join("::"))
}

/// Errors of the table itself: rows that allow names that are not above them, rows without a module, modules without a row.
pub(crate) fn table_errors(
    sources: &Sources,
    layers: &[Layer],
    guards: &[GuardedPaths],
    crates: &[String],
) -> Vec<String> {
    let mut found = Vec::new();
    let names = |list: &[Layer], name: &str| list.iter().any(|layer| layer.name == name);
    for (row, layer) in layers.iter().enumerate() {
        for used in layer.may_use.iter().chain(layer.tests_also) {
            let outside = guards.iter().any(|guard| guard.name == *used) || crates.iter().any(|name| name == used);
            // A module may re-export its submodules, whose rows follow. Tests may use any layer.
            let anywhere = below(used, layer.name) || layer.tests_also.contains(used);
            let known = outside || names(&layers[..row], used) || anywhere && names(layers, used);
            if !known {
                found.push(format!("the row {} names {used}, which is no row above it", layer.name));
            }
        }
        if !sources.modules.iter().any(|module| module.join("::") == layer.name) {
            found.push(format!("the row {} names no module", layer.name));
        }
    }
    let unlisted = sources.modules.iter().filter(|m| !m.is_empty() && layer_of(layers, &m.join("::")).is_none());
    found.extend(
        unlisted.map(|module| format!("the module {} is in no layer: add a row to the table", module.join("::"))),
    );
    found
}

/// Tests each kind of violation on small invented sources.
mod tests {
    use super::*;

    const LAYERS: &[Layer] = &[
        Layer { name: "base", may_use: &[], tests_also: &[] },
        Layer { name: "null", may_use: &["base"], tests_also: &[] },
        Layer { name: "net::link", may_use: &["base", "sockets"], tests_also: &[] },
        Layer { name: "net::wire", may_use: &["base"], tests_also: &["null"] },
        Layer { name: "net", may_use: &["net::link", "net::wire"], tests_also: &[] },
        Layer { name: "top", may_use: &["net", "net::wire", "base", "zip"], tests_also: &[] },
    ];
    const GUARDED_PATHS: &[GuardedPaths] = &[
        GuardedPaths { name: "sockets", paths: &["std::net::Tcp*", "std::net::UdpSocket", "socket2"] },
        GuardedPaths { name: "addresses", paths: &["std::net"] },
    ];

    /// The violations in a small invented crate in which `text` is the file of `module`.
    fn found(module: &[&str], text: &str) -> Vec<String> {
        let mut sources = Sources::default();
        let root = "pub mod base; #[cfg(test)] mod null; pub mod net; pub mod top; extern crate self as made_up;";
        sources.add("src/lib.rs", &[], root);
        sources.add("src/net/mod.rs", &["net"], "pub mod link; mod wire; pub use link::Link; pub use wire::*;");
        sources.add(
            "src/net/link.rs",
            &["net", "link"],
            "use std::net::TcpStream; pub struct Link(TcpStream); macro_rules! dial { () => {} } pub(crate) use dial;",
        );
        sources.add("src/net/wire/mod.rs", &["net", "wire"], "pub mod codec; #[cfg(test)] mod tests;");
        sources.add("src/file.rs", module, text);
        let crates = ["zip".to_owned()];
        assert!(table_errors(&sources, LAYERS, GUARDED_PATHS, &crates).is_empty());
        violations(&sources, LAYERS, GUARDED_PATHS, &crates)
    }

    fn rejected(module: &[&str], text: &str, used: &str) {
        let found = found(module, text);
        assert!(found.len() == 1, "{text}: {found:?}");
        assert!(found[0].contains(&format!("may not use {used} ")), "{text}: {found:?}");
    }

    fn allowed(module: &[&str], text: &str) {
        let found = found(module, text);
        assert!(found.is_empty(), "{text}: {found:?}");
    }

    #[test]
    fn allowed_uses_are_no_violations() {
        allowed(&["net", "wire", "codec"], "use crate::base::{self, Number}; fn f() -> base::Number { Number::new() }");
        allowed(&["net", "wire", "codec"], "use super::super::wire::Frame; use super::Other; use crate::VERSION;");
        allowed(&["top"], "use crate::net; use zip::Archive; fn f() { net::connect(); crate::net::Frame::new() }");
        allowed(&["net", "link"], "use std::net::TcpStream;");
    }

    #[test]
    fn imports_are_found() {
        rejected(&["base"], "use crate::net::wire::Frame;", "net::wire");
        rejected(&["base"], "use crate::{base::Number, net::{wire::{Frame as _}}};", "net::wire");
        rejected(&["base"], "use crate::net::*;", "net");
        rejected(&["base"], "pub use crate::top::Runtime as Engine;", "top");
        rejected(&["base"], "fn f() { use crate::top::Runtime; }", "top");
        rejected(&["net", "wire", "codec"], "use super::super::link::dial;", "net::link");
        rejected(&["net", "wire", "codec"], "use super::super::super::top::Runtime;", "top");
        rejected(&["base"], "use made_up::top::Runtime;", "top");
    }

    #[test]
    fn paths_are_found() {
        rejected(&["base"], "fn f() { crate::top::run(1) }", "top");
        rejected(&["base"], "fn f(x: Vec<crate::top::Runtime>) {}", "top");
        rejected(&["base"], "impl crate::top::Run for Number {}", "top");
        rejected(&["base"], "fn f(x: u8) { match x { crate::top::LIMIT => {} _ => {} } }", "top");
        rejected(&["base"], "#[derive(crate::top::Derive)] struct Number;", "top");
        rejected(&["net", "wire", "codec"], "mod inner { fn f() { super::super::super::link::dial() } }", "net::link");
        rejected(&["net", "wire", "codec"], "fn f() { self::super::super::super::top::run() }", "top");
    }

    #[test]
    fn macro_bodies_are_found() {
        rejected(&["base"], "fn f() { println!(\"{}\", crate::top::run(1)) }", "top");
        rejected(&["base"], "macro_rules! m { ($x:expr) => { { $crate::top::run($x) } }; }", "top");
        rejected(&["base"], "macro_rules! m { () => { use crate::{base::Number, top::Runtime}; }; }", "top");
        rejected(&["base"], "thread_local! { static X: crate::top::Runtime = f(); }", "top");
    }

    #[test]
    fn test_code_may_also_use_the_names_for_tests() {
        let test = "#[cfg(test)] mod tests { use super::*; fn f() { crate::top::run() } }";
        rejected(&["net", "wire", "codec"], test, "top");
        rejected(&["net", "wire", "tests"], "fn f() { crate::top::run() }", "top");
        rejected(&["net", "wire", "codec"], "#[cfg(all(test, unix))] use crate::top::Runtime;", "top");
        allowed(&["net", "wire", "codec"], "#[cfg(test)] mod tests { use crate::null::Null; }");
        allowed(&["net", "wire", "codec"], "impl Frame { #[cfg(test)] fn f() { crate::null::Null; } }");
        allowed(&["net", "wire", "tests"], "use crate::null::Null;");
        rejected(&["net", "wire", "codec"], "use crate::null::Null;", "null");
        rejected(&["net", "wire", "codec"], "#[cfg(not(test))] use crate::null::Null;", "null");
        rejected(&["net", "wire", "codec"], "#[cfg(test)] mod a {} fn f() { crate::null::make() }", "null");
    }

    #[test]
    fn re_exports_and_imports_of_modules_are_followed() {
        rejected(&["net", "wire", "codec"], "use crate::net::Link;", "net::link");
        rejected(&["top"], "use crate::net::Link; fn f(link: Link) {}", "net::link");
        // A macro by example that is re-exported in its own module.
        rejected(&["base"], "use crate::net::link::dial;", "net::link");
        rejected(&["base"], "use made_up as us; fn f() { us::top::run() }", "top");
        let text = "use super::top as above; mod inner { fn f() { super::above::run() } }";
        let twice = found(&["base"], text);
        assert!(twice.len() == 2 && twice[1].contains("may not use top (`super::above::run`)"), "{twice:?}");
    }

    #[test]
    fn names_outside_of_the_crate_are_found() {
        rejected(&["top"], "use std::net::TcpStream;", "sockets");
        rejected(&["top"], "use std::net::{TcpListener};", "sockets");
        rejected(&["top"], "use std::net::*;", "sockets");
        rejected(&["top"], "fn f() { socket2::Socket::new() }", "sockets");
        rejected(&["top"], "use std::net::SocketAddr;", "addresses");
        rejected(&["base"], "use zip::Archive;", "zip");
        let twice = found(&["top"], "use std::net; fn f(s: net::UdpSocket) {}");
        assert!(twice.len() == 2 && twice[1].contains("may not use sockets"), "{twice:?}");
    }

    #[test]
    fn programs_may_use_only_the_layers_in_their_row() {
        let mut sources = Sources::default();
        sources.add("bin/main.rs", &["main"], "use fanout::{net, top as above}; mod top; fn f() { crate::top::run() }");
        let program = Layer { name: "bin", may_use: &["net"], tests_also: &[] };
        let found = violations_of_program(&sources, &program, "fanout", LAYERS);
        assert_eq!(found, ["bin/main.rs:1: bin may not use top (`fanout::top`)"]);
    }

    #[test]
    fn unused_permissions_are_found() {
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod base; mod top; mod net; mod null;");
        let text =
            "/// See [`crate::null`].\nuse crate::base::Number;\n#[cfg(test)] mod tests { use crate::net::Link; }";
        sources.add("src/top.rs", &["top"], text);
        let layers = [
            Layer { name: "base", may_use: &[], tests_also: &["zip"] },
            Layer { name: "null", may_use: &["base"], tests_also: &[] },
            Layer { name: "net", may_use: &[], tests_also: &[] },
            Layer { name: "top", may_use: &["base", "net", "null", "addresses"], tests_also: &["net"] },
        ];
        let found = unused(&sources, &layers, GUARDED_PATHS, &["zip".to_owned()], |layer| layer != "null");
        let expected = [
            "the row base allows zip, which no test uses",
            "the row top allows net, which no code outside of tests uses",
            "the row top allows null, which no code outside of tests uses",
            "the row top allows addresses, which no code outside of tests uses",
        ];
        assert_eq!(found, expected);
        let mut sources = Sources::default();
        sources.add("bin/main.rs", &["main"], "use fanout::net::link::Link;");
        let program = Layer { name: "bin", may_use: &["net", "top"], tests_also: &[] };
        let found = unused_by_program(&sources, &program, "fanout", LAYERS);
        assert_eq!(found, ["the row bin allows top, which no code uses"]);
    }

    #[test]
    fn errors_of_the_table_are_found() {
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod base; mod top; mod new;");
        let layers = [
            Layer { name: "base", may_use: &["top"], tests_also: &[] },
            Layer { name: "top", may_use: &["base", "bass"], tests_also: &[] },
            Layer { name: "gone", may_use: &[], tests_also: &[] },
        ];
        let errors = table_errors(&sources, &layers, GUARDED_PATHS, &[]);
        let expected = [
            "the row base names top, which is no row above it",
            "the row top names bass, which is no row above it",
            "the row gone names no module",
            "the module new is in no layer: add a row to the table",
        ];
        assert_eq!(errors, expected);
    }
}

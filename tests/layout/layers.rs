//! Holds a crate's sources to a table of rooms and what each may use.

use crate::paths::{Mention, Sources};
use std::collections::BTreeSet;

/// A row of the table.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// A module with all that is in it but rooms of their own: `rpc::wire`.
    pub(crate) name: &'static str,
    /// Rooms of the rows above, parts of its own room, guarded names and crates.
    pub(crate) may_use: &'static [&'static str],
    /// What its unit tests may use besides.
    pub(crate) tests_also: &'static [&'static str],
}

/// Paths outside of the crate that only some rooms may name.
pub(crate) struct Guard {
    /// How rows name it.
    pub(crate) name: &'static str,
    /// What it covers: a path with all below it. A path that ends with `*` covers all names that begin so.
    pub(crate) paths: &'static [&'static str],
}

impl Guard {
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

/// Whether `path` is a glob import that brings in `guarded`.
fn glob_over(path: &str, guarded: &str) -> bool {
    path.strip_suffix('*').is_some_and(|start| guarded.starts_with(start))
}

/// The room of a path from the crate's root: the row with the longest name that it is in.
fn room_of<'a>(rooms: &'a [Room], path: &str) -> Option<&'a Room> {
    rooms.iter().filter(|room| below(path, room.name)).max_by_key(|room| room.name.len())
}

/// The room that a resolved path leads to in the crate of that name; `None` for another crate, and for the crate's root, which
/// is everybody's.
fn room_within<'a>(name: &str, rooms: &'a [Room], resolved: &[String]) -> Option<&'a Room> {
    if resolved[0] == name { room_of(rooms, &resolved[1..].join("::")) } else { None }
}

/// A mention in a room of what some row may name.
struct Use<'a> {
    mention: &'a Mention,
    room: &'a Room,
    /// A room, a guarded name or a crate.
    used: &'a str,
    in_test: bool,
}

/// Everything that the library's files name and a row may allow. `crates` are the crates that only the rooms whose rows name them
/// may use.
fn uses<'a>(
    sources: &'a Sources,
    rooms: &'a [Room],
    guards: &'a [Guard],
    crates: &'a [String],
) -> impl Iterator<Item = Use<'a>> {
    sources.mentions.iter().filter_map(move |mention| {
        let resolved = sources.resolve(mention);
        let path = resolved.join("::");
        let named = room_within("crate", rooms, &resolved).map(|room| room.name);
        let named = named.or_else(|| crates.iter().find(|&name| *name == resolved[0]).map(String::as_str));
        let used = named.or_else(|| guards.iter().find(|guard| guard.covers(&path)).map(|guard| guard.name))?;
        // What stands at the crate's root ties the rooms together.
        let room = room_of(rooms, &mention.module.join("::"))?;
        Some(Use { mention, room, used, in_test: sources.in_test(mention) })
    })
}

/// Everything that the library's files name and their room may not use.
pub(crate) fn violations(sources: &Sources, rooms: &[Room], guards: &[Guard], crates: &[String]) -> Vec<String> {
    let refused = uses(sources, rooms, guards, crates).filter_map(|Use { mention, room, used, in_test }| {
        let allowed = room.name == used || room.may_use.contains(&used) || in_test && room.tests_also.contains(&used);
        let user = if in_test { format!("a test of {}", room.name) } else { room.name.to_owned() };
        (!allowed).then(|| refusal(mention, &user, used))
    });
    refused.collect()
}

/// Permissions that no file of their room uses: code outside of tests those of `may_use`, tests those of `tests_also`. Only the rows
/// that are `listed` are held to it: a rule may allow more than each of its rooms needs. A room of tests has one list.
pub(crate) fn unused(
    sources: &Sources,
    rooms: &[Room],
    guards: &[Guard],
    crates: &[String],
    listed: impl Fn(&str) -> bool,
) -> Vec<String> {
    let found: BTreeSet<_> =
        uses(sources, rooms, guards, crates).map(|found| (found.room.name, found.used, found.in_test)).collect();
    let mut unused = Vec::new();
    for room in rooms.iter().filter(|room| listed(room.name)) {
        let only_tests = !found.iter().any(|&(name, _, in_test)| name == room.name && !in_test);
        for (list, in_test, who) in
            [(room.may_use, false, "no code outside of tests"), (room.tests_also, true, "no test")]
        {
            let idle = list.iter().filter(|&&name| !found.contains(&(room.name, name, in_test || only_tests)));
            unused.extend(idle.map(|name| format!("the row {} allows {name}, which {who} uses", room.name)));
        }
    }
    unused
}

/// The same for a program: its row says which rooms of `library` it may use, each with its parts.
pub(crate) fn violations_of_program(sources: &Sources, program: &Room, library: &str, rooms: &[Room]) -> Vec<String> {
    let refused = sources.mentions.iter().filter_map(|mention| {
        let used = room_within(library, rooms, &sources.resolve(mention))?.name;
        let within = |list: &[&str]| list.iter().any(|room| below(used, room));
        let allowed = within(program.may_use) || sources.in_test(mention) && within(program.tests_also);
        (!allowed).then(|| refusal(mention, program.name, used))
    });
    refused.collect()
}

/// The same as [`unused`] for a program.
pub(crate) fn unused_by_program(sources: &Sources, program: &Room, library: &str, rooms: &[Room]) -> Vec<String> {
    let uses = |mention| Some((room_within(library, rooms, &sources.resolve(mention))?.name, sources.in_test(mention)));
    let found: BTreeSet<_> = sources.mentions.iter().filter_map(uses).collect();
    let idle = |list: &'static [&str], in_test| {
        let used = |room: &str| found.iter().any(|(used, tests)| *tests == in_test && below(used, room));
        list.iter().filter(move |room| !used(room)).collect::<Vec<_>>()
    };
    let idle = [idle(program.may_use, false), idle(program.tests_also, true)].concat();
    idle.iter().map(|room| format!("the row {} allows {room}, which nobody uses", program.name)).collect()
}

fn refusal(mention: &Mention, user: &str, used: &str) -> String {
    format!("{}:{}: {user} may not use {used} (`{}`)", mention.file, mention.line, mention.path.join("::"))
}

/// What is wrong with a table: rows that name what is not below them, rooms that are not there, modules without a room.
pub(crate) fn faults_of_table(sources: &Sources, rooms: &[Room], guards: &[Guard], crates: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let names = |list: &[Room], name: &str| list.iter().any(|room| room.name == name);
    for (row, room) in rooms.iter().enumerate() {
        for used in room.may_use.iter().chain(room.tests_also) {
            let outside = guards.iter().any(|guard| guard.name == *used) || crates.iter().any(|name| name == used);
            // A room's own module hands out what its parts make. Tests compare with what they like.
            let anywhere = below(used, room.name) || room.tests_also.contains(used);
            let known = outside || names(&rooms[..row], used) || anywhere && names(rooms, used);
            if !known {
                found.push(format!("the row {} names {used}, which is no row above it", room.name));
            }
        }
        if !sources.modules.iter().any(|module| module.join("::") == room.name) {
            found.push(format!("the row {} names no module", room.name));
        }
    }
    let homeless = sources.modules.iter().filter(|m| !m.is_empty() && room_of(rooms, &m.join("::")).is_none());
    found.extend(homeless.map(|module| format!("the module {} is in no room: give it a row", module.join("::"))));
    found
}

/// Each kind of violation is found in sources made up for it.
mod tests {
    use super::*;

    const ROOMS: &[Room] = &[
        Room { name: "base", may_use: &[], tests_also: &[] },
        Room { name: "null", may_use: &["base"], tests_also: &[] },
        Room { name: "net::link", may_use: &["base", "sockets"], tests_also: &[] },
        Room { name: "net::wire", may_use: &["base"], tests_also: &["null"] },
        Room { name: "net", may_use: &["net::link", "net::wire"], tests_also: &[] },
        Room { name: "top", may_use: &["net", "net::wire", "base", "zip"], tests_also: &[] },
    ];
    const GUARDS: &[Guard] = &[
        Guard { name: "sockets", paths: &["std::net::Tcp*", "std::net::UdpSocket", "socket2"] },
        Guard { name: "addresses", paths: &["std::net"] },
    ];

    /// What is found where `text` is the file of `module`, in a small crate.
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
        assert!(faults_of_table(&sources, ROOMS, GUARDS, &crates).is_empty());
        violations(&sources, ROOMS, GUARDS, &crates)
    }

    fn refused(module: &[&str], text: &str, used: &str) {
        let found = found(module, text);
        assert!(found.len() == 1, "{text}: {found:?}");
        assert!(found[0].contains(&format!("may not use {used} ")), "{text}: {found:?}");
    }

    fn allowed(module: &[&str], text: &str) {
        let found = found(module, text);
        assert!(found.is_empty(), "{text}: {found:?}");
    }

    #[test]
    fn what_the_table_allows_passes() {
        allowed(&["net", "wire", "codec"], "use crate::base::{self, Number}; fn f() -> base::Number { Number::new() }");
        allowed(&["net", "wire", "codec"], "use super::super::wire::Frame; use super::Other; use crate::VERSION;");
        allowed(&["top"], "use crate::net; use zip::Archive; fn f() { net::connect(); crate::net::Frame::new() }");
        allowed(&["net", "link"], "use std::net::TcpStream;");
    }

    #[test]
    fn imports_are_found() {
        refused(&["base"], "use crate::net::wire::Frame;", "net::wire");
        refused(&["base"], "use crate::{base::Number, net::{wire::{Frame as _}}};", "net::wire");
        refused(&["base"], "use crate::net::*;", "net");
        refused(&["base"], "pub use crate::top::Runtime as Engine;", "top");
        refused(&["base"], "fn f() { use crate::top::Runtime; }", "top");
        refused(&["net", "wire", "codec"], "use super::super::link::dial;", "net::link");
        refused(&["net", "wire", "codec"], "use super::super::super::top::Runtime;", "top");
        refused(&["base"], "use made_up::top::Runtime;", "top");
    }

    #[test]
    fn paths_are_found() {
        refused(&["base"], "fn f() { crate::top::run(1) }", "top");
        refused(&["base"], "fn f(x: Vec<crate::top::Runtime>) {}", "top");
        refused(&["base"], "impl crate::top::Run for Number {}", "top");
        refused(&["base"], "fn f(x: u8) { match x { crate::top::LIMIT => {} _ => {} } }", "top");
        refused(&["base"], "#[derive(crate::top::Derive)] struct Number;", "top");
        refused(&["net", "wire", "codec"], "mod inner { fn f() { super::super::super::link::dial() } }", "net::link");
        refused(&["net", "wire", "codec"], "fn f() { self::super::super::super::top::run() }", "top");
    }

    #[test]
    fn macro_bodies_are_found() {
        refused(&["base"], "fn f() { println!(\"{}\", crate::top::run(1)) }", "top");
        refused(&["base"], "macro_rules! m { ($x:expr) => { { $crate::top::run($x) } }; }", "top");
        refused(&["base"], "macro_rules! m { () => { use crate::{base::Number, top::Runtime}; }; }", "top");
        refused(&["base"], "thread_local! { static X: crate::top::Runtime = f(); }", "top");
    }

    #[test]
    fn code_of_tests_is_found_and_may_use_what_its_row_adds() {
        let test = "#[cfg(test)] mod tests { use super::*; fn f() { crate::top::run() } }";
        refused(&["net", "wire", "codec"], test, "top");
        refused(&["net", "wire", "tests"], "fn f() { crate::top::run() }", "top");
        refused(&["net", "wire", "codec"], "#[cfg(all(test, unix))] use crate::top::Runtime;", "top");
        allowed(&["net", "wire", "codec"], "#[cfg(test)] mod tests { use crate::null::Null; }");
        allowed(&["net", "wire", "codec"], "impl Frame { #[cfg(test)] fn f() { crate::null::Null; } }");
        allowed(&["net", "wire", "tests"], "use crate::null::Null;");
        refused(&["net", "wire", "codec"], "use crate::null::Null;", "null");
        refused(&["net", "wire", "codec"], "#[cfg(not(test))] use crate::null::Null;", "null");
        refused(&["net", "wire", "codec"], "#[cfg(test)] mod a {} fn f() { crate::null::make() }", "null");
    }

    #[test]
    fn re_exports_and_imports_of_modules_are_followed() {
        refused(&["net", "wire", "codec"], "use crate::net::Link;", "net::link");
        refused(&["top"], "use crate::net::Link; fn f(link: Link) {}", "net::link");
        // A macro by example that is re-exported in its own module.
        refused(&["base"], "use crate::net::link::dial;", "net::link");
        refused(&["base"], "use made_up as us; fn f() { us::top::run() }", "top");
        let text = "use super::top as above; mod inner { fn f() { super::above::run() } }";
        let twice = found(&["base"], text);
        assert!(twice.len() == 2 && twice[1].contains("may not use top (`super::above::run`)"), "{twice:?}");
    }

    #[test]
    fn names_outside_of_the_crate_are_found() {
        refused(&["top"], "use std::net::TcpStream;", "sockets");
        refused(&["top"], "use std::net::{TcpListener};", "sockets");
        refused(&["top"], "use std::net::*;", "sockets");
        refused(&["top"], "fn f() { socket2::Socket::new() }", "sockets");
        refused(&["top"], "use std::net::SocketAddr;", "addresses");
        refused(&["base"], "use zip::Archive;", "zip");
        let twice = found(&["top"], "use std::net; fn f(s: net::UdpSocket) {}");
        assert!(twice.len() == 2 && twice[1].contains("may not use sockets"), "{twice:?}");
    }

    #[test]
    fn programs_are_held_to_their_row() {
        let mut sources = Sources::default();
        sources.add("bin/main.rs", &["main"], "use fanout::{net, top as above}; mod top; fn f() { crate::top::run() }");
        let program = Room { name: "bin", may_use: &["net"], tests_also: &[] };
        let found = violations_of_program(&sources, &program, "fanout", ROOMS);
        assert_eq!(found, ["bin/main.rs:1: bin may not use top (`fanout::top`)"]);
    }

    #[test]
    fn permissions_that_nobody_uses_are_found() {
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod base; mod top; mod net; mod null;");
        let text =
            "/// See [`crate::null`].\nuse crate::base::Number;\n#[cfg(test)] mod tests { use crate::net::Link; }";
        sources.add("src/top.rs", &["top"], text);
        let rooms = [
            Room { name: "base", may_use: &[], tests_also: &["zip"] },
            Room { name: "null", may_use: &["base"], tests_also: &[] },
            Room { name: "net", may_use: &[], tests_also: &[] },
            Room { name: "top", may_use: &["base", "net", "null", "addresses"], tests_also: &["net"] },
        ];
        let found = unused(&sources, &rooms, GUARDS, &["zip".to_owned()], |room| room != "null");
        let expected = [
            "the row base allows zip, which no test uses",
            "the row top allows net, which no code outside of tests uses",
            "the row top allows null, which no code outside of tests uses",
            "the row top allows addresses, which no code outside of tests uses",
        ];
        assert_eq!(found, expected);
        let mut sources = Sources::default();
        sources.add("bin/main.rs", &["main"], "use fanout::net::link::Link;");
        let program = Room { name: "bin", may_use: &["net", "top"], tests_also: &[] };
        let found = unused_by_program(&sources, &program, "fanout", ROOMS);
        assert_eq!(found, ["the row bin allows top, which nobody uses"]);
    }

    #[test]
    fn a_table_that_does_not_fit_is_found() {
        let mut sources = Sources::default();
        sources.add("src/lib.rs", &[], "mod base; mod top; mod new;");
        let rooms = [
            Room { name: "base", may_use: &["top"], tests_also: &[] },
            Room { name: "top", may_use: &["base", "bass"], tests_also: &[] },
            Room { name: "gone", may_use: &[], tests_also: &[] },
        ];
        let faults = faults_of_table(&sources, &rooms, GUARDS, &[]);
        let expected = [
            "the row base names top, which is no row above it",
            "the row top names bass, which is no row above it",
            "the row gone names no module",
            "the module new is in no room: give it a row",
        ];
        assert_eq!(faults, expected);
    }
}

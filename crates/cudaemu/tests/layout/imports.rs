//! Imports between the modules of a crate: follows the module tree from the crate's root and reads every path in it.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ItemMod, Macro, Meta, UseTree, Visibility};

/// A path in one module to an item of another one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Import {
    /// The file that contains the path.
    pub(crate) file: String,
    /// Top-level module of the file; empty for the root itself.
    pub(crate) from: String,
    /// Top-level module that the path leads to; `*` for all of them.
    pub(crate) to: String,
    /// Whether only tests compile the code.
    pub(crate) test: bool,
}

/// The imports, files and modules of a crate.
#[derive(Debug, Default)]
pub(crate) struct CrateImports {
    pub(crate) imports: BTreeSet<Import>,
    /// Files that are reachable by `mod`.
    pub(crate) files: BTreeSet<String>,
    /// Top-level modules, without test modules.
    pub(crate) modules: BTreeSet<String>,
}

/// Reads a crate from its sources, keyed by file name relative to the folder of `lib.rs`.
pub(crate) fn read_crate(sources: &BTreeMap<String, String>) -> CrateImports {
    let mut tree = CrateImports::default();
    read_file(sources, "lib.rs", &[], false, &mut tree);
    tree
}

/// Reads one file, which contains the module of this path.
fn read_file(sources: &BTreeMap<String, String>, name: &str, path: &[String], test: bool, tree: &mut CrateImports) {
    let text = sources.get(name).unwrap_or_else(|| panic!("no file {name}"));
    let parsed = syn::parse_file(text).unwrap_or_else(|error| panic!("{name}: {error}"));
    tree.files.insert(name.to_owned());
    let mut reader = Reader { name, path: path.to_vec(), test, declared: Vec::new(), tree };
    reader.visit_file(&parsed);
    for (path, test) in reader.declared {
        let stem = path.join("/");
        let found =
            [format!("{stem}.rs"), format!("{stem}/mod.rs")].into_iter().find(|name| sources.contains_key(name));
        let name = found.unwrap_or_else(|| panic!("{name}: no file for the module {}", path.join("::")));
        read_file(sources, &name, &path, test, tree);
    }
}

struct Reader<'a> {
    name: &'a str,
    /// The current module.
    path: Vec<String>,
    /// Whether only tests compile the current code.
    test: bool,
    /// Modules in separate files: path, and whether only tests compile them.
    declared: Vec<(Vec<String>, bool)>,
    tree: &'a mut CrateImports,
}

impl Reader<'_> {
    /// Records a path that starts with `crate`, `self` or `super`. Other paths start with a crate or an imported name.
    fn record_path(&mut self, segments: &[String]) {
        let mut at = self.path.clone();
        let mut rest = segments.iter();
        match rest.next().map(String::as_str) {
            Some("crate" | "$crate") => at.clear(),
            Some("self") => {}
            Some("super") => {
                at.pop();
            }
            _ => return,
        }
        for segment in rest {
            match segment.as_str() {
                "self" => {}
                "super" => {
                    at.pop();
                }
                _ => at.push(segment.clone()),
            }
        }
        let from = self.path.first().cloned().unwrap_or_default();
        if let Some(to) = at.first().filter(|to| **to != from) {
            let (file, to) = (self.name.to_owned(), to.clone());
            self.tree.imports.insert(Import { file, from, to, test: self.test });
        }
    }

    /// Every path of a `use` with braces.
    fn record_uses(&mut self, tree: &UseTree, before: &[String]) {
        let with = |name: String| [before, &[name]].concat();
        match tree {
            UseTree::Path(path) => self.record_uses(&path.tree, &with(path.ident.to_string())),
            UseTree::Name(name) => self.record_path(&with(name.ident.to_string())),
            UseTree::Rename(name) => self.record_path(&with(name.ident.to_string())),
            UseTree::Glob(_) => self.record_path(&with("*".into())),
            UseTree::Group(group) => group.items.iter().for_each(|item| self.record_uses(item, before)),
        }
    }

    /// Reads an item with attributes; `#[cfg(test)]` applies to everything in it.
    fn with_attributes(&mut self, attributes: &[Attribute], read: impl FnOnce(&mut Self)) {
        let before = self.test;
        self.test |= attributes.iter().any(is_test_only);
        read(self);
        self.test = before;
    }
}

/// `#[cfg(test)]`, `#[cfg(all(test, …))]`, `#[test]`. Any other condition may be true in the library.
fn is_test_only(attribute: &Attribute) -> bool {
    match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition: String = list.tokens.to_string().split_whitespace().collect();
            condition == "test" || condition.starts_with("all(test,")
        }
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes: &[Attribute] = match item {
            Item::Const(item) => &item.attrs,
            Item::Enum(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Macro(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Trait(item) => &item.attrs,
            Item::Type(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        self.with_attributes(attributes, |this| visit::visit_item(this, item));
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = if let ImplItem::Fn(item) = item { &item.attrs } else { &[] };
        self.with_attributes(attributes, |this| visit::visit_impl_item(this, item));
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let outside = item.attrs.iter().any(|attribute| attribute.path().is_ident("path"));
        assert!(!outside, "{}: `#[path]` hides where a module lies", self.name);
        self.path.push(item.ident.to_string());
        if self.path.len() == 1 && !self.test {
            self.tree.modules.insert(item.ident.to_string());
        }
        if item.content.is_none() {
            self.declared.push((self.path.clone(), self.test));
        }
        visit::visit_item_mod(self, item);
        self.path.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.record_uses(&item.tree, &[]);
    }

    // `pub(in crate::a)` names only a module that contains this one, so it is no import.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.record_path(&segments);
        visit::visit_path(self, path);
    }

    /// The tokens of a macro form no syntax tree, so this searches their text for paths.
    fn visit_macro(&mut self, item: &'ast Macro) {
        visit::visit_macro(self, item);
        let text: String = item.tokens.to_string().split_whitespace().collect();
        let within = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        for root in ["crate::", "super::"] {
            for (at, _) in text.match_indices(root) {
                // A `super::super::` is read from its first segment.
                if text[..at].ends_with(within) {
                    continue;
                }
                let path = text[at..].split(|c| !within(c)).next().unwrap_or_default();
                let mut segments: Vec<String> = path.split("::").map(str::to_owned).collect();
                if let Some(last) = segments.last_mut().filter(|last| last.is_empty()) {
                    // `crate::{…}`: counts as all modules.
                    *last = "*".into();
                }
                self.record_path(&segments);
            }
        }
    }
}

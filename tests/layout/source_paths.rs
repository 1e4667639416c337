//! Collects the paths that the files of a crate use: in imports, expressions, types, patterns, attributes and the bodies of
//! macros; and resolves them through imports and re-exports.

use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Field, ImplItem, Item, ItemUse, Macro, Meta, Stmt, UseTree, Visibility};

/// The segments of a path. A glob import ends with `*`.
pub(crate) type ModulePath = Vec<String>;

/// A path at its place in a file.
#[derive(Clone, Debug)]
pub(crate) struct Mention {
    pub(crate) file: String,
    /// Line number, starting at 1.
    pub(crate) line: usize,
    /// The module that uses the path, from the crate's root.
    pub(crate) module: ModulePath,
    /// The path as written.
    pub(crate) path: ModulePath,
    /// Whether the path is in an item that is compiled only for tests.
    test: bool,
}

/// The paths that the files of a crate use, and their declarations. A module is identified by its path from the crate's root;
/// the root's path is empty.
#[derive(Default)]
pub(crate) struct Sources {
    pub(crate) mentions: Vec<Mention>,
    /// All modules, from their files and declarations.
    pub(crate) modules: BTreeSet<ModulePath>,
    test_modules: BTreeSet<ModulePath>,
    /// Imports and re-exports by name: the target of (module, name).
    imports: BTreeMap<(ModulePath, String), ModulePath>,
    /// Glob imports of a module.
    globs: BTreeMap<ModulePath, Vec<ModulePath>>,
    /// Macros by example: the module that defines each.
    macros: BTreeSet<(ModulePath, String)>,
    /// Names by which the crate refers to itself: `extern crate self as name`.
    aliases: BTreeSet<String>,
}

/// Limit of re-exports that are followed in sequence, so that circular imports terminate.
const MAX_HOPS: usize = 16;

impl Sources {
    /// Adds the file of `module`. `file` is its name for messages.
    pub(crate) fn add(&mut self, file: &str, module: &[&str], text: &str) {
        let parsed = syn::parse_file(text).unwrap_or_else(|e| panic!("{file}: {e}"));
        let module: ModulePath = module.iter().map(|&segment| segment.to_owned()).collect();
        self.modules.insert(module.clone());
        Reader { file, module, test: false, sources: self }.visit_file(&parsed);
    }

    /// Whether the mention is compiled only for tests: its item, or a module around it, is `#[cfg(test)]`.
    pub(crate) fn in_test(&self, mention: &Mention) -> bool {
        let around = |n| self.test_modules.contains(&mention.module[..n]);
        mention.test || (1..=mention.module.len()).any(around)
    }

    /// Resolves a mention through imports and re-exports, to `crate::…` or to a path in another crate.
    pub(crate) fn resolve(&self, mention: &Mention) -> ModulePath {
        self.follow(&mention.module, &mention.path, MAX_HOPS)
    }

    fn follow(&self, module: &[String], path: &[String], hops: usize) -> ModulePath {
        let (mut at, rest) = match path[0].as_str() {
            "crate" => (Vec::new(), &path[1..]),
            alias if self.aliases.contains(alias) => (Vec::new(), &path[1..]),
            "self" => (module.to_vec(), &path[1..]),
            "super" => (parent(module), &path[1..]),
            name if self.declares(module, name) || self.resolve_glob(module, name, hops).is_some() => {
                (module.to_vec(), path)
            }
            _ => return path.to_vec(),
        };
        for (n, name) in rest.iter().enumerate() {
            let beyond = &rest[n + 1..];
            if name == "super" {
                at = parent(&at);
            } else if let Some(import) = self.imports.get(&key(&at, name)).filter(|_| hops > 0) {
                if *import == [name.clone()] && self.macros.contains(&key(&at, name)) {
                    // `pub(crate) use name;` after `macro_rules! name`: the macro becomes an item of its module.
                    at.push(name.clone());
                    continue;
                }
                // `use log::log` in a module: the first segment is the crate, not the import itself.
                let target = if import[0] == *name { import.clone() } else { self.follow(&at, import, hops - 1) };
                return self.follow(&at, &[&target, beyond].concat(), hops - 1);
            } else if let Some(target) = self.resolve_glob(&at, name, hops) {
                return self.follow(&at, &[&target, beyond].concat(), hops - 1);
            } else {
                at.push(name.clone());
            }
        }
        at.insert(0, "crate".to_owned());
        at
    }

    /// Whether `module` declares a module or an import of that name.
    fn declares(&self, module: &[String], name: &str) -> bool {
        self.imports.get(&key(module, name)).is_some_and(|import| import[0] != name)
            || self.modules.contains(&child(module, name))
    }

    /// Resolves a name that a glob import provides in `module`.
    fn resolve_glob(&self, module: &[String], name: &str, hops: usize) -> Option<ModulePath> {
        if hops == 0 || self.modules.contains(&child(module, name)) {
            return None;
        }
        self.globs.get(module)?.iter().find_map(|glob| {
            let from = self.follow(module, glob, hops - 1);
            let (root, inside) = from.split_first()?;
            let found = root == "crate" && inside != module && self.declares(inside, name);
            found.then(|| child(&from, name))
        })
    }
}

fn parent(module: &[String]) -> ModulePath {
    module[..module.len().saturating_sub(1)].to_vec()
}

fn child(module: &[String], name: &str) -> ModulePath {
    [module, &[name.to_owned()]].concat()
}

fn key(module: &[String], name: &str) -> (ModulePath, String) {
    (module.to_vec(), name.to_owned())
}

/// Visits one file and records its paths and declarations.
struct Reader<'a> {
    file: &'a str,
    module: ModulePath,
    test: bool,
    sources: &'a mut Sources,
}

impl Reader<'_> {
    fn mention(&mut self, path: ModulePath, line: usize) {
        let inside = matches!(path[0].as_str(), "Self" | "self") && path.len() < 3;
        if path.len() > 1 && !inside {
            let (file, module) = (self.file.to_owned(), self.module.clone());
            self.sources.mentions.push(Mention { file, line, module, path, test: self.test });
        }
    }

    /// Runs `read` for an item with these attributes, and tracks whether it is compiled only for tests.
    fn within(&mut self, attrs: &[Attribute], read: impl FnOnce(&mut Self)) {
        let before = self.test;
        self.test |= attrs.iter().any(only_tests);
        read(self);
        self.test = before;
    }

    /// Records every path of an import with the prefix `prefix`.
    fn import(&mut self, prefix: &ModulePath, tree: &UseTree) {
        let (line, module) = (tree.span().start().line, self.module.clone());
        match tree {
            UseTree::Path(tree) => self.import(&child(prefix, &tree.ident.to_string()), &tree.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(prefix, tree)),
            UseTree::Glob(_) => {
                self.sources.globs.entry(module).or_default().push(prefix.clone());
                self.mention(child(prefix, "*"), line);
            }
            UseTree::Name(_) | UseTree::Rename(_) => {
                let (name, bound) = match tree {
                    UseTree::Rename(tree) => (tree.ident.to_string(), tree.rename.to_string()),
                    UseTree::Name(tree) => (tree.ident.to_string(), tree.ident.to_string()),
                    _ => unreachable!("matched above"),
                };
                let itself = name == "self" && !prefix.is_empty();
                let path = if itself { prefix.clone() } else { child(prefix, &name) };
                let bound = if bound == "self" { path[path.len() - 1].clone() } else { bound };
                self.sources.imports.insert((module, bound), path.clone());
                self.mention(path, line);
            }
        }
    }

    /// Records the paths in token streams, which the parser does not analyse: macro arguments and definitions, attribute lists.
    fn tokens(&mut self, stream: TokenStream) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        let colons = |at: usize| -> bool {
            let colon = |t: Option<&TokenTree>| matches!(t, Some(TokenTree::Punct(p)) if p.as_char() == ':');
            colon(tokens.get(at)) && colon(tokens.get(at + 1))
        };
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(word) if word == "use" => {
                    let is_end = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ';');
                    let end = tokens[at..].iter().position(is_end).map_or(tokens.len(), |n| at + n + 1);
                    let import = tokens[at..end].iter().cloned().collect();
                    if let Ok(import) = syn::parse2::<ItemUse>(import) {
                        self.visit_item_use(&import);
                        at = end;
                        continue;
                    }
                }
                TokenTree::Ident(word) => {
                    let line = word.span().start().line;
                    let mut path = vec![word.to_string()];
                    while colons(at + 1)
                        && let Some(TokenTree::Ident(next)) = tokens.get(at + 3)
                    {
                        path.push(next.to_string());
                        at += 3;
                    }
                    self.mention(path, line);
                }
                _ => {}
            }
            at += 1;
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if let Item::ExternCrate(item) = item
            && item.ident == "self"
        {
            self.sources.aliases.extend(item.rename.iter().map(|(_, name)| name.to_string()));
        }
        if let Item::Macro(item) = item
            && let Some(name) = &item.ident
        {
            self.sources.macros.insert(key(&self.module, &name.to_string()));
        }
        self.within(item_attributes(item), |reader| {
            let Item::Mod(module) = item else { return visit::visit_item(reader, item) };
            reader.module.push(module.ident.to_string());
            reader.sources.modules.insert(reader.module.clone());
            if reader.test {
                reader.sources.test_modules.insert(reader.module.clone());
            }
            visit::visit_item(reader, item);
            reader.module.pop();
        });
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            ImplItem::Macro(item) => &item.attrs,
            _ => &[],
        };
        self.within(attributes, |reader| visit::visit_impl_item(reader, item));
    }

    fn visit_field(&mut self, field: &'ast Field) {
        self.within(&field.attrs, |reader| visit::visit_field(reader, field));
    }

    fn visit_stmt(&mut self, statement: &'ast Stmt) {
        let attributes: &[Attribute] = match statement {
            Stmt::Local(statement) => &statement.attrs,
            Stmt::Macro(statement) => &statement.attrs,
            _ => &[],
        };
        self.within(attributes, |reader| visit::visit_stmt(reader, statement));
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.import(&Vec::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.mention(path.segments.iter().map(|s| s.ident.to_string()).collect(), path.span().start().line);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, body: &'ast Macro) {
        self.tokens(body.tokens.clone());
        visit::visit_macro(self, body);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
        visit::visit_attribute(self, attribute);
    }

    /// Ignores the path in `pub(in crate::module)`, which restricts visibility and uses nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// Whether an attribute restricts code to tests: `#[cfg(test)]`, `#[cfg(all(test, …))]`, `#[test]`.
fn only_tests(attribute: &Attribute) -> bool {
    fn requires_test(stream: TokenStream) -> bool {
        let mut tokens = stream.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(word) if word == "not" || word == "any" => drop(tokens.next()),
                TokenTree::Ident(word) if word == "test" => return true,
                TokenTree::Group(group) if requires_test(group.stream()) => return true,
                _ => {}
            }
        }
        false
    }
    match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) => list.path.is_ident("cfg") && requires_test(list.tokens.clone()),
        Meta::NameValue(_) => false,
    }
}

fn item_attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

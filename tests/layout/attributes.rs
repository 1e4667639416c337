//! Parses attributes as the compiler does: also inside `cfg_attr`, beside other lints, and in the bodies of macros.

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Lit, Macro, Meta, Token};

/// All attributes of a file. The condition of `cfg_attr` is taken as true.
fn attributes(text: &str) -> Vec<Meta> {
    #[derive(Default)]
    struct Found(Vec<Meta>);

    impl Found {
        fn add(&mut self, meta: &Meta) {
            let Meta::List(list) = meta else { return self.0.push(meta.clone()) };
            if !list.path.is_ident("cfg_attr") {
                return self.0.push(meta.clone());
            }
            // The first argument is the condition.
            let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap();
            parts.iter().skip(1).for_each(|meta| self.add(meta));
        }

        /// Finds attributes in the tokens of a macro's arguments or definition: `#`, optionally `!`, and a group in brackets.
        fn tokens(&mut self, stream: TokenStream) {
            let mut hash = false;
            for token in stream {
                match token {
                    TokenTree::Punct(mark) => hash = mark.as_char() == '#' || hash && mark.as_char() == '!',
                    TokenTree::Group(group) => {
                        match syn::parse2::<Meta>(group.stream()) {
                            Ok(meta) if hash => self.add(&meta),
                            _ => self.tokens(group.stream()),
                        }
                        hash = false;
                    }
                    _ => hash = false,
                }
            }
        }
    }

    impl Visit<'_> for Found {
        fn visit_attribute(&mut self, attribute: &Attribute) {
            self.add(&attribute.meta);
        }

        fn visit_macro(&mut self, body: &Macro) {
            self.tokens(body.tokens.clone());
            visit::visit_macro(self, body);
        }
    }

    let mut found = Found::default();
    found.visit_file(&syn::parse_file(text).unwrap());
    found.0
}

/// Whether a file has an attribute that allows unsafe code, which the crate's lints deny.
pub(crate) fn allows_unsafe_code(text: &str) -> bool {
    let names_it = |token: TokenTree| matches!(token, TokenTree::Ident(word) if word == "unsafe_code");
    attributes(text).iter().any(|meta| match meta {
        Meta::List(list) => {
            let weakens = ["allow", "expect", "warn"].iter().any(|level| list.path.is_ident(level));
            weakens && list.tokens.clone().into_iter().any(names_it)
        }
        _ => false,
    })
}

/// The files that modules of a file name by `path = "…"`.
pub(crate) fn module_paths(text: &str) -> Vec<String> {
    let path = |meta: Meta| match meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match pair.value {
            Expr::Lit(value) => match value.lit {
                Lit::Str(file) => Some(file.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    attributes(text).into_iter().filter_map(path).collect()
}

mod tests {
    use super::*;

    #[test]
    fn allowing_unsafe_code_is_found_in_every_form() {
        for (text, lifts) in [
            ("#![allow(unsafe_code)]", true),
            ("#![allow(dead_code, unsafe_code)]", true),
            ("fn f() { #[expect( unsafe_code, reason = \"r\")] unsafe { g() } }", true),
            ("#[cfg_attr(unix, inline, warn(unsafe_code))] fn f() {}", true),
            ("#[cfg_attr(unix, cfg_attr(test, allow(unsafe_code)))] fn f() {}", true),
            ("macro_rules! m { () => { #[allow(dead_code, unsafe_code)] fn f() {} } }", true),
            ("m! { mod a { #![allow(unsafe_code)] } }", true),
            ("#![deny(unsafe_code)]", false),
            ("/// allow(unsafe_code)\n#[allow(dead_code)] fn f() { \"allow(unsafe_code)\"; }", false),
        ] {
            assert_eq!(allows_unsafe_code(text), lifts, "{text}");
        }
    }

    #[test]
    fn module_paths_are_found_in_every_form() {
        for (text, file) in [
            ("#[path = \"../a.rs\"] mod a;", "../a.rs"),
            ("#[cfg_attr(unix, path = \"b.rs\")] mod b;", "b.rs"),
            ("#[cfg_attr(unix, allow(dead_code), path = \"../c.rs\")] mod c;", "../c.rs"),
            ("macro_rules! m { () => { #[path = \"../d.rs\"] mod d; } }", "../d.rs"),
        ] {
            assert_eq!(module_paths(text), [file], "{text}");
        }
        assert!(module_paths("/// path = \"a\"\nfn f() { let path = \"../a.rs\"; }").is_empty());
    }
}

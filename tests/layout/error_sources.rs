//! Texts of errors: `Display` and `source()` of an error do not both contain the error below it, or a report that prints the
//! chain of sources, such as `{:#}` of `anyhow`, repeats its text.

use syn::{Attribute, Field, Fields, Item, Meta, Visibility};

/// The public errors of a file, by type or variant, whose text contains an error that `source()` returns too.
fn repeating(file: &syn::File) -> Vec<String> {
    let mut found = Vec::new();
    for item in &file.items {
        match item {
            Item::Enum(item) if is_public_error(&item.vis, &item.attrs) => {
                let variants = item.variants.iter().filter(|variant| repeats(&variant.attrs, &variant.fields));
                found.extend(variants.map(|variant| format!("{}::{}", item.ident, variant.ident)));
            }
            Item::Struct(item) if is_public_error(&item.vis, &item.attrs) && repeats(&item.attrs, &item.fields) => {
                found.push(item.ident.to_string());
            }
            _ => {}
        }
    }
    found
}

fn is_public_error(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let derives = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("derive") => {
            list.tokens.to_string().split(|c: char| !c.is_alphanumeric()).any(|word| word == "Error")
        }
        _ => false,
    };
    matches!(visibility, Visibility::Public(_)) && attributes.iter().any(derives)
}

/// Whether `thiserror` derives a source for these fields although the text is not the source's own (`transparent`).
fn repeats(attributes: &[Attribute], fields: &Fields) -> bool {
    let is_source = |field: &Field| {
        field.ident.as_ref().is_some_and(|name| name == "source")
            || field.attrs.iter().any(|attribute| ["from", "source"].iter().any(|name| attribute.path().is_ident(name)))
    };
    let is_transparent = |attribute: &Attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("error") && list.tokens.to_string() == "transparent",
        _ => false,
    };
    fields.iter().any(is_source) && !attributes.iter().any(is_transparent)
}

#[test]
fn no_text_of_an_error_repeats_its_source() {
    let (mut found, mut errors) = (Vec::new(), 0);
    for (name, path) in super::all_sources().into_iter().filter(|(name, _)| name.starts_with("src/")) {
        let parsed = syn::parse_file(&std::fs::read_to_string(path).unwrap()).unwrap();
        errors += parsed
            .items
            .iter()
            .filter(|item| matches!(item, Item::Enum(item) if is_public_error(&item.vis, &item.attrs)))
            .count();
        found.extend(repeating(&parsed).into_iter().map(|error| format!("{name}: {error}")));
    }
    assert!(errors > 20, "only {errors} public errors found");
    assert!(found.is_empty(), "the text and source() of these contain the same error: {found:#?}");
}

#[test]
fn repeated_sources_are_recognised() {
    let file = r#"
        #[derive(Debug, Error)] pub enum E {
            #[error("a: {0}")] From(#[from] io::Error),
            #[error("b: {source}")] Named { source: io::Error },
            #[error("c")] Marked(#[source] io::Error),
            #[error(transparent)] Transparent(#[from] io::Error),
            #[error("{error}")] Plain { error: io::Error },
        }
        #[derive(Error)] #[error("d: {source}")] pub struct S { source: io::Error }
        #[derive(Error)] #[error("e: {source}")] struct Private { source: io::Error }
    "#;
    assert_eq!(repeating(&syn::parse_file(file).unwrap()), ["E::From", "E::Named", "E::Marked", "S"]);
}

//! Test helper: compares constants of a kernel's source with those of the code that launches it.

/// Asserts that a source has these constants: `NAME = value`, or `#define NAME value`.
pub(super) fn assert_constants(source: &str, expected: &[(&str, u64)]) {
    for &(name, value) in expected {
        let definitions = [format!(" {name} = "), format!("#define {name} ")];
        let found = definitions.iter().find_map(|definition| source.split_once(definition.as_str()));
        let digits = found.map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
        assert_eq!(digits.and_then(|digits| digits.parse().ok()), Some(value), "{name}");
    }
}

//! Lookup of instruction rows by opcode, and generation of the list of supported instructions.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::OnceLock;

use super::{
    Family, Row, approx, async_copy, atomics, bits, compare, compare_float, control, convert, dot, float, half,
    integer, logic, matrix, memory, mma, moves, shuffle, special,
};

/// All families, in the order of the generated list.
fn families() -> Vec<Family> {
    vec![
        integer::family(),
        dot::family(),
        float::family(),
        half::family(),
        approx::family(),
        convert::family(),
        compare::family(),
        compare_float::family(),
        logic::family(),
        bits::family(),
        moves::family(),
        special::family(),
        memory::access::family(),
        memory::address::family(),
        atomics::family(),
        async_copy::family(),
        shuffle::family(),
        matrix::family(),
        mma::family(),
        control::family(),
    ]
}

/// The instruction table for the host processor.
pub fn table() -> &'static InstructionTable {
    static TABLE: OnceLock<InstructionTable> = OnceLock::new();
    TABLE.get_or_init(|| InstructionTable::new(families()))
}

/// Rows by opcode.
#[derive(Debug)]
pub struct InstructionTable {
    rows: Vec<Row>,
    by_name: HashMap<String, Vec<u32>>,
    sections: Vec<Section>,
}

/// Range of a family's rows, and its hints.
#[derive(Debug)]
struct Section {
    title: &'static str,
    rows: std::ops::Range<usize>,
    hints: Vec<(&'static str, &'static [&'static str])>,
}

impl InstructionTable {
    /// A table of these families.
    pub fn new(families: Vec<Family>) -> Self {
        let mut table = Self { rows: Vec::new(), by_name: HashMap::new(), sections: Vec::new() };
        for family in families {
            let start = table.rows.len();
            for row in family.rows {
                table.by_name.entry(row.name.clone()).or_default().push(table.rows.len() as u32);
                table.rows.push(row);
            }
            table.sections.push(Section { title: family.title, rows: start..table.rows.len(), hints: family.hints });
        }
        table
    }

    /// The first row of an opcode as written, with its index.
    pub fn find(&self, opcode: &str) -> Option<(u32, &Row)> {
        let index = *self.candidates(opcode).first()?;
        Some((index, self.rows.get(index as usize)?))
    }

    /// All rows of an opcode as written, or if there are none, of the opcode without its hints.
    pub fn candidates(&self, opcode: &str) -> &[u32] {
        if let Some(rows) = self.by_name.get(opcode) {
            return rows;
        }
        self.by_name.get(&self.without_hints(opcode)).map_or(&[], Vec::as_slice)
    }

    /// A row by its index.
    pub fn row(&self, index: u32) -> Option<&Row> {
        self.rows.get(index as usize)
    }

    /// All rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    fn without_hints(&self, opcode: &str) -> String {
        let hints: Vec<&str> = self
            .sections
            .iter()
            .flat_map(|section| &section.hints)
            .filter(|(head, _)| opcode.strip_prefix(head).is_some_and(|rest| rest.starts_with('.')))
            .flat_map(|(_, hints)| hints.iter().copied())
            .collect();
        let mut parts = opcode.split('.');
        let mut kept = parts.next().unwrap_or_default().to_string();
        for part in parts.filter(|part| !hints.contains(part)) {
            kept.push('.');
            kept.push_str(part);
        }
        kept
    }

    /// Up to `count` names of rows most similar to an opcode, of the same instruction if there are any.
    pub fn closest(&self, opcode: &str, count: usize) -> Vec<&str> {
        let opcode = self.without_hints(opcode);
        let kind = |name: &str| name.split('.').next().unwrap_or_default().to_string();
        let mut among: Vec<&str> = self.rows.iter().map(|row| &*row.name).collect();
        let same = among.iter().any(|name| kind(name) == kind(&opcode));
        among.retain(|name| !same || kind(name) == kind(&opcode));
        let words: Vec<&str> = opcode.split('.').collect();
        let letters: Vec<char> = opcode.chars().collect();
        let rank = |name: &str| {
            let other: Vec<&str> = name.split('.').collect();
            let foreign = other.iter().filter(|word| !words.contains(word)).count();
            (distance(&words, &other), foreign, distance(&letters, &name.chars().collect::<Vec<_>>()))
        };
        let mut ranked: Vec<_> = among.iter().map(|name| (rank(name), *name)).collect();
        ranked.sort_unstable();
        ranked.dedup();
        // For another instruction only accept names within two edits, probably typing errors.
        let limit = if same { usize::MAX } else { 2 };
        ranked.into_iter().filter(|(rank, _)| rank.2 <= limit).take(count).map(|(_, name)| name).collect()
    }

    /// The list of supported instructions as Markdown: a heading per family, a line per set of rows that only differ in
    /// modifiers.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# Instructions\n\n{} forms, generated from the decoder's table by `cargo run -p cudaemu --example supported`. \
             `{{a,b}}` is one of them, `[.a]` may be absent.\n\n",
            self.rows.len()
        );
        for section in &self.sections {
            let names = self.rows[section.rows.clone()].iter().map(|row| &*row.name);
            let _ = writeln!(text, "## {} ({} forms)\n", section.title, section.rows.len());
            for pattern in fold(names) {
                let _ = writeln!(text, "- `{}`", render(&pattern));
            }
            let mut hints: Vec<(&str, BTreeSet<&str>)> = Vec::new();
            for (head, list) in &section.hints {
                match hints.iter_mut().find(|(name, _)| name == head) {
                    Some((_, all)) => all.extend(list.iter()),
                    None => hints.push((head, list.iter().copied().collect())),
                }
            }
            for (head, list) in hints.iter().filter(|(_, list)| !list.is_empty()) {
                let list: Vec<String> = list.iter().map(|hint| format!("`.{hint}`")).collect();
                let _ = writeln!(text, "- accepted on `{head}` without effect: {}", list.join(", "));
            }
            text.push('\n');
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        text
    }
}

/// Edit distance of two sequences.
fn distance<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}

/// A set of names: at each position one of several words; the empty word means "absent".
type Pattern<'a> = Vec<Vec<&'a str>>;

/// Folds names that only differ in words into patterns: `add.{s32,u32}`, `add[.ftz].f32`.
fn fold<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Pattern<'a>> {
    let mut patterns: Vec<Pattern<'a>> = Vec::new();
    for name in names {
        let pattern: Pattern<'a> = name.split('.').map(|word| vec![word]).collect();
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    let longest = patterns.iter().map(Vec::len).max().unwrap_or(0);
    // If a pattern equals another one with a word left out, that word becomes optional. Repeated until nothing changes: two
    // patterns may have to lose another word first to become equal.
    let mut before = usize::MAX;
    while patterns.len() < before {
        before = patterns.len();
        (1..longest).rev().for_each(|place| make_optional(&mut patterns, place));
    }
    // From the last position, the type, to the first modifier: merges patterns that are equal elsewhere.
    for place in (1..longest).rev() {
        let mut merged: Vec<Pattern<'a>> = Vec::new();
        let mut known: HashMap<Pattern<'a>, usize> = HashMap::new();
        for pattern in patterns {
            let mut key = pattern.clone();
            if place < key.len() {
                key[place].clear();
            }
            match known.get(&key) {
                Some(&at) if place < pattern.len() => merged[at][place].extend(pattern[place].iter()),
                _ => {
                    known.insert(key, merged.len());
                    merged.push(pattern);
                }
            }
        }
        patterns = merged;
    }
    patterns
}

/// Merges each pattern with the pattern that lacks its word at `place`.
fn make_optional<'a>(patterns: &mut Vec<Pattern<'a>>, place: usize) {
    let known: HashMap<Pattern<'a>, usize> = patterns.iter().cloned().zip(0..).collect();
    let mut gone = vec![false; patterns.len()];
    for at in 0..patterns.len() {
        let mut shorter = patterns[at].clone();
        if gone[at] || place >= shorter.len() || shorter[place].contains(&"") {
            continue;
        }
        shorter.remove(place);
        // The map may be outdated by earlier merges, so check again.
        let other = known.get(&shorter).copied().filter(|&other| !gone[other] && patterns[other] == shorter);
        if let Some(other) = other {
            patterns[at][place].push("");
            gone[other] = true;
        }
    }
    let mut gone = gone.into_iter();
    patterns.retain(|_| !gone.next().unwrap_or_default());
}

fn render(pattern: &[Vec<&str>]) -> String {
    let mut text = String::new();
    for (place, words) in pattern.iter().enumerate() {
        let optional = words.contains(&"");
        let words: Vec<&str> = words.iter().copied().filter(|word| !word.is_empty()).collect();
        let dot = if place == 0 { "" } else { "." };
        let words = if words.len() == 1 { words[0].to_string() } else { format!("{{{}}}", words.join(",")) };
        let _ = if optional { write!(text, "[{dot}{words}]") } else { write!(text, "{dot}{words}") };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytecode::Action;
    use crate::isa::{Category, Operand, Value, row};

    fn family(names: &[&str], hints: Vec<(&'static str, &'static [&'static str])>) -> Family {
        let rows = names
            .iter()
            .map(|name| row(*name, &[Operand::Out(Value::B32)], Category::Other, 0, Action::Compute(|_, _, _| ())))
            .collect();
        Family { title: "Test", rows, hints }
    }

    #[test]
    fn no_two_rows_of_a_name_take_the_same_operands() {
        for (name, rows) in &table().by_name {
            for (at, &a) in rows.iter().enumerate() {
                for &b in &rows[at + 1..] {
                    let (a, b) = (&table().rows[a as usize], &table().rows[b as usize]);
                    assert_ne!(a.operands, b.operands, "{name} stands twice in the table");
                }
            }
        }
    }

    #[test]
    fn a_hint_is_one_word_and_no_row_is_hidden_by_it() {
        for section in &table().sections {
            for (head, hints) in &section.hints {
                for hint in *hints {
                    assert!(!hint.contains('.'), "{head}: {hint} is more than one modifier");
                }
            }
        }
    }

    #[test]
    fn hints_are_removed_at_any_position() {
        let table =
            InstructionTable::new(vec![family(&["ld.global.u32", "ldx.ca.u32"], vec![("ld", &["ca", "L2::128B"])])]);
        assert_eq!(table.find("ld.global.ca.L2::128B.u32").map(|found| found.0), Some(0));
        assert_eq!(table.find("ld.global.u32").map(|found| found.0), Some(0));
        assert_eq!(table.find("ldx.ca.u32").map(|found| found.0), Some(1));
        assert!(table.find("ldx.L2::128B.u32").is_none());
        assert!(table.find("ld.global.cb.u32").is_none());
    }

    #[test]
    fn the_closest_rows_are_of_the_same_instruction() {
        let table = InstructionTable::new(vec![family(&["add.s32", "add.f32", "sub.s32"], vec![])]);
        assert_eq!(table.closest("add.s31", 1), ["add.s32"]);
        assert_eq!(table.closest("adf.s32", 2), ["add.s32", "add.f32"]);
        assert!(table.closest("wgmma.fence", 2).is_empty());
    }

    #[test]
    fn names_fold_into_patterns() {
        let names = ["add.s32", "add.u32", "add.f32", "add.ftz.f32", "add.rn.f32", "add.rn.ftz.f32", "ret"];
        let lines: Vec<String> = fold(names.into_iter()).iter().map(|pattern| render(pattern)).collect();
        assert_eq!(lines, ["add.{s32,u32}", "add[.rn][.ftz].f32", "ret"]);
    }

    #[test]
    fn the_list_holds_every_row_and_nothing_else() {
        for section in &table().sections {
            let names: BTreeSet<&str> = table().rows[section.rows.clone()].iter().map(|row| &*row.name).collect();
            let mut listed = BTreeSet::new();
            for pattern in fold(names.iter().copied()) {
                let mut texts = vec![String::new()];
                for (place, words) in pattern.iter().enumerate() {
                    let with = |text: &String, word: &&str| match (place, *word) {
                        (0, word) => word.to_string(),
                        (_, "") => text.clone(),
                        (_, word) => format!("{text}.{word}"),
                    };
                    texts = texts.iter().flat_map(|text| words.iter().map(move |word| with(text, word))).collect();
                }
                for text in texts {
                    assert!(names.contains(&*text), "{text} is listed, but is no row");
                    assert!(listed.insert(text.clone()), "{text} is listed twice");
                }
            }
            assert_eq!(listed.len(), names.len(), "{}", section.title);
        }
    }
}

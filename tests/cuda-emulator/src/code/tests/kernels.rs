//! The committed PTX files.

use std::collections::BTreeMap;
use std::path::Path;

use super::decode;
use crate::isa::table;
use crate::ptx;
use crate::ptx::ast::Statement;

/// All texts under kernels/ptx.
pub(super) fn texts() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    let mut texts: Vec<(String, String)> = std::fs::read_dir(folder)
        .expect("kernels/ptx exists")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).expect("a readable file")))
        .collect();
    texts.sort();
    texts
}

/// Instructions that no family has rows for yet, by the start of their opcode.
const PENDING: [&str; 3] = ["vabsdiff.", "vadd.", "wmma."];

fn pending(opcode: &str) -> bool {
    PENDING.iter().any(|start| opcode.starts_with(start))
}

/// Takes out the instructions that no row exists for, and counts them.
pub(super) fn remove_unknown(statements: &mut Vec<Statement>, missing: &mut BTreeMap<String, usize>) {
    statements.retain_mut(|statement| match statement {
        Statement::Block(inner) => {
            remove_unknown(inner, missing);
            true
        }
        Statement::Instruction(instruction) => {
            let known = table().find(&instruction.opcode).is_some();
            if !known {
                *missing.entry(instruction.opcode.to_string()).or_default() += 1;
            }
            known
        }
        _ => true,
    });
}

#[test]
fn every_committed_kernel_decodes() {
    let mut missing: BTreeMap<String, usize> = BTreeMap::new();
    let mut errors = Vec::new();
    let texts = texts();
    assert!(!texts.is_empty());
    for (path, text) in &texts {
        let mut module = ptx::parse(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        for body in module.functions.iter_mut().filter_map(|function| function.body.as_mut()) {
            remove_unknown(body, &mut missing);
        }
        match decode(&module, text) {
            Ok(code) => assert_eq!(code.functions.iter().filter(|f| f.entry).count(), text.matches(".entry").count()),
            Err(error) => errors.push(format!("{path}: {error}")),
        }
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    missing.retain(|opcode, _| !pending(opcode));
    assert!(missing.is_empty(), "{missing:#?}");
}

//! The committed PTX files.

use std::collections::BTreeMap;
use std::path::Path;

use super::decode;
use crate::isa::table;
use crate::ptx;
use crate::ptx::ast::{Operand, Statement};

/// All texts under kernels/ptx.
fn texts() -> Vec<(String, String)> {
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

fn opcodes(statements: &[Statement], found: &mut impl FnMut(&str)) {
    for statement in statements {
        match statement {
            Statement::Block(inner) => opcodes(inner, found),
            Statement::Instruction(instruction) => {
                // Moves of vectors and of changing special registers are rows of other names.
                let plain = !instruction.operands.iter().any(|operand| matches!(operand, Operand::Vector(_)));
                if plain || !instruction.opcode.starts_with("mov") {
                    found(&instruction.opcode);
                }
            }
            _ => {}
        }
    }
}

#[test]
fn every_committed_kernel_decodes() {
    let mut missing: BTreeMap<String, usize> = BTreeMap::new();
    let mut errors = Vec::new();
    let texts = texts();
    assert!(!texts.is_empty());
    for (path, text) in &texts {
        let module = ptx::parse(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        let before = missing.len();
        for body in module.functions.iter().filter_map(|function| function.body.as_ref()) {
            opcodes(body, &mut |opcode| {
                if table().find(opcode).is_none() {
                    *missing.entry(opcode.to_string()).or_default() += 1;
                }
            });
        }
        if let Err(error) = decode(&module, text)
            && !error.message.starts_with("no instruction")
        {
            errors.push(format!("{path}: {error}"));
        }
        let _ = before;
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    assert!(missing.is_empty(), "{missing:#?}");
}

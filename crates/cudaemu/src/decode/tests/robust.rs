//! Fuzzing of the decoder: mutated modules decode to consistent bytecode or give an error, and the decoder never panics.

use super::kernels::kernel_texts;
use super::*;
use crate::bytecode::{Action, Control};
use crate::isa::table;
use crate::operands::{Base, Slot};
use crate::ptx::ast::Statement;

/// Tokens to insert at random places.
const WORDS: [&str; 32] = [
    "%r1",
    "%rd1",
    "%p1",
    "%f1",
    "0",
    "-1",
    "0xFFFFFFFFFFFFFFFF",
    "9223372036854775807",
    "1.5",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ";",
    ":",
    "|",
    "!",
    "_",
    "+",
    ".v4",
    ".u64",
    ".shared",
    ".param",
    "%tid.x",
    "%clock64",
    "bra",
    "call",
    "mov.u64",
    "@",
];

/// The text with some words replaced, duplicated, swapped or dropped.
fn mutate(text: &str, random: &mut fastrand::Rng) -> String {
    let mut words: Vec<&str> = text.split_inclusive([' ', '\t', '\n', ',', ';', '.']).collect();
    for _ in 0..random.usize(1..4) {
        let at = random.usize(..words.len());
        let other = words[random.usize(..words.len())];
        match random.u8(..4) {
            0 => words[at] = WORDS[random.usize(..WORDS.len())],
            1 => words[at] = other,
            2 => words.insert(at, other),
            _ => drop(words.remove(at)),
        }
    }
    words.concat()
}

/// Removes instructions whose opcode the mutation broke; otherwise unknown opcodes would hide all other errors.
fn remove_unknown(statements: &mut Vec<Statement>) {
    statements.retain_mut(|statement| match statement {
        Statement::Block(inner) => {
            remove_unknown(inner);
            true
        }
        Statement::Instruction(instruction) => table().find(&instruction.opcode).is_some(),
        _ => true,
    });
}

#[test]
fn mutated_kernels_are_decoded_or_rejected() {
    let mut random = fastrand::Rng::with_seed(41);
    let texts: Vec<String> =
        kernel_texts().into_iter().map(|(_, text)| text).filter(|text| text.len() < 20_000).collect();
    assert!(!texts.is_empty());
    let (mut decodable, mut errors) = (0, 0);
    for round in 0..1500 {
        let text = mutate(&texts[round % texts.len()], &mut random);
        let Ok(mut module) = ptx::parse(&text) else { continue };
        for body in module.functions.iter_mut().filter_map(|function| function.body.as_mut()) {
            remove_unknown(body);
        }
        match decode(&module, &text) {
            Ok(code) => {
                decodable += 1;
                assert_in_range(&code);
            }
            Err(error) => {
                errors += 1;
                assert!(error.line as usize <= text.lines().count(), "{error}");
                assert!(!error.message.contains("the emulator is at fault"), "{error}");
            }
        }
    }
    // Checks the mutations themselves: both outcomes must be frequent.
    assert!(decodable > 50 && errors > 50, "{decodable} mutated modules decoded, {errors} gave an error");
}

/// Asserts the executor's preconditions: branch targets are in the function, and slots are in the kernel's register file.
fn assert_in_range(code: &DecodedModule) {
    for function in &code.functions {
        let range = function.start..function.end;
        assert!(!range.is_empty());
        let last = &code.insts[function.end as usize - 1];
        assert!(matches!(last.action, Action::Control(Control::Return | Control::Exit)));
        for inst in &code.insts[function.start as usize..function.end as usize] {
            if let Action::Control(Control::Branch(target)) = &inst.action {
                assert!(range.contains(target));
            }
            let base = match inst.args.base {
                Base::Wide(slot) | Base::Narrow(slot) => slot,
                _ => Slot::NONE,
            };
            let slots = inst.args.s.iter().chain(&inst.args.all).chain([&inst.guard, &base]);
            for slot in slots.filter(|slot| !slot.is_none() && function.entry) {
                assert!(slot.index() < function.registers.of(slot.class()));
            }
        }
    }
}

#[test]
fn deep_and_large_declarations_are_rejected() {
    for body in [
        format!("{}ret;{}", "{".repeat(90), "}".repeat(90)),
        ".local .b8 x[4294967296][4294967296];".to_string(),
        ".local .b8 x[18446744073709551615];".to_string(),
        ".global .b8 x[99999999999999];".to_string(),
    ] {
        let text = kernel(&body);
        if let Ok(module) = ptx::parse(&text) {
            assert!(decode(&module, &text).is_err(), "{body}");
        }
    }
    // Declaring a range of a million registers allocates none.
    let code = kernel_code(".reg .b32 %many<1048576>;\nmov.u32 %many1048575, 1;");
    assert_eq!(function(&code, "k").registers.b32, 2);
}

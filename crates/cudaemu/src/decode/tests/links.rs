//! Call graphs (recursion, the limit on reached functions), and the `used_bytes_mask` pragma of loads.

use super::*;

/// A module of functions and kernels, each given as (name, body).
fn program(functions: &[(&str, &str)], kernels: &[(&str, &str)]) -> String {
    let declared: String = functions.iter().map(|(name, _)| format!(".func {name}();\n")).collect();
    let functions: String = functions.iter().map(|(name, body)| format!(".func {name}()\n{{ {body} }}\n")).collect();
    let kernels: String = kernels.iter().map(|(name, body)| format!(".entry {name}()\n{{ {body} }}\n")).collect();
    module(&format!("{declared}{functions}{kernels}"))
}

/// Names of the functions that satisfy a condition.
fn names_of_functions(code: &DecodedModule, condition: impl Fn(&Function) -> bool) -> Vec<&str> {
    code.functions.iter().filter(|&function| condition(function)).map(|function| &*function.name).collect()
}

#[test]
fn functions_on_a_call_cycle_are_recursive() {
    let text = program(
        &[
            ("leaf", "ret;"),
            ("own", "call own; call leaf;"),
            ("a", "call b;"),
            ("b", "call c; call leaf;"),
            ("c", "call a; call own;"),
            ("before", "call a;"),
            ("far", "call leaf;"),
        ],
        &[("k", "call before;")],
    );
    assert_eq!(names_of_functions(&decoded(&text), |function| function.recursive), ["own", "a", "b", "c"]);
}

#[test]
fn a_long_call_chain_decodes_and_too_much_reached_code_fails() {
    // A chain of functions, each calling the next.
    let names: Vec<String> = (0..20_000).map(|i| format!("f{i}")).collect();
    let bodies: Vec<String> = (1..20_000).map(|i| format!("call f{i};")).chain([String::from("ret;")]).collect();
    let functions: Vec<(&str, &str)> =
        names.iter().map(|name| &**name).zip(bodies.iter().map(|body| &**body)).collect();
    let code = decoded(&program(&functions, &[("k", "call f0;")]));
    assert!(code.functions.iter().all(|function| !function.recursive));
    // 300 kernels that each reach the whole chain exceed the limit on the sum over all kernels.
    let names: Vec<String> = (0..300).map(|i| format!("k{i}")).collect();
    let kernels: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "call f0;")).collect();
    let text = program(&functions, &kernels);
    let error = try_decode(&text).map(drop).unwrap_err();
    assert!(error.message.contains("reach more than 8388608 functions, calls,"), "{error}");
    assert!(error.quote.starts_with(".entry k2"), "{error}");
}

/// `args.padding` is the complement of the mask. A mask applies only to the next instruction, and only if that is a load: the
/// second load has no mask, and the mask 7 is lost at the `add`.
#[test]
fn used_bytes_masks_apply_to_the_next_load_only() {
    let paddings: Vec<u32> = insts(
        ".pragma \"nounroll\";\n.pragma \"used_bytes_mask 0x7f\";\nld.global.v2.u32 {%r1, %r2}, [%rd1];\n\
         ld.global.u32 %r1, [%rd1];\n\
         .pragma \"used_bytes_mask 7\";\nadd.s32 %r1, %r1, 1;\nld.shared.u32 %r1, [tile];\n\
         .pragma \"used_bytes_mask 1\", \"nounroll\";\nl: ld.local.u16 %rs1, [depot];",
    )
    .iter()
    .map(|inst| inst.args.padding)
    .collect();
    assert_eq!(paddings, [!0x7f, 0, 0, 0, !1]);
}

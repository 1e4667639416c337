//! Errors of the decoder: each case with parts of its message and the line that it reports.

use super::*;

/// Line of the first line of the body in [`kernel`].
const BODY_LINE: u32 = 14;

/// Asserts that decoding a kernel with this body fails at line `line` of the body with a message that contains all of `parts`.
#[track_caller]
fn assert_body_error(body: &str, line: u32, parts: &[&str]) {
    assert_error(&kernel(body), BODY_LINE + line - 1, parts);
}

/// Asserts that decoding a module fails at line `line` with a message that contains all of `parts`, and quotes the line.
#[track_caller]
fn assert_error(text: &str, line: u32, parts: &[&str]) {
    let error = match try_decode(text) {
        Ok(_) => panic!("no error in:\n{text}"),
        Err(error) => error,
    };
    assert_eq!(error.line, line, "{error}");
    for part in parts {
        assert!(error.message.contains(part), "{part:?} is not in: {error}");
    }
    let quote = text.lines().nth(line as usize - 1).unwrap_or_default().trim();
    assert_eq!(error.quote, quote);
}

#[test]
fn messages_quote_their_line() {
    let error = try_decode(&kernel("  foo.bar.u32 %r1;")).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "PTX line 14: no instruction `foo.bar.u32` in this machine\n    foo.bar.u32 %r1;");
}

#[test]
fn unknown_instructions_are_reported_with_similar_names() {
    assert_body_error(
        "add.s33 %r1, %r2, %r3;",
        1,
        &["no instruction `add.s33`", "the closest supported ones: add.s32"],
    );
    assert_body_error(
        "ret;\nld.global.L9::x.u32 %r1, [%rd1];",
        2,
        &["no instruction `ld.global.L9::x.u32`", "ld.global.u32"],
    );
    assert_body_error("mov.b64 %rd1, {%r1, %r2, %r3};", 1, &["no form for these vectors"]);
}

#[test]
fn operands_that_do_not_fit_are_reported() {
    for (body, parts) in [
        ("add.s32 %r1, %r2;", &["takes 3 operands (a 32-bit register, ", "2 came"][..]),
        ("add.s32 %r1, %r2, %r3, %r4;", &["takes 3 operands", "4 came"]),
        (
            "add.s32 %rd1, %r2, %r3;",
            &["operand 1 of `add.s32` must be a 32-bit register, not `%rd1`", "64-bit register"],
        ),
        ("add.s32 %r1, %r2, %rd3;", &["operand 3 of `add.s32`", "a 32-bit register or a number", "`%rd3`"]),
        ("add.s32 5, %r2, %r3;", &["operand 1", "not the number 5"]),
        ("add.s32 %r1, %r2, 1.5;", &["operand 3", "floating-point literal"]),
        ("mov.f32 %f1, 1;", &["operand 2", "a 32-bit register or a floating-point literal", "the number 1"]),
        ("add.s32 %r1, %r2, %r77;", &["operand 3", "no register or special register `%r77` is declared"]),
        ("add.s32 %r1, %r2, nothing;", &["no register, variable or function `nothing`"]),
        ("add.s32 %r1, %r2, %p1;", &["operand 3", "a predicate register"]),
        ("add.s32 table, %r2, %r3;", &["`table`, which is not a register"]),
        ("add.s32 %r1, %r2, table;", &["operand 3", "a 64-bit address"]),
        ("add.s16 %rs1, %rs2, tile;", &["operand 3", "an address"]),
        ("add.s32 %r1, {%r2, %r3}, 1;", &["operand 2", "not a vector of 2"]),
        ("add.s32 %r1, [%rd1], 1;", &["operand 2", "an address in brackets"]),
        ("mov.u32 %r1;", &["takes 2 operands"]),
        ("mov.u64 %rd1, %tid.x;", &["`%tid.x`, which has 32 bits"]),
        ("mov.u32 %r1, %gridid;", &["`%gridid`, which has 64 bits"]),
        ("mov.u32 %r1, %nothing;", &["no register or special register `%nothing`"]),
        ("mov.u32 %r1, %clock64;", &["%clock64"]),
        ("mov.pred %p1, 2;", &["a predicate register, 0, 1 or -1", "the number 2"]),
        ("selp.b32 %r1, %r2, %r3, %r4;", &["operand 4", "a predicate register"]),
        ("shfl.sync.down.b32 %r1|%r2, %r2, %r3, 31, -1;", &["operand 1", "a predicate register, not `%r2`"]),
        ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", &["operand 5", "must be a number, not `%r5`"]),
    ] {
        assert_body_error(body, 1, parts);
    }
}

#[test]
fn addresses_that_do_not_fit_are_reported() {
    for (body, parts) in [
        ("ld.global.u32 %r1, %rd1;", &["operand 2", "must be an address in brackets, not `%rd1`"][..]),
        ("ld.global.u32 %r1, [%r2];", &["64-bit register", "`%r2`, which is a 32-bit register"]),
        ("ld.shared.u32 %r1, [%rs2];", &["a 16-bit register"]),
        ("ld.global.u32 %r1, [tile];", &["an address in .global memory, not `tile`, which is a .shared variable"]),
        ("ld.u32 %r1, [tile];", &["generic address", "cvta"]),
        ("ld.shared.u32 %r1, [table];", &["an address in .shared memory"]),
        ("ld.param.u32 %r1, [depot];", &["an address in .param memory, not `depot`, which is a .local variable"]),
        ("ld.global.u32 %r1, [k];", &["`k`, which is no memory"]),
        ("ld.global.u32 %r1, [nothing];", &["`nothing`"]),
        ("ld.global.v2.u32 {%r1, %r2, %r3, %r4}, [%rd1];", &["a vector of 2, not one of 4"]),
        ("ld.global.v2.u32 %r1, [%rd1];", &["operand 1"]),
        ("ld.param.u32 %r1, [k_1+0x7FFFFFFFFFFFFFFF];", &["offset"]),
    ] {
        assert_body_error(body, 1, parts);
    }
}

#[test]
fn unknown_labels_and_guards_are_reported() {
    assert_body_error("bra nowhere;", 1, &["no label `nowhere`"]);
    assert_body_error("{\ninner:\n}\nbra inner;", 4, &["no label `inner`"]);
    assert_body_error("a:\nret;\na:", 3, &["the label `a` stands twice"]);
    assert_body_error("bra %r1, %r2;", 1, &["takes one operand"]);
    assert_body_error("@%r1 bra a;\na:", 1, &["the guard `%r1` is not a predicate register"]);
    assert_body_error("@%p9 bra a;\na:", 1, &["no predicate register `%p9`"]);
}

#[test]
fn calls_that_do_not_fit_are_reported() {
    let functions = ".func (.param .b32 r) f(.param .b64 a);\n.extern .func cudaDeviceSynchronize();\n\
                     .func (.param .b32 r) f(.param .b64 a) { ret; }\n";
    let text = |body: &str| {
        module(&format!(
            "{functions}.entry k() {{\n.reg .b32 %r<3>; .reg .b64 %rd<3>; .param .b64 a; .param .b32 b;\n{body}\n}}"
        ))
    };
    for (body, parts) in [
        ("call nowhere;", &["no function `nowhere`"][..]),
        ("call cudaDeviceSynchronize;", &["`cudaDeviceSynchronize` is declared, but", "__assertfail"]),
        ("call (b), f;", &["takes 1 arguments and gives 1 results, 0 and 1 came"]),
        ("call (b), f, (b);", &["this argument of `f` must have 8 bytes, not be `b`, which has 4"]),
        ("call (a), f, (a);", &["this result of `f` must have 4 bytes"]),
        ("call (b), f, (%r1);", &["must have 8 bytes, not be the register `%r1`, which has 4"]),
        ("call (5), f, (a);", &["this result"]),
        ("call k;", &["`k` is a kernel, which cannot be called"]),
        ("call (b), (a), f;", &["(results), function, (arguments)"]),
        ("mov.u64 %rd1, cudaDeviceSynchronize;", &["declared, but the module does not define it"]),
    ] {
        assert_error(&text(body), 9, parts);
    }
}

#[test]
fn duplicate_undefined_and_too_large_declarations_are_reported() {
    assert_body_error(".reg .b32 %a;\n.reg .b32 %a;", 2, &["`%a` is declared twice"]);
    assert_body_error(".reg .b32 %a<3>;\n.reg .b32 %a<4>;", 2, &["`%a<…>` is declared twice"]);
    assert_body_error(".local .b8 big[524289];", 1, &["`big` takes 524289 bytes, more than the 524288"]);
    assert_body_error(".local .b8 one[524288];", 1, &["local variables take more than 524288 bytes"]);
    assert_body_error(".local .b8 none[];", 1, &["`none` has no size"]);
    assert_body_error(".shared .b8 big[49153];", 1, &["more than the 49152"]);
    for (text, line, parts) in [
        (".global .b32 x;\n.global .b32 x;", 5, &["`x` is defined twice"][..]),
        (".func f() { ret; }\n.func f() { ret; }", 5, &["`f` is defined twice"]),
        (".global .b8 x[];", 4, &["`x` has no size"]),
        (".entry k(.param .b8 a[4097]) { ret; }", 4, &["4097 bytes, more than the 4096"]),
        (".entry k(.param .b8 a[4000],\n.param .b8 b[97]) { ret; }", 5, &["more than 4096 bytes"]),
        (".extern .global .b8 y[4];\n.entry k() { .reg .b64 %rd;\nmov.u64 %rd, y; }", 6, &["`y` is declared, but"]),
    ] {
        assert_error(&module(text), line, parts);
    }
    let two = ".shared .b8 a[40000];\n.shared .b8 b[40000];\n.entry k() { .reg .b32 %r<2>;\nld.shared.u32 %r1, [a];\n\
               ld.shared.u32 %r1, [b]; }";
    assert_error(&module(two), 6, &["the kernel `k` has 80000 bytes of static shared memory, at most 49152"]);
    // Each kernel gets only the variables that it names; an unnamed variable takes no space.
    let each = ".shared .b8 a[40000];\n.shared .b8 b[40000];\n.entry k() { .reg .b32 %r; ld.shared.u32 %r, [a]; }\n\
                .entry l() { .reg .b32 %r; ld.shared.u32 %r, [b]; }\n.extern .global .b8 nobody[];";
    let code = decoded(&module(each));
    assert!(code.functions.iter().all(|kernel| kernel.shared_bytes == 40000));
    // PTX 8.1 raised the limit of a kernel's parameters.
    let text = ".version 8.1\n.target sm_80\n.address_size 64\n.entry k(.param .b8 a[32764]) { ret; }";
    assert_eq!(decoded(text).functions[0].param_bytes, 32764);
}

#[test]
fn a_module_with_32_bit_addresses_is_rejected() {
    let error = try_decode(".version 7.0\n.target sm_80\n.address_size 32\n.entry k() { ret; }").map(drop);
    assert!(error.is_err_and(|error| error.line == 0 && error.to_string().contains(".address_size must be 64")));
}

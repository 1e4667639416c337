//! Errors of the parser: position and message.

use crate::ptx::parse;

const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

#[test]
fn an_error_quotes_its_line() {
    let error = parse(&format!("{HEAD}.entry e() {{\n\tmov.u32 %r1 %r2; // here\n}}")).unwrap_err();
    let text = "PTX line 5: expected `,` or `;` after an operand, found `%r2`\n    mov.u32 %r1 %r2; // here";
    assert_eq!(error.to_string(), text);
}

#[test]
fn invalid_module_heads_are_rejected() {
    let cases = [
        ("", 1, "`.version`"),
        ("\n\n.target sm_80", 3, "`.version`"),
        (".version 8\n.target sm_80", 1, "a version such as 8.0"),
        (".version 8.0\n", 2, "`.target`"),
        (".version 8.0 .target debug", 1, "a target such as sm_80"),
        (".version 8.0 .target sm_80x", 1, "a target such as sm_80"),
        (".version 8.0 .target sm_10, map_f64_to_f32", 1, "a target such as sm_80"),
        (".version 8.0 .target sm_80 .address_size 16", 1, "32 or 64"),
    ];
    for (text, line, message) in cases {
        let error = parse(text).unwrap_err();
        assert!(error.line == line && error.message.contains(message), "{text}: {error}");
    }
}

/// (text after the head, line in it (from 1), part of the message)
#[test]
fn invalid_module_items_are_rejected() {
    let cases = [
        ("\n.version 8.0", 2, "found `.version`"),
        (".global x;", 1, "the type of a declaration"),
        (".global .u32 1;", 1, "the name of a variable"),
        (".global .u32 _;", 1, "the name of a variable"),
        (".global .u32 WARP_SZ;", 1, "the name of a variable"),
        (".global .u32 $;", 1, "a name after `$`"),
        (".global .u32 x", 1, "expected `;`, found the end of the file"),
        (".global .pred x;", 1, "`.pred`"),
        (".global .texref x;", 1, "not supported"),
        (".global .v4 .f64 x;", 1, "128 bits"),
        (".global .u32 .align 8 x;", 1, "expected a type, `.align` or a name"),
        (".global .align 3 .u32 x;", 1, "a power of two"),
        (".reg .u32 x;", 1, "module scope"),
        (".const[2] .u32 x;", 1, "the type of a declaration"),
        (".global .b8 x[1][];", 1, "inner dimension"),
        (".global .b8 x[-1];", 1, "not negative"),
        (".global .b8 x[1.5];", 1, "an integer"),
        (".global .b8 x[0x10000000000][0x10000000000];", 1, "at most 1099511627776 bytes"),
        (".shared .u32 x = 1;", 1, "initialiser"),
        (".global .u32 x[2] = 1;", 1, "expected `{`"),
        (".global .u32 x[2] = {1,\n2,\n3};", 3, "at most 2 elements"),
        (".global .u32 x[2] = {1,};", 1, "after the comma"),
        (".global .u32 x[2][2] = {1, 2};", 1, "several dimensions and of vectors are not supported"),
        (".global .u32 x = {1};", 1, "a number"),
        (".global .u32 x = 1.5;", 1, "the variable's type"),
        (".global .f32 x = 1;", 1, "the variable's type"),
        (".global .f16 x = 1.0;", 1, "the variable's type"),
        (".global .u16 x = 0f3F800000;", 1, "the variable's type"),
        (".global .u64 x = y;", 1, "a number"),
        (".global .u32 x = 08;", 1, "base 8"),
        (".global .u32 x = 1u;", 1, "expected a number, found `1u`"),
        (".global .u32 x = 0x;", 1, "base 16"),
        (".global .u32 x = 18446744073709551616;", 1, "at most 64 bits"),
        (".global .f32 x = 0f3F80;", 1, "8 hexadecimal digits"),
        (".global .f32 x = 1e;", 1, "a floating-point number"),
        (".entry e(.reg .u32 x) { }", 1, "must be `.param`"),
        (".entry e(.param .u32 x { }", 1, "expected `)`"),
        (".entry e() .maxntid { }", 1, "a number"),
        (".entry e() .maxntid 0x100000000 { }", 1, "32 bits"),
        (".entry e() .fast { }", 1, "a directive of the function"),
        (".func f() ret;", 1, "expected `{`, `;`"),
        (".func (.param .b32 r f();", 1, "expected `)`"),
        (".visible .weak .global .u32 x;", 1, "found `.weak`"),
        (".section .debug_x {\n .b8 1\n", 3, "the section of line 4"),
        (".pragma nounroll;", 1, "a string"),
        (".pragma \"nounroll\n;", 1, "expected `\"`"),
        (".func f() {\n.pragma \"used_bytes_mask 0x1g\"; }", 2, "a number of 32 bits after `used_bytes_mask`"),
        (".func f() {\n.pragma \"used_bytes_mask 4294967296\"; }", 2, "a number of 32 bits after `used_bytes_mask`"),
        ("\n/* one\ntwo", 2, "expected `*/`"),
        ("#include", 1, "'#'"),
        ("// fine \u{e9}\n\u{e9}", 2, "'\u{e9}'"),
        ("ret;", 1, "a variable, function or directive"),
    ];
    assert_errors(&cases, |text| format!("{HEAD}{text}"), 3);
}

#[test]
fn invalid_statements_are_rejected() {
    let cases = [
        ("ret", 2, "an operand, found `}`"),
        ("ret %r1\n", 3, "`,` or `;`"),
        ("\nadd.u32 a, ;", 2, "an operand, found `;`"),
        ("%r1;", 1, "`:` after the label `%r1`"),
        (";", 1, "an instruction, a label"),
        ("@bra;", 1, "an instruction"),
        ("@1 bra x;", 1, "a predicate"),
        ("mov.u32 a, !;", 1, "a predicate after `!`"),
        ("mov.u32 a, b|;", 1, "an operand"),
        ("mov.u32 a, b|1;", 1, "a register after `|`"),
        ("mov.u32 a, -b;", 1, "a number"),
        ("mov.f32 a, -0f3F800000;", 1, "a number, found the number 0f3F800000"),
        ("mov.u32 a, ~1;", 1, "an operand"),
        ("ld.u32 a, [b-8];", 1, "expected `]`"),
        ("ld.u32 a, [1.5];", 1, "an integer address"),
        ("ld.u32 a, [b+1.5];", 1, "an integer offset"),
        ("tex.2d.v4.f32.f32 {a, b, c, d}, [t, {x, y}];", 1, "several parts"),
        ("ld.u32 a, b[1];", 1, "`,` or `;`"),
        ("mov.b64 {a, b, c;", 1, "`,` or `}`"),
        ("mov.b64 {{a}}, c;", 1, "an operand"),
        (".reg .b32 %r<4000000000>;", 1, "at most 1048576 registers"),
        (".reg .b32 %r<-1>;", 1, "not negative"),
        (".reg .b32 %r<1;", 1, "expected `>`"),
        (".reg .b32 a[4];", 1, "expected `;`"),
        (".entry f() { }", 1, "a declaration or directive of a function's body"),
        ("{ ret;", 2, "expected `}` for the `{` of line 4, found the end of the file"),
    ];
    assert_errors(&cases, |text| format!("{HEAD}.entry e() {{ {text}\n}}"), 3);
}

/// Asserts that each case fails: `whole` makes a module of its text, whose first line follows `before` other lines.
fn assert_errors(cases: &[(&str, u32, &str)], whole: impl Fn(&str) -> String, before: u32) {
    for (text, line, message) in cases {
        match parse(&whole(text)) {
            Ok(_) => panic!("{text}: no error"),
            Err(error) => {
                assert!(error.message.contains(message), "{text}: {error}");
                assert_eq!(error.line, line + before, "{text}: {error}");
            }
        }
    }
}

//! Texts and their syntax trees.

use crate::ptx::ast::{Function, Instruction, Linkage, Module, Operand, Statement, Type, Variable};
use crate::ptx::parse;

fn module(items: &str) -> Module {
    parse(&format!(".version 8.0\n.target sm_80\n.address_size 64\n{items}")).unwrap_or_else(|e| panic!("{items}\n{e}"))
}

fn body(text: &str) -> Vec<Statement> {
    let mut module = module(&format!(".entry e() {{\n{text}\n}}"));
    module.functions.remove(0).body.unwrap()
}

fn operand(operand: &Operand) -> String {
    let list = |all: &[Operand]| all.iter().map(self::operand).collect::<Vec<_>>().join(" ");
    match operand {
        Operand::Name(name) => name.to_string(),
        Operand::Not(name) => format!("not:{name}"),
        Operand::Sink => "sink".to_owned(),
        Operand::Int(value) => format!("int:{value}"),
        Operand::F32(bits) => format!("f32:{bits:X}"),
        Operand::F64(bits) => format!("f64:{:?}", f64::from_bits(*bits)),
        Operand::Vector(all) => format!("{{{}}}", list(all)),
        Operand::Address { base, offset } => format!("[{} {offset}]", base.as_deref().unwrap_or("-")),
        Operand::Pair(a, b) => format!("pair:{}:{}", self::operand(a), self::operand(b)),
        Operand::Offset(name, offset) => format!("offset:{name}:{offset}"),
        Operand::List(all) => format!("({})", list(all)),
    }
}

fn instruction(instruction: &Instruction) -> String {
    let mut text = match &instruction.guard {
        Some((name, negated)) => format!("@{}{name} ", if *negated { "not:" } else { "" }),
        None => String::new(),
    };
    text.push_str(&instruction.opcode);
    for operand in &instruction.operands {
        text.push_str("  ");
        text.push_str(&self::operand(operand));
    }
    text
}

fn variable(variable: &Variable) -> String {
    let Variable { name, space, ty, vector, align, dims, init: values, linkage, .. } = variable;
    let values = values.iter().map(|bits| format!("{bits:x}")).collect::<Vec<_>>().join(",");
    format!("{linkage:?} {space:?} {ty:?}x{vector} align {align} {name}{dims:?} = {values}")
}

fn statement(statement: &Statement) -> String {
    match statement {
        Statement::Label(name, _) => format!("{name}:"),
        Statement::Registers { ty, name, count, .. } => format!("reg {ty:?} {name} {count:?}"),
        Statement::Variable(found) => variable(found),
        Statement::Block(all) => format!("{{ {} }}", all.iter().map(self::statement).collect::<Vec<_>>().join(" / ")),
        Statement::UsedBytes(mask) => format!("used bytes {mask:#x}"),
        Statement::Instruction(found) => instruction(found),
    }
}

#[test]
fn instructions_become_opcode_and_operands() {
    let cases = [
        ("ret;", "ret"),
        ("add.rn.ftz.sat.f32 %f1, %f2, %f3;", "add.rn.ftz.sat.f32  %f1  %f2  %f3"),
        ("mov .u32 %r1 , %tid .x ;", "mov.u32  %r1  %tid.x"),
        ("mov.u32 %r1, %ctaid.y;", "mov.u32  %r1  %ctaid.y"),
        ("@%p1 bra.uni $L__BB0_1;", "@%p1 bra.uni  $L__BB0_1"),
        ("@ ! %p1 exit;", "@not:%p1 exit"),
        (
            "ld.global.L1::evict_last.L2::128B.v2.f32 {%f1, _}, [%rd1+-8];",
            "ld.global.L1::evict_last.L2::128B.v2.f32  {%f1 sink}  [%rd1 -8]",
        ),
        ("ld.shared::cta.u32 %r1, [buffer];", "ld.shared::cta.u32  %r1  [buffer 0]"),
        ("ld.local.u32 %r1, [32];", "ld.local.u32  %r1  [- 32]"),
        ("st.param.b32 [param0+0], %r1;", "st.param.b32  [param0 0]  %r1"),
        ("ld.u32 %r1, [%rd1+-4];", "ld.u32  %r1  [%rd1 -4]"),
        ("mov.u64 %rd1, table+12;", "mov.u64  %rd1  offset:table:12"),
        ("setp.eq.and.s32 %p1|%p2, %r1, 0x1F, !%p3;", "setp.eq.and.s32  pair:%p1:%p2  %r1  int:31  not:%p3"),
        (
            "shfl.sync.down.b32 %r1|_, %r2, 16, 31, -1;",
            "shfl.sync.down.b32  pair:%r1:sink  %r2  int:16  int:31  int:-1",
        ),
        ("mov.b64 {%r1, %r2}, %rd1;", "mov.b64  {%r1 %r2}  %rd1"),
        ("st.v2.b32 [%rd1], {3, 0f3F800000};", "st.v2.b32  [%rd1 0]  {int:3 f32:3F800000}"),
        ("call (retval0), f, (a, 5);", "call  (retval0)  f  (a int:5)"),
        ("call.uni f;", "call.uni  f"),
        ("call (), f, ();", "call  ()  f  ()"),
    ];
    for (text, tree) in cases {
        let found: Vec<_> = body(text).iter().map(statement).collect();
        assert_eq!(found, [tree], "{text}");
    }
}

#[test]
fn constants_have_their_value() {
    let cases = [
        ("0", "int:0"),
        ("017", "int:15"),
        ("0x7fffffffU", "int:2147483647"),
        ("0B101", "int:5"),
        ("0xFFFFFFFFFFFFFFFF", "int:18446744073709551615"),
        ("-9223372036854775808", "int:-9223372036854775808"),
        ("-1", "int:-1"),
        ("WARP_SZ", "int:32"),
        ("0f3F800000", "f32:3F800000"),
        ("0d3FF0000000000000", "f64:1.0"),
        ("1.5e2", "f64:150.0"),
        ("1e5", "f64:100000.0"),
        ("1.", "f64:1.0"),
        (".5", "f64:0.5"),
        ("-2.5", "f64:-2.5"),
    ];
    for (text, tree) in cases {
        match &body(&format!("mov.b64 %rd1, {text};"))[..] {
            [Statement::Instruction(found)] => assert_eq!(operand(&found.operands[1]), tree, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn statements_become_syntax_trees() {
    let cases: &[(&str, &[&str])] = &[
        (".reg .b32 %r<10>, a;", &["reg B32 %r Some(10)", "reg B32 a None"]),
        ("a: b : ret;", &["a:", "b:", "ret"]),
        ("{ .reg .pred p; { L: } }", &["{ reg Pred p None / { L: } }"]),
        (".param .align 8 .b8 p[24];", &["Internal Param B8x1 align 8 p[24] = "]),
        (".loc 1 2 3, function_name $L, inlined_at 1 2 3\n.pragma \"nounroll\"; // c\n/* c */ ret;", &["ret"]),
    ];
    for (text, trees) in cases {
        let found: Vec<_> = body(text).iter().map(statement).collect();
        assert_eq!(found, *trees, "{text}");
    }
}

#[test]
fn variables_have_their_type_alignment_and_initial_value() {
    let cases = [
        (".global .u32 x;", "Internal Global U32x1 align 0 x[] = "),
        (".visible .const .align 8 .v2 .f32 x[3];", "Visible Const F32x2 align 8 x[3] = "),
        (".extern .shared .align 16 .b8 x[];", "Extern Shared B8x1 align 16 x[0] = "),
        (".common .global .f16x2 x[2][WARP_SZ];", "Common Global F16x2x1 align 0 x[2, 32] = "),
        (".global .s8 x[4] = {-1, 0xFF, 255, 0};", "Internal Global S8x1 align 0 x[4] = ff,ff,ff,0"),
        (
            ".global .f32 x[3] = {1.0, 0f40000000, -0.5};",
            "Internal Global F32x1 align 0 x[3] = 3f800000,40000000,bf000000",
        ),
        (".global .f64 x = 0d3FF0000000000000;", "Internal Global F64x1 align 0 x[] = 3ff0000000000000"),
        (".global .b64 x = 0xFFFFFFFFFFFFFFFF;", "Internal Global B64x1 align 0 x[] = ffffffffffffffff"),
    ];
    for (text, tree) in cases {
        let module = module(text);
        assert_eq!(module.variables.iter().map(variable).collect::<Vec<_>>(), [tree], "{text}");
    }
    let module = module(".weak .global .u32 a, b = 1,\n c[2];");
    let found: Vec<_> = module.variables.iter().map(|v| (&*v.name, v.linkage, v.init.len(), v.line)).collect();
    assert_eq!(found, [("a", Linkage::Weak, 0, 4), ("b", Linkage::Weak, 1, 4), ("c", Linkage::Weak, 0, 5)]);
}

#[test]
fn functions_have_their_parameters_and_directives() {
    let module = module(
        ".visible .entry k(.param .u64 .ptr .global .align 16 a, .param .align 8 .b8 b[24])
         .maxntid 256, 2 .minnctapersm 2 .maxnreg 64 .pragma \"noinline\"; { ret; }
         .entry r .reqntid 32 .reqnctapercluster 2, 1, 1 .explicitcluster { }
         .func (.param .b32 v) f (.reg .u32 x, .param .b8 rest[]);
         .weak .func never() .noreturn { trap; }",
    );
    let list = |all: &[Variable]| all.iter().map(variable).collect::<Vec<_>>();
    let [k, r, f, never] = &module.functions[..] else { panic!("{module:?}") };
    assert_eq!((&*k.name, k.entry, k.linkage, k.line), ("k", true, Linkage::Visible, 4));
    assert_eq!((k.max_threads, k.required_threads, k.max_registers), (Some([256, 2, 1]), false, 64));
    assert_eq!(list(&k.params), ["Internal Param U64x1 align 0 a[] = ", "Internal Param B8x1 align 8 b[24] = "]);
    assert_eq!((r.max_threads, r.required_threads, r.cluster), (Some([32, 1, 1]), true, Some([2, 1, 1])));
    assert_eq!(list(&f.returns), ["Internal Param B32x1 align 0 v[] = "]);
    assert_eq!(list(&f.params), ["Internal Reg U32x1 align 0 x[] = ", "Internal Param B8x1 align 0 rest[0] = "]);
    let bodies = |f: &Function| f.body.as_ref().map(Vec::len);
    assert_eq!([k, r, f, never].map(bodies), [Some(1), Some(0), None, Some(1)]);
    assert_eq!((never.noreturn, never.entry, never.linkage), (true, false, Linkage::Weak));
}

#[test]
fn module_heads_give_version_target_and_address_size() {
    let cases = [
        (".version 8.10 .target sm_90a, debug", ((8, 10), 90, "a", 64)),
        ("// c\n.version 1.4\n.target texmode_unified, sm_50\n.address_size 32", ((1, 4), 50, "", 32)),
    ];
    for (text, head) in cases {
        let Module { version, target, target_suffix, address_size, .. } = parse(text).unwrap();
        assert_eq!((version, target, &*target_suffix, address_size), head, "{text}");
    }
}

#[test]
fn a_line_counts_every_newline() {
    let found = body("/* 1\n2 */ add.u32\n a,\n b, c; @@DWARF x\n.loc 1 1 1\n{ ret; }");
    let [Statement::Instruction(add), Statement::Block(block)] = &found[..] else { panic!("{found:?}") };
    let [Statement::Instruction(ret)] = &block[..] else { panic!("{block:?}") };
    assert_eq!((add.line, ret.line), (6, 10));
}

#[test]
fn types_have_their_sizes_in_bytes() {
    let sizes = [(Type::Pred, 0), (Type::S8, 1), (Type::BF16, 2), (Type::F16x2, 4), (Type::F64, 8)];
    for (ty, bytes) in sizes {
        assert_eq!(ty.bytes(), bytes, "{ty:?}");
    }
}

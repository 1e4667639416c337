//! Bytecode of valid programs.

use super::*;
use crate::bytecode::{Action, ArgLocation, CallSite, Callee, Constant, Control, SpecialRegister};
use crate::isa::table;
use crate::operands::{Base, Class, Slot};

/// The initial value of a constant slot of the kernel.
#[track_caller]
fn constant(code: &DecodedModule, slot: Slot) -> Constant {
    let kernel = function(code, "k");
    let found = kernel.constants.iter().find(|(at, _)| *at == slot).map(|(_, value)| *value);
    found.unwrap_or_else(|| panic!("{slot:?} is no constant"))
}

/// The constant in operand `place` of the last instruction of a body.
#[track_caller]
fn operand_constant(body: &str, place: usize) -> Constant {
    let code = kernel_code(body);
    constant(&code, code.insts[code.insts.len() - 2].args.s[place])
}

fn control(inst: &Inst) -> &Control {
    match &inst.action {
        Action::Control(control) => control,
        _ => panic!("{inst:?} is no control instruction"),
    }
}

fn row_name(inst: &Inst) -> &str {
    &table().row(inst.row).expect("the row exists").name
}

#[track_caller]
fn call_site(inst: &Inst) -> &CallSite {
    match control(inst) {
        Control::Call(site) => site,
        other => panic!("{other:?} is no call"),
    }
}

#[test]
fn literals_become_constants() {
    for (body, want) in [
        ("add.s32 %r1, %r2, -1;", 0xffff_ffff),
        ("add.s32 %r1, %r2, 0xFFFFFFFF;", 0xffff_ffff),
        ("add.s16 %rs1, %rs2, -2;", 0xfffe),
        ("add.s64 %rd1, %rd2, -2;", u64::MAX - 1),
        ("add.u64 %rd1, %rd2, 0xFFFFFFFFFFFFFFFF;", u64::MAX),
        ("add.s32 %r1, %r2, WARP_SZ;", 32),
    ] {
        assert_eq!(operand_constant(body, 2), Constant::Bits(want), "{body}");
    }
    for (body, want) in [
        ("mov.f32 %f1, 0f3F800000;", 0x3f80_0000),
        ("mov.f32 %f1, 1.5;", 0x3fc0_0000),
        ("mov.b32 %r1, 0f3F800000;", 0x3f80_0000),
        ("mov.f64 %fd1, 0d3FF0000000000000;", 0x3ff0_0000_0000_0000),
        ("mov.f64 %fd1, 0f3F800000;", 0x3ff0_0000_0000_0000),
        ("mov.pred %p1, 1;", 1),
        ("mov.pred %p1, -1;", 1),
        ("mov.pred %p1, 0;", 0),
    ] {
        assert_eq!(operand_constant(body, 1), Constant::Bits(want), "{body}");
    }
    assert_eq!(operand_constant("st.global.u8 [%rd1], 300;", 0), Constant::Bits(300));
}

#[test]
fn equal_constants_share_a_slot() {
    let code = kernel_code("add.s32 %r1, %r2, 7;\nadd.s32 %r3, %r4, 7;\nadd.s64 %rd1, %rd2, 7;\nmov.u32 %r1, %tid.x;");
    assert_eq!(code.insts[0].args.s[2], code.insts[1].args.s[2]);
    let kernel = function(&code, "k");
    assert_eq!(kernel.constants.len(), 3);
    assert_eq!(constant(&code, code.insts[3].args.s[1]), Constant::Special(SpecialRegister::Tid(0)));
    // r1 to r4 and two constants: a register that is declared but never used gets no slot.
    assert_eq!((kernel.registers.b32, kernel.registers.b64, kernel.registers.pred), (6, 3, 0));
    assert_eq!(kernel.own_registers.len(), 6);
}

#[test]
fn special_registers_become_constants_or_clock_reads() {
    for (name, special) in [
        ("%ntid.y", SpecialRegister::Ntid(1)),
        ("%nctaid.z", SpecialRegister::Nctaid(2)),
        ("%laneid", SpecialRegister::LaneId),
        ("%lanemask_lt", SpecialRegister::LanemaskLt),
        ("%cluster_ctarank", SpecialRegister::ClusterCtarank),
    ] {
        assert_eq!(operand_constant(&format!("mov.u32 %r1, {name};"), 1), Constant::Special(special));
    }
    assert_eq!(operand_constant("mov.u64 %rd1, %gridid;", 1), Constant::Special(SpecialRegister::GridId));
    for (body, row) in [
        ("mov.u32 %r1, %clock;", "mov.u32.%clock"),
        ("mov.u64 %rd1, %clock64;", "mov.u64.%clock64"),
        ("mov.b64 %rd1, %globaltimer;", "mov.u64.%globaltimer"),
    ] {
        assert_eq!(row_name(&insts(body)[0]), row);
    }
}

#[test]
fn an_address_becomes_a_base_and_an_offset() {
    let wide = |inst: &Inst| match inst.args.base {
        Base::Wide(slot) => slot,
        other => panic!("{other:?}"),
    };
    let code = kernel_code(
        "ld.global.u32 %r1, [table+4];\nld.const.f64 %fd1, [half];\nld.shared.u32 %r1, [tile+12];\n\
         ld.shared.u32 %r1, [dynamic+8];\nld.shared.u32 %r1, [%r2+-4];\nld.global.u32 %r1, [%rd2+16];\n\
         ld.param.u32 %r1, [k_1];\nld.local.u32 %r1, [depot+8];\nld.global.u32 %r1, [64];\nld.u32 %r1, [table];",
    );
    let args = |at: usize| &code.insts[at].args;
    assert_eq!((constant(&code, wide(&code.insts[0])), args(0).offset), (Constant::Global(0, 0), 4));
    assert_eq!(constant(&code, wide(&code.insts[1])), Constant::Global(1, 0));
    assert_eq!((args(2).base, args(2).offset), (Base::None, 12));
    let Base::Narrow(dynamic) = args(3).base else { panic!("{:?}", args(3)) };
    assert_eq!((constant(&code, dynamic), args(3).offset), (Constant::DynamicShared(0), 8));
    assert!(matches!(args(4).base, Base::Narrow(slot) if slot.class() == Class::B32));
    assert_eq!(args(4).offset, -4);
    assert_eq!((wide(&code.insts[5]).class(), args(5).offset), (Class::B64, 16));
    assert_eq!((args(6).base, args(6).offset), (Base::Param, 8));
    assert_eq!((args(7).base, args(7).offset), (Base::Frame, 8));
    assert_eq!((args(8).base, args(8).offset), (Base::None, 64));
    assert_eq!(constant(&code, wide(&code.insts[9])), Constant::Global(0, 0));
    let kernel = function(&code, "k");
    assert_eq!((kernel.shared_bytes, kernel.dynamic_shared_align, kernel.frame_bytes), (256, 16, 48));
    assert_eq!(kernel.param_bytes, 12);
}

#[test]
fn the_address_of_a_variable_becomes_a_constant() {
    assert_eq!(operand_constant("mov.u64 %rd1, table;", 1), Constant::Global(0, 0));
    assert_eq!(operand_constant("mov.u64 %rd1, table+8;", 1), Constant::Global(0, 8));
    assert_eq!(operand_constant("mov.u32 %r1, tile;", 1), Constant::Bits(0));
    assert_eq!(operand_constant("mov.u32 %r1, dynamic;", 1), Constant::DynamicShared(0));
    assert_eq!(operand_constant("mov.b64 %rd1, k_1;", 1), Constant::Bits(8));
    assert_eq!(operand_constant("cvta.global.u64 %rd1, table;", 1), Constant::Global(0, 0));
    assert_eq!(operand_constant("add.s64 %rd1, table, %rd2;", 1), Constant::Global(0, 0));
    let list = insts("mov.u64 %rd1, depot+4;");
    assert_eq!((row_name(&list[0]), list[0].args.base, list[0].args.offset), ("mov.u64.frame", Base::Frame, 4));
    // Other instructions need the frame's address in a register, so `mov.u64.frame` computes it first.
    let list = insts("cvta.local.u64 %rd1, depot;");
    assert_eq!((list.len(), row_name(&list[0])), (2, "mov.u64.frame"));
    assert_eq!(list[0].args.s[0], list[1].args.s[1]);
}

#[test]
fn vectors_pairs_discarded_operands_and_guards_get_their_slots() {
    let list = insts(
        "ld.global.v4.u32 {%r1, %r2, %r3, _}, [%rd1];\nmov.b64 %rd1, {%r1, %r2};\nmov.b64 {%r1, _}, %rd1;\n\
         @!%p1 add.s32 %r1, %r1, %r2;\nshfl.sync.down.b32 %r1|%p2, %r2, %r3, 31, -1;\n\
         shfl.sync.down.b32 %r1, %r2, %r3, 31, -1;\nmov.b32 %r1, {%rs1, %rs2};",
    );
    assert_eq!(list[0].args.vector, 4);
    assert!(list[0].args.s[3].is_none() && !list[0].args.s[2].is_none());
    assert_eq!(row_name(&list[1]), "mov.b64.pack2.b32");
    assert_eq!(row_name(&list[2]), "mov.b64.unpack2.b32");
    assert_eq!(list[2].args.s[2], list[1].args.s[0]);
    assert!(list[3].guard.negated());
    assert_eq!(list[4].args.s[1].class(), Class::Pred);
    assert!(list[5].args.s[1].is_none());
    assert_eq!(list[4].args.all.len(), 6);
    assert_eq!(row_name(&list[6]), "mov.b32.pack2.b16");
}

#[test]
fn labels_are_scoped() {
    let code = kernel_code(
        "bra $end;\n{\nagain: add.s32 %r1, %r1, 1;\n@%p1 bra again;\n}\n{\nagain: add.s32 %r1, %r1, 2;\nbra.uni again;\n}\n$end:",
    );
    let targets: Vec<u32> = code
        .insts
        .iter()
        .filter_map(|inst| match &inst.action {
            Action::Control(Control::Branch(target)) => Some(*target),
            _ => None,
        })
        .collect();
    assert_eq!(targets, [5, 1, 3]);
    // A label at the end points at the `ret` that the decoder adds.
    assert!(matches!(control(&code.insts[5]), Control::Return));
    assert_eq!((function(&code, "k").start, function(&code, "k").end), (0, 6));
}

#[test]
fn names_are_scoped() {
    let list = insts(
        ".reg .b32 %x; .reg .b32 %t1<3>;\nmov.u32 %x, 1;\n{\n.reg .b64 %x;\nmov.u64 %x, 1;\n}\nmov.u32 %x, %t12;",
    );
    assert_eq!(list[0].args.s[0], list[2].args.s[0]);
    assert_eq!(list[1].args.s[0].class(), Class::B64);
}

/// Two kernels, three functions: both kernels call `both`, `cycle` calls itself, nothing calls `unused`.
const CALLS: &str = "
.func (.param .b32 r) both(.param .b64 a, .param .b32 b);
.func (.param .b32 r) both(.param .b64 a, .param .b32 b)
{
.reg .b32 %r<3>; .reg .pred %p; .shared .b8 own[20];
ld.param.u32 %r1, [b];
st.shared.u32 [own+4], %r1;
st.param.b32 [r], 9;
ret;
}
.func (.reg .b32 r) cycle(.reg .b32 a)
{
call (r), cycle, (a);
add.s32 r, r, 1;
ret;
}
.func unused()
{
ret;
}
.entry k()
{
.reg .b32 %r<4>; .reg .b64 %rd<4>; .shared .align 16 .b8 mine[32];
{ .param .b64 a; .param .b32 b; .param .b32 c;
st.param.b64 [a], 1; st.param.b32 [b], 2;
call.uni (c), both, (a, b);
ld.param.b32 %r1, [c]; }
call (%r2), cycle, (5);
st.shared.u32 [mine+4], %r2;
}
.entry l()
{
.reg .b32 %r<4>; .shared .align 16 .b8 mine[16];
call (%r1), both, (1, %r2);
st.shared.u32 [mine], %r1;
}
";

#[test]
fn call_sites_have_the_places_of_arguments_and_results() {
    let code = decoded(&module(CALLS));
    let index = |name: &str| code.functions.iter().position(|f| &*f.name == name).expect("it exists") as u32;
    let both = function(&code, "both");
    assert_eq!(both.returns.iter().map(|p| (p.offset, p.bytes)).collect::<Vec<_>>(), [(0, 4)]);
    assert_eq!(both.params.iter().map(|p| (p.offset, p.bytes)).collect::<Vec<_>>(), [(8, 8), (16, 4)]);
    assert_eq!(both.frame_bytes, 32);
    let recursive: Vec<&str> = code.functions.iter().filter(|f| f.recursive).map(|f| &*f.name).collect();
    assert_eq!(recursive, ["cycle"]);
    let cycle = function(&code, "cycle");
    assert_eq!(cycle.params[0].register, Some(cycle.own_registers[1]));
    assert_eq!(cycle.returns[0].register, Some(cycle.own_registers[0]));

    let k = function(&code, "k");
    let sites: Vec<&CallSite> = code.insts[k.start as usize..k.end as usize]
        .iter()
        .filter(|inst| matches!(inst.action, Action::Control(Control::Call(_))))
        .map(call_site)
        .collect();
    assert!(matches!(sites[0].callee, Callee::Function(f) if f == index("both")));
    assert_eq!(
        *sites[0].args,
        [ArgLocation::Param { offset: 0, bytes: 8 }, ArgLocation::Param { offset: 8, bytes: 4 }]
    );
    assert_eq!(*sites[0].returns, [ArgLocation::Param { offset: 12, bytes: 4 }]);
    let [ArgLocation::Register(five)] = *sites[1].args else { panic!("{:?}", sites[1]) };
    assert_eq!(constant(&code, five), Constant::Bits(5));
}

#[test]
fn kernels_that_share_a_function_use_its_slots_and_offsets() {
    let code = decoded(&module(CALLS));
    let (k, l, both, cycle) =
        (function(&code, "k"), function(&code, "l"), function(&code, "both"), function(&code, "cycle"));
    // `own` of `both` is at offset 0 in both kernels, each kernel's `mine` behind it.
    assert_eq!((k.shared_bytes, l.shared_bytes), (64, 48));
    let offsets = |f: &Function| -> Vec<i64> {
        let insts = &code.insts[f.start as usize..f.end as usize];
        insts.iter().filter(|inst| row_name(inst) == "st.shared.u32").map(|inst| inst.args.offset).collect()
    };
    assert_eq!((offsets(both), offsets(k), offsets(l)), (vec![4], vec![36], vec![32]));
    // Within a kernel the registers of no two functions overlap.
    for (kernel, reached) in [(k, vec![both, cycle]), (l, vec![both])] {
        let mut slots: Vec<Slot> =
            kernel.own_registers.iter().chain(reached.iter().flat_map(|f| &f.own_registers)).copied().collect();
        slots.extend(kernel.constants.iter().map(|(slot, _)| *slot));
        let count = slots.len();
        slots.sort_unstable_by_key(|slot| (slot.class() as u32, slot.index()));
        slots.dedup();
        assert_eq!(slots.len(), count, "{}", kernel.name);
        for slot in slots {
            assert!(slot.index() < kernel.registers.of(slot.class()), "{slot:?} of {}", kernel.name);
        }
    }
    assert!(l.registers.b32 < k.registers.b32);
}

#[test]
fn initialisers_become_bytes() {
    let code = decoded(&module(
        ".const .f32 c[] = {1.0, 2.0};\n.global .b8 g[4] = {1, 2};\n.global .u64 w[2] = {5};\n.global .align 8 .b8 x[16];",
    ));
    let [c, g, w, x] = &code.globals[..] else { panic!("{:?}", code.globals) };
    assert_eq!((c.bytes, c.constant), (8, true));
    assert_eq!(c.init.as_deref(), Some(&[0, 0, 0x80, 0x3f, 0, 0, 0, 0x40][..]));
    assert_eq!(g.init.as_deref(), Some(&[1, 2][..]));
    assert_eq!((w.bytes, w.align, w.constant), (16, 8, false));
    assert_eq!(w.init.as_deref(), Some(&5u64.to_le_bytes()[..]));
    assert_eq!((x.init.as_deref(), x.bytes), (None, 16));
}

#[test]
fn the_reported_registers_are_those_live_at_once() {
    let reported = |body: &str| function(&kernel_code(body), "k").reported_registers;
    // A chain with one live value takes one register.
    assert_eq!(reported("mov.u32 %r1, 1;\nadd.s32 %r2, %r1, 1;\nadd.s32 %r3, %r2, 1;\nst.shared.u32 [tile], %r3;"), 1);
    assert_eq!(reported("mov.u32 %r1, 1;\nmov.u32 %r2, 2;\nadd.s32 %r3, %r1, %r2;\nst.shared.u32 [tile], %r3;"), 2);
    // A 64-bit address takes two 32-bit registers.
    assert_eq!(reported("mov.u64 %rd1, 1;\nmov.u32 %r1, 2;\nst.global.u32 [%rd1], %r1;"), 3);
    // %r1 stays live during the loop.
    assert_eq!(
        reported(
            "mov.u32 %r1, 1;\nmov.u32 %r2, 9;\nl: add.s32 %r2, %r2, -1;\nsetp.ne.s32 %p1, %r2, 0;\n@%p1 bra l;\n\
                  st.shared.u32 [tile], %r1;"
        ),
        2
    );
    // 300 live values: the hardware has 255 registers per thread.
    let many: String = (0..300).map(|i| format!("ld.shared.u32 %x{i}, [tile];\n")).collect();
    let used: String = (0..300).map(|i| format!("st.shared.u32 [tile], %x{i};\n")).collect();
    assert_eq!(reported(&format!(".reg .b32 %x<300>;\n{many}{used}")), 255);
}

#[test]
fn thread_limits_of_kernels_are_kept() {
    let code = decoded(&module(".entry k() .maxntid 128, 2, 1 { ret; }\n.entry l() .reqntid 64 { trap; }"));
    assert_eq!(function(&code, "k").max_threads, Some([128, 2, 1]));
    assert!(!function(&code, "k").required_threads && function(&code, "l").required_threads);
    assert_eq!(function(&code, "l").end - function(&code, "l").start, 2);
    assert_eq!(code.lines.len(), 5);
    assert_eq!(code.target, 80);
}

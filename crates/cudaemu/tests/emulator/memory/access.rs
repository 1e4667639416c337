//! `ld` and `st`: every state space, type and vector length, with registers of every width.

use super::{LANES, bytes_of, header, noise};
use crate::bare_device::{Device, Params};

/// The parts of a row's name.
struct Row<'a> {
    name: &'a str,
    store: bool,
    space: &'a str,
    count: usize,
    ty: &'a str,
}

impl<'a> Row<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let words: Vec<&str> = name.split('.').collect();
        if !["ld", "st"].contains(&words[0]) {
            return None;
        }
        let spaces = ["global", "const", "shared", "local", "param"];
        let space = words.iter().find(|word| spaces.contains(&word.split("::").next().unwrap_or_default()));
        let vector = words.iter().find_map(|word| word.strip_prefix('v')?.parse().ok());
        Some(Self {
            name,
            store: words[0] == "st",
            space: space.copied().unwrap_or(""),
            count: vector.unwrap_or(1),
            ty: words[words.len() - 1],
        })
    }

    /// Allowed register widths in bits.
    fn registers(&self) -> Vec<usize> {
        let bits = 8 * bytes_of(self.ty);
        [16, 32, 64].into_iter().filter(|&width| width >= bits).collect()
    }

    /// Memories that the row can address.
    fn places(&self) -> Vec<AccessPlace> {
        match self.space {
            // `st` to the generic address of a parameter is not allowed.
            "" if self.store => vec![AccessPlace::Global, AccessPlace::Shared, AccessPlace::Local],
            "" => vec![
                AccessPlace::Global,
                AccessPlace::Shared,
                AccessPlace::Local,
                AccessPlace::Const,
                AccessPlace::KernelParam,
            ],
            "global" => vec![AccessPlace::Global],
            "const" => vec![AccessPlace::Const],
            "local" => vec![AccessPlace::Local],
            "param" if self.store => vec![AccessPlace::FunctionParam],
            "param" => vec![AccessPlace::KernelParam, AccessPlace::FunctionParam],
            "param::entry" => vec![AccessPlace::KernelParam],
            "param::func" => vec![AccessPlace::FunctionParam],
            _ => vec![AccessPlace::Shared],
        }
    }
}

/// A memory with 16 bytes per lane.
#[derive(Clone, Copy, Debug, PartialEq)]
enum AccessPlace {
    Global,
    Shared,
    Local,
    Const,
    /// The kernel's parameter block.
    KernelParam,
    /// A parameter of a function.
    FunctionParam,
}

/// Content of constant memory and parameters, equal for all lanes.
const SAME: [u8; 16] = [0x81, 0x02, 0xf3, 0x84, 0x05, 0xe6, 0x07, 0x98, 0xff, 0x0a, 0x8b, 0x0c, 0x9d, 0x0e, 0x7f, 0xc0];

/// Declarations and addresses of each thread: `%in` points to its 64 bytes of input, `%out` to its 64 bytes of output.
const PROLOGUE: &str = "
    .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .b32 %w<4>;
    .reg .b32 %t, %s; .reg .b64 %in, %out, %o, %a;
    .shared .align 16 .b8 shared[512];
    .local .align 16 .b8 local[16];
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    mov.u32 %t, %tid.x;
    mul.wide.u32 %o, %t, 64;
    add.s64 %in, %in, %o;
    add.s64 %out, %out, %o;
    shl.b32 %t, %t, 4;
    mov.u32 %s, shared;
    add.s32 %s, %s, %t;
";

fn register(width: usize, index: usize) -> String {
    let file = match width {
        16 => "h",
        32 => "r",
        _ => "d",
    };
    format!("%{file}{index}")
}

/// `{a, b}`, or one operand.
fn operands(width: usize, count: usize) -> String {
    let list: Vec<String> = (0..count).map(|index| register(width, index)).collect();
    if count == 1 { list[0].clone() } else { format!("{{{}}}", list.join(", ")) }
}

/// The address operand of a row, and the instructions that compute it into `%a`.
fn address(row: &Row<'_>, place: AccessPlace) -> (String, String) {
    let generic = |space: &str, name: &str| format!("mov.u64 %a, {name};\ncvta.{space}.u64 %a, %a;\n");
    let (before, base) = match (place, row.space) {
        (AccessPlace::Global, _) => (String::new(), "%in"),
        (AccessPlace::Shared, "") => ("mul.wide.u32 %a, %s, 1;\ncvta.shared.u64 %a, %a;\n".into(), "%a"),
        (AccessPlace::Shared, _) => (String::new(), "%s"),
        (AccessPlace::Local, "") => (generic("local", "local"), "%a"),
        (AccessPlace::Local, _) => (String::new(), "local"),
        (AccessPlace::Const, "") => (generic("const", "same"), "%a"),
        (AccessPlace::Const, _) => (String::new(), "same"),
        (AccessPlace::KernelParam, "") => (generic("param", "data"), "%a"),
        (AccessPlace::KernelParam | AccessPlace::FunctionParam, _) => (String::new(), "data"),
    };
    (before, base.into())
}

/// A kernel that loads with the row and stores each element as a whole register, 16 bytes apart.
fn load_kernel(row: &Row<'_>, place: AccessPlace, width: usize, kernel: usize) -> String {
    let mut body = PROLOGUE.to_string();
    match place {
        AccessPlace::Shared => {
            body += "ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%in];\nst.shared.v4.u32 [%s], {%w0, %w1, %w2, %w3};\n"
        }
        AccessPlace::Local => {
            body += "ld.global.v4.u32 {%w0, %w1, %w2, %w3}, [%in];\nst.local.v4.u32 [local], {%w0, %w1, %w2, %w3};\n"
        }
        _ => {}
    }
    let (before, base) = address(row, place);
    body += &format!("{before}{} {}, [{base}];\n", row.name, operands(width, row.count));
    for index in 0..row.count {
        body += &format!("st.global.b{width} [%out+{}], {};\n", 16 * index, register(width, index));
    }
    let params = "(.param .u64 out, .param .u64 in, .param .align 16 .b8 data[16])";
    if place != AccessPlace::FunctionParam {
        return format!(".visible .entry k{kernel}{params} {{ {body} ret; }}\n");
    }
    // The function's 16 bytes are this lane's input.
    format!(
        ".func f{kernel}{params} {{ {body} ret; }}
        .visible .entry k{kernel}{params} {{
            {PROLOGUE}
            ld.param.u64 %out, [out];
            ld.param.u64 %d0, [in];
            ld.global.v4.u32 {{%w0, %w1, %w2, %w3}}, [%in];
            {{
                .param .b64 a; .param .b64 b; .param .align 16 .b8 c[16];
                st.param.b64 [a], %out; st.param.b64 [b], %d0; st.param.v4.b32 [c], {{%w0, %w1, %w2, %w3}};
                call.uni f{kernel}, (a, b, c);
            }}
            ret;
        }}\n"
    )
}

/// A register's bits after a load of `bytes` as the type.
fn extended(bytes: &[u8], ty: &str, width: usize) -> Vec<u8> {
    let negative = ty.starts_with('s') && bytes[bytes.len() - 1] & 0x80 != 0;
    let mut value = bytes.to_vec();
    value.resize(width / 8, if negative { 0xff } else { 0 });
    value
}

fn params(out: u64, input: u64) -> Params {
    Params::default().pointer(out).pointer(input).add(&SAME)
}

/// Every row that satisfies `wanted`, with every memory and register width.
fn variants(wanted: impl Fn(&Row<'_>) -> bool) -> Vec<(Row<'static>, AccessPlace, usize)> {
    let rows = cudaemu::isa::table().rows().iter().filter_map(|row| Row::parse(&row.name)).filter(|row| wanted(row));
    rows.flat_map(|row| {
        let mut list = Vec::new();
        for place in row.places() {
            for width in row.registers() {
                list.push((Row { ..row }, place, width));
            }
        }
        list
    })
    .collect()
}

#[test]
fn every_load_extends_the_value_to_the_register() {
    let mut device = Device::new();
    let input = noise(64 * LANES, 1);
    let source = device.upload(&input);
    let variants = variants(|row| !row.store);
    // A module has 200 kernels, one per variant.
    for chunk in variants.chunks(200) {
        let constant: Vec<String> = SAME.iter().map(u8::to_string).collect();
        let mut text = header() + &format!(".const .align 16 .b8 same[16] = {{{}}};\n", constant.join(", "));
        for (kernel, (row, place, width)) in chunk.iter().enumerate() {
            text += &load_kernel(row, *place, *width, kernel);
        }
        let module = device.load(&text);
        for (kernel, (row, place, width)) in chunk.iter().enumerate() {
            let out = device.upload(&[0; 64 * LANES]);
            device.run(&module, &format!("k{kernel}"), 1, LANES as u32, params(out, source));
            let got = device.download(out, 64 * LANES);
            let size = bytes_of(row.ty);
            for lane in 0..LANES {
                let data = if matches!(place, AccessPlace::Const | AccessPlace::KernelParam) {
                    &SAME[..]
                } else {
                    &input[64 * lane..]
                };
                for index in 0..row.count {
                    let at = 64 * lane + 16 * index;
                    let want = extended(&data[size * index..][..size], row.ty, *width);
                    assert_eq!(
                        got[at..at + width / 8],
                        want,
                        "{} from {place:?} to {width} bits, lane {lane}",
                        row.name
                    );
                }
            }
        }
    }
    device.assert_executed_all(&["ld"]);
}

/// A kernel that fills 16 bytes with 0xa5, stores elements from registers there and copies the 16 bytes to the output.
fn store_kernel(row: &Row<'_>, place: AccessPlace, width: usize, kernel: usize) -> String {
    let mut body = PROLOGUE.to_string();
    for index in 0..row.count {
        body += &format!("ld.global.b{width} {}, [%in+{}];\n", register(width, index), 16 * index);
    }
    body += "mov.u32 %w0, 0xa5a5a5a5;\n";
    let fill = "{%w0, %w0, %w0, %w0}";
    let (before, base) = address(row, place);
    let store = |base: &str| format!("{before}{} [{base}], {};\n", row.name, operands(width, row.count));
    body += &match place {
        AccessPlace::Global => format!("st.global.v4.u32 [%out], {fill};\n{}", store("%out")),
        AccessPlace::Shared => format!(
            "st.shared.v4.u32 [%s], {fill};\n{}{};\n",
            store(&base),
            "ld.shared.v4.u32 {%w0, %w1, %w2, %w3}, [%s]"
        ),
        AccessPlace::Local => format!(
            "st.local.v4.u32 [local], {fill};\n{}{};\n",
            store(&base),
            "ld.local.v4.u32 {%w0, %w1, %w2, %w3}, [local]"
        ),
        _ => format!(
            "{{ .param .b64 a; .param .align 16 .b8 data[16];
               st.param.b64 [a], %out; st.param.v4.b32 [data], {fill};
               {}
               call.uni keep, (a, data); }}\n",
            store(&base)
        ),
    };
    if matches!(place, AccessPlace::Shared | AccessPlace::Local) {
        body += "st.global.v4.u32 [%out], {%w0, %w1, %w2, %w3};\n";
    }
    format!(
        ".visible .entry k{kernel}(.param .u64 out, .param .u64 in, .param .align 16 .b8 unused[16]) {{ {body} ret; }}\n"
    )
}

/// A function that stores its 16-byte parameter at the address in its first parameter.
const KEEP: &str = ".func keep(.param .b64 out, .param .align 16 .b8 data[16]) {
    .reg .b32 %w<4>; .reg .b64 %out;
    ld.param.u64 %out, [out];
    ld.param.v4.u32 {%w0, %w1, %w2, %w3}, [data];
    st.global.v4.u32 [%out], {%w0, %w1, %w2, %w3};
    ret;
}\n";

#[test]
fn every_store_writes_its_bytes_and_no_others() {
    let mut device = Device::new();
    let input = noise(64 * LANES, 2);
    let source = device.upload(&input);
    let variants = variants(|row| row.store);
    for chunk in variants.chunks(200) {
        let mut text = header() + KEEP;
        for (kernel, (row, place, width)) in chunk.iter().enumerate() {
            text += &store_kernel(row, *place, *width, kernel);
        }
        let module = device.load(&text);
        for (kernel, (row, place, width)) in chunk.iter().enumerate() {
            let out = device.upload(&[0; 64 * LANES]);
            device.run(&module, &format!("k{kernel}"), 1, LANES as u32, params(out, source));
            let got = device.download(out, 64 * LANES);
            let size = bytes_of(row.ty);
            for lane in 0..LANES {
                let mut want = [0xa5; 16];
                for index in 0..row.count {
                    want[size * index..][..size].copy_from_slice(&input[64 * lane + 16 * index..][..size]);
                }
                assert_eq!(got[64 * lane..][..16], want, "{} to {place:?} from {width} bits, lane {lane}", row.name);
            }
        }
    }
    device.assert_executed_all(&["st"]);
}

#[test]
fn immediates_absent_elements_and_cache_hints_are_accepted() {
    let mut device = Device::new();
    let module = device.load(
        &(header()
            + "
        .visible .entry k(.param .u64 out) {
            .reg .b64 %a, %p; .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .f64 %e;
            ld.param.u64 %a, [out];
            mov.u64 %p, 0;
            st.relaxed.gpu.global.u32 [%a], 0x12345678;
            st.global.L1::no_allocate.L2::cache_hint.v2.f32 [%a+8], {0f3FC00000, 2.5}, %p;
            st.volatile.global.f64 [%a+16], 0d3FF8000000000000;
            st.global.wt.u8 [%a+24], 258;
            ld.global.nc.L1::evict_last.L2::128B.v4.u32 {%r0, _, %r1, _}, [%a];
            st.release.sys.global.v2.u32 [%a+32], {%r1, %r0};
            ld.acquire.cta.global.L2::cache_hint.u32 %r2, [%a], %p;
            ld.volatile.u32 %r3, [%a+8];
            st.v2.u32 [%a+40], {%r2, %r3};
            ret;
        }"),
    );
    let out = device.upload(&[0; 48]);
    device.run(&module, "k", 1, 1, Params::default().pointer(out));
    let words: Vec<u32> =
        device.download(out, 48).chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect();
    assert_eq!(
        words,
        [
            0x1234_5678,
            0,
            0x3fc0_0000,
            0x4020_0000,
            0,
            0x3ff8_0000,
            2,
            0,
            0x3fc0_0000,
            0x1234_5678,
            0x1234_5678,
            0x3fc0_0000
        ]
    );
}

#[test]
fn parameters_are_readable_by_their_address() {
    let mut device = Device::new();
    let body = "
        .reg .b64 %out, %a; .reg .b32 %x, %y;
        ld.param.u64 %out, [out];
        mov.u64 %a, data;
        ld.param.u32 %x, [%a+8];";
    let module = device.load(
        &(header()
            + &format!(
                "
        .func f(.param .b64 out, .param .align 16 .b8 data[16]) {{ {body}
            cvta.local.u64 %a, %a;
            ld.u32 %y, [%a+12];
            st.global.v2.u32 [%out], {{%x, %y}};
            ret;
        }}
        .visible .entry k(.param .u64 out, .param .align 16 .b8 data[16]) {{ {body}
            .reg .b32 %w<4>;
            cvta.param.u64 %a, %a;
            ld.u32 %y, [%a+12];
            st.global.v2.u32 [%out], {{%x, %y}};
            mov.u32 %w0, 5; mov.u32 %w1, 6; mov.u32 %w2, 7; mov.u32 %w3, 8;
            add.s64 %out, %out, 8;
            {{ .param .b64 a; .param .align 16 .b8 b[16];
               st.param.b64 [a], %out; st.param.v4.b32 [b], {{%w0, %w1, %w2, %w3}};
               call.uni f, (a, b); }}
            ret;
        }}"
            )),
    );
    let out = device.upload(&[0; 16]);
    device.run(&module, "k", 1, 1, Params::default().pointer(out).add(&SAME));
    let mut want = SAME[8..].to_vec();
    want.extend([7, 0, 0, 0, 8, 0, 0, 0]);
    assert_eq!(device.download(out, 16), want);
}

#[test]
fn isspacep_recognises_only_the_space_of_a_generic_address() {
    let mut device = Device::new();
    let mut body = String::new();
    for (index, space) in ["global", "const", "shared", "local", "param"].into_iter().enumerate() {
        let name = ["variable", "constant", "shared", "local", "out"][index];
        body += &format!("mov.u64 %a, {name}; cvta.{space}.u64 %a, %a; mov.u32 %v, 0;\n");
        for (bit, asked) in ["global", "const", "shared", "local", "param"].into_iter().enumerate() {
            body += &format!("isspacep.{asked} %p, %a; selp.u32 %w, {}, 0, %p; or.b32 %v, %v, %w;\n", 1 << bit);
        }
        body += &format!("st.global.u32 [%out+{}], %v;\n", 4 * index);
    }
    let module = device.load(
        &(header()
            + &format!(
                "
        .global .align 4 .b8 variable[4];
        .const .align 4 .b8 constant[4];
        .visible .entry k(.param .u64 out) {{
            .reg .b64 %a, %out; .reg .b32 %v, %w; .reg .pred %p;
            .shared .align 4 .b8 shared[4];
            .local .align 4 .b8 local[4];
            ld.param.u64 %out, [out];
            {body}
            ret;
        }}"
            )),
    );
    let out = device.upload(&[0; 20]);
    device.run(&module, "k", 1, 1, Params::default().pointer(out));
    let got: Vec<u8> = device.download(out, 20).into_iter().step_by(4).collect();
    assert_eq!(got, [1, 2, 4, 8, 16]);
}

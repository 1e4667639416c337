//! `cp.async`: every form and size, and accesses before the wait.

use cudaemu::fault::FaultKind;

use super::{LANES, header, noise};
use crate::bare_device::{Device, Params};

/// A kernel that copies `size` bytes of each thread's 16 (with the operands after the size) over 16 bytes of 0xa5 in shared
/// memory, executes `wait`, and stores the 16 bytes.
fn kernel(name: &str, opcode: &str, operands: &str, wait: &str) -> String {
    format!(
        ".visible .entry {name}(.param .u64 out, .param .u64 in) {{
            .reg .b32 %w<4>; .reg .b32 %t, %s, %size; .reg .b64 %in, %out, %o, %s64, %policy; .reg .pred %p;
            .shared .align 16 .b8 shared[1024];
            ld.param.u64 %out, [out]; ld.param.u64 %in, [in];
            mov.u64 %policy, 0;
            mov.u32 %t, %tid.x;
            setp.lt.u32 %p, %t, 16;
            and.b32 %size, %t, 3;
            mul.wide.u32 %o, %t, 16; add.s64 %in, %in, %o; add.s64 %out, %out, %o; add.s64 %in, %in, -16;
            shl.b32 %t, %t, 4; mov.u32 %s, shared; add.s32 %s, %s, %t; mul.wide.u32 %s64, %s, 1;
            mov.u32 %w0, 0xa5a5a5a5;
            st.shared.v4.u32 [%s], {{%w0, %w0, %w0, %w0}};
            {opcode} {operands};
            {wait}
            ld.shared.v4.u32 {{%w0, %w1, %w2, %w3}}, [%s];
            st.global.v4.u32 [%out], {{%w0, %w1, %w2, %w3}};
            ret;
        }}\n"
    )
}

/// Input after 16 bytes that must not be read: `kernel` subtracts 16 from the address and the instructions add it again.
fn upload_input(device: &Device) -> (Vec<u8>, u64) {
    let bytes = noise(16 * LANES, 3);
    (bytes.clone(), device.upload(&bytes))
}

/// (opcode, operands, wait instruction, size of the copy, bytes that a lane's source provides)
type Form = (String, String, &'static str, usize, fn(usize, usize) -> usize);

#[test]
fn every_form_and_size_copies_its_bytes_and_zeros() {
    let mut device = Device::new();
    let (data, source) = upload_input(&device);
    let wait_all = "cp.async.wait_all;";
    let wait_group = "cp.async.commit_group; cp.async.wait_group 0;";
    let mut forms: Vec<Form> = Vec::new();
    for (cache, sizes) in [("ca", &[4, 8, 16][..]), ("cg", &[16])] {
        for space in ["shared", "shared::cta"] {
            for &size in sizes {
                let name = format!("cp.async.{cache}.{space}.global");
                let mut form = |name: String, operands: String, wait, of| forms.push((name, operands, wait, size, of));
                form(name.clone(), format!("[%s], [%in+16], {size}"), wait_all, |_, size| size);
                form(format!("{name}.L2::128B"), format!("[%s64], [%in+16], {size}"), wait_group, |_, size| size);
                form(
                    format!("{name}.L2::cache_hint"),
                    format!("[%s], [%in+16], {size}, %policy"),
                    wait_all,
                    |_, size| size,
                );
                form(name.clone(), format!("[%s], [%in+16], {size}, %size"), wait_group, |lane, _| lane & 3);
                form(name.clone(), format!("[%s], [%in+16], {size}, 3"), wait_all, |_, _| 3);
                form(
                    format!("{name}.L2::cache_hint.L2::64B"),
                    format!("[%s], [%in+16], {size}, %size, %policy"),
                    wait_all,
                    |lane, _| lane & 3,
                );
                form(
                    name.clone(),
                    format!("[%s], [%in+16], {size}, %p"),
                    wait_all,
                    |lane, size| if lane < 16 { 0 } else { size },
                );
                form(
                    format!("{name}.L2::cache_hint"),
                    format!("[%s], [%in+16], {size}, !%p, %policy"),
                    wait_all,
                    |lane, size| if lane < 16 { size } else { 0 },
                );
            }
        }
    }
    let mut text = header();
    for (number, (opcode, operands, wait, ..)) in forms.iter().enumerate() {
        text += &kernel(&format!("k{number}"), opcode, operands, wait);
    }
    let module = device.load(&text);
    for (number, (opcode, operands, _, size, of)) in forms.iter().enumerate() {
        let out = device.upload(&[0; 16 * LANES]);
        device.run(&module, &format!("k{number}"), 1, LANES as u32, Params::default().pointer(out).pointer(source));
        let got = device.download(out, 16 * LANES);
        for lane in 0..LANES {
            let mut want = [0xa5; 16];
            want[..*size].fill(0);
            let copied = of(lane, *size);
            want[..copied].copy_from_slice(&data[16 * lane..][..copied]);
            assert_eq!(got[16 * lane..][..16], want, "{opcode} {operands}, lane {lane}");
        }
    }
    device.assert_executed_all(&["cp"]);
}

/// The fault of a kernel with this copy and wait.
fn run_copy(opcode: &str, operands: &str, wait: &str) -> Result<(), FaultKind> {
    let mut device = Device::new();
    let (_, source) = upload_input(&device);
    let module = device.load(&(header() + &kernel("k", opcode, operands, wait)));
    let out = device.upload(&[0; 16 * LANES]);
    let outcome = device.launch(&module, "k", 1, LANES as u32, Params::default().pointer(out).pointer(source));
    outcome.result.map_err(|report| report.fault.kind)
}

#[test]
fn a_copy_that_is_not_waited_for_is_reported() {
    let copy = "cp.async.ca.shared.global";
    let operands = "[%s], [%in+16], 16";
    for wait in
        ["", "cp.async.commit_group;", "cp.async.wait_group 0;", "cp.async.commit_group; cp.async.wait_group 1;"]
    {
        let fault = run_copy(copy, operands, wait);
        assert!(matches!(fault, Err(FaultKind::PendingCopy(_))), "{wait}: {fault:?}");
    }
    // The older of two groups is complete while the younger may be pending.
    let young = "cp.async.commit_group;
        cp.async.ca.shared.global [%s+512], [%in+16], 16; cp.async.commit_group;
        cp.async.wait_group 1;";
    assert_eq!(run_copy(copy, operands, young), Ok(()));
}

#[test]
fn invalid_sizes_are_reported() {
    for (opcode, operands) in [
        ("cp.async.cg.shared.global", "[%s], [%in+16], 8"),
        ("cp.async.ca.shared.global", "[%s], [%in+16], 2"),
        ("cp.async.ca.shared.global", "[%s], [%in+16], 4, 5"),
    ] {
        let fault = run_copy(opcode, operands, "cp.async.wait_all;");
        assert!(matches!(fault, Err(FaultKind::InvalidValue(_))), "{opcode} {operands}: {fault:?}");
    }
    assert!(matches!(run_copy("cp.async.ca.shared.global", "[%s+4], [%in+16], 8", ""), Err(FaultKind::Misaligned)));
}

//! printf output of kernels. Each test runs in its own process, because the output at process exit is tested.

use std::os::fd::AsRawFd;
use std::process::Command;

use super::support::{PrimaryContext, get_function, handle, launch, ok};
use cudarc::driver::sys;

/// The environment variable with the child's role: `plain`, or `closed` for closed outputs.
const ROLE: &str = "TEST_PRINTING_ROLE";

const PRINTING: &str = r#"
.version 7.0
.target sm_75
.address_size 64
.global .align 1 .b8 text[6] = {100, 111, 110, 101, 33, 0};
.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 values);
.visible .entry say()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<3>;
    .param .b64 format;
    .param .b64 values;
    .param .b32 result;
    mov.u64 %rd1, text;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [format], %rd2;
    mov.u64 %rd1, 0;
    st.param.b64 [values], %rd1;
    call.uni (result), vprintf, (format, values);
    ld.param.b32 %r1, [result];
    ret;
}
"#;

/// The child's entry point; does nothing in a normal test run.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    let text = std::ffi::CString::new(PRINTING).unwrap();
    // SAFETY: the image is a zero-terminated text; the process owns both descriptors.
    unsafe {
        let module = handle(|m| sys::cuModuleLoadData(m, text.as_ptr().cast()));
        let say = get_function(module, "say");
        if role == "closed" {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            for descriptor in [1, 2] {
                assert_eq!(libc::dup2(writer.as_raw_fd(), descriptor), descriptor);
            }
            // Causes a message on stderr.
            let mut none = std::ptr::null_mut();
            assert_ne!(sys::cuModuleLoadData(&mut none, c"nonsense".as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
        }
        ok(launch(say, 1, std::ptr::null_mut(), &[]));
        ok(sys::cuCtxSynchronize());
    }
    std::process::exit(7);
}

/// Starts this test program as a child in a role; returns its exit code and output.
fn run_child(role: &str) -> (Option<i32>, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", "driver::printing::child", "--nocapture"]).env(ROLE, role).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn text_without_a_newline_is_printed_at_exit() {
    let (code, text) = run_child("plain");
    assert_eq!(code, Some(7), "{text}");
    assert!(text.ends_with("done!"), "{text}");
}

#[test]
fn closed_outputs_do_not_change_the_exit_code() {
    assert_eq!(run_child("closed").0, Some(7));
}

//! Messages of the emulator when the program has closed its outputs. The test runs in its own process, which closes them.

use std::os::fd::AsRawFd;
use std::process::Command;

use super::support::PrimaryContext;
use cudarc::driver::sys;

/// The environment variable that marks the child.
const ROLE: &str = "TEST_OUTPUTS_ROLE";

/// The child's entry point; does nothing in a normal test run.
#[test]
fn child() {
    if std::env::var(ROLE).is_err() {
        return;
    }
    let _emulator = cudaemu::test::start("").unwrap();
    let _primary = PrimaryContext::new(0);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    // SAFETY: the process owns both descriptors; the image is a zero-terminated text.
    unsafe {
        for descriptor in [1, 2] {
            assert_eq!(libc::dup2(writer.as_raw_fd(), descriptor), descriptor);
        }
        // Causes a message on stderr.
        let mut none = std::ptr::null_mut();
        assert_ne!(sys::cuModuleLoadData(&mut none, c"nonsense".as_ptr().cast()), sys::CUresult::CUDA_SUCCESS);
    }
    std::process::exit(7);
}

#[test]
fn closed_outputs_do_not_change_the_exit_code() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output =
        command.args(["--exact", "driver::outputs::child", "--nocapture"]).env(ROLE, "child").output().unwrap();
    assert_eq!(output.status.code(), Some(7));
}

//! Runs the built programs as processes.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// This test also makes `cargo test` build the programs, which scripts then run without building them (`FANOUT_BUILT`).
#[test]
fn help_names_the_options() {
    for (program, option) in
        [(env!("CARGO_BIN_EXE_generate"), "--tokens"), (env!("CARGO_BIN_EXE_demo"), "--device <LIST>")]
    {
        let output = Command::new(program).arg("--help").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains(option), "{text}");
    }
}

/// An empty folder for a test, and in it a script in place of rpc-server.
fn fake_server(test: &str, script: &str) -> (PathBuf, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let server = folder.join("server");
    fs::write(&server, format!("#!/bin/sh\ncd '{}'\n{script}\n", folder.display())).unwrap();
    fs::set_permissions(&server, fs::Permissions::from_mode(0o755)).unwrap();
    (folder, server)
}

/// A demo with `server` in place of rpc-server. Its folder cannot be made, so it makes no model.
fn demo(server: &Path) -> Command {
    let mut demo = Command::new(env!("CARGO_BIN_EXE_demo"));
    demo.arg("--server").arg(server).args(["--folder", "/dev/null/demo"]);
    demo
}

#[test]
fn what_stops_the_demo_is_named() {
    let ends = fake_server("demo-ends", "echo CUDA7: there is no such device; exit 1").1;
    let serves = fake_server("demo-serves", "echo 'listening on 127.0.0.1:1 (8.0)'; exec sleep 60").1;
    for (server, option, status, says) in [
        (Path::new("/nowhere/rpc-server"), "--tiny", 1, "there is no program /nowhere/rpc-server: build it with"),
        (&ends, "--tiny", 1, "a server has ended; it printed:\nCUDA7: there is no such device"),
        (&serves, "--tiny", 1, "the model in /dev/null/demo: "),
        (&serves, "--device=CPU", 2, "expected two devices"),
        (&serves, "--device=CPU,", 2, "expected two devices"),
        (&serves, "--what", 2, "--what"),
    ] {
        let output = demo(server).arg(option).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(status) && text.contains(says), "{server:?} {option}: {text}");
    }
}

/// The servers of a demo that is killed do not survive it. The shell in place of a server holds the pipe open until it ends.
#[test]
fn servers_end_with_a_demo_that_is_killed() {
    let (folder, server) = fake_server("demo-killed", "exec 3>pipe; echo up >&3; sleep 60 3>&-; echo survived >&3");
    assert!(Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap().success());
    let mut demo = demo(&server).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(File::open(folder.join("pipe")).unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    demo.kill().unwrap();
    demo.wait().unwrap();
    assert_eq!(lines.next().map(Result::unwrap), None, "the server runs on");
}

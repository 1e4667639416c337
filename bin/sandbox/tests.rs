//! The sandbox of a thread: it holds for the thread that enters it, so these tests need no process of their own.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use super::*;

/// Enters the sandbox on a new thread, and runs `check` there.
fn in_sandbox(access: Access, check: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sandbox = enter(SandboxMode::On, &access).expect("this kernel has all parts");
            let line = sandbox.to_string();
            assert!(line.starts_with("sandbox: no new privileges, Landlock (ABI "), "{line}");
            assert!(line.ends_with("), no capabilities, system calls filtered"), "{line}");
            check();
        });
    });
}

#[track_caller]
fn assert_denied<T>(result: std::io::Result<T>, what: &str) {
    assert_eq!(result.map(drop).map_err(|e| e.kind()), Err(ErrorKind::PermissionDenied), "{what}");
}

fn write(path: &Path) -> std::io::Result<()> {
    fs::write(path, "bytes")
}

/// As a model hub, and a link elsewhere: neighbours of the file are readable only in the folder of the hub.
#[test]
fn only_the_listed_files_can_be_used() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    for folder in ["models/snapshot", "blobs", "home", "library"] {
        fs::create_dir_all(at(folder)).expect("a folder");
    }
    for file in ["models/a.gguf", "blobs/1", "home/b.gguf", "home/secret", "library/c.gguf"] {
        write(&at(file)).expect("a file");
    }
    for (target, link) in [("blobs/1", "hub.gguf"), ("home/b.gguf", "b.gguf"), ("library", "library")] {
        std::os::unix::fs::symlink(at(target), at("models/snapshot").join(link)).expect("a link");
    }
    // A thread outside of the sandbox, which adds a model to the hub later.
    let (hub, requests) = std::sync::mpsc::channel::<()>();
    let new = at("blobs/2");
    let added = std::thread::spawn(move || requests.recv().map(|()| write(&new).expect("a file")));
    let access = Access {
        models: Some(at("models")),
        keys: Vec::new(),
        writable: vec![at("new/cache")],
        gpu: false,
        mps: false,
    };
    in_sandbox(access, || {
        for file in
            ["models/a.gguf", "models/snapshot/hub.gguf", "models/snapshot/b.gguf", "models/snapshot/library/c.gguf"]
        {
            fs::read(at(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            assert_denied(File::options().write(true).open(at(file)), file);
        }
        assert_eq!(fs::read_dir(at("models/snapshot/library")).expect("a linked folder").count(), 1);
        assert_denied(fs::read(at("home/secret")), "a neighbour of a linked file");
        assert_denied(fs::read("/etc/passwd"), "a file of the system");
        assert_denied(write(&at("models/new")), "a new file beside the models");
        assert_denied(write(&at("new/other")), "a new file beside the cache");
        assert_denied(fs::read_dir("/etc"), "a folder of the system");
        let cached = at("new/cache/entry");
        write(&cached).expect("a new file of the cache");
        write(&cached).expect("an existing file of the cache");
        fs::rename(&cached, at("new/cache/other")).expect("a file of the cache");
        fs::remove_file(at("new/cache/other")).expect("a file of the cache");
        fs::read_to_string("/proc/self/status").expect("a file of the kernel");
        assert_denied(std::os::unix::fs::symlink("/etc/passwd", at("new/cache/link")), "a link");
        hub.send(()).expect("a live thread");
        added.join().expect("a live thread").expect("a request");
        fs::read(at("blobs/2")).expect("a new file of the hub");
    });
}

#[test]
fn denied_system_calls_fail_and_threads_start() {
    let access = Access { models: None, keys: Vec::new(), writable: Vec::new(), gpu: false, mps: false };
    in_sandbox(access, || {
        // Landlock alone would deny it with EACCES.
        let started = Command::new("/bin/true").spawn().map(drop).map_err(|e| e.raw_os_error());
        assert_eq!(started, Err(Some(libc::EPERM)));
        // By `clone`, since `clone3` is absent.
        let inherited = std::thread::spawn(|| fs::read("/etc/passwd").is_err()).join();
        assert!(inherited.expect("a thread"), "a new thread is in the sandbox");
    });
}

/// Landlock restricts neither: modes and attributes of other files of this user, and sockets of services.
#[test]
fn modes_and_attributes_of_files_cannot_be_changed() {
    use rustix::fs::{AtFlags, CWD, Mode, XattrFlags, chmodat, chownat, fchmod, fsetxattr, removexattr, setxattr};
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("cache");
    let access = Access { writable: vec![folder.clone()], ..Access::none() };
    in_sandbox(access, || {
        let path = folder.join("entry");
        write(&path).expect("a file of the cache");
        let file = File::options().write(true).open(&path).expect("a file of the cache");
        let denied = Err(rustix::io::Errno::PERM);
        let mode = Mode::RUSR | Mode::WUSR;
        for (call, got) in [
            ("chmod", chmodat(CWD, &path, mode, AtFlags::empty())),
            ("fchmod", fchmod(&file, mode)),
            ("chown", chownat(CWD, &path, None, None, AtFlags::empty())),
            ("setxattr", setxattr(&path, "user.fanout", b"1", XattrFlags::empty())),
            ("fsetxattr", fsetxattr(&file, "user.fanout", b"1", XattrFlags::empty())),
            ("removexattr", removexattr(&path, "user.fanout")),
        ] {
            assert_eq!(got, denied, "{call}");
        }
        // As the cache marks its entries as used.
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("a time");
    });
}

#[test]
fn only_sockets_of_the_needed_families_can_be_created() {
    use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with, socketpair};
    let vsock = AddressFamily::from_raw(40);
    // With a GPU its driver needs some more, and with MPS even more.
    for (gpu, mps) in [(false, false), (false, true), (true, false), (true, true)] {
        let access = Access { gpu, mps, ..Access::none() };
        in_sandbox(access, || {
            for (family, kind, allowed) in [
                (AddressFamily::INET, SocketType::STREAM, true),
                (AddressFamily::INET6, SocketType::STREAM, true),
                (AddressFamily::INET, SocketType::DGRAM, true),
                (AddressFamily::UNIX, SocketType::STREAM, gpu && mps),
                (AddressFamily::UNIX, SocketType::DGRAM, gpu && mps),
                (AddressFamily::UNIX, SocketType::SEQPACKET, gpu),
                (AddressFamily::NETLINK, SocketType::RAW, gpu),
                (AddressFamily::PACKET, SocketType::RAW, false),
                (vsock, SocketType::STREAM, false),
            ] {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let got = socket_with(family, kind, flags, None::<Protocol>).map(drop);
                // This machine may have no IPv6.
                let is_allowed = got.is_ok() || family == AddressFamily::INET6 && got != Err(rustix::io::Errno::PERM);
                assert_eq!(is_allowed, allowed, "GPU {gpu}, MPS {mps}: {family:?} {kind:?}: {got:?}");
            }
            let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None::<Protocol>);
            assert!(pair.is_ok(), "sockets without an address");
        });
    }
}

#[test]
fn a_gpu_turns_the_automatic_sandbox_off() {
    let access = |gpu| Access { models: None, keys: Vec::new(), writable: Vec::new(), gpu, mps: false };
    let off = |mode, gpu| enter(mode, &access(gpu)).expect("no error").to_string();
    assert_eq!(off(SandboxMode::Auto, true), "sandbox: off (a GPU is used; --sandbox on enforces it)");
    assert_eq!(off(SandboxMode::Off, false), "sandbox: off (--sandbox off)");
    assert!(fs::read("/etc/passwd").is_ok());
}

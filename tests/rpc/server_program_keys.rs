//! `rpc-server --key --allow-keys`: who may connect over TLS, what both ends say of those who may not, and SIGHUP.

use crate::server_program::{ServerProcess, program, run_server_program, spawn_server_with_log};
use crate::server_program_lifecycle::options;
use crate::support::*;
use fanout::device::MemoryBudget;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::keys::SecretKey;
use std::fs;
use std::io::Read;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};

/// A server with a list of keys, and the keys of clients.
pub(crate) struct Fixture {
    dir: tempfile::TempDir,
    pub(crate) server: ServerProcess,
    pub(crate) own: SecretKey,
    pub(crate) alice: SecretKey,
    pub(crate) bob: SecretKey,
}

impl Fixture {
    /// Starts a server that allows alice and bob, and has revoked eve's key, which is returned.
    pub(crate) fn start(args: &[&str]) -> (Fixture, SecretKey) {
        Fixture::start_with_limits(["", ""], &[&["-d", "CPU", "--mem", "64M"], args].concat())
    }

    /// As [`Fixture::start`], with limits of alice and of bob.
    pub(crate) fn start_with_limits(limits: [&str; 2], args: &[&str]) -> (Fixture, SecretKey) {
        Fixture::start_program(limits, args, program)
    }

    /// As [`Fixture::start_with_limits`], with a program that `program` makes of the arguments.
    pub(crate) fn start_program(
        limits: [&str; 2],
        args: &[&str],
        program: impl Fn(&[&str]) -> Process,
    ) -> (Fixture, SecretKey) {
        let dir = tempfile::tempdir().expect("a folder");
        let [own, alice, bob, eve] = [(); 4].map(|()| SecretKey::generate().expect("a key"));
        own.create_file(&dir.path().join("key")).expect("a file");
        let list = dir.path().join("clients");
        // A link into another folder, which the sandbox must allow, too.
        let target = dir.path().join("lists/clients");
        fs::create_dir(dir.path().join("lists")).expect("a folder");
        fs::write(&target, lines([&alice, &bob], limits) + &format!("{} eve revoked\n", eve.public_key()))
            .expect("a file");
        std::os::unix::fs::symlink(&target, &list).expect("a link");
        let files = [dir.path().join("key"), list];
        let [key, list] = files.each_ref().map(|path| path.to_str().expect("text"));
        let all = [&["-p", "0", "-t", "1", "--key", key, "--allow-keys", list], args].concat();
        let log = fs::File::create(dir.path().join("log")).expect("a file");
        let server = spawn_server_with_log(program(&all), Stdio::from(log));
        (Fixture { dir, server, own, alice, bob }, eve)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("log")).expect("text")
    }

    /// The addresses of the banner, in the order of the options.
    pub(crate) fn addresses(&self) -> Vec<&str> {
        listening_addresses(&self.server)
    }

    pub(crate) fn options(&self, key: Option<&SecretKey>) -> Options {
        options().with_server_keys(vec![self.own.public_key()]).with_key(key.cloned())
    }

    pub(crate) fn connect(&self, key: &SecretKey) -> Endpoint {
        Endpoint::connect(&self.server.addr, &self.options(Some(key))).expect("a server")
    }

    /// Makes the server read a list in which alice and bob have other limits, and waits for a text in the log.
    pub(crate) fn reread(&self, limits: [&str; 2], awaited: &str) {
        self.reread_list(&lines([&self.alice, &self.bob], limits), awaited);
    }

    fn reread_list(&self, list: &str, awaited: &str) {
        use rustix::process::{Pid, Signal, kill_process};
        let before = self.log().len();
        fs::write(self.path("clients"), list).expect("a file");
        kill_process(Pid::from_child(&self.server.child), Signal::HUP).expect("a process");
        eventually(awaited, || self.log()[before..].contains(awaited));
    }
}

/// The lines of alice and bob.
fn lines([alice, bob]: [&SecretKey; 2], limits: [&str; 2]) -> String {
    format!("{} alice {}\n{} bob {}\n", alice.public_key(), limits[0], bob.public_key(), limits[1])
}

/// The addresses in the banner of a program.
pub(crate) fn listening_addresses(program: &ServerProcess) -> Vec<&str> {
    let lines = program.banner.lines();
    lines.filter_map(|line| line.strip_prefix("listening on ")?.split(' ').next()).collect()
}

/// Writes bytes to a device and reads them back.
pub(crate) fn is_served(endpoint: &Endpoint) -> bool {
    let device = &endpoint.devices()[0];
    let sent = noise_bytes(3, 300_000);
    let Ok(buffer) = device.alloc(sent.len() as u64, &MemoryBudget::new(1 << 30)) else { return false };
    let mut queue = device.queue(&MemoryBudget::new(1 << 30)).expect("a queue");
    queue.upload(buffer.whole(), None, fanout::device::UploadSource::Borrowed(&sent)).expect("a live server");
    queue.download(buffer.whole()).is_ok_and(|read| read.wait(None).is_ok_and(|got| got == sent))
}

fn noise_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

#[test]
fn only_allowed_keys_are_served_and_both_ends_say_why() {
    let (fixture, eve) = Fixture::start(&["--listen", "127.0.0.1:0=plain"]);
    assert!(fixture.server.banner.contains(&format!("key: {}", fixture.own.public_key())), "{}", fixture.server.banner);
    assert!(is_served(&fixture.connect(&fixture.alice)) && is_served(&fixture.connect(&fixture.bob)));
    let addresses = fixture.addresses();
    let [over_tls, plain] = addresses[..] else { panic!("{}", fixture.server.banner) };
    let stranger = SecretKey::generate().expect("a key");
    let other_server = options().with_server_keys(vec![stranger.public_key()]).with_key(Some(fixture.alice.clone()));
    // The last client tries several forms of HELLO, and so causes more lines than the log has of one address.
    for (name, at, options, says, log) in [
        ("no key", over_tls, fixture.options(None), "demands one of this client", ""),
        (
            "unknown",
            over_tls,
            fixture.options(Some(&stranger)),
            "does not accept the key or certificate",
            "is not allowed",
        ),
        ("revoked", over_tls, fixture.options(Some(&eve)), "has revoked the key or certificate", "was revoked"),
        (
            "another server",
            over_tls,
            other_server,
            "which this end was not told to expect",
            "does not accept the key or certificate",
        ),
        (
            "plain server",
            plain,
            fixture.options(Some(&fixture.alice)),
            "during the TLS handshake",
            "the client uses TLS",
        ),
        ("plain client", over_tls, options(), "closed the connection on HELLO", "does not use TLS"),
    ] {
        let error = Endpoint::connect(at, &options).map(drop).expect_err(name).to_string();
        assert!(error.contains(says), "{name}: {error}");
        eventually(name, || fixture.log().contains(log));
    }
    let plain_client = Endpoint::connect(plain, &options()).expect("a server");
    assert!(is_served(&plain_client));
    // The audit lines name the key.
    eventually("audit lines", || fixture.log().contains("(alice)") && fixture.log().contains("(bob)"));
}

#[test]
fn sighup_rereads_the_list_and_ends_the_sessions_of_removed_keys() {
    for alone in [&[][..], &["--no-supervise"]] {
        let (fixture, _) = Fixture::start(alone);
        let (alice, bob) = (fixture.connect(&fixture.alice), fixture.connect(&fixture.bob));
        assert!(is_served(&alice) && is_served(&bob));
        fixture.reread_list("no list", "stays as it was");
        assert!(is_served(&alice) && is_served(&bob));
        // Another key takes her name.
        let stranger = SecretKey::generate().expect("a key").public_key();
        let list = format!("{} bob\n{stranger} alice\n", fixture.bob.public_key());
        fixture.reread_list(&list, "the list no longer allows its key under this name");
        assert!(is_served(&bob));
        eventually("the reason in the audit line", || fixture.log().contains("end=key-changed"));
        eventually("the session of the removed key ends", || alice.devices()[0].memory().is_err());
        let error = Endpoint::connect(&fixture.server.addr, &fixture.options(Some(&fixture.alice)));
        assert!(
            error.map(drop).expect_err("a removed key").to_string().contains("does not accept the key or certificate")
        );
    }
}

/// Nothing but a handshake is possible without an allowed key.
#[test]
fn messages_without_tls_are_not_served() {
    let (fixture, _) = Fixture::start(&[]);
    for first in 0..=u8::MAX {
        let mut stream = TcpStream::connect(&fixture.server.addr).expect("a connection");
        stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
        // A record's header with a length of 24 bytes, or the header of a message.
        let bytes = [&[first, 24, 0, 0, 24][..], &[0; 60]].concat();
        let _ = std::io::Write::write_all(&mut stream, &bytes);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        // At most an alert of TLS.
        assert!(reply.is_empty() || (reply.len() == 7 && reply[0] == 21), "{first}: {reply:?}");
    }
    assert!(is_served(&fixture.connect(&fixture.alice)));
}

#[test]
fn keygen_writes_a_key_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("key");
    let run =
        |args: &[&str], file: &Path| run_server_program(&[&["keygen"], args, &[file.to_str().expect("text")]].concat());
    let (status, public) = run(&[], &file);
    assert_eq!(status, Some(0), "{public}");
    assert_eq!(SecretKey::read_file(&file).expect("a key").public_key().to_string(), public.trim());
    assert_eq!(run(&["--public"], &file), (Some(0), public));
    let (status, error) = run(&[], &file);
    assert!(status == Some(1) && error.contains("exists"), "{error}");
}

//! `rpc-server --cert --key --ca`: certificates of an organisation's CA, and what both ends say of those that they do not accept.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{QueueFixture, deadline};
use crate::server_program::{ServerProcess, program, run_server_program, spawn_server_with_log};
use crate::server_program_lifecycle::options;
use crate::support::*;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::keys::{Certificate, SecretKey};
use rcgen::{
    BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, date_time_ymd,
};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// A CA, whose certificate is in a file.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
}

/// The files of a certificate and its key, and that of its CA.
#[derive(Clone)]
struct Files {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
}

/// From and until when a certificate is valid.
type Validity = [i32; 2];

const VALID: Validity = [2020, 2900];
const EXPIRED: Validity = [2020, 2021];
const NOT_YET: Validity = [2800, 2900];

impl Authority {
    fn new(folder: &Path, name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let file = folder.join(format!("{name}.pem"));
        fs::write(&file, params.self_signed(&key).unwrap().pem()).unwrap();
        Authority { issuer: Issuer::new(params, key), file }
    }

    /// A certificate of this CA for DNS names and IP addresses.
    fn issue(&self, folder: &Path, file: &str, names: &[&str], [from, until]: Validity) -> Files {
        let mut params =
            CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(until, 1, 1));
        // Two of the kinds of keys that are supported.
        let kind = if file.len().is_multiple_of(2) { &PKCS_ED25519 } else { &PKCS_ECDSA_P256_SHA256 };
        let key = KeyPair::generate_for(kind).unwrap();
        let [cert, secret] = ["crt", "key"].map(|extension| folder.join(format!("{file}.{extension}")));
        fs::write(&cert, params.signed_by(&key, &self.issuer).unwrap().pem()).unwrap();
        fs::write(&secret, key.serialize_pem()).unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        Files { cert, key: secret, ca: self.file.clone() }
    }
}

impl Files {
    /// The options of a client with this certificate.
    fn options(&self) -> Options {
        options().with_certificate(Some(Certificate::read_files(&self.cert, &self.key, &self.ca).unwrap()))
    }

    fn args(&self) -> Vec<String> {
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let flags = [("--cert", &self.cert), ("--key", &self.key), ("--ca", &self.ca)];
        flags.iter().flat_map(|(flag, path)| [(*flag).to_owned(), text(path)]).collect()
    }
}

/// A folder with a CA, and a server with a certificate.
struct Fixture {
    dir: tempfile::TempDir,
    authority: Authority,
    server: ServerProcess,
}

/// Starts a server on a host with these files, and further options.
fn start(folder: &Path, host: &str, files: &Files, args: &[&str]) -> ServerProcess {
    let mut all: Vec<_> = ["-H", host, "-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"].map(str::to_owned).into();
    all.extend(files.args().into_iter().chain(args.iter().map(|arg| (*arg).to_owned())));
    let all: Vec<_> = all.iter().map(String::as_str).collect();
    let log = fs::File::create(folder.join(format!("log-{host}"))).unwrap();
    spawn_server_with_log(program(&all), Stdio::from(log))
}

impl Fixture {
    /// A server for these names. With `list`, only the clients that it names are allowed.
    fn start(names: &[&str], validity: Validity, list: Option<&str>) -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::new(dir.path(), "ca");
        let files = authority.issue(dir.path(), "server", names, validity);
        let clients = dir.path().join("clients");
        let args = match list {
            Some(list) => {
                fs::write(&clients, list).unwrap();
                vec!["--allow-keys", clients.to_str().unwrap()]
            }
            None => Vec::new(),
        };
        let server = start(dir.path(), "127.0.0.1", &files, &args);
        Fixture { dir, authority, server }
    }

    fn issue(&self, name: &str, validity: Validity) -> Files {
        self.authority.issue(self.dir.path(), name, &[name], validity)
    }

    fn connect(&self, options: &Options) -> Result<Endpoint, String> {
        Endpoint::connect(&self.server.addr, options).map_err(|e| e.to_string())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log-127.0.0.1")).unwrap()
    }
}

const SERVER: [&str; 2] = ["server.test", "127.0.0.1"];

#[test]
fn only_valid_certificates_of_the_ca_are_served() {
    let fixture = Fixture::start(&SERVER, VALID, None);
    let banner = &fixture.server.banner;
    assert!(banner.contains("certificate: server.test; allowed names: all of the CA"), "{banner}");
    for name in ["alice.test", "bob.example.test"] {
        let endpoint = fixture.connect(&fixture.issue(name, VALID).options()).unwrap();
        let mut work = QueueFixture::new(&endpoint.devices()[0], 100_000);
        work.upload(&random_bytes(1, 100_000));
        assert!(work.download() == random_bytes(1, 100_000));
        drop((work, endpoint));
        eventually("audit line", || fixture.log().contains(&format!("({name})")));
    }
    let foreign = Authority::new(fixture.dir.path(), "foreign");
    let mut stranger = foreign.issue(fixture.dir.path(), "stranger", &["stranger.test"], VALID);
    // The client trusts the server's CA.
    stranger.ca.clone_from(&fixture.authority.file);
    let wildcard = fixture.authority.issue(fixture.dir.path(), "wildcard", &["a.test"], VALID);
    assert!(fixture.connect(&wildcard.options()).is_ok());
    let raw = SecretKey::generate().unwrap();
    let raw = options().with_server_keys(vec![raw.public_key()]).with_key(Some(raw));
    for (name, options, says, log) in [
        ("other CA", stranger.options(), "does not know the CA", "is not signed by the CA"),
        (
            "expired",
            fixture.issue("expired.test", EXPIRED).options(),
            "by the peer's clock it has expired",
            "expired on 2021-01-01 00:00 UTC, and this machine's clock says 2",
        ),
        (
            "not yet valid",
            fixture.issue("early.test", NOT_YET).options(),
            "this machine's clock says 2",
            "not valid before 2800-01-01 00:00 UTC, and this machine's clock says 2",
        ),
        ("raw key", raw, "raw keys", "raw keys"),
        ("plain", options(), "closed the connection on HELLO", "does not use TLS"),
    ] {
        let error = fixture.connect(&options).map(drop).expect_err(name);
        assert!(error.contains(says), "{name}: {error}");
        eventually(name, || fixture.log().contains(log));
    }
}

#[test]
fn clients_check_the_certificate_of_the_server() {
    for (name, names, validity, says) in [
        ("other name", &["server.test"][..], VALID, "the server's certificate is not for 127.0.0.1"),
        ("expired", &SERVER, EXPIRED, "expired on 2021-01-01 00:00 UTC, and this machine's clock says 2"),
        ("not yet valid", &SERVER, NOT_YET, "not valid before 2800-01-01 00:00 UTC, and this machine's clock says 2"),
    ] {
        let fixture = Fixture::start(names, validity, None);
        let error = fixture.connect(&fixture.issue("alice.test", VALID).options()).map(drop).expect_err(name);
        assert!(error.contains(says), "{name}: {error}");
        eventually(name, || fixture.log().contains("does not accept this end's certificate"));
    }
    let fixture = Fixture::start(&SERVER, VALID, None);
    let foreign = Authority::new(fixture.dir.path(), "foreign");
    let mut alice = fixture.issue("alice.test", VALID);
    alice.ca = foreign.file;
    let error = fixture.connect(&alice.options()).map(drop).unwrap_err();
    assert!(error.contains("is not signed by the CA (--ca)"), "{error}");
}

#[test]
fn a_list_allows_names_of_certificates() {
    use rustix::process::{Pid, Signal, kill_process};
    let list = "cert:alice.test alice\ncert:bob.test bob\ncert:eve.test eve revoked\n";
    let fixture = Fixture::start(&SERVER, VALID, Some(list));
    assert!(fixture.server.banner.contains("allowed names: 2"), "{}", fixture.server.banner);
    let [alice, bob] =
        ["alice.test", "BOB.test"].map(|name| fixture.connect(&fixture.issue(name, VALID).options()).unwrap());
    for (name, says, log) in [
        ("eve.test", "has revoked", "was revoked"),
        ("mallory.test", "does not accept the key", "no certificate for the name mallory.test is allowed"),
    ] {
        let error = fixture.connect(&fixture.issue(name, VALID).options()).map(drop).expect_err(name);
        assert!(error.contains(says), "{name}: {error}");
        eventually(name, || fixture.log().contains(log));
    }
    fs::write(fixture.dir.path().join("clients"), "cert:bob.test bob\ncert:alice.test alice revoked\n").unwrap();
    kill_process(Pid::from_child(&fixture.server.child), Signal::HUP).unwrap();
    eventually("the session of alice ends", || {
        fixture.log().contains("(alice): the list no longer allows its key under this name")
    });
    eventually("her connection is lost", || alice.devices()[0].memory().is_err());
    assert!(bob.devices()[0].memory().is_ok());
    // A new certificate for the same name is the same client.
    assert!(fixture.connect(&fixture.issue("bob.test", VALID).options()).is_ok());
}

#[test]
fn servers_copy_to_each_other_with_certificates() {
    capture_log(); // of the client
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let issue = |name: &str, ip: &str| authority.issue(dir.path(), name, &[name, ip], VALID);
    let client = issue("client.test", "127.0.0.1").options();
    // The second destination has no certificate for its address.
    let hosts = [("a.test", "127.0.93.1", "127.0.93.1"), ("b.test", "127.0.93.2", "127.0.93.2")];
    let [from, to] =
        hosts.map(|(name, host, ip)| start(dir.path(), host, &issue(name, ip), &["--peer", "127.0.93.0/24:*=cert"]));
    let endpoints = [&from, &to].map(|server| Endpoint::connect(&server.addr, &client).unwrap());
    let [mut a, mut b] = endpoints.each_ref().map(|endpoint| QueueFixture::new(&endpoint.devices()[0], 300_000));
    let data = random_bytes(9, 300_000);
    a.upload(&data);
    assert!(b.device.copies_from(a.device.info()));
    let after = a.queue.mark();
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    b.queue.mark().wait(deadline()).unwrap();
    assert!(b.download() == data);
    drop((a, b, endpoints));
    eventually("audit line", || fs::read_to_string(dir.path().join("log-127.0.93.2")).unwrap().contains("(a.test)"));
}

#[test]
fn files_and_options_are_checked_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let files = authority.issue(dir.path(), "server", &SERVER, VALID);
    let other = authority.issue(dir.path(), "other", &["other.test"], VALID);
    let nameless = authority.issue(dir.path(), "nameless", &["127.0.0.1"], VALID);
    let exposed = authority.issue(dir.path(), "exposed", &["exposed.test"], VALID);
    fs::set_permissions(&exposed.key, fs::Permissions::from_mode(0o644)).unwrap();
    let key = SecretKey::generate().unwrap().public_key();
    let peer = format!("10.0.0.6={key}");
    let cert = files.cert.to_str().unwrap();
    for (status, args, says) in [
        (1, Files { key: other.key.clone(), ..files.clone() }.args(), "not the key of the certificate"),
        (1, nameless.args(), "the first DNS name (subjectAltName) of the certificate is missing"),
        (1, exposed.args(), "other users can read this secret key"),
        (1, Files { ca: files.key.clone(), ..files.clone() }.args(), "no certificate in PEM"),
        (2, files.args()[..4].to_vec(), "--ca"),
        (2, vec!["--key".to_owned(), cert.to_owned()], "--key needs --allow-keys, or --cert and --ca"),
        (2, [files.args(), vec!["--peer".to_owned(), peer]].concat(), "demands one of this server"),
        (2, vec!["--peer".to_owned(), "10.0.0.6=cert".to_owned()], "demands one of this server"),
    ] {
        let mut all = vec!["-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M", "--no-supervise"];
        all.extend(args.iter().map(String::as_str));
        let (code, error) = run_server_program(&all);
        assert_eq!(code, Some(status), "{says}: {error}");
        assert!(error.contains(says), "{says}: {error}");
    }
}

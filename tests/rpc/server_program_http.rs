//! The options of HTTP, `--status` and `--log-format` of the `rpc-server` program.

use crate::server_program::{program, run_server_program, spawn_server, spawn_server_with_log};
use crate::support::*;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;

const CPU: [&str; 6] = ["-d", "CPU", "-t", "1", "--mem", "64M"];

/// The status of the response to a request by this name of the server; 0 if the connection is closed.
fn get(addr: &str, path: &str, host: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).expect("a connection");
    stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    (text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default(), text)
}

#[test]
fn the_banner_names_the_status_page() {
    let server = spawn_server(&[&["-p", "0"], &CPU[..]].concat());
    let page = format!("\nstatus page: http://{}/\n", server.addr);
    assert!(server.banner.contains(&page), "{}", server.banner);
    assert_eq!(get(&server.addr, "/", "localhost").0, 200);
    assert_eq!(get(&server.addr, "/", "gpu-2").0, 421);
    let server = spawn_server(&[&["-p", "0", "--http-host", "gpu-2"], &CPU[..]].concat());
    assert_eq!(get(&server.addr, "/", "gpu-2:50052").0, 200);
    let server = spawn_server(&[&["-p", "0", "--http", "off"], &CPU[..]].concat());
    assert!(!server.banner.contains("http"), "{}", server.banner);
    assert_eq!(get(&server.addr, "/", "localhost").0, 0);
}

#[test]
fn http_can_have_an_address_of_its_own() {
    let server = spawn_server(&[&["-p", "0", "--http", "0"], &CPU[..]].concat());
    let page = server.banner.lines().find_map(|line| line.strip_prefix("status page: http://")).expect("a page");
    let page = page.trim_end_matches('/');
    assert!(page != server.addr && server.banner.contains(&format!("listening on {page} (HTTP)")), "{}", server.banner);
    assert_eq!((get(page, "/health", "localhost").0, get(&server.addr, "/health", "localhost").0), (200, 0));
    for (option, says) in [
        ("8080=7", "an address for HTTP has no `plain` and no version"),
        ("on", "or `off`"),
        ("8080=allow:x", "8080=allow:x"),
    ] {
        let (status, error) = run_server_program(&[&["--http", option], &CPU[..]].concat());
        assert_eq!(status, Some(2), "{option}: {error}");
        assert!(error.contains(says), "{option}: {error}");
    }
}

#[test]
fn status_shows_devices_sessions_and_rates() {
    let server = spawn_server(&[&["-p", "0", "--protocol", "7"], &CPU[..]].concat());
    let addr: SocketAddr = server.addr.parse().expect("an address");
    let mut client = Client::connect_from([127, 0, 0, 1], addr).exchange_hello(CLIENT_VERSION);
    let _memory = client.alloc(0, 1 << 20);
    let (status, text) = run_server_program(&["--status", &server.addr]);
    assert_eq!(status, Some(0), "{text}");
    let session = format!("\nsession 1: {}, protocol 7.0, for ", client.addr);
    for part in [
        &format!("{}: ready\n", server.addr),
        "\ndevice CPU: ",
        ", load ",
        "\nsessions: 1 besides this one\n",
        &session,
        "device memory 1 MiB (at most 1 MiB)",
        "0 graphs",
        ", idle for ",
        " graphs/s\n",
        "\nlimit: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (status, text) = run_server_program(&["--status", &server.addr, "--json"]);
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &json["state"], &json["sessions"][0]["memory"]), (Some(0), &"ready".into(), &(1 << 20).into()));
    let (status, error) = run_server_program(&["--json"]);
    assert!(status == Some(2) && error.contains("--status"), "{error}");
}

#[test]
fn the_log_can_be_json() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = fs::File::create(dir.path().join("log")).expect("a file");
    let args = [&["-p", "0", "--protocol", "7", "--log-format", "json"], &CPU[..]].concat();
    let server = spawn_server_with_log(program(&args), Stdio::from(file));
    let addr: SocketAddr = server.addr.parse().expect("an address");
    let client = Client::connect_from([127, 0, 0, 1], addr).exchange_hello(CLIENT_VERSION);
    let want = format!("session started: peer={} session=1 protocol=7.0", client.addr);
    let lines = || fs::read_to_string(dir.path().join("log")).expect("text");
    eventually("a line", || lines().contains(&want));
    for line in lines().lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let fields: Vec<_> = line.as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["level", "message", "time"], "{line}");
    }
}

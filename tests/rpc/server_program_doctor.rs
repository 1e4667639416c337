//! `rpc-server doctor`: what it finds out about servers, its exit status and its output.

use crate::server_program::{run_server_program, spawn_server};
use crate::server_program_keys::Fixture;
use crate::support::*;
use fanout::rpc::keys::SecretKey;
use fanout_testing::protocol_relay::ProtocolRelay;
use serde_json::Value;
use std::io::Write;
use std::net::TcpListener;

/// The findings of a run with `--json` about its server: check, level, message with remedy.
fn findings(text: &str, server: &str) -> Vec<[String; 3]> {
    let json: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let findings = json["findings"].as_array().expect("a list");
    let text = |finding: &Value, field: &str| finding[field].as_str().unwrap_or_default().to_owned();
    let of_server = findings.iter().filter(|finding| finding["subject"] == server);
    of_server
        .map(|finding| {
            let says = format!("{} -> {}", text(finding, "message"), text(finding, "remedy"));
            [text(finding, "check"), text(finding, "level"), says]
        })
        .collect()
}

fn check_of<'a>(findings: &'a [[String; 3]], check: &str) -> [&'a str; 2] {
    let [_, level, says] = findings.iter().find(|[name, ..]| name == check).expect("a finding");
    [level, says]
}

#[test]
fn a_healthy_server_passes_every_check() {
    let server = spawn_server(&["-p", "0", "-d", "CPU,CPU", "-t", "1", "--mem", "128M"]);
    let (status, text) = run_server_program(&["doctor", &server.addr, "--json"]);
    let found = findings(&text, &server.addr);
    let checks: Vec<_> = found.iter().map(|[check, ..]| &**check).collect();
    let want = ["version", "clock", "round trip", "bandwidth", "memory", "memory", "self-test", "self-test"];
    assert_eq!(checks, want, "{found:?}");
    for (check, part) in [
        ("version", "extensions"),
        ("round trip", " us (median of "),
        ("bandwidth", " MB/s to the server, "),
        ("memory", "CPU0: "),
        ("self-test", "cases agree with exact arithmetic"),
    ] {
        let [level, says] = check_of(&found, check);
        // A loaded machine may have slow round trips.
        assert!(level != "problem" && says.contains(part), "{check} is {level}: {says}");
    }
    let json: Value = serde_json::from_str(&text).expect("JSON");
    let of_machine = json["findings"].as_array().expect("a list").iter().filter(|f| f["subject"] == "this machine");
    let checks: Vec<_> = of_machine.filter_map(|finding| finding["check"].as_str()).collect();
    for check in ["processor", "memory", "GPU", "open files", "clock", "port", "self-test"] {
        assert!(checks.contains(&check), "{check}: {checks:?}");
    }
    // A machine with a defect of its own has a problem.
    assert_eq!(status, Some(i32::from(json["problems"] != 0)), "{text}");
}

#[test]
fn servers_that_cannot_be_used_are_problems_with_a_remedy() {
    // Nothing listens on port 1. The other listener speaks HTTP.
    let closed = "127.0.0.1:1".to_owned();
    let http = TcpListener::bind("127.0.0.1:0").expect("a port");
    let http_addr = http.local_addr().expect("an address").to_string();
    std::thread::spawn(move || {
        for mut stream in http.incoming().flatten() {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let keyed = Fixture::start(&[]).0;
    let plain = spawn_server(&["-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"]);
    keyed.bob.create_file(&keyed.path("bob")).expect("a file");
    let bob = keyed.path("bob");
    let bob = bob.to_str().expect("text");
    let own_key = keyed.own.public_key().to_string();
    let (other_key, keyed_addr) = (keyed.alice.public_key().to_string(), keyed.server.addr.clone());
    for (server, key, check, level, part) in [
        (closed.clone(), None, "connection", "problem", "-> start it there"),
        ("no-such-host.invalid:1".to_owned(), None, "connection", "problem", "-> check the name"),
        (keyed_addr.clone(), None, "connection", "problem", "demands keys"),
        (keyed_addr.clone(), Some(other_key), "connection", "problem", "-> compare the server's key"),
        (plain.addr.clone(), Some(own_key.clone()), "connection", "problem", "-> compare the server's key"),
        (http_addr, None, "connection", "problem", "-> ss -ltnp"),
        (keyed_addr, Some(own_key), "version", "ok", "extensions"),
    ] {
        let target = key.as_ref().map_or(server.clone(), |key| format!("{server}={key}"));
        let options: &[&str] = if key.is_some() { &["--key", bob] } else { &[] };
        let (status, text) = run_server_program(&[&["doctor", &target, "--json"], options].concat());
        let found = findings(&text, &server);
        let [is, says] = check_of(&found, check);
        assert!(is == level && says.contains(part), "{target}: {found:?}");
        if level == "problem" {
            assert_eq!(status, Some(1), "{target}: {text}");
        }
    }
}

#[test]
fn servers_of_llama_cpp_run_ops_only_on_request() {
    let server = TestServer::start(fanout::rpc::server::Config::default());
    let relayed = ProtocolRelay::start(server.addr, true).addr.to_string();
    let (_, text) = run_server_program(&["doctor", &relayed, "--json"]);
    let found = findings(&text, &relayed);
    assert!(check_of(&found, "version")[1].contains("without fanout's extension"), "{found:?}");
    assert!(check_of(&found, "self-test")[1].starts_with("left out"), "{found:?}");
    let relayed = ProtocolRelay::start(server.addr, true).addr.to_string();
    let (_, text) = run_server_program(&["doctor", &relayed, "--json", "--self-test"]);
    let found = findings(&text, &relayed);
    let [level, says] = check_of(&found, "self-test");
    assert!(level == "ok" && says.contains("cases agree"), "{found:?}");
}

#[test]
fn the_text_has_a_line_for_each_finding_and_a_summary() {
    let addr = "127.0.0.1:1";
    let (status, text) = run_server_program(&["doctor", addr]);
    assert_eq!(status, Some(1), "{text}");
    for part in [
        "this machine\n  ok       processor: ",
        &format!("\n{addr}\n  PROBLEM  connection: "),
        "\n           -> start it",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let summary = text.lines().last().expect("a line");
    assert!(summary.contains(" problem") && summary.contains(" warning"), "{summary}");
    let keyed = format!("a={}", SecretKey::generate().expect("random bytes").public_key());
    for (args, part) in [
        (&["doctor", "50052"][..], "expected a server"),
        (&["doctor", "a=ed25519:x"], "key"),
        (&["doctor", "--cert", "x"], "--key"),
        (&["doctor", &keyed], "error: a:50052 has a key: give this client's with --key FILE"),
        (&["doctor", &keyed], "Usage: rpc-server doctor [OPTIONS] [SERVER]..."),
    ] {
        let (status, error) = run_server_program(args);
        assert!(status == Some(2) && error.contains(part), "{args:?}: {error}");
    }
}

//! `rpc-server --allow-keys` with limits of a key in its line: memory, connections, devices, and what `--status` says.

use crate::server_program::{run_server_program, spawn_server};
use crate::server_program_keys::{Fixture, is_served};
use crate::server_program_lifecycle::options;
use crate::support::*;
use fanout::device::MemoryBudget;
use fanout::rpc::client::{ConnectError, Endpoint};
use fanout::rpc::keys::SecretKey;
use std::fs;

const TWO: [&str; 4] = ["-d", "CPU,CPU", "--mem", "64M"];

/// The free memory of the first device in KiB, as a client sees it.
fn free_kib(endpoint: &Endpoint) -> u64 {
    endpoint.devices()[0].memory().expect("memory").free >> 10
}

#[test]
fn the_sessions_of_a_key_share_its_memory() {
    let (fixture, _) = Fixture::start_with_limits(["memory=1M", ""], &TWO);
    let [first, second] = [(); 2].map(|()| fixture.connect(&fixture.alice));
    let (bob, budget) = (fixture.connect(&fixture.bob), MemoryBudget::new(1 << 30));
    let held = first.devices()[1].alloc(600 << 10, &budget).expect("memory");
    assert_eq!((free_kib(&first), free_kib(&second)), (424, 424));
    let refused = second.devices()[0].alloc(600 << 10, &budget).expect_err("too much for the key");
    assert!(refused.to_string().contains("memory"), "{refused}");
    eventually("the reason", || fixture.log().contains("that is the limit of the key in --allow-keys (memory=)"));
    assert!(bob.devices()[0].alloc(8 << 20, &budget).is_ok());
    // More memory holds for the sessions that there are, and less takes nothing away.
    fixture.reread(["memory=2M", ""], "allowed keys: 2");
    eventually("the new limit", || free_kib(&second) == 1448);
    fixture.reread(["memory=1K", ""], "allowed keys: 2");
    eventually("the new limit", || free_kib(&second) == 0);
    assert!(second.devices()[0].alloc(600 << 10, &budget).is_err());
    drop(held);
    eventually("the memory is free", || free_kib(&second) == 1);
}

#[test]
fn a_key_has_its_number_of_connections() {
    let (fixture, _) = Fixture::start_with_limits(["connections=2", ""], &TWO);
    let connect = |key: &SecretKey| Endpoint::connect(&fixture.server.addr, &fixture.options(Some(key)));
    let mut held: Vec<_> = (0..2).map(|_| fixture.connect(&fixture.alice)).collect();
    for _ in 0..3 {
        let refused = connect(&fixture.alice).map(drop).expect_err("a third connection");
        assert!(matches!(refused, ConnectError::Full { .. }), "{refused}");
    }
    let text =
        "(alice): rejected: its key has already 2 connections, the limit of the key in --allow-keys (connections=)";
    eventually("the reason", || fixture.log().contains(text));
    assert!(is_served(&fixture.connect(&fixture.bob)));
    held.pop();
    eventually("a connection is free", || connect(&fixture.alice).is_ok());
    fixture.reread(["connections=8", ""], "allowed keys: 2");
    eventually("the new limit", || {
        let more: Vec<_> = (0..4).map_while(|_| connect(&fixture.alice).ok()).collect();
        more.len() == 4
    });
}

#[test]
fn a_key_sees_its_devices_alone() {
    let (fixture, _) = Fixture::start_with_limits(["devices=1", "devices=1,0"], &["-d", "CPU,CPU", "--mem", "32M,64M"]);
    let total_mib = |endpoint: &Endpoint| -> Vec<_> {
        endpoint.devices().iter().map(|device| device.memory().expect("memory").total >> 20).collect()
    };
    let (alice, bob) = (fixture.connect(&fixture.alice), fixture.connect(&fixture.bob));
    assert_eq!((total_mib(&alice), total_mib(&bob)), (vec![64], vec![64, 32]));
    assert!(is_served(&alice) && is_served(&bob));
    // A device that does not exist leaves the list as it was.
    let missing = "clients:2: devices: there is no device 2; the server has 2, from 0 on";
    fixture.reread(["devices=0", "devices=2"], missing);
    assert!(is_served(&alice));
    fixture.reread(["devices=0", "devices=1,0"], "(alice): its key may use other devices now; connection closed");
    eventually("the session ends", || alice.devices()[0].memory().is_err());
    assert!(is_served(&bob));
    assert_eq!(total_mib(&fixture.connect(&fixture.alice)), [32]);
}

#[test]
fn wrong_limits_are_errors_with_the_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let [own, alice] = [(); 2].map(|()| SecretKey::generate().expect("a key"));
    let [key, list] = ["key", "list"].map(|name| dir.path().join(name));
    own.create_file(&key).expect("a file");
    for (rest, reason) in [
        ("share=0", "list:2: share: expected a number from 1 to 1000"),
        ("memory=lots", "list:2: memory: expected a size"),
        ("revoked=yes", "list:2: \"revoked=yes\": expected a key"),
        ("devices=0,1", "list:2: devices: there is no device 1; the server has 1, from 0 on"),
    ] {
        fs::write(&list, format!("# clients\n{} alice {rest}\n", alice.public_key())).expect("a file");
        let [key, list] = [&key, &list].map(|path| path.to_str().expect("text"));
        let args = ["-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M", "--key", key, "--allow-keys", list];
        let (status, text) = run_server_program(&args);
        assert!(status == Some(1) && text.contains(reason), "{rest}: {text}");
    }
}

#[test]
fn the_status_option_names_the_keys_with_sessions_to_keys_alone() {
    let (fixture, _) =
        Fixture::start_with_limits(["share=50", ""], &["-d", "CPU", "--mem", "64M", "--listen", "127.0.0.1:0=plain"]);
    let (alice, budget) = (fixture.connect(&fixture.alice), MemoryBudget::new(1 << 30));
    let _held = alice.devices()[0].alloc(3 << 20, &budget).expect("memory");
    let secret = fixture.path("bob");
    fixture.bob.create_file(&secret).expect("a file");
    let own = fixture.own.public_key().to_string();
    let over_tls = ["--status", &fixture.server.addr, "--server-key", &own, "--key", secret.to_str().expect("text")];
    let (status, text) = run_server_program(&over_tls);
    assert_eq!(status, Some(0), "{text}");
    for part in [
        "\nkey alice: sessions 1, device memory 3 MiB\nkey bob: sessions 1, device memory 0 B\n",
        "\nlimit: connections of this key (max-connections-per-address): 1 of 256\n",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    let mut plain =
        fixture.server.banner.lines().filter_map(|line| line.strip_prefix("listening on ")?.split(' ').next());
    let (status, text) = run_server_program(&["--status", plain.next_back().expect("an address")]);
    assert!(status == Some(0) && !text.contains("alice") && !text.contains("bob"), "{text}");
    // A server without keys has none to name.
    let server = spawn_server(&["-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"]);
    let client = Endpoint::connect(&server.addr, &options()).expect("a server");
    assert!(client.status().expect("extensions").keys.is_empty());
}

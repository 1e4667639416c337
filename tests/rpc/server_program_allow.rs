//! `rpc-server --allow` and `--listen …=allow:…`: which addresses of clients may connect without keys.

use crate::server_program::{program, run_server_program, spawn_server_with_log};
use crate::support::*;
use std::fs;
use std::net::SocketAddr;
use std::process::Stdio;

#[test]
fn only_allowed_addresses_are_served() {
    let (first, second) = ([127, 0, 0, 1], [127, 0, 0, 2]);
    for (listen, may) in [
        (&["-H", "0.0.0.0", "-p", "0", "--allow", "127.0.0.2"][..], &[second][..]),
        (&["-H", "0.0.0.0", "-p", "0", "--allow", "10.0.0.0/8,127.0.0.0/31", "--allow", "fd00::/8"], &[first]),
        (&["--listen", "0.0.0.0:0=7,allow:127.0.0.2,allow:127.0.0.1"], &[first, second]),
        (&["--listen", "0.0.0.0:0=allow:10.0.0.0/8", "--allow", "127.0.0.1"], &[]),
        // An IPv6 socket gets IPv4 clients by mapped addresses.
        (&["-H", "::", "-p", "0", "--allow", "127.0.0.2"], &[second]),
        (&["-p", "0", "--allow", "10.0.0.0/8"], &[first, second]),
        (&["-p", "0"], &[first, second]),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let log = || fs::read_to_string(dir.path().join("log")).expect("text");
        let file = fs::File::create(dir.path().join("log")).expect("a file");
        let args = [listen, &["--protocol", "7", "-d", "CPU", "-t", "1", "--mem", "64M"]].concat();
        let server = spawn_server_with_log(program(&args), Stdio::from(file));
        let port = server.addr.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        let addr = SocketAddr::from((first, port));
        for client in [first, second] {
            let mut client_connection = Client::connect_from(client, addr);
            if may.contains(&client) {
                client_connection.exchange_hello(CLIENT_VERSION).assert_alive();
                continue;
            }
            client_connection.expect_closed();
            let text =
                format!("{}: its address is not allowed here (--allow); connection closed", client_connection.addr);
            let text =
                if server.addr.starts_with('[') { text.split_once(": ").map_or("", |(_, text)| text) } else { &text };
            eventually("a line", || log().contains(text));
        }
    }
}

#[test]
fn a_server_beyond_loopback_needs_keys_addresses_or_consent() {
    let common = ["-d", "CPU", "-t", "1", "--mem", "64M"];
    for listen in
        [&["-H", "0.0.0.0", "-p", "0"][..], &["--listen", "0.0.0.0:0=7", "--listen", "127.0.0.1:0=allow:10.0.0.1"]]
    {
        let (status, error) = run_server_program(&[listen, &common].concat());
        assert_eq!(status, Some(1), "{error}");
        assert!(["--allow-keys", "--allow)", "--insecure"].iter().all(|flag| error.contains(flag)), "{error}");
    }
    for listen in
        [&["--allow", "gpu-2"][..], &["--listen", "50053=7,allow:10.0.0.0/40"], &["--listen", "50053=plain,plain"]]
    {
        let (status, error) = run_server_program(&[listen, &common].concat());
        assert_eq!(status, Some(2), "{error}");
    }
}

//! Floods of log lines that clients cause: a few lines are logged, and the number of the others. Tokens come back after a day,
//! so the counts do not depend on the time that a test takes. The log of all tests is one, so each test floods kinds of its
//! own.

use crate::support::*;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use std::time::Duration;

/// A server that logs a few lines of each kind. Other test servers log all.
fn server_with_burst(burst: u32, config: Config) -> TestServer {
    TestServer::start(config.with_log_burst(burst).with_log_interval(Duration::from_secs(24 * 3600)))
}

/// The sum of the numbers of lines about `what` that were left out. Complete once the server has ended.
fn left_out(what: &str) -> u64 {
    let suffix = format!(" more lines about {what}");
    let count = |line: &String| line.split_once("left out: ")?.1.split_once(&suffix)?.0.parse::<u64>().ok();
    logged_lines(&suffix).iter().map(|line| count(line).expect("a number")).sum()
}

#[test]
fn ten_thousand_refused_allocations_are_a_few_lines() {
    let mut server = server_with_burst(7, Config::default());
    let mut client = Client::connect(&server);
    let request = encode_message(&Request::AllocBuffer(AllocBuffer { device: 0, size: 1 << 60 }));
    for _ in 0..100 {
        client.write(&request.repeat(100));
        (0..100).for_each(|_| drop(client.read_reply(RpcCommand::AllocBuffer)));
    }
    let shown = client.infos();
    assert_eq!(shown.len(), 7, "{shown:#?}");
    assert!(shown.iter().all(|line| line.contains("cannot allocate a buffer")), "{shown:#?}");
    // Clients of loopback share the lines.
    let mut other = Client::connect(&server);
    assert_eq!(other.try_alloc(0, 1 << 60).remote_ptr, 0);
    assert_eq!(other.infos(), Vec::<String>::new());
    server.stop();
    assert_eq!(left_out("refused allocations"), 10_000 + 1 - 7);
}

#[test]
fn bad_and_rejected_connections_are_a_few_lines() {
    let mut server = server_with_burst(3, Config::default().with_max_connections(1));
    let warnings = |mut client: Client| {
        assert!(client.wait_closed().is_ok());
        client.warnings().len()
    };
    let bad = || {
        let mut client = Client::connect_without_hello(&server);
        client.write(&[250; 9]);
        warnings(client)
    };
    let rejected = || {
        let mut client = Client::connect_without_hello(&server);
        client.send(&hello_request());
        client.read_reply(RpcCommand::Hello);
        warnings(client)
    };
    assert_eq!((0..50).map(|_| bad()).sum::<usize>(), 3);
    let mut first = Client::connect(&server);
    assert_eq!((0..50).map(|_| rejected()).sum::<usize>(), 3);
    first.assert_alive();
    server.stop();
    assert_eq!(left_out("connections that ended badly before their HELLO"), 50 - 3);
    assert_eq!(left_out("clients rejected by the limits of connections"), 50 - 3);
}

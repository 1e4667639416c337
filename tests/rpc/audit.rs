//! The audit line: exactly one when a session ends, with what the session has used and why it ended.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use std::time::Duration;

/// The audit lines of a client's session.
fn audit_lines(client: &Client) -> Vec<String> {
    logged_lines(&format!("session ended: peer={} ", client.addr))
}

/// The only audit line of a client's session, once its server has no session.
#[track_caller]
fn audit_line(server: &TestServer, client: &Client) -> String {
    eventually("the session has ended", || server.handle.connections() == 0);
    let mut lines = audit_lines(client);
    assert_eq!(lines.len(), 1, "{lines:#?}");
    lines.remove(0)
}

/// The value of a field.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, rest) = line.split_once(&format!(" {name}=")).unwrap_or_else(|| panic!("{name}: {line}"));
    rest.split(' ').next().unwrap_or_default()
}

#[test]
fn a_session_that_ends_has_one_line_with_what_it_used() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 4096);
    client.free(&memory);
    let memory = client.alloc(0, 1024);
    let [x, y] = [1, 2].map(|id| memory.float_tensor(id, 16, 128 * (id - 1)));
    client.set_floats(&x, &[-2.0; 16]);
    let sum = node(OpCode::Add, y, &[&x, &x]);
    for _ in 0..3 {
        client.compute_graph(0, &[2], &[x.clone(), sum.clone()]);
    }
    assert_eq!(client.get_floats(&sum), [-4.0; 16]);
    client.assert_alive();
    client.shutdown_write();
    client.expect_closed();
    let line = audit_line(&server, &client);
    for (name, want) in [("protocol", "7.0"), ("extended", "no"), ("graphs", "3"), ("end", "client-closed")] {
        assert_eq!(field(&line, name), want, "{line}");
    }
    let number = |name| field(&line, name).parse::<f64>().expect("a number");
    assert!(number("device_seconds") > 0.0 && number("device_seconds") <= number("seconds"), "{line}");
    assert!(number("peak_memory_bytes") >= 4096.0 && number("peak_memory_bytes") < 1e6, "{line}");
    // HELLO, three graphs and 64 bytes of data; their replies.
    assert!(number("received_bytes") > 3.0 * 2.0 * 296.0 && number("received_bytes") < 1e5, "{line}");
    assert!(number("sent_bytes") > 64.0 && number("sent_bytes") < 1000.0, "{line}");
    assert!(number("seconds") < WATCHDOG.as_secs_f64() && !line.contains("detail="), "{line}");
}

#[test]
fn the_line_says_why_a_session_ended() {
    type End = fn(&TestServer, &mut Client);
    let ends: &[(&str, Option<&str>, End)] = &[
        ("violation", Some(""), |_, client| client.write(&[250; 9])),
        ("client-gone", Some("in the middle of a message"), |_, client| {
            client.write(&[6, 100]);
            client.shutdown_write();
        }),
        ("client-reset", None, |_, client| {
            let linger = Some(Duration::ZERO);
            socket2::SockRef::from(&client.stream).set_linger(linger).expect("a live socket");
            let other = std::net::TcpStream::from(
                socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap(),
            );
            drop(std::mem::replace(&mut client.stream, other));
        }),
        ("shutdown", None, |server, _| server.handle.shutdown()),
        ("drain", None, |server, _| server.handle.drain(Duration::ZERO)),
    ];
    for (reason, detail, end) in ends {
        let server = TestServer::start(Config::default());
        let mut client = Client::connect(&server);
        client.assert_alive();
        end(&server, &mut client);
        let line = audit_line(&server, &client);
        assert_eq!(field(&line, "end"), *reason, "{line}");
        assert_eq!(line.contains("detail="), detail.is_some(), "{line}");
        assert!(detail.is_none_or(|detail| line.contains(detail)), "{line}");
    }
}

#[test]
fn the_line_of_a_client_of_the_extension_says_so() {
    let server = TestServer::start(Config::default());
    let (client, _) = Client::connect_extended(&server);
    client.shutdown_write();
    let line = audit_line(&server, &client);
    assert_eq!((field(&line, "extended"), field(&line, "end")), ("yes", "client-closed"), "{line}");
}

/// A connection without a complete HELLO is no session.
#[test]
fn a_connection_without_hello_has_no_line() {
    let server = TestServer::start(Config::default());
    for bytes in [&[][..], &[250; 9], &[14]] {
        let mut client = Client::connect_without_hello(&server);
        client.write(bytes);
        client.shutdown_write();
        client.expect_closed();
        eventually("the connection has ended", || server.handle.connections() == 0);
        assert_eq!(audit_lines(&client), Vec::<String>::new(), "{bytes:?}");
    }
}

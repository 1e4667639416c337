//! The state of the server over HTTP, on the port of the sessions or on its own: routes, and what full and draining servers answer.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, ListenAddress, Server};
use fanout::rpc::status::{ServerStatus, machine_id};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

/// A connection for HTTP.
struct Browser(TcpStream);

/// A response: status, head, body.
struct Page {
    status: u16,
    head: String,
    body: String,
}

impl Browser {
    fn open(addr: SocketAddr) -> Browser {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        Browser(stream)
    }

    fn send(&mut self, method: &str, path: &str, host: &str) -> &mut Browser {
        // In one write: a server that serves no HTTP closes after the first bytes.
        self.0.write_all(format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
        self
    }

    fn read(&mut self, method: &str) -> Page {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        let head = String::from_utf8(head).unwrap();
        let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap().parse().unwrap();
        let mut body = vec![0; if method == "HEAD" { 0 } else { len }];
        self.0.read_exact(&mut body).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Page { status, head, body: String::from_utf8(body).unwrap() }
    }

    fn get(&mut self, path: &str) -> Page {
        self.send("GET", path, "localhost").read("GET")
    }

    fn is_closed(&mut self) -> bool {
        is_end(self.0.read(&mut [0]))
    }

    /// Whether the server has closed the connection by now. Sends and reads nothing.
    fn was_closed(&self) -> bool {
        self.0.set_nonblocking(true).unwrap();
        is_end(self.0.peek(&mut [0]))
    }
}

/// Whether a read has met the end of the connection.
fn is_end(read: io::Result<usize>) -> bool {
    match read {
        Ok(n) => n == 0,
        Err(e) => e.kind() == ErrorKind::ConnectionReset,
    }
}

fn get(addr: SocketAddr, path: &str) -> Page {
    Browser::open(addr).get(path)
}

fn status(addr: SocketAddr) -> ServerStatus {
    serde_json::from_str(&get(addr, "/api/status").body).unwrap()
}

/// The values of `/metrics` by name and labels.
fn metrics(addr: SocketAddr) -> BTreeMap<String, f64> {
    let text = get(addr, "/metrics").body;
    assert!(text.ends_with("# EOF\n"), "{text}");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
        .collect()
}

#[test]
fn one_port_serves_sessions_and_http() {
    let server = TestServer::start(Config::default());
    for (method, path, host, want, part) in [
        ("GET", "/", "127.0.0.1:50052", 200, "<!doctype html>"),
        ("GET", "/health", "localhost", 200, "ok"),
        ("GET", "/ready", "localhost", 200, "ready"),
        ("GET", "/metrics", "[::1]", 200, "fanout_sessions 0"),
        ("GET", "/api/status", "localhost", 200, "\"state\":\"ready\""),
        ("HEAD", "/", "localhost", 200, ""),
        ("GET", "/x", "localhost", 404, "/metrics"),
        // A page that a browser has found under a foreign name.
        ("GET", "/api/status", "evil.example", 421, "--http-host"),
        ("GET", "/health", "evil.example", 200, "ok"),
    ] {
        let mut browser = Browser::open(server.addr);
        let page = browser.send(method, path, host).read(method);
        assert_eq!(page.status, want, "{method} {path} {host}: {}", page.head);
        assert!(page.body.contains(part), "{method} {path}: {}", page.body);
        assert!(page.head.contains("Connection: close") && page.head.contains("nosniff"), "{}", page.head);
        assert!(browser.is_closed());
    }
    let mut browser = Browser::open(server.addr);
    let page = browser.send("POST", "/", "localhost").read("POST");
    assert!(page.status == 405 && page.head.contains("Allow: GET, HEAD") && browser.is_closed(), "{}", page.head);
    // It was no session, and says nothing about the version of the clients at this address.
    let mut client = Client::connect(&server);
    client.assert_alive();
    assert_eq!(status(server.addr).totals.sessions, 1);
    assert_eq!(status(server.addr).session_count, 1);
    assert_eq!(Some(status(server.addr).machine), machine_id());
}

#[test]
fn http_answers_while_no_client_is_accepted() {
    let server = TestServer::start(Config::default().with_max_connections(1));
    let client = Client::connect(&server);
    let codes = |addr| ["/health", "/ready", "/metrics", "/"].map(|path| get(addr, path).status);
    assert_eq!(codes(server.addr), [200; 4], "full");
    // Who asks for the state is no client that was refused.
    assert_eq!(metrics(server.addr)["fanout_refusals_total{reason=\"rejected-full\"}"], 0.0);
    let handle = server.handle.clone();
    let drain = std::thread::spawn(move || handle.drain(WATCHDOG));
    eventually("the server drains", || get(server.addr, "/ready").status == 503);
    assert_eq!(codes(server.addr), [200, 503, 200, 200], "draining");
    assert_eq!(metrics(server.addr)["fanout_ready"], 0.0);
    assert_eq!(status(server.addr).state, "draining");
    drop(client);
    drain.join().unwrap();
}

#[test]
fn http_can_be_switched_off_or_moved() {
    let server = TestServer::start(Config::default().with_http(false));
    let mut browser = Browser::open(server.addr);
    assert!(browser.send("GET", "/", "localhost").is_closed());
    let both = [ListenAddress::new("127.0.0.1", 0), ListenAddress::new("127.0.0.1", 0).for_http()];
    let server = TestServer::run(&both, vec![cpu_device(0)], Config::default().with_http(false));
    let [sessions, http] = [0, 1].map(|at: usize| server.listeners[at].addr);
    assert!(Browser::open(sessions).send("GET", "/", "localhost").is_closed());
    assert_eq!(get(http, "/health").status, 200);
    // No other protocol there.
    let mut client = Client::connect_from([127, 0, 0, 1], http);
    client.send(&hello_request());
    let mut reply = [0; 12];
    client.stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"HTTP/1.1 400");
}

/// docs/monitoring.md lists every metric, and no other.
#[test]
fn the_manual_lists_the_metrics() {
    let server = TestServer::start(Config::default());
    let text = get(server.addr, "/metrics").body;
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let sample_name =
        |(name, kind): (&str, &str)| if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
    let shown: BTreeSet<String> = types.map(sample_name).collect();
    let manual = include_str!("../../docs/monitoring.md");
    let names = manual.split('`').filter(|word| word.starts_with("fanout_")).map(str::to_owned);
    assert_eq!(shown, names.collect());
    assert!(shown.len() > 20, "{shown:?}");
}

/// The bytes that a client has sent and received, counted at its socket, are those of `/metrics`.
#[test]
fn metrics_agree_with_an_independent_count() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 1 << 20);
    let [x, y] = [1, 2].map(|id| memory.float_tensor(id, 16, 128 * (id - 1)));
    client.set_floats(&x, &[-2.0; 16]);
    let sum = node(OpCode::Add, y, &[&x, &x]);
    for _ in 0..3 {
        client.compute_graph(0, &[2], &[x.clone(), sum.clone()]);
    }
    assert_eq!(client.get_floats(&sum), [-4.0; 16]);
    client.assert_alive();
    let [sent, received] = client.counted_bytes();
    // Bytes count when they are sent, which their receiver may notice first.
    eventually("all bytes are counted", || status(server.addr).sessions.first().is_some_and(|of| of.sent == received));
    let before = status(server.addr);
    let [session] = &before.sessions[..] else { panic!("{before:?}") };
    assert_eq!((session.received, session.sent, session.graphs), (sent, received, 3));
    assert_eq!((session.peer.as_deref(), session.memory >= 1 << 20), (Some(&*client.addr.to_string()), true));
    client.shutdown_write();
    client.expect_closed();
    eventually("the session has ended", || metrics(server.addr)["fanout_sessions"] == 0.0);
    let metrics = metrics(server.addr);
    let counts =
        |name: &str, command: &str| metrics[&format!("fanout_request_seconds_{name}{{command=\"{command}\"}}")];
    for (name, want) in [
        ("fanout_received_bytes_total", sent as f64),
        ("fanout_sent_bytes_total", received as f64),
        ("fanout_graphs_total", 3.0),
        ("fanout_sessions_started_total", 1.0),
        ("fanout_sessions_ended_total{reason=\"client-closed\"}", 1.0),
        ("fanout_sessions_ended_total{reason=\"violation\"}", 0.0),
        ("fanout_tensor_data_bytes_total{source=\"client\"}", 64.0),
        ("fanout_refusals_total{reason=\"rejected-full\"}", 0.0),
    ] {
        assert_eq!(metrics.get(name), Some(&want), "{name} in {metrics:#?}");
    }
    assert_eq!(
        [counts("count", "GRAPH_COMPUTE"), counts("count", "SET_TENSOR"), counts("count", "HELLO")],
        [3.0, 1.0, 1.0]
    );
    assert!(counts("sum", "GRAPH_COMPUTE") > 0.0);
    assert!(metrics["fanout_session_device_time_seconds_total"] > 0.0);
}

/// Places for HTTP are no places of sessions, and the other way round.
#[test]
fn many_browsers_keep_no_client_out() {
    let server = TestServer::start(Config::default().with_max_connections(2));
    let open = |_| {
        let mut browser = Browser::open(server.addr);
        browser.0.write_all(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n").unwrap();
        browser
    };
    let browsers: Vec<_> = (0..80).map(open).collect();
    let mut clients = [Client::connect(&server), Client::connect(&server)];
    clients.iter_mut().for_each(Client::assert_alive);
    // The server reads them on threads of their own, so that the order of their places is not known: all have had one once 16 are closed.
    eventually("the first ones give way", || browsers.iter().filter(|browser| browser.was_closed()).count() >= 16);
    assert_eq!(get(server.addr, "/api/status").status, 200);
}

#[test]
fn a_server_with_a_listener_for_http_alone_needs_one_for_clients() {
    let only = [ListenAddress::new("127.0.0.1", 0).for_http()];
    assert!(Server::bind_all(&only, vec![cpu_device(0)], Config::default()).is_err());
}

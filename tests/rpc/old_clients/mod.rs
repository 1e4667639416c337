//! The server with clients of older versions: transcripts that are built from the layouts byte by byte, this crate's own client
//! on a port of each version, and invalid messages.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

mod frames;
mod hostile;

use crate::client::options;
use crate::old_servers::run_network;
use crate::support::*;
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::{CacheConfig, Config};
use frames::{GEN0, GEN0_FIRST, Layout, Tensor, V3_0_0, V3_0_0_SECOND, V3_0_0_THIRD, V3_6_1};
use std::io::{Read, Write};

const LAYOUTS: [Layout; 5] = [GEN0, GEN0_FIRST, V3_0_0, V3_0_0_SECOND, V3_0_0_THIRD];

/// A connection of a client of an older version.
struct OldClient {
    client: Client,
    layout: Layout,
}

impl OldClient {
    /// Connects, and exchanges HELLO if the version has one.
    fn connect(server: &TestServer, layout: Layout) -> OldClient {
        let mut old = OldClient { client: Client::connect_without_hello(server), layout };
        if let Some(version) = layout.hello {
            assert_eq!(old.request(&layout.frame(14, &[])), version);
        }
        old
    }

    /// Sends a frame and returns the body of its response.
    #[track_caller]
    fn request(&mut self, frame: &[u8]) -> Vec<u8> {
        self.client.stream.write_all(frame).unwrap();
        let mut size = [0; 8];
        self.client.stream.read_exact(&mut size).unwrap();
        let mut body = vec![0; u64::from_le_bytes(size) as usize];
        self.client.stream.read_exact(&mut body).unwrap();
        body
    }

    #[track_caller]
    fn request_number(&mut self, frame: &[u8]) -> u64 {
        u64::from_le_bytes(self.request(frame).try_into().unwrap())
    }

    /// Allocates a buffer and returns its handle and its base address.
    fn alloc(&mut self, size: u64) -> (u64, u64) {
        let layout = self.layout;
        let reply = self.request(&layout.alloc_buffer(size));
        assert_eq!(reply[8..], size.to_le_bytes());
        let handle = u64::from_le_bytes(reply[..8].try_into().unwrap());
        (handle, self.request_number(&layout.buffer_request(3, handle)))
    }

    fn set_tensor(&mut self, t: &Tensor<'_>, offset: u64, data: &[u8]) {
        let frame = self.layout.set_tensor(t, offset, data);
        if self.layout.set_tensor_replies {
            assert!(self.request(&frame).is_empty());
        } else {
            self.client.write(&frame);
        }
    }

    fn get_floats(&mut self, t: &Tensor<'_>) -> Vec<f32> {
        let bytes = self.request(&self.layout.get_tensor(t, 0, 4 * u64::from(t.floats)));
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }
}

/// A leaf of 4 floats, `SCALE` of it by 2, and SILU of that. The bias, which versions before 3.0 do not read, is `bias`.
fn graph(layout: &Layout, (buffer, base): (u64, u64), bias: f32) -> [Tensor<'static>; 3] {
    let tensor = |id, at| Tensor { id, buffer, data: base + at, floats: 4, ..Tensor::default() };
    let params = [2f32.to_bits() as i32, bias.to_bits() as i32];
    [
        tensor(1, 0),
        Tensor { op: layout.scale, params, srcs: &[1], ..tensor(2, 64) },
        Tensor { op: layout.unary, params: [10, 0], srcs: &[2], ..tensor(3, 128) },
    ]
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|f| f.to_le_bytes()).collect()
}

/// A session with every command of a version: on a port for it, and on one where the first bytes tell it.
fn transcript(layout: Layout, server: &TestServer) {
    let mut client = OldClient::connect(server, layout);
    assert_eq!(client.request_number(&layout.device_query(1)), 64);
    assert_eq!(client.request_number(&layout.device_query(2)), MEMORY);
    let memory = client.request(&layout.device_query(layout.commands[3]));
    assert_eq!(memory, [MEMORY.to_le_bytes(), MEMORY.to_le_bytes()].concat());
    let at = client.alloc(256);
    assert!(client.request(&layout.buffer_clear(at.0, 0)).is_empty());
    let bias = if layout.hello.is_some() { 0.5 } else { 7.0 };
    let [x, doubled, y] = graph(&layout, at, bias);
    let values = [-1.0, 0.0, 0.5, 3.0f32];
    client.set_tensor(&x, 0, &bytes(&values));
    client.set_tensor(&x, 4, &bytes(&[0.25]));
    if layout.hello.is_some() {
        assert_eq!(client.request(&layout.frame(15, &[])), 1u32.to_le_bytes());
        let record = layout.record(&x);
        assert!(client.request(&layout.frame(12, &[&record])).is_empty());
        assert_eq!(client.request_number(&layout.frame(13, &[layout.device(), &record])), 16);
        assert_eq!(client.request(&layout.frame(7, &[&record, &[0; 16]])), [0]);
    }
    let applied = if layout.hello.is_some() { bias } else { 0.0 };
    let want: Vec<f32> =
        [-1.0, 0.25, 0.5, 3.0f32].iter().map(|x| 2.0 * x + applied).map(|x| x / (1.0 + (-x).exp())).collect();
    for _ in 0..2 {
        assert_eq!(client.request(&layout.graph_compute(&[2, 3], &[x, doubled, y])), [0], "status of the graph");
        let got = client.get_floats(&y);
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-6), "{layout:?}: {got:?} {want:?}");
    }
    assert_eq!(client.request(&layout.copy_tensor(&y, &x)), [1]);
    assert_eq!(client.get_floats(&x), client.get_floats(&y));
    assert!(client.request(&layout.buffer_request(4, at.0)).is_empty());
    assert_eq!(server.used_bytes(0), 0);
}

#[test]
fn transcripts_of_old_clients_get_the_responses_of_their_versions() {
    for layout in LAYOUTS {
        for listen in ["127.0.0.1:0".to_owned(), format!("127.0.0.1:0={}", layout.listen)] {
            transcript(layout, &TestServer::with_listeners(&[&listen], Config::default()));
        }
    }
}

/// RMS_NORM (24 in 3.0.0, then 25) of a leaf, and MUL_MAT (28, then 29) of both: no op that only one version has. The counts of
/// sources tell the numbering, and the client that sends nothing waits for the status.
#[test]
fn clients_of_3_0_0_are_told_by_the_sources_of_any_op() {
    let server = TestServer::with_listeners(&["127.0.0.1:0"], Config::default());
    for (layout, norm) in [(V3_0_0, 24), (V3_0_0_SECOND, 25), (V3_0_0_THIRD, 25)] {
        let mut client = OldClient::connect(&server, layout);
        let (buffer, base) = client.alloc(256);
        let tensor = |id, at, floats| Tensor { id, buffer, data: base + at, floats, ..Tensor::default() };
        let x = tensor(1, 0, 4);
        let normed = Tensor { op: norm, srcs: &[1], ..tensor(2, 64, 4) };
        let product = Tensor { op: norm + 4, srcs: &[2, 1], ..tensor(3, 128, 1) };
        client.set_tensor(&x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]));
        for _ in 0..2 {
            assert_eq!(client.request(&layout.graph_compute(&[2, 3], &[x, normed, product])), [0], "{layout:?}");
            let (got, rms) = (client.get_floats(&product)[0], 7.5f32.sqrt());
            assert!((got - 30.0 / rms).abs() < 1e-5, "{layout:?}: {got}");
        }
        // Ops behind TOP_K tell the second numbering from the third.
        assert_eq!(client.request(&layout.graph_compute(&[2, 3], &graph(&layout, (buffer, base), 0.0))), [0]);
    }
}

/// RMS_NORM of 3.0.0 is NORM in later versions, and nothing in the graph tells which one it is.
#[test]
fn a_graph_whose_ops_are_a_guess_is_refused_with_the_remedy() {
    for (listen, refused) in [("127.0.0.1:0", true), ("127.0.0.1:0=3.0.0", false), ("127.0.0.1:0=3.6.1", false)] {
        let server = TestServer::with_listeners(&[listen], Config::default());
        let mut layout = V3_0_0;
        layout.hello = Some(if listen.ends_with("3.6.1") { [3, 6, 1] } else { [3, 0, 0] });
        let mut client = OldClient::connect(&server, layout);
        let [x, mut y, _] = graph(&layout, client.alloc(256), 0.0);
        (y.op, y.params) = (24, [0, 0]);
        let graph = layout.graph_compute(&[2], &[x, y]);
        if listen.ends_with("3.0.0") {
            assert_eq!(client.request(&graph), [0]);
        } else {
            client.client.write(&graph);
        }
        if refused {
            client.client.expect_refused(&["GRAPH_COMPUTE", "3.0.0", "--listen PORT=3.0.0"]);
        } else {
            assert_eq!(client.get_floats(&y).len(), 4);
        }
    }
}

/// ADD has one number in all versions. The second graph has the flags and an op of 3.6.1.
#[test]
fn a_graph_without_flags_does_not_exclude_versions_with_flags() {
    let server = TestServer::with_listeners(&["127.0.0.1:0"], Config::default());
    let mut client = OldClient::connect(&server, V3_6_1);
    let (buffer, base) = client.alloc(256);
    let [x, mut sum, mut y] = graph(&V3_6_1, (buffer, base), 0.0);
    (sum.op, sum.params, sum.srcs) = (2, [0, 0], &[1, 1]);
    client.set_tensor(&x, 0, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    // In one write, as a client that waits for no status sends them.
    let first = [V3_6_1.graph_compute(&[2], &[x, sum]), V3_6_1.get_tensor(&sum, 0, 16)].concat();
    assert_eq!(client.request(&first), bytes(&[2.0, 4.0, 6.0, 8.0]));
    (sum.flags, y.flags) = (16, 16);
    client.client.write(&V3_6_1.graph_compute(&[2, 3], &[x, sum, y]));
    let got = client.get_floats(&y);
    assert!((got[0] - 2.0 / (1.0 + (-2f32).exp())).abs() < 1e-6, "{got:?}");
}

/// A graph may also be the first message with a record.
#[test]
fn a_graph_alone_tells_the_length_of_a_record() {
    let server = TestServer::with_listeners(&["127.0.0.1:0"], Config::default());
    for layout in LAYOUTS {
        let mut client = OldClient::connect(&server, layout);
        let at = client.alloc(256);
        assert_eq!(client.request(&layout.graph_compute(&[2, 3], &graph(&layout, at, 0.0))), [0], "{layout:?}");
    }
}

#[test]
fn ops_that_exist_no_longer_are_refused_with_their_name() {
    let server = TestServer::with_listeners(&["127.0.0.1:0"], Config::default());
    for (op, kind, reason) in [
        (70, 0, "invalid graph: version gen0 (2024, before HELLO) of the RPC protocol has no op 70 (MAP_UNARY)"),
        (74, 0, "op 74 (MAP_CUSTOM3_F32)"),
        (81, 0, "has no op 81"),
        (69, 14, "no kind 14 of UNARY"),
        (61, 0, "op FLASH_ATTN_BACK is not supported by this server"),
    ] {
        let mut client = OldClient::connect(&server, GEN0);
        let [x, mut doubled, _] = graph(&GEN0, client.alloc(256), 0.0);
        (doubled.op, doubled.params) = (op, [kind, 0]);
        // The op of a leaf is irrelevant.
        client.request(&GEN0.graph_compute(&[], &[x, doubled]));
        client.client.write(&GEN0.graph_compute(&[2], &[x, doubled]));
        client.client.expect_refused(&["GRAPH_COMPUTE", reason]);
    }
}

/// Before 7.0 SET_TENSOR has no cache flag: a client sends the hash of every upload of more than 10 MiB, and the server caches
/// these.
#[test]
fn large_uploads_of_old_clients_are_cached_without_a_flag() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config::default().with_cache(Some(CacheConfig::new(dir.path())));
    let server = TestServer::with_listeners(&["127.0.0.1:0"], config);
    let mut client = OldClient::connect(&server, V3_0_0);
    for (bytes, cached) in [(10_u32 << 20, false), ((10 << 20) + 4, true)] {
        let (buffer, data) = client.alloc(bytes.into());
        let x = Tensor { id: 1, buffer, data, floats: bytes / 4, ..Tensor::default() };
        let content = random_bytes(1, bytes as usize);
        client.set_tensor(&x, 0, &content);
        assert_eq!(client.request(&V3_0_0.buffer_clear(buffer, 0)).len(), 0);
        let hash = content
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let found = client.request(&V3_0_0.frame(7, &[&V3_0_0.record(&x), &[0; 8], &hash.to_le_bytes()]));
        assert_eq!(found, [u8::from(cached)], "{bytes} bytes");
        let want = if cached { content[..16].to_vec() } else { vec![0; 16] };
        assert_eq!(client.request(&V3_0_0.get_tensor(&x, 0, 16)), want);
    }
}

/// Names of versions for `--listen`, the version that the client then sees, and its name in the lists of numbers.
const SERVED: [(&str, &str, &str); 14] = [
    ("8.0", "8.0.1", "8.0.1"),
    ("7.0", "7.0.0", "7.0.0"),
    ("5.1", "5.1.0", "5.1.0"),
    ("5.0", "5.0.0", "5.0.0"),
    ("4.0", "4.0.3", "4.0.3"),
    ("4.0.3", "4.0.3", "4.0.3"),
    ("4.0.2", "4.0.2", "4.0.2"),
    ("4.0.1", "4.0.1", "4.0.1"),
    ("4.0.0", "4.0.0", "4.0.0"),
    ("3.x", "3.0.0", "3.0.0"),
    ("3.6.1", "3.6.1", "3.6.1"),
    ("3.0.0", "3.0.0", "3.0.0"),
    ("gen0", "0.0.0", "gen0"),
    ("3", "3.0.0", "3.0.0"),
];

/// The client takes its codec from the server's reply, so each version's encoder meets its decoder.
#[test]
fn the_client_computes_the_same_results_on_a_port_of_every_version() {
    for (listen, version, name) in SERVED {
        let server = TestServer::with_listeners(&[&format!("127.0.0.1:0={listen}")], Config::default());
        let endpoint = Endpoint::connect(&server.addr.to_string(), &options()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(endpoint.version().to_string(), version, "{listen}");
        assert_eq!(endpoint.server().is_some(), version >= "7", "{listen}: only 7.0 and later offer the extensions");
        let (local, remote) = (&server.devices[0], &endpoint.devices()[0]);
        assert!(run_network(remote, name, 3) == run_network(local, name, 3), "{listen}");
        drop(endpoint);
        eventually("the server has freed all buffers", || server.used_bytes(0) == 0);
    }
}

/// A port for one version refuses a client that begins like another one.
#[test]
fn a_port_for_one_version_refuses_other_forms_of_hello() {
    let server = TestServer::with_listeners(&["127.0.0.1:0=3.6.1"], Config::default());
    let mut client = Client::connect_without_hello(&server);
    client.send(&hello_request());
    client.expect_refused(&["HELLO", "protocol 4.0 and later", "this address serves 3.6.1"]);
    let mut client = Client::connect_without_hello(&server);
    client.write(&GEN0.device_query(1));
    client.expect_refused(&["GET_ALIGNMENT", "expected HELLO as the first message"]);
    let server = TestServer::with_listeners(&["127.0.0.1:0=gen0"], Config::default());
    let mut client = Client::connect_without_hello(&server);
    client.write(&V3_0_0.frame(14, &[]));
    client.expect_refused(&["HELLO", "protocols 1.0 to 3.6, and this address serves gen0"]);
}

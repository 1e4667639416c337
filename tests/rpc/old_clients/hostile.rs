//! Invalid messages of older versions: each closes only its own connection and logs at most one line.

use super::frames::{Layout, Tensor};
use super::{LAYOUTS, OldClient, bytes, graph};
use crate::support::*;
use fanout::rpc::server::Config;
use std::io::Read;

/// One valid request of every command with a body.
fn requests(layout: &Layout, at: (u64, u64)) -> Vec<Vec<u8>> {
    let tensors @ [x, _, y] = graph(layout, at, 0.0);
    let record = layout.record(&x);
    let mut all = vec![
        layout.alloc_buffer(64),
        layout.device_query(1),
        layout.device_query(layout.commands[3]),
        layout.buffer_request(3, at.0),
        layout.buffer_request(4, at.0),
        layout.buffer_clear(at.0, 1),
        layout.set_tensor(&x, 0, &bytes(&[1.0; 4])),
        layout.get_tensor(&x, 0, 16),
        layout.copy_tensor(&x, &y),
        layout.graph_compute(&[2, 3], &tensors),
    ];
    if layout.hello.is_some() {
        all.push(layout.frame(7, &[&record, &[0; 16]]));
        all.push(layout.frame(12, &[&record]));
        all.push(layout.frame(13, &[layout.device(), &record]));
        all.push(layout.frame(15, &[]));
    }
    all
}

/// A server, and a bystander client of today with a buffer that must stay unchanged.
struct Attack {
    server: TestServer,
    bystander: Client,
    memory: ClientBuffer,
}

impl Attack {
    fn new(layout: &Layout) -> Attack {
        let config = Config::default();
        let mut server =
            TestServer::with_listeners(&[&format!("127.0.0.1:0={}", layout.listen), "127.0.0.1:0=7"], config);
        let old = server.addr;
        server.addr = server.listeners[1].addr;
        let mut bystander = Client::connect(&server);
        server.addr = old;
        let memory = bystander.alloc(0, 4096);
        bystander.set_tensor(&memory.byte_tensor(), 0, &[7; 4096]);
        Attack { server, bystander, memory }
    }

    fn end(mut self) {
        assert_eq!(self.bystander.get_tensor(&self.memory.byte_tensor(), 0, 4096), [7; 4096]);
        eventually("the server has freed the memory of all attackers", || self.server.used_bytes(0) == 4096);
        assert_eq!(logged_warnings("bug in fanout"), Vec::<String>::new());
    }
}

#[test]
fn messages_of_old_versions_cut_at_any_length_are_rejected() {
    for layout in LAYOUTS {
        let attack = Attack::new(&layout);
        for number in 0..requests(&layout, (1, 64)).len() {
            let n = requests(&layout, (1, 64))[number].len();
            for len in [1, 8, 9, 10, 8 + layout.record, n / 2, n - 1].into_iter().filter(|&len| len > 0 && len < n) {
                let mut old = OldClient::connect(&attack.server, layout);
                let at = old.alloc(4096);
                old.client.write(&requests(&layout, at)[number][..len]);
                old.client.shutdown_write();
                old.client.expect_refused(&["in the middle of a message"]);
            }
        }
        attack.end();
    }
}

#[test]
fn messages_of_old_versions_with_impossible_sizes_are_rejected() {
    for layout in LAYOUTS {
        let attack = Attack::new(&layout);
        let commands = if layout.hello.is_some() { 17 } else { 11 };
        for command in (0..commands).chain([17, 22, 23, 200]) {
            for size in [1, 5, u64::from(u32::MAX), 1 << 62, u64::MAX] {
                // An upload may have any length; its range is checked instead.
                if command == 6 && (304..1 << 63).contains(&size) {
                    continue;
                }
                let mut old = OldClient::connect(&attack.server, layout);
                let _ = old.alloc(64);
                old.client.write(&[&[command][..], &size.to_le_bytes()].concat());
                old.client.expect_refused(&[]);
            }
        }
        attack.end();
    }
}

#[test]
fn uploads_of_old_versions_past_the_end_are_rejected() {
    for layout in LAYOUTS {
        let attack = Attack::new(&layout);
        for (offset, len) in [(0, 4100), (4096, 1), (u64::MAX, 1), (1 << 63, 8)] {
            let mut old = OldClient::connect(&attack.server, layout);
            let (buffer, data) = old.alloc(4096);
            let x = Tensor { id: 1, buffer, data, floats: 1024, ..Tensor::default() };
            old.client.write(&layout.set_tensor(&x, offset, &vec![1; len]));
            old.client.expect_refused(&["SET_TENSOR", "reach past its buffer of 4096"]);
        }
        attack.end();
    }
}

#[test]
fn randomly_changed_messages_of_old_versions_end_at_most_their_connection() {
    for layout in LAYOUTS {
        let attack = Attack::new(&layout);
        let mut rng = fastrand::Rng::with_seed(9);
        for _ in 0..200 {
            let mut old = OldClient::connect(&attack.server, layout);
            let at = old.alloc(4096);
            let mut all = requests(&layout, at);
            let chosen = rng.usize(..all.len());
            let message = &mut all[chosen];
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..message.len());
                message[at] = if rng.bool() { rng.u8(..) } else { 0xff };
            }
            old.client.write(message);
            old.client.shutdown_write();
            let mut rest = Vec::new();
            let _ = old.client.stream.read_to_end(&mut rest);
            assert!(old.client.warnings().len() <= 1);
        }
        attack.end();
    }
}

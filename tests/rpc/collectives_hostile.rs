//! Hostile clients of the collectives of protocol 8.0. A bystander's session goes on.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::collectives::*;
use crate::support::*;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::io::Read;

/// Requests without end, and a client that has hung up: the first wait ends the session, and nothing dials for the others.
#[cfg(target_os = "linux")] // elsewhere, unread requests may hide the end of the stream
#[test]
fn a_client_that_hangs_up_ends_its_pipelined_requests() {
    let server = server(21, config(&["127.0.0.0/8:*"]));
    let silent = std::net::TcpListener::bind((loopback(22), 0)).unwrap();
    let there = silent.local_addr().unwrap();
    let mut client = connect(&server);
    for _ in 0..64 {
        send_init(&mut client, comm_init(0, 1, there.port().into(), there.ip().to_string().as_bytes()));
    }
    client.shutdown_write();
    let mut replies = Vec::new();
    let _ = client.stream.read_to_end(&mut replies);
    assert!(replies.is_empty(), "{replies:?}");
    eventually("the session has ended", || server.handle.connections() == 0);
    silent.set_nonblocking(true).unwrap();
    assert!(std::iter::from_fn(|| silent.accept().ok()).count() <= 1, "dialled again");
    assert_eq!(client.warnings().len(), 1, "{:?}", client.warnings());
}

/// Changed and truncated requests of one of two linked sessions, while the other one waits for its bytes.
#[test]
fn mutated_requests_of_linked_sessions_end_at_most_their_sessions() {
    let server = server(23, config(&["127.0.0.0/8:*"]));
    let mut bystander = connect(&server);
    let (memory, data) = (bystander.alloc(0, 4096), random_bytes(5, 4096));
    bystander.set_tensor(&memory.byte_tensor(), 0, &data);
    let mut rng = fastrand::Rng::with_seed(11);
    for round in 0..120 {
        let mut clients = [connect(&server), connect(&server)];
        link(&mut clients, both_ranks(&server));
        let tensors = clients.each_mut().map(|client| client.alloc(0, 1024).float_tensor(1, 64, 0));
        let rank = rng.usize(..2);
        let [rank_0, rank_1] = both_ranks(&server);
        let mut bytes = encode_message(&match round % 3 {
            0 => Request::CommAllreduce(CommAllreduce { device: 0, tensor: tensors[rank].clone() }),
            1 => Request::CommInit(if rank == 0 { rank_0 } else { rank_1 }),
            _ => Request::CommFree(CommFree { device: 0 }),
        });
        if rng.bool() {
            bytes.truncate(rng.usize(1..bytes.len()));
        } else {
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                bytes[at] = if rng.bool() { rng.u8(..) } else { 0xff };
            }
        }
        clients[rank].write(&bytes);
        allreduce(&mut clients[1 - rank], &tensors[1 - rank]);
        bystander.assert_alive();
        clients.iter().for_each(Client::shutdown_write);
        for client in &mut clients {
            let _ = client.stream.read_to_end(&mut Vec::new());
            // Of a COMM_INIT, and of the session's end.
            assert!(client.warnings().len() <= 2, "{bytes:?}: {:?}", client.warnings());
        }
        // The next pair uses the same address.
        eventually("the sessions have ended", || server.handle.connections() == 1);
    }
    assert_eq!(bystander.get_tensor(&memory.byte_tensor(), 0, 4096), data);
    assert_eq!(server.used_bytes(0), 4096);
    assert_eq!(logged_warnings("bug in fanout"), Vec::<String>::new());
}

#[test]
fn a_tensor_that_cannot_be_reduced_ends_the_session() {
    let server = server(19, config(&["127.0.0.0/8:*"]).with_max_memory(Some(2 << 20)));
    type Change = fn(&mut TensorRecord);
    let cases: [(&str, Change); 5] = [
        ("expected a tensor of type F32 without gaps", |t| {
            (t.dtype, t.nb) = (DType::F16.to_wire(), [2, 2 * 64, 2 * 64, 2 * 64]);
        }),
        ("expected a tensor of type F32 without gaps", |t| (t.ne, t.nb) = ([32, 2, 1, 1], [4, 256, 512, 512])),
        ("reach past its buffer", |t| t.data += (1 << 20) + (1 << 19) - 252),
        ("no buffer has the handle", |t| t.buffer += 100),
        // 1.25 MiB of elements: the scratch memory exceeds the session's budget.
        ("out of memory", |t| {
            *t = TensorRecord { ne: [327_680, 1, 1, 1], nb: [4, 1_310_720, 1_310_720, 1_310_720], ..t.clone() }
        }),
    ];
    for (reason, change) in cases {
        let mut client = connect(&server);
        let _peer = linked(&server, &mut client);
        let memory = client.alloc(0, (1 << 20) + (1 << 19));
        let mut tensor = memory.float_tensor(1, 64, 0);
        change(&mut tensor);
        allreduce(&mut client, &tensor);
        client.expect_refused(&["COMM_ALLREDUCE", reason]);
    }
}

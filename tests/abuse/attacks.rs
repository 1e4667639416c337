//! The attacks. All of their messages are valid.

use crate::session::{ExtendedSession, Session, allocated, encode, encode_ext, ping};
use fanout::rpc::wire::ext::{
    BufferSpan, CloseQueue, ExtCommand, ExtRequest, ExtResponse, IssueTokens, Mark, OpenQueue, ReceiveFromPeer,
    TransferTokenList, Wait,
};
use fanout::rpc::wire::{AllocBuffer, FreeBuffer, Request};
use std::io::{Error, Result};
use std::time::Instant;

/// What a client, or several, do until a time is over.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    /// Connections of the attack at a time.
    pub(crate) connections: usize,
    /// Threads of transfers between servers that the attack makes the server start.
    pub(crate) transfer_threads: usize,
    /// Repeats the attack until the time is over, at least once. Returns the number of rounds, and closes all connections.
    pub(crate) run: fn(address: &str, until: Instant) -> Result<u64>,
}

pub(crate) const ATTACKS: &[Attack] = &[
    Attack { name: "closed-queues", connections: 1, transfer_threads: 1, run: close_queues_that_wait },
    Attack { name: "small-buffers", connections: 1, transfer_threads: 0, run: free_every_second_small_buffer },
    Attack { name: "many-queues", connections: 64, transfer_threads: 0, run: open_all_queues },
];

/// Calls `round` until the time is over, at least once.
fn rounds(until: Instant, mut round: impl FnMut() -> Result<()>) -> Result<u64> {
    let mut count = 0;
    loop {
        round()?;
        count += 1;
        if Instant::now() >= until {
            return Ok(count);
        }
    }
}

/// Opens queues that wait for a mark that is never reached, and closes them.
fn close_queues_that_wait(address: &str, until: Instant) -> Result<u64> {
    const BYTES: u64 = 4096;
    let mut client = ExtendedSession::connect(address)?;
    let buffer = client.alloc(BYTES)?;
    let tokens = client.request(&ExtRequest::IssueTokens(IssueTokens { count: 1 }))?;
    let Ok(ExtResponse::IssueTokens(tokens)) = ExtResponse::decode(ExtCommand::IssueTokens, &tokens) else {
        return Err(Error::other("no token"));
    };
    // The bytes of the transfer never arrive.
    let span = BufferSpan { buffer, offset: 0, len: BYTES };
    let receive = ReceiveFromPeer { queue: 0, span, tokens: TransferTokenList(tokens.0) };
    for request in [
        ExtRequest::OpenQueue(OpenQueue { queue: 0, device: 0 }),
        ExtRequest::ReceiveFromPeer(receive),
        ExtRequest::Mark(Mark { queue: 0, number: 1 }),
    ] {
        client.send(&encode_ext(&request))?;
    }
    let queue = [
        ExtRequest::OpenQueue(OpenQueue { queue: 1, device: 0 }),
        ExtRequest::Wait(Wait { queue: 1, other_queue: 0, number: 1 }),
        ExtRequest::CloseQueue(CloseQueue { queue: 1 }),
    ];
    let mut round = queue.each_ref().map(encode_ext).concat().repeat(100);
    round.extend(ping());
    rounds(until, || {
        client.send(&round)?;
        client.read_reply().map(drop)
    })
}

/// Fills a session's handles with buffers of one byte and frees every second one, so that no two free ones are neighbours.
fn free_every_second_small_buffer(address: &str, until: Instant) -> Result<u64> {
    const BUFFERS: usize = 65_500;
    /// Requests that are sent before their replies are read: few enough for the buffers of the sockets.
    const BATCH: usize = 500;
    let mut client = Session::connect(address)?;
    let alloc = encode(&Request::AllocBuffer(AllocBuffer { device: 0, size: 1 }));
    let mut handles = Vec::new();
    rounds(until, || {
        while handles.len() < BUFFERS {
            let batch = BATCH.min(BUFFERS - handles.len());
            client.send(&alloc.repeat(batch))?;
            for _ in 0..batch {
                let handle = allocated(&client.read_reply()?)?;
                handles.push(handle.ok_or_else(|| Error::other("the server refuses a buffer"))?);
            }
        }
        let mut freed = Vec::new();
        let mut number = 0;
        handles.retain(|&remote_ptr| {
            number += 1;
            if number % 2 == 0 {
                freed.extend(encode(&Request::FreeBuffer(FreeBuffer { remote_ptr })));
            }
            number % 2 == 1
        });
        client.send(&freed)?;
        client.synchronise()
    })
}

/// Opens as many queues as a session may have, in many sessions, and closes them again.
fn open_all_queues(address: &str, until: Instant) -> Result<u64> {
    const SESSIONS: usize = 64;
    const QUEUES: u32 = 256;
    let mut clients = (0..SESSIONS).map(|_| ExtendedSession::connect(address)).collect::<Result<Vec<_>>>()?;
    let of_each = |request: fn(u32) -> ExtRequest<'static>| {
        let mut bytes: Vec<u8> = (0..QUEUES).flat_map(|queue| encode_ext(&request(queue))).collect();
        bytes.extend(ping());
        bytes
    };
    let open = of_each(|queue| ExtRequest::OpenQueue(OpenQueue { queue, device: 0 }));
    let close = of_each(|queue| ExtRequest::CloseQueue(CloseQueue { queue }));
    rounds(until, || {
        for messages in [&open, &close] {
            clients.iter_mut().try_for_each(|client| client.send(messages))?;
            clients.iter_mut().try_for_each(|client| client.read_reply().map(drop))?;
        }
        Ok(())
    })
}

//! The attacks. All of their messages are valid.

use crate::fairness::WireGraph;
use crate::session::{ExtendedSession, Session, allocated, base_address, encode, encode_ext, ping};
use fanout::graph::{Builder, TensorId};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::reduce::Reduce;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::softmax::SoftMax;
use fanout::ops::sort::Sort;
use fanout::ops::{Op, OpCode};
use fanout::rpc::wire::ext::{
    BufferSpan, BufferSpans, CloseQueue, ExtCommand, ExtHeader, ExtRequest, ExtResponse, IssueTokens, Mark, OpenQueue,
    PrepareGraph, ReadSpans, ReceiveFromPeer, Wait,
};
use fanout::rpc::wire::{AllocBuffer, BufferGetBase, FreeBuffer, GraphCompute, Request, TENSOR_RECORD, TensorRecord};
use fanout::tensor::DType;
use std::io::{Error, ErrorKind, Result, Write};
use std::time::{Duration, Instant};

/// What a client, or several, do until a time is over.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    /// Connections of the attack at a time.
    pub(crate) connections: usize,
    /// Whether the times of ordinary clients are limited. Otherwise they must only be served.
    pub(crate) timed: bool,
    /// Threads of transfers between servers that the attack makes the server start.
    pub(crate) transfer_threads: usize,
    /// Device memory that the graphs of the attack write, in bytes. Unless it is 0, the times of a client's graphs are limited.
    pub(crate) device_memory: u64,
    /// Whether the attack leaves ordinary clients a queue: those of loopback share `max-queues` with it.
    pub(crate) queues_left: bool,
    /// Repeats the attack until the time is over, at least once. Returns the number of rounds, and closes all connections.
    pub(crate) run: fn(address: &str, until: Instant) -> Result<u64>,
}

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        name: "closed-queues",
        connections: 1,
        timed: true,
        transfer_threads: 1,
        device_memory: 0,
        queues_left: true,
        run: close_queues_that_wait,
    },
    Attack {
        name: "small-buffers",
        connections: 1,
        timed: true,
        transfer_threads: 0,
        device_memory: 0,
        queues_left: true,
        run: free_every_second_small_buffer,
    },
    Attack {
        name: "many-queues",
        connections: 64,
        timed: true,
        transfer_threads: 0,
        device_memory: 0,
        queues_left: false,
        run: open_all_queues,
    },
    // Its graphs keep both processors busy, with a thread for each of its sessions.
    Attack {
        name: "host-memory",
        connections: FILLERS,
        timed: false,
        transfer_threads: 0,
        device_memory: 0,
        queues_left: true,
        run: fill_host_memory,
    },
    Attack {
        name: "far-pages",
        connections: 1,
        timed: true,
        transfer_threads: 0,
        device_memory: (FAR_COLUMNS as u64 + 8) << 21,
        queues_left: true,
        run: write_columns_far_apart,
    },
    Attack {
        name: "long-rows",
        connections: 1,
        timed: true,
        transfer_threads: 0,
        device_memory: 1 << 30,
        queues_left: true,
        run: process_long_rows,
    },
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
    let Ok(ExtResponse::IssueTokens(&[token])) = ExtResponse::decode(ExtCommand::IssueTokens, &tokens) else {
        return Err(Error::other("no token"));
    };
    // The bytes of the transfer never arrive.
    let span = BufferSpan { buffer, offset: 0, len: BYTES };
    let receive = ReceiveFromPeer { queue: 0, span, token };
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

/// Pause of an attacker before it allocates again.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Columns of the product of [`write_columns_far_apart`].
const FAR_COLUMNS: usize = 400;

/// Products of little work into new memory: the columns lie 2 MiB apart, so a tile of the product is in as many huge pages as it
/// has columns.
fn write_columns_far_apart(address: &str, until: Instant) -> Result<u64> {
    let mut builder = Builder::new();
    let mut leaf = |ne| builder.leaf(DType::F32, ne).map_err(Error::other);
    let (a, b) = (leaf([8, 1 << 19, 1, 1])?, leaf([8, FAR_COLUMNS, 1, 1])?);
    let product = builder.node(MulMat::PLAIN, &[Some(a), Some(b)]).map_err(Error::other)?;
    let graph = builder.build();
    rounds(until, || {
        let mut client = Session::connect(address)?;
        // The memory of the round before is freed after its connection has ended.
        let Ok(graph) = WireGraph::new(&graph, |size| client.alloc_or_fail(size)) else {
            std::thread::sleep(RETRY_PAUSE);
            return Ok(());
        };
        client.send(&[graph.compute()?, graph.read(product, 4)].concat())?;
        client.read_reply().map(drop)
    })
}

/// The longest rows that a CPU device accepts, in the ops that take longest for them.
fn process_long_rows(address: &str, until: Instant) -> Result<u64> {
    let mut builder = Builder::new();
    let mut leaf = |dtype, n| builder.leaf(dtype, [n, 1, 1, 1]).map_err(Error::other);
    let (row, sorted, rotated) = (leaf(DType::F32, 1 << 25)?, leaf(DType::F32, 1 << 21)?, leaf(DType::F32, 1 << 20)?);
    let positions = leaf(DType::I32, 1)?;
    let mut node = |op: Op, srcs: &[TensorId]| {
        let srcs: Vec<_> = srcs.iter().copied().map(Some).collect();
        builder.node(op, &srcs).map_err(Error::other)
    };
    node(SoftMax { scale: 1.0, max_bias: 0.0 }.into(), &[row])?;
    node(Norm::Norm { eps: 1.0 }.into(), &[row])?;
    node(Reduce::Cumsum.into(), &[row])?;
    node(Rope::new(RopeMode::Neox, 1 << 20).into(), &[rotated, positions])?;
    let result = node(Sort::Argsort { descending: true }.into(), &[sorted])?;
    let mut client = Session::connect(address)?;
    let graph = WireGraph::new(&builder.build(), |size| client.alloc_or_fail(size))?;
    let mut random = fastrand::Rng::with_seed(1);
    let values: Vec<u8> = (0..1 << 21).flat_map(|_| random.f32().to_le_bytes()).collect();
    client.send(&graph.write(sorted, &values))?;
    let messages = [graph.compute()?, graph.read(result, 4)].concat();
    rounds(until, || {
        client.send(&messages)?;
        client.read_reply().map(drop)
    })
}

/// Sessions that fill host memory.
const FILLERS: usize = 200;

/// Fills the host memory of many sessions, each with prepared graphs, replies that are not taken, and a message that misses its
/// last byte. A session that the server ends is replaced.
fn fill_host_memory(address: &str, until: Instant) -> Result<u64> {
    let messages = filling_messages(&mut ExtendedSession::connect(address)?)?;
    let mut opened = 0;
    let mut sessions: Vec<_> = (0..FILLERS).map(|_| None).collect();
    while Instant::now() < until {
        let mut progress = false;
        for session in &mut sessions {
            // The server may refuse a session while its host memory is full.
            let Some((stream, sent)) = session else {
                *session =
                    ExtendedSession::connect(address).and_then(ExtendedSession::into_nonblocking).ok().map(|s| (s, 0));
                opened += u64::from(session.is_some());
                continue;
            };
            match stream.write(&messages[*sent..]) {
                Ok(n) => (*sent, progress) = (*sent + n, progress || n > 0),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => *session = None,
            }
        }
        if !progress {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(opened)
}

/// The messages with which a session fills its host memory: it allocates a buffer, prepares graphs, and requests reads of the
/// buffer. The handle and the address of the buffer are those that the session `sample` gets for the same allocation, because
/// the server numbers the buffers of every session alike.
fn filling_messages(sample: &mut ExtendedSession) -> Result<Vec<u8>> {
    const BUFFER_BYTES: u64 = 8 << 20;
    const GRAPHS: u64 = 8;
    const NODES: u64 = 4000;
    const READS: u64 = 8;
    const MESSAGE_BYTES: u64 = 16 << 20;
    let alloc = Request::AllocBuffer(AllocBuffer { device: 0, size: BUFFER_BYTES });
    sample.send(&encode(&alloc))?;
    let buffer = allocated(&sample.read_reply()?)?.ok_or_else(|| Error::other("no memory"))?;
    sample.send(&encode(&Request::BufferGetBase(BufferGetBase { remote_ptr: buffer })))?;
    let data = base_address(&sample.read_reply()?)?;

    let row = |id: u64| TensorRecord {
        id,
        dtype: DType::F32.to_wire(),
        buffer,
        ne: [16, 1, 1, 1],
        nb: [4, 64, 64, 64],
        data,
        ..TensorRecord::decode(&[0; TENSOR_RECORD])
    };
    let mut messages = encode(&alloc);
    messages.extend(encode_ext(&ExtRequest::OpenQueue(OpenQueue { queue: 0, device: 0 })));
    for graph in 1..=GRAPHS {
        // Each graph has another number of nodes, so no two are the same.
        let nodes = 2..NODES + graph;
        let ids: Vec<_> = nodes.clone().map(|id| id.to_le_bytes()).collect();
        let node = |id| {
            let mut node = TensorRecord { op: OpCode::Sqr.to_wire(), flags: TensorRecord::FLAG_COMPUTE, ..row(id) };
            node.src[0] = id - 1;
            node.encode()
        };
        let tensors: Vec<_> = std::iter::once(row(1).encode()).chain(nodes.map(node)).collect();
        let compute = GraphCompute::new(0, &ids, &tensors).map_err(Error::other)?;
        let prepare = encode_ext(&ExtRequest::PrepareGraph(PrepareGraph { id: graph, graph: compute }));
        if graph == 1 {
            // Shows that the graphs are valid.
            sample.send(&[&prepare[..], &ping()].concat())?;
            sample.read_reply()?;
        }
        messages.extend(prepare);
    }
    let whole = BufferSpans::encode(&BufferSpan { buffer, offset: 0, len: BUFFER_BYTES });
    for id in 0..READS {
        messages.extend(encode_ext(&ExtRequest::ReadSpans(ReadSpans {
            queue: 0,
            id,
            spans: BufferSpans::new(&[whole]),
        })));
    }
    messages.extend(ExtHeader { command: ExtCommand::PrepareGraph, size: MESSAGE_BYTES }.encode());
    messages.resize(messages.len() + MESSAGE_BYTES as usize - 1, 0);
    Ok(messages)
}

//! Load beside a measured client: sessions that keep the device busy by valid messages until the measurement ends them.

use super::decoder::{Decoder, Model, q4_0};
use super::wire_graph::WireGraph;
use crate::session::{ExtendedSession, Session, encode, encode_ext};
use fanout::graph::{Builder, TensorId};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::rows::Rows;
use fanout::ops::unary::Unary;
use fanout::rpc::wire::ext::{BufferSpan, CopySpan, ExtRequest, Fill, Mark, NotifyReached, OpenQueue, RunGraph};
use fanout::rpc::wire::{BufferClear, Request, TENSOR_RECORD, TensorRecord};
use fanout::tensor::{DType, TensorDesc};
use std::io::{Error, Result};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A kind of load.
pub(crate) struct LoadClient {
    pub(crate) name: &'static str,
    /// Number of its sessions.
    pub(crate) sessions: usize,
    /// Runs one session until [`Load::has_ended`], or until its connection ends.
    pub(crate) run: fn(&Load<'_>) -> Result<()>,
}

/// The first one decodes as the measured client does. The times beside the others are compared with those beside it.
pub(crate) const LOAD_CLIENTS: &[LoadClient] = &[
    LoadClient { name: "ordinary", sessions: 1, run: decode },
    LoadClient { name: "long-graph", sessions: 1, run: run_long_graph },
    LoadClient { name: "huge-product", sessions: 1, run: run_huge_product },
    LoadClient { name: "pipeline", sessions: 1, run: send_graphs_without_reading },
    LoadClient { name: "small-graphs", sessions: 1, run: run_small_graphs_in_queues },
    LoadClient { name: "fills-copies", sessions: 1, run: fill_and_copy },
    LoadClient { name: "clears", sessions: 1, run: clear_buffers },
    LoadClient { name: "uploads", sessions: 1, run: upload_weights },
    LoadClient { name: "ping-pong", sessions: 1, run: use_and_download_weight },
    LoadClient { name: "set-rows", sessions: 1, run: set_rows },
    LoadClient { name: "new-graphs", sessions: 1, run: import_new_graphs },
    LoadClient { name: "16-sessions", sessions: 16, run: run_medium_graphs },
];

/// The state that the sessions of a load share.
pub(crate) struct Load<'a> {
    pub(crate) address: &'a str,
    /// The model of the ordinary load.
    pub(crate) model: &'a Model,
    has_ended: AtomicBool,
    /// Connections of the sessions.
    streams: Mutex<Vec<TcpStream>>,
    /// Sessions that keep the device busy.
    busy: AtomicUsize,
    /// Rounds of all sessions.
    rounds: AtomicU64,
}

impl<'a> Load<'a> {
    pub(crate) fn new(address: &'a str, model: &'a Model) -> Load<'a> {
        Load {
            address,
            model,
            has_ended: AtomicBool::new(false),
            streams: Mutex::default(),
            busy: AtomicUsize::new(0),
            rounds: AtomicU64::new(0),
        }
    }

    /// Ends the connections.
    pub(crate) fn end(&self) {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_ended.store(true, Ordering::Relaxed);
        for stream in &*streams {
            // Fails if the connection has ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    pub(crate) fn busy(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    fn connect(&self) -> Result<Session> {
        let session = Session::connect(self.address)?;
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_ended() {
            return Err(Error::other("the load has ended"));
        }
        streams.push(session.stream()?);
        Ok(session)
    }

    /// Calls `start` and `finish`, which waits for the work that `start` has sent, until the load has ended.
    fn repeat<S>(
        &self,
        session: &mut S,
        mut start: impl FnMut(&mut S) -> Result<()>,
        mut finish: impl FnMut(&mut S) -> Result<()>,
    ) -> Result<()> {
        start(session)?;
        self.busy.fetch_add(1, Ordering::Relaxed);
        loop {
            finish(session)?;
            self.rounds.fetch_add(1, Ordering::Relaxed);
            if self.has_ended() {
                return Ok(());
            }
            start(session)?;
        }
    }

    /// Sends `message` and reads its only reply, until the load has ended.
    fn repeat_message(&self, session: &mut Session, message: &[u8]) -> Result<()> {
        self.repeat(session, |session| session.send(message), |session| session.read_reply().map(drop))
    }
}

/// A graph of `nodes` products of `[k, rows]` by `[k, columns]`, which all write the same result.
fn products(nodes: usize, dtype: DType, [k, rows, columns]: [usize; 3]) -> Result<(Builder, [TensorId; 2])> {
    let build = || {
        let mut b = Builder::with_separate_slots();
        let a = b.leaf(dtype, [k, rows, 1, 1])?;
        let x = b.leaf(DType::F32, [k, columns, 1, 1])?;
        let product = b.leaf(DType::F32, [rows, columns, 1, 1])?;
        for _ in 0..nodes {
            b.node_into(MulMat::PLAIN, &[Some(a), Some(x)], product)?;
        }
        Ok((b, [a, product]))
    };
    build().map_err(|e: fanout::graph::BuildError| Error::other(e))
}

/// Places a graph in new buffers of `session`.
fn place(session: &mut Session, b: Builder) -> Result<WireGraph> {
    WireGraph::new(&b.build(), |size| session.alloc_or_fail(size))
}

/// A GRAPH_COMPUTE, and a GET_TENSOR of the first bytes of `result`.
fn compute_and_read(wire: &WireGraph, result: TensorId) -> Result<Vec<u8>> {
    Ok([wire.compute()?, wire.read(result, 64)].concat())
}

fn run_products(load: &Load<'_>, nodes: usize, sizes: [usize; 3]) -> Result<()> {
    let mut session = load.connect()?;
    let (b, [_, product]) = products(nodes, DType::F32, sizes)?;
    let wire = place(&mut session, b)?;
    let message = compute_and_read(&wire, product)?;
    load.repeat_message(&mut session, &message)
}

fn decode(load: &Load<'_>) -> Result<()> {
    let mut decoder = Decoder::new(load.connect()?, load.model)?;
    load.repeat(&mut decoder, |_| Ok(()), |decoder| decoder.token().map(drop))
}

/// Some 40 s of work.
fn run_long_graph(load: &Load<'_>) -> Result<()> {
    run_products(load, 8000, [512, 512, 1024])
}

/// Some seconds of work.
fn run_huge_product(load: &Load<'_>) -> Result<()> {
    run_products(load, 1, [4096; 3])
}

/// Some 10 ms of work.
fn run_medium_graphs(load: &Load<'_>) -> Result<()> {
    run_products(load, 200, [256, 256, 32])
}

/// Blocks only when the sockets are full.
fn send_graphs_without_reading(load: &Load<'_>) -> Result<()> {
    let mut session = load.connect()?;
    let (b, _) = products(200, DType::F32, [256, 256, 32])?;
    let message = place(&mut session, b)?.compute()?;
    load.repeat(&mut session, |session| session.send(&message), |_| Ok(()))
}

/// A session of the extension with its open queues, on each of which some work is always under way.
struct Queues {
    session: ExtendedSession,
    /// Number of the last mark that each queue has reached.
    reached: Vec<u64>,
    /// Number of the last mark that was placed in each queue.
    placed: u64,
}

impl Queues {
    fn open(load: &Load<'_>, queues: u32) -> Result<Queues> {
        let mut session = ExtendedSession::upgrade(load.connect()?)?;
        for queue in 0..queues {
            session.send(&encode_ext(&ExtRequest::OpenQueue(OpenQueue { queue, device: 0 })))?;
        }
        Ok(Queues { session, reached: vec![0; queues as usize], placed: 0 })
    }

    /// Repeats the requests of `work`, which gets the number of a queue, on all queues.
    fn repeat(mut self, load: &Load<'_>, work: impl Fn(u32) -> Vec<u8>) -> Result<()> {
        let works: Vec<_> = (0..self.reached.len() as u32).map(work).collect();
        let send = |queues: &mut Queues| {
            queues.placed += 1;
            for (queue, work) in (0..).zip(&works) {
                let number = queues.placed;
                let mark = encode_ext(&ExtRequest::Mark(Mark { queue, number }));
                let notify = encode_ext(&ExtRequest::NotifyReached(NotifyReached { queue, number }));
                queues.session.send(&[&work[..], &mark, &notify].concat())?;
            }
            Ok(())
        };
        // The next work is sent before the last one is awaited, so that no queue is ever empty.
        send(&mut self)?;
        load.repeat(&mut self, send, |queues| {
            while queues.reached.iter().any(|&reached| reached + 1 < queues.placed) {
                let (queue, number) = queues.session.next_mark()?;
                queues.reached[queue as usize] = number;
            }
            Ok(())
        })
    }
}

/// Graphs of four small products, back to back in eight queues.
fn run_small_graphs_in_queues(load: &Load<'_>) -> Result<()> {
    const GRAPHS: usize = 50;
    let mut queues = Queues::open(load, 8)?;
    let (b, _) = products(4, DType::F32, [256, 256, 8])?;
    let graph = b.build();
    let session = &mut queues.session;
    let wire = WireGraph::new(&graph, |size| {
        let buffer = session.alloc(size)?;
        Ok((buffer, session.base(buffer)?))
    })?;
    session.send(&wire.prepare(1)?)?;
    queues.repeat(load, |queue| encode_ext(&ExtRequest::RunGraph(RunGraph { queue, graph: 1 })).repeat(GRAPHS))
}

/// Fills and copies of 256 MiB in a queue.
fn fill_and_copy(load: &Load<'_>) -> Result<()> {
    const BYTES: u64 = 256 << 20;
    let mut queues = Queues::open(load, 1)?;
    let buffers = [queues.session.alloc(BYTES)?, queues.session.alloc(BYTES)?];
    let [src, dst] = buffers.map(|buffer| BufferSpan { buffer, offset: 0, len: BYTES });
    queues.repeat(load, |queue| {
        let fill = encode_ext(&ExtRequest::Fill(Fill { queue, span: src, value: 0x5a }));
        [fill, encode_ext(&ExtRequest::CopySpan(CopySpan { queue, src, dst }))].concat()
    })
}

/// BUFFER_CLEARs of 512 MiB.
fn clear_buffers(load: &Load<'_>) -> Result<()> {
    let mut session = load.connect()?;
    let (remote_ptr, _) = session.alloc_or_fail(512 << 20)?;
    let clear = encode(&Request::BufferClear(BufferClear { remote_ptr, value: 0x5a }));
    load.repeat(&mut session, |session| session.send(&clear), Session::synchronise)
}

/// SET_TENSORs of a weight of q4_0 that is used, so that the device packs it.
fn upload_weights(load: &Load<'_>) -> Result<()> {
    const SIZES: [usize; 3] = [2048, 8192, 1];
    let mut session = load.connect()?;
    let (b, [weight, product]) = products(1, DType::Q4_0, SIZES)?;
    let wire = place(&mut session, b)?;
    let upload = wire.write(weight, &q4_0(SIZES[0] / 32 * 18 * SIZES[1]));
    session.send(&[upload.clone(), compute_and_read(&wire, product)?].concat())?;
    session.read_reply()?;
    let upload_all = |session: &mut Session| (0..8).try_for_each(|_| session.send(&upload));
    load.repeat(&mut session, upload_all, Session::synchronise)
}

/// A product needs its weight packed, and a download needs it as it was uploaded.
fn use_and_download_weight(load: &Load<'_>) -> Result<()> {
    const SIZES: [usize; 3] = [4096, 14336, 1];
    let bytes = SIZES[0] / 32 * 18 * SIZES[1];
    let mut session = load.connect()?;
    let (b, [weight, _]) = products(1, DType::Q4_0, SIZES)?;
    let wire = place(&mut session, b)?;
    session.send(&wire.write(weight, &q4_0(bytes)))?;
    let message = [wire.compute()?, wire.read(weight, bytes as u64)].concat();
    load.repeat_message(&mut session, &message)
}

/// SET_ROWs of 256 MiB.
fn set_rows(load: &Load<'_>) -> Result<()> {
    const NE: [usize; 4] = [4096, 16384, 1, 1];
    let mut session = load.connect()?;
    let build = || {
        let mut b = Builder::with_separate_slots();
        let (rows, ids, table) =
            (b.leaf(DType::F32, NE)?, b.leaf(DType::I64, [NE[1], 1, 1, 1])?, b.leaf(DType::F32, NE)?);
        let written = b.view(table, TensorDesc::contiguous(DType::F32, NE)?, 0)?;
        b.node_into(Rows::SetRows, &[Some(rows), Some(ids), Some(table)], written)?;
        Ok((b, ids, written))
    };
    let (b, ids, table) = build().map_err(|e: fanout::graph::BuildError| Error::other(e))?;
    let wire = place(&mut session, b)?;
    let numbers: Vec<_> = (0..NE[1] as u64).flat_map(u64::to_le_bytes).collect();
    session.send(&wire.write(ids, &numbers))?;
    let message = compute_and_read(&wire, table)?;
    load.repeat_message(&mut session, &message)
}

/// Graphs of 8,000 small nodes, of which no two are the same.
fn import_new_graphs(load: &Load<'_>) -> Result<()> {
    let mut session = load.connect()?;
    let build = || {
        let mut b = Builder::with_separate_slots();
        let (x, scaled) = (b.leaf(DType::F32, [16, 1, 1, 1])?, b.leaf(DType::F32, [16, 1, 1, 1])?);
        for _ in 0..8000 {
            b.node_into(Unary::Scale { scale: 1.0, bias: 0.0 }, &[Some(x)], scaled)?;
        }
        Ok((b, scaled))
    };
    let (b, scaled) = build().map_err(|e: fanout::graph::BuildError| Error::other(e))?;
    let wire = place(&mut session, b)?;
    let (mut compute, read) = (wire.compute()?, wire.read(scaled, 64));
    let mut bias = 0f32;
    let send = |session: &mut Session| {
        bias += 1.0;
        if let Some(last) = compute.last_chunk_mut::<TENSOR_RECORD>() {
            let mut record = TensorRecord::decode(last);
            record.op_params[1] = bias.to_bits() as i32;
            *last = record.encode();
        }
        session.send(&compute)?;
        session.send(&read)
    };
    load.repeat(&mut session, send, |session| session.read_reply().map(drop))
}

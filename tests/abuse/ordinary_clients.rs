//! Ordinary clients beside an attack: short sessions that are timed, and an idle one whose buffer must keep its bytes.

use crate::fairness::WireGraph;
use crate::session::{ExtendedSession, Session, encode_ext};
use fanout::graph::Builder;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::rpc::wire::ext::{BufferSpan, ExtRequest, Fill, Mark, NotifyReached, OpenQueue};
use fanout::rpc::wire::{FreeBuffer, GetTensor, Request, SetTensor, SetTensorHead, TENSOR_RECORD, TensorRecord};
use fanout::tensor::DType;
use std::fmt;
use std::io::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause between two sessions of a thread: the clients must leave most of the processors to the attack.
const PAUSE: Duration = Duration::from_millis(10);

/// Of the sessions, 99 of 100 must be served within the first limit and all within the second.
const LIMIT_OF_MOST: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(2);

/// Limit of the time of 99 of 100 graphs that take a few milliseconds alone.
const GRAPH_LIMIT: Duration = Duration::from_millis(250);

/// Sessions below which the shares mean nothing.
const MIN_SESSIONS: usize = 100;

/// Times of the sessions, from connecting to the last reply.
#[derive(Default)]
pub(crate) struct Latencies {
    /// `Duration::MAX` for a session that failed.
    times: Vec<Duration>,
    /// The first failure.
    error: Option<Error>,
}

impl std::iter::Sum for Latencies {
    fn sum<I: Iterator<Item = Latencies>>(all: I) -> Latencies {
        let mut sum = all.fold(Latencies::default(), |mut sum, part| {
            sum.times.extend(part.times);
            Latencies { error: sum.error.or(part.error), ..sum }
        });
        sum.times.sort_unstable();
        sum
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_rank = |part: f64| self.times.get((self.times.len() as f64 * part) as usize).or(self.times.last());
        write!(f, "{}", self.times.len())?;
        for (name, part) in [("median", 0.5), ("99 of 100", 0.99), ("slowest", 1.0)] {
            match of_rank(part) {
                Some(&time) if time < Duration::MAX => write!(f, ", {name} {time:.1?}")?,
                _ => write!(f, ", {name} not served")?,
            }
        }
        Ok(())
    }
}

impl Latencies {
    /// The limits that graphs exceed, whose times these are.
    pub(crate) fn check_graphs(&self) -> Vec<String> {
        let mut failures = Vec::new();
        failures.extend(self.error.as_ref().map(|e| format!("the client with graphs: {e}")));
        let within = |limit| self.times.iter().filter(|&&time| time <= limit).count();
        let (all, most, served) = (self.times.len(), within(GRAPH_LIMIT), within(LIMIT));
        if all == 0 || most * 100 < all * 99 || served < all {
            failures.push(format!("{most} of {all} graphs within {GRAPH_LIMIT:?}, {served} within {LIMIT:?}"));
        }
        failures
    }

    /// The limits that the sessions exceed; without `timed`, whether any session failed.
    pub(crate) fn check(&self, timed: bool) -> Vec<String> {
        let within = |limit| self.times.iter().filter(|&&time| time <= limit).count();
        let (all, most, served) = (self.times.len(), within(LIMIT_OF_MOST), within(LIMIT));
        let mut failures = Vec::new();
        failures.extend(self.error.as_ref().map(|e| format!("the first session that failed: {e}")));
        if !timed {
            return failures;
        }
        if all < MIN_SESSIONS {
            failures.push(format!("only {all} sessions, {MIN_SESSIONS} needed"));
        }
        if most * 100 < all * 99 {
            failures.push(format!("{most} of {all} sessions were served within {LIMIT_OF_MOST:?}, not 99 of 100"));
        }
        if served < all {
            failures.push(format!("{served} of {all} sessions were served within {LIMIT:?}, not all"));
        }
        failures
    }
}

/// Runs sessions one after the other until `stop` is set. `with_queues`: every third one opens a queue.
pub(crate) fn serve_until(stop: &AtomicBool, address: &str, with_queues: bool) -> Latencies {
    let sessions = [count_devices, use_buffer, use_queue];
    let kinds = if with_queues { &sessions[..] } else { &sessions[..2] };
    let mut latencies = Latencies::default();
    while !stop.load(Ordering::Relaxed) {
        let since = Instant::now();
        match kinds[latencies.times.len() % kinds.len()](address) {
            Ok(()) => latencies.times.push(since.elapsed()),
            Err(e) => {
                latencies.times.push(Duration::MAX);
                latencies.error.get_or_insert(e);
            }
        }
        std::thread::sleep(PAUSE);
    }
    latencies
}

/// Runs a graph, too large for the lane of small programs, in one session until `stop` is set. The times are those of the graphs.
pub(crate) fn compute_until(stop: &AtomicBool, address: &str) -> Latencies {
    let mut latencies = Latencies::default();
    let mut compute = || {
        let mut builder = Builder::new();
        let x = builder.leaf(DType::F32, [1 << 22, 1, 1, 1]).map_err(Error::other)?;
        let y = builder.node(Unary::Kind(UnaryKind::Silu), &[Some(x)]).map_err(Error::other)?;
        let mut session = Session::connect(address)?;
        let graph = WireGraph::new(&builder.build(), |size| session.alloc_or_fail(size))?;
        let messages = [graph.compute()?, graph.read(y, 4)].concat();
        while !stop.load(Ordering::Relaxed) {
            let since = Instant::now();
            session.send(&messages)?;
            session.read_reply()?;
            latencies.times.push(since.elapsed());
            std::thread::sleep(PAUSE);
        }
        Ok(())
    };
    let error = compute().err();
    latencies.error = error;
    latencies.times.sort_unstable();
    latencies
}

fn count_devices(address: &str) -> Result<()> {
    Session::connect(address)?.synchronise()
}

fn use_buffer(address: &str) -> Result<()> {
    let mut session = Session::connect(address)?;
    let buffer = Buffer::write(&mut session, 64, 0x5a)?;
    if buffer.holds(&mut session)? { Ok(()) } else { Err(Error::other("the buffer has other bytes")) }
}

/// A session of the extension: its completion comes from the notifier, unless the queue was faster.
fn use_queue(address: &str) -> Result<()> {
    const BYTES: u64 = 1 << 20;
    let mut session = ExtendedSession::connect(address)?;
    let buffer = session.alloc(BYTES)?;
    for request in [
        ExtRequest::OpenQueue(OpenQueue { queue: 0, device: 0 }),
        ExtRequest::Fill(Fill { queue: 0, span: BufferSpan { buffer, offset: 0, len: BYTES }, value: 0x5a }),
        ExtRequest::Mark(Mark { queue: 0, number: 1 }),
        ExtRequest::NotifyReached(NotifyReached { queue: 0, number: 1 }),
    ] {
        session.send(&encode_ext(&request))?;
    }
    session.wait_for_mark(0, 1)
}

/// A buffer of a session, full of one byte value.
struct Buffer {
    tensor: TensorRecord,
    bytes: Vec<u8>,
}

impl Buffer {
    fn write(session: &mut Session, size: u32, value: u8) -> Result<Buffer> {
        let (buffer, data) =
            session.alloc(size.into())?.ok_or_else(|| Error::other("the server has no memory for a buffer"))?;
        let zero = TensorRecord::decode(&[0; TENSOR_RECORD]);
        let tensor = TensorRecord {
            id: 1,
            dtype: DType::I8.to_wire(),
            buffer,
            ne: [size, 1, 1, 1],
            nb: [1, size, size, size],
            data,
            ..zero
        };
        let bytes = vec![value; size as usize];
        let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset: 0 };
        session.send(&crate::session::encode(&Request::SetTensor(SetTensor { head, data: &bytes })))?;
        Ok(Buffer { tensor, bytes })
    }

    /// Whether the buffer still has its bytes.
    fn holds(&self, session: &mut Session) -> Result<bool> {
        let size = self.bytes.len() as u64;
        let get = Request::GetTensor(GetTensor { tensor: self.tensor.clone(), offset: 0, size });
        Ok(session.request(&get)? == self.bytes)
    }
}

/// The buffer of a client that is idle during the attack.
pub(crate) struct HeldBuffer {
    session: Session,
    buffer: Buffer,
}

/// Its size in bytes: large, so that it is charged exactly that.
const HELD: u32 = 1 << 20;

impl HeldBuffer {
    pub(crate) fn new(address: &str) -> Result<HeldBuffer> {
        let mut session = Session::connect(address)?;
        let buffer = Buffer::write(&mut session, HELD, 0xa5)?;
        if !buffer.holds(&mut session)? {
            return Err(Error::other("the buffer has other bytes"));
        }
        Ok(HeldBuffer { session, buffer })
    }

    pub(crate) fn is_intact(&mut self) -> bool {
        self.buffer.holds(&mut self.session).is_ok_and(|intact| intact)
    }

    /// Whether a client can allocate all of the server's memory but this buffer.
    pub(crate) fn rest_is_free(&self, address: &str) -> bool {
        let rest = crate::MEMORY - u64::from(HELD);
        let allocate = || {
            let mut session = Session::connect(address)?;
            let Some((remote_ptr, _)) = session.alloc(rest)? else { return Ok(false) };
            session.send(&crate::session::encode(&Request::FreeBuffer(FreeBuffer { remote_ptr })))?;
            session.synchronise()?;
            Ok::<_, Error>(true)
        };
        allocate().unwrap_or(false)
    }
}

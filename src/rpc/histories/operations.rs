//! The operations of a history, and their choice by a seed.
//!
//! Operations name slots instead of objects, and what a slot lacks is made when an operation needs it. So any part of a history
//! is a history, which shrinking relies on.

use std::fmt;
use std::time::Duration;

use crate::rpc::transport::memory::{Fault, Injection};

/// The slots of connections: the first and the last one are two clients at server 0.
pub(super) const CONNECTIONS: usize = 3;
/// The devices of a server.
pub(super) const DEVICES: usize = 2;
/// The slots of queues: one for each device of each connection.
pub(super) const QUEUES: usize = 2 * CONNECTIONS * DEVICES;
/// The slots of buffers: two for each device of each connection.
pub(super) const BUFFERS: usize = 2 * CONNECTIONS * DEVICES;
pub(super) const SERVERS: usize = 2;

/// Where the objects of a slot are: the slot of a connection, and a device.
pub(super) fn place(slot: usize) -> (usize, usize) {
    (slot % CONNECTIONS, slot / CONNECTIONS % DEVICES)
}

/// The server of a connection's slot.
pub(super) fn server_of(connection: usize) -> usize {
    connection % SERVERS
}

/// A range of a buffer, in parts of 1/256 of it, so that it fits a buffer of any size.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) start: u8,
    pub(super) len: u8,
    /// Bytes to add to the start: 1 to 3 for a range that is not aligned.
    pub(super) shift: u8,
}

impl Part {
    const WHOLE: Part = Part { start: 0, len: 255, shift: 0 };

    /// The range of a buffer of `bytes` bytes: at least one byte.
    pub(super) fn of(self, bytes: usize) -> std::ops::Range<usize> {
        if (self.start, self.len, self.shift) == (0, 255, 0) {
            return 0..bytes;
        }
        let start = (bytes * usize::from(self.start) / 256 / 4 * 4 + usize::from(self.shift)).min(bytes - 1);
        let len = (bytes * usize::from(self.len) / 256 / 4 * 4).max(1);
        start..(start + len).min(bytes)
    }
}

/// Where the bytes of a write come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Slice,
    Writer,
    FailingWriter,
}

/// Which connection a fault hits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// The connection of a slot.
    Client(usize),
    /// The next connection of a client to a server.
    NextClient(usize),
    /// The connection from another server, or from itself, to this server.
    Peer(usize),
}

/// An operation. `buffer` of a queue's operation selects one of the two slots of buffers on the queue's device.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Write {
        queue: usize,
        buffer: usize,
        part: Part,
        source: Source,
        seed: u64,
    },
    Read {
        queue: usize,
        buffer: usize,
        part: Part,
        also: Option<Part>,
    },
    Fill {
        queue: usize,
        buffer: usize,
        part: Part,
        value: u8,
    },
    /// `from` is the slot of any buffer: of the same device, of the other device, or of another connection.
    Copy {
        queue: usize,
        buffer: usize,
        from: usize,
        part: Part,
    },
    Run {
        queue: usize,
        buffer: usize,
        graph: usize,
        times: u8,
    },
    /// Waits for the n-th pending read, with no deadline or with one that has passed.
    AwaitRead {
        read: usize,
        passed: bool,
    },
    AwaitQueue {
        queue: usize,
        passed: bool,
    },
    /// A queue waits for a point of another queue.
    QueueWaits {
        queue: usize,
        other: usize,
    },
    /// More than the client's budget has, or than the server's device has.
    AllocateTooMuch {
        queue: usize,
        beyond_budget: bool,
    },
    Free {
        buffer: usize,
    },
    DropRead {
        read: usize,
    },
    DropQueue {
        queue: usize,
    },
    Disconnect {
        connection: usize,
    },
    Inject {
        target: Target,
        injection: Injection,
    },
    /// Shuts a server down, and starts another one at its address.
    Replace {
        server: usize,
    },
}

/// A history.
#[derive(Clone, Debug)]
pub(super) struct History {
    pub(super) seed: u64,
    /// Whether timeouts are short, so that any connection may be lost at any time. Only then do stalls have no end.
    pub(super) is_impatient: bool,
    /// Bytes of each buffer.
    pub(super) sizes: [usize; BUFFERS],
    /// The operations with their numbers.
    pub(super) operations: Vec<(usize, Operation)>,
}

impl History {
    /// The history of a seed.
    pub(super) fn of_seed(seed: u64) -> History {
        let mut rng = fastrand::Rng::with_seed(seed);
        let is_impatient = rng.u8(..10) == 0;
        // Half of all histories are without faults: what fails in them is a bug, whatever the error.
        let has_faults = is_impatient || rng.bool();
        let mut sizes = [0; BUFFERS];
        sizes.iter_mut().for_each(|size| {
            *size = match rng.u8(..40) {
                0 => 300_000,
                1..10 => rng.usize(1..=70),
                _ => rng.usize(1024..6000),
            }
        });
        // Few slots make conflicts, many make copies between servers.
        let slots = rng.usize(1..=QUEUES);
        let count = rng.usize(10..=40);
        let operations = (0..count).map(|_| operation(&mut rng, slots, has_faults, is_impatient));
        History { seed, is_impatient, sizes, operations: operations.enumerate().collect() }
    }
}

fn part(rng: &mut fastrand::Rng) -> Part {
    match rng.u8(..3) {
        0 => Part::WHOLE,
        _ => Part { start: rng.u8(..), len: rng.u8(..), shift: if rng.u8(..4) == 0 { rng.u8(..4) } else { 0 } },
    }
}

fn operation(rng: &mut fastrand::Rng, slots: usize, has_faults: bool, is_impatient: bool) -> Operation {
    let (queue, buffer, part) = (rng.usize(..slots), rng.usize(..2), part(rng));
    match rng.u8(..100) {
        0..16 => {
            let source = [Source::Slice, Source::Writer, Source::Slice, Source::FailingWriter];
            Operation::Write { queue, buffer, part, source: source[rng.usize(..13) / 4], seed: rng.u64(..1 << 20) }
        }
        16..32 => {
            let also = rng.bool().then(|| self::part(rng));
            Operation::Read { queue, buffer, part, also }
        }
        32..38 => Operation::Fill { queue, buffer, part, value: if rng.bool() { 0 } else { rng.u8(..) } },
        38..58 => Operation::Copy { queue, buffer, from: rng.usize(..BUFFERS), part },
        58..70 => Operation::Run { queue, buffer, graph: rng.usize(..4), times: rng.u8(1..6) },
        70..76 => Operation::AwaitRead { read: rng.usize(..8), passed: rng.u8(..4) == 0 },
        76..81 => Operation::AwaitQueue { queue, passed: rng.u8(..3) == 0 },
        81..84 => Operation::QueueWaits { queue, other: rng.usize(..slots) },
        84 => Operation::AllocateTooMuch { queue, beyond_budget: rng.bool() },
        85..88 => Operation::Free { buffer: rng.usize(..BUFFERS) },
        88 => Operation::DropRead { read: rng.usize(..8) },
        89..91 => Operation::DropQueue { queue },
        91 => Operation::Disconnect { connection: rng.usize(..CONNECTIONS) },
        92 if has_faults => Operation::Replace { server: rng.usize(..SERVERS) },
        _ if !has_faults => Operation::AwaitQueue { queue, passed: true },
        _ => {
            let target = match rng.u8(..8) {
                0 => Target::NextClient(rng.usize(..SERVERS)),
                1..5 => Target::Peer(rng.usize(..SERVERS)),
                _ => Target::Client(rng.usize(..CONNECTIONS)),
            };
            let fault = match rng.u8(..6) {
                0 => Fault::Cut,
                1 => Fault::Reset,
                2 => Fault::HalfClose,
                3 if is_impatient => Fault::Stall(None),
                _ => Fault::Stall(Some(Duration::from_micros(rng.u64(..5000)))),
            };
            let after = match rng.u8(..3) {
                0 => 0,
                1 => rng.u64(1..200),
                _ => rng.u64(1..10_000),
            };
            Operation::Inject { target, injection: Injection { fault, to_server: rng.bool(), after } }
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timeouts = if self.is_impatient { ", with short timeouts" } else { "" };
        writeln!(f, "history {}{timeouts}, {} operations:", self.seed, self.operations.len())?;
        self.operations.iter().try_for_each(|(number, operation)| writeln!(f, "  {number:3} {operation:?}"))
    }
}

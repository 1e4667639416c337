//! A proxy that speaks an older protocol version and translates each message for a server of 7.0.
//!
//! It duplicates the client's version tables on purpose (command numbers, lengths, which commands have replies), so that an
//! error in those tables is detected.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

/// Numbers of the ops, types and sub-ops of each version. `src/rpc/wire/tests/version_codec.rs` describes the format.
const VERSION_LISTS: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/rpc/wire/tests/versions.txt"));

const RECORD: usize = 296;

/// A protocol version. Commands are given by their numbers in this version.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldVersion {
    pub(crate) name: &'static str,
    /// The version in the reply to HELLO, and the required length of the HELLO body. `None`: the version has no HELLO.
    hello: Option<([u8; 3], usize)>,
    /// Number of commands; the first invalid command number.
    commands: u8,
    /// Commands with an empty reply, and the command with a status as its reply.
    empty_replies: &'static [u8],
    status: Option<u8>,
    /// Whether GET_ALLOC_SIZE includes the sources, and whether tensor records have the compute flag and a use count.
    alloc_size_sources: bool,
    compute_flag: bool,
    use_count: bool,
}

pub(crate) const GEN0: OldVersion = OldVersion {
    name: "gen0",
    hello: None,
    commands: 11,
    empty_replies: &[4, 5, 6],
    status: Some(9),
    alloc_size_sources: false,
    compute_flag: false,
    use_count: false,
};

pub(crate) const V3_0: OldVersion = OldVersion {
    name: "3.0.0",
    hello: Some(([3, 0, 0], 0)),
    commands: 16,
    empty_replies: &[4, 5, 12],
    status: Some(10),
    ..GEN0
};

/// The versions to test: every encoding of a message occurs in at least one.
pub(crate) const ALL: [OldVersion; 7] = [
    GEN0,
    V3_0,
    OldVersion { name: "3.5.0", hello: Some(([3, 5, 0], 0)), commands: 17, status: None, ..V3_0 },
    V3_6_1,
    OldVersion { name: "4.0.2", hello: Some(([4, 0, 2], 24)), ..V3_6_1 },
    V5_0,
    OldVersion { name: "5.1.0", hello: Some(([5, 1, 0], 24)), use_count: true, ..V5_0 },
];

const V3_6_1: OldVersion = OldVersion {
    name: "3.6.1",
    hello: Some(([3, 6, 1], 0)),
    commands: 17,
    status: None,
    alloc_size_sources: true,
    compute_flag: true,
    ..V3_0
};

const V5_0: OldVersion =
    OldVersion { name: "5.0.0", hello: Some(([5, 0, 0], 24)), commands: 18, empty_replies: &[4, 5, 12, 17], ..V3_6_1 };

impl OldVersion {
    fn list(&self, what: &str) -> Vec<&'static str> {
        list(self.name, what)
    }

    /// This version's number of a command, given by its number in 7.0.
    pub(crate) fn number(&self, current: u8) -> Option<u8> {
        (0..self.commands).find(|&command| self.current(command) == current)
    }

    /// The number in 7.0 of a command, given by its number in this version.
    fn current(&self, command: u8) -> u8 {
        if self.hello.is_none() && command >= 7 { command + 1 } else { command }
    }
}

fn list(version: &str, what: &str) -> Vec<&'static str> {
    let line = VERSION_LISTS.lines().find(|line| line.split(' ').take(2).eq([version, what]));
    line.expect("a version with its lists").split(' ').skip(2).collect()
}

/// State that the test shares with the proxy: the received commands, and how to reply to graphs.
#[derive(Debug, Default)]
pub(crate) struct ProxyState {
    /// Numbers of the received commands, in order.
    pub(crate) commands: Mutex<Vec<u8>>,
    /// The status in replies to later graphs.
    pub(crate) status: AtomicU8,
    /// While a test holds this lock, the proxy delays the status replies of graphs.
    pub(crate) gate: Mutex<()>,
}

/// A proxy that speaks an older version. `addr` is its listening address.
pub(crate) struct OldVersionProxy {
    pub(crate) addr: SocketAddr,
    pub(crate) state: Arc<ProxyState>,
}

impl OldVersionProxy {
    pub(crate) fn new(version: OldVersion, server: SocketAddr) -> OldVersionProxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let (addr, state) = (listener.local_addr().expect("bound"), Arc::<ProxyState>::default());
        let theirs = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let state = Arc::clone(&theirs);
                std::thread::spawn(move || {
                    let session = ProxySession { version, client: &client, state: &state, ops: ops(&version) };
                    // An error means that the client or the server has closed its connection.
                    let _ = session.serve(server);
                    let _ = client.shutdown(Shutdown::Both);
                });
            }
        });
        OldVersionProxy { addr, state }
    }

    pub(crate) fn count(&self, command: u8) -> usize {
        self.state.commands.lock().expect("whole").iter().filter(|&&other| other == command).count()
    }
}

/// By op number of a version: the op's number in 7.0.
fn ops(version: &OldVersion) -> Vec<Option<u32>> {
    let current = list("7.0.0", "op");
    version.list("op").iter().map(|op| current.iter().position(|other| other == op).map(|n| n as u32)).collect()
}

struct ProxySession<'a> {
    version: OldVersion,
    client: &'a TcpStream,
    state: &'a ProxyState,
    ops: Vec<Option<u32>>,
}

impl ProxySession<'_> {
    fn serve(mut self, server: SocketAddr) -> io::Result<()> {
        self.client.set_nodelay(true)?;
        if let Some((version, len)) = self.version.hello {
            let mut header = [0; 9];
            self.client.read_exact(&mut header)?;
            if header[0] != 14 || header[1..] != (len as u64).to_le_bytes() {
                return Ok(());
            }
            self.client.read_exact(&mut vec![0; len])?;
            let mut reply = version.to_vec();
            if len > 0 {
                reply.resize(28, 0);
            }
            self.answer(&reply)?;
        }
        let upstream = TcpStream::connect(server)?;
        upstream.set_nodelay(true)?;
        let mut hello = vec![14];
        hello.extend(24u64.to_le_bytes());
        hello.extend([0; 24]);
        (&upstream).write_all(&hello)?;
        (&upstream).read_exact(&mut [0; 36])?;
        loop {
            let mut command = [0];
            self.client.read_exact(&mut command)?;
            let [command] = command;
            if command >= self.version.commands || command == 14 {
                return Ok(());
            }
            let mut size = [0; 8];
            self.client.read_exact(&mut size)?;
            let mut body = vec![0; u64::from_le_bytes(size) as usize];
            self.client.read_exact(&mut body)?;
            self.state.commands.lock().expect("whole").push(command);
            let number = self.version.current(command);
            let body = self.translate_body(number, &body);
            let mut message = vec![number];
            message.extend((body.len() as u64).to_le_bytes());
            message.extend(body);
            (&upstream).write_all(&message)?;
            if self.version.empty_replies.contains(&command) {
                self.answer(&[])?;
            } else if self.version.status == Some(command) {
                drop(self.state.gate.lock().expect("whole"));
                self.answer(&[self.state.status.load(Ordering::SeqCst)])?;
            } else if matches!(number, 0..=3 | 7..=9 | 11 | 13 | 15) {
                (&upstream).read_exact(&mut size)?;
                let mut reply = vec![0; u64::from_le_bytes(size) as usize];
                (&upstream).read_exact(&mut reply)?;
                self.answer(&reply)?;
            }
        }
    }

    fn answer(&mut self, body: &[u8]) -> io::Result<()> {
        self.client.write_all(&[&(body.len() as u64).to_le_bytes(), body].concat())
    }

    /// Translates the body of a message of this version to 7.0.
    fn translate_body(&self, number: u8, body: &[u8]) -> Vec<u8> {
        // Versions without HELLO have one device, so their messages have no device index.
        let device: &[u8] = if self.version.hello.is_none() { &[0; 4] } else { &[] };
        match number {
            0..=2 | 11 | 16 => [device, body].concat(),
            6 => {
                let (tensor, rest) = body.split_at(RECORD);
                [&self.record(tensor, false), &[0][..], rest].concat()
            }
            7 | 8 | 12 | 17 => {
                let (tensor, rest) = body.split_at(RECORD);
                [&self.record(tensor, false), rest].concat()
            }
            9 => {
                let (src, dst) = body.split_at(RECORD);
                [self.record(src, false), self.record(dst, false)].concat()
            }
            10 => self.graph(&[device, body].concat()),
            13 => {
                let (device, records) = body.split_at(4);
                assert_eq!(records.len(), if self.version.alloc_size_sources { 11 * RECORD } else { RECORD });
                let mut records: Vec<u8> =
                    records.chunks(RECORD).flat_map(|record| self.record(record, false)).collect();
                records.resize(11 * RECORD, 0);
                [device, &records].concat()
            }
            _ => body.to_vec(),
        }
    }

    fn graph(&self, body: &[u8]) -> Vec<u8> {
        let count = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().expect("4 bytes")) as usize;
        let nodes = count(&body[4..]);
        let (head, records) = body.split_at(4 + 4 + 8 * nodes + 4);
        assert_eq!(records.len(), RECORD * count(&head[head.len() - 4..]));
        let listed: HashSet<&[u8]> = head[8..head.len() - 4].chunks(8).collect();
        let records = records.chunks(RECORD).flat_map(|record| self.record(record, listed.contains(&record[..8])));
        head.iter().copied().chain(records).collect()
    }

    /// Translates a tensor record of this version to 7.0. `listed`: the graph lists the tensor as a node.
    fn record(&self, record: &[u8], listed: bool) -> Vec<u8> {
        let mut record = record.to_vec();
        let word = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().expect("4 bytes"));
        let (dtype, op, kind, mut flags, uses) = (word(8), word(52), word(56), word(120), word(292));
        let types = self.version.list("type");
        assert!(types.iter().any(|t| t.ends_with(&format!("={dtype}"))), "{}: type {dtype}", self.version.name);
        let op = self.ops[op as usize].expect("an op that 7.0 has");
        assert!(self.version.use_count || uses == 0, "{}: how often a tensor is read", self.version.name);
        if self.version.compute_flag {
            assert_eq!(flags & 16 != 0, listed, "{}: what is computed", self.version.name);
        } else {
            assert_eq!(flags & 16, 0, "{}: a flag that is not known", self.version.name);
            flags |= if listed { 16 } else { 0 };
        }
        // UNARY and GLU have a sub-op number in the first parameter.
        let kinds = match op {
            91 => Some("unary"),
            100 => Some("glu"),
            _ => None,
        };
        let kind = kinds.map_or(kind, |what| {
            let name = self.version.list(what)[kind as usize];
            list("7.0.0", what).iter().position(|other| *other == name).expect("a kind that 7.0 has") as u32
        });
        for (at, value) in [(52, op), (56, kind), (120, flags)] {
            record[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        record
    }
}

//! What clients say of tickets, and servers that only look like some.

use crate::greeted_support::*;
use crate::support::*;
use fanout::rpc::server::{Config, Peer};
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::*;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

/// Bytes of a ticket's piece.
pub(crate) const PIECE: usize = 256 << 10;

/// What a test's server takes.
const LIMITS: Limits = Limits::new(1, 1, 1 << 20);

/// A configuration that allows these peers.
pub(crate) fn dialling(peers: &[&str]) -> Config {
    let peers = peers.iter().map(|peer| peer.parse::<Peer>().expect("a peer")).collect();
    Config::default().with_peers(peers)
}

/// On queue 0, which is of device 0.
impl Client {
    /// A buffer of zeros.
    pub(crate) fn span(&mut self, size: usize) -> Span {
        self.buffer(0, size as u64).all()
    }

    /// The bytes of a span, after the queue's work so far.
    #[track_caller]
    pub(crate) fn bytes(&mut self, span: Span) -> Vec<u8> {
        self.read_spans(0, 7, &[span]);
        self.bytes_told()
    }

    /// The bytes that [`Client::read_spans`] has asked for as number 7.
    #[track_caller]
    pub(crate) fn bytes_told(&mut self) -> Vec<u8> {
        match self.told() {
            Told::Data(7, bytes) => bytes,
            other => panic!("expected data, got {other:?}"),
        }
    }

    pub(crate) fn tickets(&mut self, count: u32) -> Vec<Ticket> {
        self.ask(&ExtRequest::Tickets(Tickets { count }));
        let body = self.answered();
        let Ok(Answer::Tickets(list)) = Answer::decode(ExtCommand::Tickets, &body) else { panic!("{body:?}") };
        assert_eq!(list.0.len(), count as usize);
        list.0.to_vec()
    }

    /// As many tickets as `bytes` bytes take.
    pub(crate) fn tickets_for(&mut self, bytes: usize) -> Vec<Ticket> {
        self.tickets(bytes.div_ceil(PIECE) as u32)
    }

    pub(crate) fn receive(&mut self, span: Span, tickets: &[Ticket]) {
        self.ask(&ExtRequest::Receive(Receive { queue: 0, span, tickets: TicketList(tickets) }));
    }

    pub(crate) fn send_to(&mut self, span: Span, tickets: &[Ticket], address: &str) {
        self.ask(&ExtRequest::Send(Send { queue: 0, span, tickets: TicketList(tickets), address }));
    }

    pub(crate) fn put(&mut self, ticket: Ticket, data: &[u8]) {
        self.ask(&ExtRequest::Put(Put { ticket, data }));
    }

    /// Puts pieces and sees that they are taken.
    #[track_caller]
    pub(crate) fn puts(&mut self, tickets: &[Ticket], data: &[u8]) {
        for (ticket, piece) in tickets.iter().zip(data.chunks(PIECE)) {
            self.put(*ticket, piece);
        }
        self.pings();
    }

    pub(crate) fn reach(&mut self, address: &str) -> Result<(), String> {
        self.ask(&ExtRequest::Reach(Reach { address }));
        let body = self.answered();
        match Answer::decode(ExtCommand::Reach, &body) {
            Ok(Answer::Reach(reaches)) => reaches.map_err(str::to_owned),
            other => panic!("{other:?}"),
        }
    }

    /// Why the queue has failed, which must be said next.
    #[track_caller]
    pub(crate) fn failed(&mut self) -> Fault {
        match self.told() {
            Told::Failed(0, fault) => fault,
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    pub(crate) fn close_queue(&mut self) {
        self.ask(&ExtRequest::CloseQueue(CloseQueue { queue: 0 }));
    }

    /// A new queue for one that has failed.
    pub(crate) fn reopen(&mut self) {
        self.close_queue();
        self.open_queue(0, 0);
    }
}

/// Something that shakes hands as a server does, and then does what a test wants.
pub(crate) struct Impostor {
    listener: TcpListener,
    pub(crate) address: String,
}

impl Impostor {
    pub(crate) fn start() -> Impostor {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        Impostor { listener, address }
    }

    /// The next connection, after a reply to HELLO of this version with the greeting of a fanout server.
    pub(crate) fn accept_hello(&self, version: Version) -> Guest {
        let (stream, _) = self.listener.accept().expect("a connection");
        stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
        let mut guest = Guest(stream);
        let mut header = [0; REQUEST_HEADER];
        guest.0.read_exact(&mut header).expect("HELLO");
        let header = RequestHeader::decode(&header).expect("HELLO");
        let mut body = vec![0; header.body_len(&LIMITS).expect("HELLO's size")];
        guest.0.read_exact(&mut body).expect("HELLO's body");
        let greeting = Greeting { revision: REVISION, state: State::Ready }.to_byte();
        let reply = HelloReply { version, conn_caps: Some([0; 24]), greeting };
        let mut out = Vec::new();
        Response::Hello(reply).encode(&mut out);
        guest.write(&out);
        guest
    }

    /// The next connection, after HELLO and GREET.
    pub(crate) fn accept(&self) -> Guest {
        let mut guest = self.accept_hello(PROTOCOL_VERSION);
        assert_eq!(guest.next().0, ExtCommand::Greet);
        let reply = GreetReply {
            build: "impostor".to_owned(),
            max_message: 1 << 20,
            graph_budget: 0,
            max_graphs: 0,
            abilities: Abilities::default(),
            sessions: 1,
            devices: Vec::new(),
        };
        let mut body = Vec::new();
        Answer::Greet(reply).encode(&mut body);
        let mut out = Vec::new();
        out.extend_from_slice(&ResponseHeader { size: body.len() as u64 }.encode());
        out.extend_from_slice(&body);
        guest.write(&out);
        guest
    }

    /// That nobody has connected.
    #[track_caller]
    pub(crate) fn is_alone(&self) {
        self.listener.set_nonblocking(true).expect("a live socket");
        assert!(self.listener.accept().is_err(), "somebody dialled {}", self.address);
    }
}

/// An impostor's end of a connection.
pub(crate) struct Guest(TcpStream);

impl Guest {
    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("somebody reads");
    }

    /// The next message.
    pub(crate) fn next(&mut self) -> (ExtCommand, Vec<u8>) {
        let mut header = [0; REQUEST_HEADER];
        self.0.read_exact(&mut header).expect("a message");
        let header = ExtHeader::decode(&header).expect("a header");
        let mut body = vec![0; header.body_len(&LIMITS).expect("a size")];
        self.0.read_exact(&mut body).expect("a whole message");
        (header.command, body)
    }

    pub(crate) fn tell(&mut self, notice: &Notice<'_>) {
        let mut out = Vec::new();
        notice.encode(&mut out);
        self.write(&out);
    }

    /// Says that no more will come.
    pub(crate) fn hang_up(&self) {
        self.0.shutdown(Shutdown::Write).expect("a live socket");
    }

    /// That the other end closes the connection.
    pub(crate) fn wait_closed(&mut self) {
        let closed = self.0.read(&mut [0]);
        assert!(!matches!(closed, Ok(1)), "{closed:?}");
    }

    /// Answers the PING that comes next.
    pub(crate) fn pong(&mut self) {
        assert_eq!(self.next().0, ExtCommand::Ping);
        let mut body = Vec::new();
        Answer::Ping(State::Ready, 1).encode(&mut body);
        self.tell(&Notice::Reply(&body));
    }
}

/// Short enough to pass in a test, for a server whose peers say nothing.
pub(crate) fn impatient(config: Config) -> Config {
    config.with_stall_timeout(4 * SHORT)
}

/// As [`impatient`], for bytes that do not come.
pub(crate) fn brief(config: Config) -> Config {
    config.with_device_timeout(Duration::from_millis(300))
}

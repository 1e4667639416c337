//! Test support for peer transfers: client requests about transfer tokens, and a fake server that accepts connections from a
//! source server.

use crate::extended_support::*;
use crate::support::*;
use fanout::rpc::server::{Config, Peer};
use fanout::rpc::wire::ext::*;
use fanout::rpc::wire::*;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

/// Bytes of one PEER_WRITE, except for the last one of a transfer.
pub(crate) const CHUNK_BYTES: usize = 256 << 10;

/// Limits of the messages that the fake server decodes.
const LIMITS: Limits = Limits::new(1, 1, 1 << 20);

/// A configuration with these peers on the allow-list.
pub(crate) fn config_with_peers(peers: &[&str]) -> Config {
    let peers = peers.iter().map(|peer| peer.parse::<Peer>().expect("a peer")).collect();
    Config::default().with_peers(peers)
}

/// Requests of peer transfers. All use queue 0, which is on device 0.
impl Client {
    /// Allocates a buffer of zeros on device 0. Returns the span of the whole buffer.
    pub(crate) fn alloc_span(&mut self, size: usize) -> BufferSpan {
        self.alloc_ext(0, size as u64).whole_span()
    }

    /// Reads a span, in order with the queue's work.
    #[track_caller]
    pub(crate) fn read_bytes(&mut self, span: BufferSpan) -> Vec<u8> {
        self.read_spans(0, 7, &[span]);
        self.receive_read_bytes()
    }

    /// Receives the data of the READ with id 7.
    #[track_caller]
    pub(crate) fn receive_read_bytes(&mut self) -> Vec<u8> {
        match self.next_notification() {
            ReceivedNotification::ReadData(7, bytes) => bytes,
            other => panic!("expected READ_DATA, got {other:?}"),
        }
    }

    pub(crate) fn request_tokens(&mut self, count: u32) -> Vec<TransferToken> {
        self.send_ext(&ExtRequest::IssueTokens(IssueTokens { count }));
        let body = self.next_ext_reply();
        let Ok(ExtResponse::IssueTokens(list)) = ExtResponse::decode(ExtCommand::IssueTokens, &body) else {
            panic!("{body:?}")
        };
        assert_eq!(list.len(), count as usize);
        list.to_vec()
    }

    pub(crate) fn request_token(&mut self) -> TransferToken {
        self.request_tokens(1)[0]
    }

    pub(crate) fn receive_from_peer(&mut self, span: BufferSpan, token: TransferToken) {
        self.send_ext(&ExtRequest::ReceiveFromPeer(ReceiveFromPeer { queue: 0, span, token }));
    }

    pub(crate) fn send_to_peer(&mut self, span: BufferSpan, token: TransferToken, address: &str) {
        self.send_ext(&ExtRequest::SendToPeer(SendToPeer { queue: 0, span, token, address }));
    }

    pub(crate) fn peer_write(&mut self, token: TransferToken, at: usize, data: &[u8]) {
        self.send_ext(&ExtRequest::PeerWrite(PeerWrite { token, at: at as u64, data }));
    }

    /// Sends the bytes of a transfer from byte `at` on in pieces, and asserts that the server has accepted them.
    #[track_caller]
    pub(crate) fn peer_write_all(&mut self, token: TransferToken, at: usize, data: &[u8]) {
        for (start, piece) in (at..).step_by(CHUNK_BYTES).zip(data.chunks(CHUNK_BYTES)) {
            self.peer_write(token, start, piece);
        }
        self.assert_ping_replied();
    }

    pub(crate) fn probe_peer(&mut self, address: &str) -> Result<(), String> {
        self.send_ext(&ExtRequest::ProbePeer(ProbePeer { address }));
        let body = self.next_ext_reply();
        match ExtResponse::decode(ExtCommand::ProbePeer, &body) {
            Ok(ExtResponse::ProbePeer(reaches)) => reaches.map_err(str::to_owned),
            other => panic!("{other:?}"),
        }
    }

    /// The fault of queue 0. Its failure must be the next notification.
    #[track_caller]
    pub(crate) fn next_queue_failure(&mut self) -> DeviceFault {
        match self.next_notification() {
            ReceivedNotification::QueueFailed(0, fault) => fault,
            other => panic!("expected the failure of queue 0, got {other:?}"),
        }
    }

    pub(crate) fn close_queue(&mut self) {
        self.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue: 0 }));
    }

    /// Closes queue 0, which may have failed, and opens it again.
    pub(crate) fn reopen_queue(&mut self) {
        self.close_queue();
        self.open_queue(0, 0);
    }
}

/// A listener that exchanges the handshake of a fanout server. The test reads and sends all later messages.
pub(crate) struct FakeServer {
    listener: TcpListener,
    pub(crate) address: String,
}

impl FakeServer {
    pub(crate) fn start() -> FakeServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        FakeServer { listener, address }
    }

    /// Accepts a connection and replies to its HELLO with this version and the extension byte of a fanout server.
    pub(crate) fn accept_hello(&self, version: Version) -> FakeServerConnection {
        let (stream, _) = self.listener.accept().expect("a connection");
        stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
        let mut connection = FakeServerConnection(stream);
        let mut header = [0; REQUEST_HEADER];
        connection.0.read_exact(&mut header).expect("HELLO");
        let header = RequestHeader::decode(&header).expect("HELLO");
        let mut body = vec![0; header.body_len(&LIMITS).expect("HELLO's size")];
        connection.0.read_exact(&mut body).expect("HELLO's body");
        let offer = ExtensionOffer { revision: REVISION, state: ServerState::Ready }.to_byte();
        let reply = HelloReply { version, conn_caps: Some([0; 24]), extension_byte: offer };
        let mut out = Vec::new();
        Response::Hello(reply).encode(&mut out);
        connection.write(&out);
        connection
    }

    /// Accepts a connection and exchanges HELLO and HELLO_EXT.
    pub(crate) fn accept(&self) -> FakeServerConnection {
        let mut connection = self.accept_hello(PROTOCOL_VERSION);
        assert_eq!(connection.read_message().0, ExtCommand::HelloExt);
        let reply = HelloExtReply {
            build: "fake server".to_owned(),
            max_message: 1 << 20,
            graph_budget: 0,
            max_graphs: 0,
            capabilities: ServerCapabilities::default(),
            devices: Vec::new(),
        };
        let mut body = Vec::new();
        ExtResponse::HelloExt(reply).encode_body(&mut body);
        let mut out = Vec::new();
        out.extend_from_slice(&ResponseHeader { size: body.len() as u64 }.encode());
        out.extend_from_slice(&body);
        connection.write(&out);
        connection
    }

    /// Asserts that no connection waits to be accepted.
    #[track_caller]
    pub(crate) fn assert_no_connection(&self) {
        self.listener.set_nonblocking(true).expect("a live socket");
        assert!(self.listener.accept().is_err(), "a server has connected to {}", self.address);
    }
}

/// The fake server's end of a connection.
pub(crate) struct FakeServerConnection(TcpStream);

impl FakeServerConnection {
    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the peer accepts the bytes");
    }

    /// Reads the next message.
    pub(crate) fn read_message(&mut self) -> (ExtCommand, Vec<u8>) {
        let mut header = [0; REQUEST_HEADER];
        self.0.read_exact(&mut header).expect("a message");
        let header = ExtHeader::decode(&header).expect("a header");
        let mut body = vec![0; header.body_len(&LIMITS).expect("a size")];
        self.0.read_exact(&mut body).expect("a whole message");
        (header.command, body)
    }

    pub(crate) fn send_notification(&mut self, notification: &Notification<'_>) {
        let mut out = Vec::new();
        notification.encode(&mut out);
        self.write(&out);
    }

    /// Shuts down the writing side of the socket.
    pub(crate) fn shutdown_write(&self) {
        self.0.shutdown(Shutdown::Write).expect("a live socket");
    }

    /// Waits until the peer has closed the connection.
    pub(crate) fn wait_closed(&mut self) {
        let closed = self.0.read(&mut [0]);
        assert!(!matches!(closed, Ok(1)), "{closed:?}");
    }

    /// Reads the next message, which must be a PING, and replies to it.
    pub(crate) fn reply_to_ping(&mut self) {
        assert_eq!(self.read_message().0, ExtCommand::Ping);
        let mut body = Vec::new();
        ExtResponse::Ping(ServerState::Ready, 1).encode_body(&mut body);
        self.send_notification(&Notification::Reply(&body));
    }
}

/// Sets a stall timeout that a test can let expire, for peers that do not respond.
pub(crate) fn with_short_stall_timeout(config: Config) -> Config {
    config.with_stall_timeout(4 * SHORT_TIMEOUT)
}

/// Sets a device timeout that a test can let expire, for transfers whose bytes never arrive.
pub(crate) fn with_short_reply_timeout(config: Config) -> Config {
    config.with_reply_timeout(Duration::from_millis(300))
}

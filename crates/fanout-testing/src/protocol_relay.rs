//! A relay between one client and a server of ggml's protocol: it records the commands that the client sends, and can hide
//! that the server speaks fanout's extension.

use fanout::rpc::wire::ext::{ExtCommand, ExtHeader};
use fanout::rpc::wire::{Command, REQUEST_HEADER, RESPONSE_HEADER, RequestHeader};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Position of the byte that announces the extension, in the bytes that a server sends.
const EXTENSION_BYTE: usize = RESPONSE_HEADER + 3;

/// A relay for one connection.
pub struct ProtocolRelay {
    /// Where the client connects.
    pub addr: SocketAddr,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl ProtocolRelay {
    /// Accepts one connection and relays it to `server`. With `plain` the client sees a server of protocol 7.0 without the
    /// extension.
    ///
    /// # Panics
    /// When there is no free port on the loopback interface.
    pub fn start(server: SocketAddr, plain: bool) -> ProtocolRelay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let sent = Arc::<Mutex<Vec<u8>>>::default();
        let record = Arc::clone(&sent);
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("a client");
            let server = TcpStream::connect(server).expect("a server");
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("a live socket");
            }
            let (from, to) = (client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
            let upstream =
                std::thread::spawn(move || pass(from, to, |_, bytes| record.lock().unwrap().extend(&*bytes)));
            pass(server, client, |before, bytes| {
                let at = EXTENSION_BYTE.checked_sub(before).and_then(|at| bytes.get_mut(at));
                if let Some(announced) = at.filter(|_| plain) {
                    *announced = 0;
                }
            });
            upstream.join().expect("a thread that ends");
        });
        ProtocolRelay { addr, sent }
    }

    /// The names of the commands that the client has sent since its HELLO, in order. A command that has not arrived in full is
    /// left out.
    ///
    /// # Panics
    /// When the bytes are no commands, or do not begin with HELLO.
    pub fn commands(&self) -> Vec<&'static str> {
        let sent = self.sent.lock().unwrap();
        let mut rest = &sent[..];
        let mut names = Vec::new();
        while let Some((header, body)) = rest.split_first_chunk::<REQUEST_HEADER>() {
            let (name, size) = if ExtHeader::is_one(header) {
                let header = ExtHeader::decode(header).expect("a header");
                (header.command.name(), header.size)
            } else {
                let header = RequestHeader::decode(header).expect("a header");
                (header.command.name(), header.size)
            };
            let Some(next) = body.get(size as usize..) else { break };
            names.push(name);
            rest = next;
        }
        assert!(names.first().is_none_or(|&first| first == Command::Hello.name()), "{names:?}");
        names.into_iter().skip(1).collect()
    }

    /// How often the client has sent a command of the extension.
    pub fn count(&self, command: ExtCommand) -> usize {
        self.commands().iter().filter(|&&name| name == command.name()).count()
    }
}

/// Relays bytes until either side ends. `see` gets each piece, with the number of bytes before it, and may change it.
fn pass(mut from: TcpStream, mut to: TcpStream, mut see: impl FnMut(usize, &mut [u8])) {
    let (mut buffer, mut before) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        see(before, &mut buffer[..n]);
        before += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // A side that has closed already refuses to be shut down.
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}

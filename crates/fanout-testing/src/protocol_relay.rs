//! A relay between one client and a server of ggml's RPC protocol. It records the bytes that the client sends, and can hide or
//! change the server's offer of the protocol extension.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Position of the byte that announces the extension in the server's first bytes: after a length (8 bytes) and a version (3
/// bytes). A literal, since `fanout::rpc` is absent in builds without its features.
const EXTENSION_BYTE: usize = 8 + 3;

/// A relay for one connection.
pub struct ProtocolRelay {
    /// The address to which the client connects.
    pub addr: SocketAddr,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl ProtocolRelay {
    /// Accepts one connection and relays it to `server`. With `hide_extension`, the client sees a server of protocol 7.0
    /// without the extension.
    ///
    /// # Panics
    /// If the loopback interface has no free port.
    pub fn start(server: SocketAddr, hide_extension: bool) -> ProtocolRelay {
        ProtocolRelay::with_offer(server, if hide_extension { |_| 0 } else { |offer| offer })
    }

    /// Accepts one connection and relays it to `server`. `edit` maps the byte with which the server offers the extension to the
    /// one that the client receives.
    ///
    /// # Panics
    /// If the loopback interface has no free port.
    pub fn with_offer(server: SocketAddr, edit: fn(u8) -> u8) -> ProtocolRelay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let sent = Arc::<Mutex<Vec<u8>>>::default();
        let record = Arc::clone(&sent);
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("a connection from the client");
            let server = TcpStream::connect(server).expect("a connection to the server");
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("a live socket");
            }
            let (from, to) = (client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
            let upstream =
                std::thread::spawn(move || relay(from, to, |_, bytes| record.lock().unwrap().extend(&*bytes)));
            relay(server, client, |before, bytes| {
                if let Some(offer) = EXTENSION_BYTE.checked_sub(before).and_then(|at| bytes.get_mut(at)) {
                    *offer = edit(*offer);
                }
            });
            upstream.join().expect("a thread that ends");
        });
        ProtocolRelay { addr, sent }
    }

    /// The bytes that the client has sent so far.
    pub fn sent(&self) -> Vec<u8> {
        self.sent.lock().unwrap().clone()
    }
}

/// Relays bytes until either side closes. `visit` gets each chunk with the number of bytes before it, and may change the chunk.
fn relay(mut from: TcpStream, mut to: TcpStream, mut visit: impl FnMut(usize, &mut [u8])) {
    let (mut buffer, mut before) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        visit(before, &mut buffer[..n]);
        before += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // Errors are ignored: `shutdown` fails on a socket that the peer has closed.
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}

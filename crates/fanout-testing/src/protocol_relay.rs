//! A relay between one client and a server of ggml's protocol: it records what the client sends, and can hide that the server
//! speaks fanout's extension.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Position of the byte that announces the extension, in the bytes that a server sends: behind the 8 bytes of a length and
/// the 3 of a version. A number, since `fanout::rpc` is not there in builds without its features.
const EXTENSION_BYTE: usize = 8 + 3;

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

    /// The bytes that the client has sent so far.
    pub fn sent(&self) -> Vec<u8> {
        self.sent.lock().unwrap().clone()
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

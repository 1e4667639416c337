//! Between one client and a server: passes bytes on, keeps those of the client, and may hide that the server is fanout's.

use fanout::rpc::wire::ext::{ExtCommand, ExtHeader};
use fanout::rpc::wire::{Command, REQUEST_HEADER, RESPONSE_HEADER, RequestHeader};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Where the greeting is in the first bytes of a server.
const GREETING: usize = RESPONSE_HEADER + 3;

pub struct Relay {
    pub addr: SocketAddr,
    said: Arc<Mutex<Vec<u8>>>,
}

impl Relay {
    /// Takes one connection and passes it on to `server`; `plain`: as one that speaks 7.0 alone.
    pub fn start(server: SocketAddr, plain: bool) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let said = Arc::<Mutex<Vec<u8>>>::default();
        let kept = Arc::clone(&said);
        std::thread::spawn(move || {
            let (client, _) = listener.accept().expect("a client");
            let server = TcpStream::connect(server).expect("a server");
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("a live socket");
            }
            let (from, to) = (client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
            // The record is for the test; without it bytes go on all the same.
            let there = std::thread::spawn(move || pass(from, to, |_, bytes| kept.lock().unwrap().extend(&*bytes)));
            pass(server, client, |before, bytes| {
                let at = GREETING.checked_sub(before).and_then(|at| bytes.get_mut(at));
                if let Some(greeting) = at.filter(|_| plain) {
                    *greeting = 0;
                }
            });
            there.join().expect("a thread that ends");
        });
        Relay { addr, said }
    }

    /// The commands of the client since its HELLO, in order. All that it has said must have come.
    pub fn commands(&self) -> Vec<&'static str> {
        let said = self.said.lock().unwrap();
        let mut rest = &said[..];
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

    /// How often the client has said this.
    pub fn count(&self, command: ExtCommand) -> usize {
        self.commands().iter().filter(|&&name| name == command.name()).count()
    }
}

/// Passes bytes on to the end of either side; `see` is told how many came before.
fn pass(mut from: TcpStream, mut to: TcpStream, mut see: impl FnMut(usize, &mut [u8])) {
    let (mut buffer, mut before) = (vec![0; 64 << 10], 0);
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        see(before, &mut buffer[..n]);
        before += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    // Where the other side was faster there is nothing to end.
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}

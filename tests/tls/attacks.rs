//! What clients without an allowed key can do at an address with TLS: nothing but a handshake that fails.

use super::rustls_ends::{client, client_config};
use super::server::{Server, Session};
use super::{Arguments, median};
use fanout::rpc::client::Endpoint;
use rustls::ClientConfig;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Connections of an attacker that do not complete their handshakes.
const STALLED: usize = 1000;

/// Threads of clients whose handshakes fail, one after the other.
const HANDSHAKE_THREADS: usize = 4;

/// `max-handshakes` of the server: its default.
const MAX_HANDSHAKES: u64 = 128;

/// Threads that sessions of this suite add to the server.
const SPARE_THREADS: u64 = 16;

/// Most memory that handshakes in flight may add, in bytes: stacks, buffers, what the allocator keeps.
const MAX_MEMORY: u64 = 64 << 20;

/// Longest median of a small request beside an attack that uses a processor as well. Alone it takes about 0.05 ms.
const MAX_MEDIAN: Duration = Duration::from_millis(5);

/// Longest time to wait for bytes of the server. It closes all connections earlier (`handshake-timeout`).
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection from another address of loopback than the ordinary clients.
fn attacker(address: &str) -> std::io::Result<TcpStream> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), 0)).into())?;
    socket.connect(&address.parse::<SocketAddr>().unwrap().into())?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// The first message of a TLS client.
fn client_hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    client(&client_config()).write_tls(&mut bytes).unwrap();
    bytes
}

/// Holds 1,000 connections whose handshakes have begun. The server closes most of them at once; those are made again.
fn stall(address: &str, stop: &AtomicBool) -> u64 {
    let hello = client_hello();
    let open = || {
        let mut stream = attacker(address).ok()?;
        stream.write_all(&hello[..hello.len() / 2]).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    };
    let mut streams: Vec<_> = (0..STALLED).map(|_| open()).collect();
    let mut opened = STALLED as u64;
    while !stop.load(Ordering::Relaxed) {
        for stream in &mut streams {
            let is_open = stream
                .as_mut()
                .is_some_and(|stream| matches!(stream.read(&mut [0]), Err(e) if e.kind() == ErrorKind::WouldBlock));
            if !is_open && !stop.load(Ordering::Relaxed) {
                *stream = open();
                opened += 1;
            }
        }
    }
    opened
}

/// Sends whole handshakes with a key that the server does not know.
fn fail(address: &str, stop: &AtomicBool) -> u64 {
    let (config, count) = (client_config(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..HANDSHAKE_THREADS {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(mut stream) = attacker(address) {
                        let mut tls = client(&config);
                        while tls.complete_io(&mut stream).is_ok() && tls.is_handshaking() {}
                        let _ = stream.read(&mut [0; 64]);
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    count.into_inner()
}

/// Sessions beside handshakes that do not complete, and beside ones that fail.
pub(crate) fn handshakes(arguments: &Arguments) -> Vec<String> {
    type Attack = fn(&str, &AtomicBool) -> u64;
    let attacks: [(&str, Attack); 3] =
        [("alone", |_, _| 0), ("1,000 in flight", stall), ("failing, one after the other", fail)];
    let mut failures = Vec::new();
    for (name, attack) in attacks {
        let server = Server::start(&arguments.binary, &["--loopback-tenants"]);
        let mut session = Session::new(server.connect_tls(), 1 << 20);
        session.upload(&vec![1; 1 << 20]);
        let before = [server.status("Threads"), server.status("VmRSS")];
        let (stop, mut peak) = (AtomicBool::new(false), before);
        let (mut trips, mut connects, mut refused) = (Vec::new(), Vec::new(), 0);
        let attempts = std::thread::scope(|scope| {
            let attack = scope.spawn(|| attack(&server.tls, &stop));
            let until = Instant::now() + arguments.length;
            while Instant::now() < until {
                for _ in 0..100 {
                    let began = Instant::now();
                    session.round_trip();
                    trips.push(began.elapsed().as_secs_f64());
                }
                let began = Instant::now();
                match Endpoint::connect(&server.tls, &server.options()) {
                    Ok(_) => connects.push(began.elapsed().as_secs_f64()),
                    Err(_) => refused += 1,
                }
                for (peak, field) in peak.iter_mut().zip(["Threads", "VmRSS"]) {
                    *peak = server.status(field).max(*peak);
                }
            }
            stop.store(true, Ordering::Relaxed);
            attack.join().unwrap()
        });
        let (count, median_trip) = (trips.len(), median(trips.clone()));
        trips.sort_by(f64::total_cmp);
        let (threads, memory) = (peak[0] - before[0], (peak[1] - before[1]) << 10);
        println!(
            "handshakes {name}: {attempts} connections; {count} requests, median {:.3} ms, p99 {:.3} ms; {} new sessions, median \
             {:.1} ms, {refused} refused; threads +{threads}, memory +{} MiB",
            1e3 * median_trip,
            1e3 * trips[count * 99 / 100],
            connects.len(),
            1e3 * if connects.is_empty() { f64::NAN } else { median(connects) },
            memory >> 20
        );
        if threads > MAX_HANDSHAKES + SPARE_THREADS {
            failures.push(format!("{name}: {threads} threads more"));
        }
        if memory > MAX_MEMORY {
            failures.push(format!("{name}: {} MiB more", memory >> 20));
        }
        if refused > 0 {
            failures.push(format!("{name}: {refused} ordinary clients refused"));
        }
        if arguments.check && median_trip > MAX_MEDIAN.as_secs_f64() {
            failures.push(format!("{name}: a small request takes {:.1} ms", 1e3 * median_trip));
        }
    }
    failures
}

/// What the server has sent until it closed the connection.
fn replies(mut stream: TcpStream) -> Vec<u8> {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut got = Vec::new();
    // A reset ends what was received.
    let _ = stream.read_to_end(&mut got);
    got
}

/// What is wrong with bytes that must be the records of a failed handshake, which are few: their content is encrypted.
fn wrong_records(mut bytes: &[u8]) -> Option<String> {
    /// A server's flight of raw public keys has less.
    const MAX_FLIGHT: usize = 4 << 10;
    if bytes.len() > MAX_FLIGHT {
        return Some(format!("{} bytes of replies", bytes.len()));
    }
    while let Some((&[typ, major, _, high, low], rest)) = bytes.split_first_chunk() {
        let len = usize::from(u16::from_be_bytes([high, low]));
        if !(20..=23).contains(&typ) || major != 3 || len > rest.len() {
            return Some(format!("no record of TLS: {:?}", &bytes[..bytes.len().min(16)]));
        }
        bytes = &rest[len..];
    }
    (!bytes.is_empty()).then(|| format!("a rest of {} bytes", bytes.len()))
}

/// A message with this number of a command, of either protocol.
fn message(rng: &mut fastrand::Rng, command: u8) -> Vec<u8> {
    let body = rng.usize(..64);
    let len = if rng.u8(..) < 16 { rng.u64(..) } else { body as u64 };
    let mut bytes = vec![command];
    bytes.extend(len.to_le_bytes());
    bytes.extend((0..body).map(|_| if rng.bool() { 0 } else { rng.u8(..) }));
    bytes
}

/// Sends bytes as the first of a connection. Returns what is wrong with the replies.
fn send_first(address: &str, what: &str, bytes: &[u8]) -> Option<String> {
    let mut stream = attacker(address).ok()?;
    let _ = stream.write_all(bytes);
    wrong_records(&replies(stream)).map(|wrong| format!("{what}: {wrong}"))
}

/// Sends a message with each number of a command behind a handshake with an unknown key. Returns a reply, if there is one.
fn send_behind_handshake(address: &str, config: &Arc<ClientConfig>, rng: &mut fastrand::Rng) -> Option<String> {
    let (mut stream, mut tls) = (attacker(address).ok()?, client(config));
    for command in 0..=u8::MAX {
        tls.writer().write_all(&message(rng, command)).unwrap();
    }
    let mut reply = [0; 64];
    match rustls::Stream::new(&mut tls, &mut stream).read(&mut reply) {
        Ok(0) | Err(_) => None,
        Ok(n) => Some(format!("a reply behind a handshake with an unknown key: {:?}", &reply[..n])),
    }
}

/// The first message of a TLS client with some bytes changed, cut off or added.
fn mutated(hello: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = hello.to_vec();
    for _ in 0..rng.usize(1..8) {
        let at = rng.usize(..bytes.len());
        bytes[at] = rng.u8(..);
    }
    match rng.u8(..4) {
        0 => bytes.truncate(rng.usize(..bytes.len())),
        1 => bytes.extend((0..rng.usize(..2000)).map(|_| rng.u8(..))),
        _ => {}
    }
    bytes
}

/// Sends a plain message with each number of a command, then mutated handshakes, random bytes, and messages behind a whole
/// handshake with an unknown key, until the time is over.
pub(crate) fn hostile(arguments: &Arguments) -> Vec<String> {
    /// Mutated handshakes per whole one, which takes longer.
    const PER_HANDSHAKE: u64 = 8;
    let server = Server::start(&arguments.binary, &[]);
    let mut session = Session::new(server.connect_tls(), 1 << 20);
    let data = vec![5; 1 << 20];
    session.upload(&data);
    let (hello, config, mut rng) = (client_hello(), client_config(), fastrand::Rng::with_seed(27));
    let (until, mut failures, mut rounds) = (Instant::now() + arguments.length, Vec::new(), 0);
    for command in 0..=u8::MAX {
        failures.extend(send_first(&server.tls, "a plain message", &message(&mut rng, command)));
    }
    while Instant::now() < until {
        failures.extend(send_first(&server.tls, "a mutated handshake", &mutated(&hello, &mut rng)));
        let random: Vec<_> = [22, 3, 1].into_iter().chain((0..rng.usize(..3000)).map(|_| rng.u8(..))).collect();
        failures.extend(send_first(&server.tls, "random bytes", &random[rng.usize(..=3)..]));
        if rounds % PER_HANDSHAKE == 0 {
            failures.extend(send_behind_handshake(&server.tls, &config, &mut rng));
        }
        rounds += 1;
    }
    println!(
        "hostile: 256 plain messages, {rounds} mutated handshakes, {rounds} times random bytes, {} handshakes with an unknown key \
         and 256 messages each",
        rounds.div_ceil(PER_HANDSHAKE)
    );
    if session.download() != data {
        failures.push("the buffer of an ordinary client has changed".to_owned());
    }
    // Each session has an audit line at its end; that of the ordinary client has not ended.
    let audited = server.log().lines().filter(|line| line.contains("device_seconds")).count();
    if audited > 0 {
        failures.push(format!("{audited} sessions without a key"));
    }
    failures
}

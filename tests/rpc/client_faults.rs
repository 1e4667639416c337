//! The client against protocol 7.0 servers that disconnect, stall or send invalid replies: each fault is an error that names
//! the server and is reported before the timeout.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::options;
use crate::support::{SHORT_TIMEOUT, WATCHDOG};
use fanout::device::{DeviceError, MemoryBudget, UploadSource};
use fanout::rpc::client::{ConnectError, Endpoint};
use fanout::rpc::wire::*;
use fanout::tensor::{DType, TensorDesc};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// A server's fault in place of reply number `at`.
#[derive(Clone, Copy, Debug)]
enum ReplyFault {
    Close,
    /// Sends this many bytes of the reply, then nothing.
    Stall(usize),
    /// Sends this many bytes of the reply, then closes the connection.
    Cut(usize),
    /// Replaces the reply by random bytes of this seed.
    Garbage(u64),
    /// Replies false to COPY_TENSOR: the copy was not executed.
    Refuse,
}

/// A server with one client and one device that replaces reply number `at` by a fault.
fn faulty_server(at: usize, fault: Option<ReplyFault>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        // An error means that the client has closed the connection.
        let _ = serve(&mut stream, at, fault);
    });
    addr
}

fn serve(stream: &mut TcpStream, at: usize, fault: Option<ReplyFault>) -> std::io::Result<()> {
    let mut replies = 0;
    loop {
        let mut header = [0; REQUEST_HEADER];
        stream.read_exact(&mut header)?;
        let header = RequestHeader::decode(&header).expect("a header");
        let mut body = vec![0; header.size as usize];
        stream.read_exact(&mut body)?;
        let limits = Limits::new(1 << 20, 1 << 20, 1 << 30);
        let zeros;
        let reply = match Request::decode(header.command, &body, &limits).expect("a request") {
            Request::Hello(_) => {
                let version = Version { major: 7, minor: 0, patch: 0 };
                Response::Hello(HelloReply { version, conn_caps: Some([0; 24]), extension_byte: 0 })
            }
            Request::DeviceCount(_) => Response::DeviceCount(1),
            Request::GetAlignment(_) => Response::GetAlignment(64),
            Request::GetMaxSize(_) => Response::GetMaxSize(u64::MAX),
            Request::GetDeviceMemory(_) => {
                Response::GetDeviceMemory(DeviceMemoryReply { free: 1 << 20, total: 1 << 20 })
            }
            Request::AllocBuffer(r) => Response::AllocBuffer(AllocBufferReply { remote_ptr: 7, remote_size: r.size }),
            Request::BufferGetBase(_) => Response::BufferGetBase(1 << 40),
            Request::GetTensor(r) => {
                zeros = vec![0; r.size as usize];
                Response::GetTensor(&zeros)
            }
            Request::CopyTensor(_) => Response::CopyTensor(true),
            // A size that no tensor can have.
            Request::GetAllocSize(_) => Response::GetAllocSize(u64::MAX - 7),
            _ => continue,
        };
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        if replies == at {
            match fault {
                Some(ReplyFault::Close) => return Ok(()),
                Some(ReplyFault::Stall(n)) => {
                    stream.write_all(&bytes[..n.min(bytes.len() - 1)])?;
                    // Reads until the client closes the connection.
                    return std::io::copy(stream, &mut std::io::sink()).map(drop);
                }
                Some(ReplyFault::Cut(n)) => return stream.write_all(&bytes[..n.min(bytes.len() - 1)]),
                Some(ReplyFault::Garbage(seed)) => {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    // Half of the faults keep the length in the header, the others replace it too.
                    let from = if rng.bool() { RESPONSE_HEADER } else { 0 };
                    bytes[from..].iter_mut().for_each(|b| *b = rng.u8(..));
                }
                Some(ReplyFault::Refuse) if matches!(reply, Response::CopyTensor(_)) => bytes[RESPONSE_HEADER] = 0,
                Some(ReplyFault::Refuse) | None => {}
            }
        }
        replies += 1;
        stream.write_all(&bytes)?;
    }
}

/// Sends every command that has a reply. Returns the first error.
fn run_session(addr: SocketAddr, timeout: Duration) -> Result<(), String> {
    let options = options().with_connect_timeout(timeout).with_silence_timeout(timeout);
    let endpoint = Endpoint::connect(&addr.to_string(), &options).map_err(|e| e.to_string())?;
    let device = &endpoint.devices()[0];
    let budget = MemoryBudget::new(1 << 30);
    let until = Some(Instant::now() + WATCHDOG);
    let run = || -> Result<(), DeviceError> {
        device.memory()?;
        let buffer = device.alloc(4096, &budget)?;
        let mut queue = device.queue(&budget)?;
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[1; 4096]))?;
        // The first copy follows a probe whether the server copies; the second relies on its result.
        assert!(queue.copy_from(buffer.region(0, 64)?, buffer.region(64, 64)?, None)?.is_submitted());
        queue.mark().wait(until)?;
        assert!(queue.copy_from(buffer.region(0, 64)?, buffer.region(128, 64)?, None)?.is_submitted());
        queue.mark().wait(until)?;
        let (a, b) = (queue.download(buffer.region(0, 100)?)?, queue.download(buffer.whole())?);
        let (a, b) = (a.wait(until)?, b.wait(until)?);
        assert_eq!((a.len(), b.len()), (100, 4096));
        queue.mark().wait(until)
    };
    run().map_err(|e| e.to_string())
}

#[test]
fn faulty_replies_are_reported_before_the_timeout() {
    run_session(faulty_server(0, None), WATCHDOG).expect("a session without a fault");
    let mut failed = 0;
    for at in 0..15 {
        let faults =
            [ReplyFault::Close, ReplyFault::Stall(0), ReplyFault::Stall(9), ReplyFault::Cut(4), ReplyFault::Cut(8)];
        let garbage = (0..8).map(|seed| ReplyFault::Garbage(100 * at as u64 + seed));
        for fault in faults.into_iter().chain(garbage) {
            let addr = faulty_server(at, Some(fault));
            let timeout = if matches!(fault, ReplyFault::Stall(_)) { SHORT_TIMEOUT } else { WATCHDOG };
            let start = Instant::now();
            let outcome = run_session(addr, timeout);
            assert!(start.elapsed() < WATCHDOG / 2, "reply {at}, {fault:?}");
            // Random tensor bytes and a random amount of free memory are valid replies.
            let may_pass = matches!(fault, ReplyFault::Garbage(_));
            match outcome {
                Ok(()) => assert!(may_pass, "reply {at}, {fault:?}"),
                Err(e) => {
                    failed += 1;
                    let out_of_memory = may_pass && e.contains("out of memory");
                    assert!(e.contains(&addr.to_string()) || out_of_memory, "reply {at}, {fault:?}: {e}");
                }
            }
        }
    }
    assert!(failed > 15 * 7, "{failed}");
}

/// Some devices of llama.cpp refuse every COPY_TENSOR, even within one buffer. The probe finds out; a refusal after a
/// successful probe is an error.
#[test]
fn a_probe_detects_a_server_that_refuses_copies() {
    run_session(faulty_server(9, Some(ReplyFault::Refuse)), WATCHDOG)
        .expect("the client copies through its own memory");
    let addr = faulty_server(11, Some(ReplyFault::Refuse));
    let message = run_session(addr, WATCHDOG).expect_err("the server refuses a copy after a successful probe");
    assert!(message.contains("COPY_TENSOR") && message.contains(&addr.to_string()), "{message}");
}

#[test]
fn impossible_sizes_close_the_connection() {
    let addr = faulty_server(0, None);
    let endpoint = Endpoint::connect(&addr.to_string(), &options()).unwrap();
    let tensor = TensorDesc::contiguous(DType::Q4_0, [32, 5, 1, 1]).unwrap();
    // The server reports a maximum buffer size of `u64::MAX`, which the client clamps to `i64::MAX`. Padding beyond it is
    // impossible: the client uses the tensor's own size and closes the connection.
    assert_eq!(endpoint.devices()[0].alloc_size(&tensor), tensor.extent() as u64);
    let message = endpoint.devices()[0].memory().unwrap_err().to_string();
    assert!(message.contains(&addr.to_string()) && message.contains(&(u64::MAX - 7).to_string()), "{message}");
}

#[test]
fn a_timeout_error_names_the_command_and_the_server() {
    // Replies before the first GET_TENSOR: HELLO, DEVICE_COUNT, alignment and maximum size, memory, two for the buffer, two for
    // the probe, one copy.
    let addr = faulty_server(10, Some(ReplyFault::Stall(0)));
    let message = run_session(addr, SHORT_TIMEOUT).unwrap_err();
    for part in [&*addr.to_string(), "GET_TENSOR", "100ms"] {
        assert!(message.contains(part), "{message}");
    }
}

/// A server before 4.0 closes the connection on a HELLO with a body, so the client tries the HELLO without a body next. A full
/// server also closes the connection: here it accepts the second attempt, whose reply shows protocol 7.0.
#[test]
fn one_closed_connection_does_not_select_an_older_version() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let script = move || -> std::io::Result<()> {
        drop(listener.accept()?);
        let (mut stream, _) = listener.accept()?;
        stream.read_exact(&mut [0; REQUEST_HEADER])?;
        stream.write_all(&[&3u64.to_le_bytes()[..], &[7, 0, 0]].concat())?;
        stream.read_to_end(&mut Vec::new())?;
        serve(&mut listener.accept()?.0, 0, None)
    };
    let server = std::thread::spawn(script);
    let options = options().with_retry(WATCHDOG);
    let endpoint = Endpoint::connect(&addr.to_string(), &options).unwrap();
    assert_eq!(endpoint.devices().len(), 1);
    drop(endpoint);
    let _ = server.join().unwrap();
}

/// A fanout server answers 3.0.0 to a HELLO without a body, and its newest version to one with a body, which the client prefers.
#[test]
fn a_server_of_both_forms_of_hello_is_used_by_the_newer_one() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let script = move || -> std::io::Result<()> {
        drop(listener.accept()?);
        let (mut stream, _) = listener.accept()?;
        stream.read_exact(&mut [0; REQUEST_HEADER])?;
        stream.write_all(&[&3u64.to_le_bytes()[..], &[3, 0, 0]].concat())?;
        // llama.cpp's servers serve one client at a time, so the client closes this connection first.
        stream.read_to_end(&mut Vec::new())?;
        serve(&mut listener.accept()?.0, 0, None)
    };
    let server = std::thread::spawn(script);
    let endpoint = Endpoint::connect(&addr.to_string(), &options()).unwrap();
    assert_eq!(endpoint.version().to_string(), "7.0.0");
    drop(endpoint);
    let _ = server.join().unwrap();
}

#[test]
fn invalid_names_and_versions_are_rejected_with_a_reason() {
    for name in ["", "host", ":50052", "host:", "host:port", "host:70000", "1.2.3.4"] {
        assert!(matches!(Endpoint::connect(name, &options()), Err(ConnectError::Name(_))), "{name:?}");
    }
    for (major, minor, fault) in
        [(5, 1, "update the server"), (8, 1, "update this client"), (9, 0, "update this client")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; REQUEST_HEADER + 24]).unwrap();
            let mut bytes = Vec::new();
            let version = Version { major, minor, patch: 3 };
            Response::Hello(HelloReply { version, conn_caps: Some([0; 24]), extension_byte: 0 }).encode(&mut bytes);
            stream.write_all(&bytes).unwrap();
        });
        let error = Endpoint::connect(&addr, &options()).unwrap_err().to_string();
        thread.join().unwrap();
        for part in [&*addr, &format!("{major}.{minor}.3"), "8.0.1", fault] {
            assert!(error.contains(part), "{error}");
        }
    }
}

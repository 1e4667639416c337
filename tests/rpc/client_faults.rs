//! The client against servers that end, fall silent or talk nonsense: errors that name them, in time.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::client::options;
use crate::support::{SHORT, WATCHDOG};
use fanout::device::{Account, DeviceError, Source};
use fanout::rpc::client::{ConnectError, Endpoint};
use fanout::rpc::wire::*;
use fanout::tensor::{DType, TensorDesc};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What a server does instead of the reply number `at`.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Close,
    /// A part of the reply, then nothing.
    Stall(usize),
    /// A part of the reply, then the end.
    Cut(usize),
    /// Other bytes than those of the reply.
    Garbage(u64),
    /// That it has not done it, where the reply is whether it has.
    Refuse,
}

/// A server of one client and one device, whose reply number `at` is not what it should be.
fn server(at: usize, fault: Option<Fault>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((mut stream, _)) = listener.accept() else { return };
        // When the client is gone, this is over.
        let _ = serve(&mut stream, at, fault);
    });
    addr
}

fn serve(stream: &mut TcpStream, at: usize, fault: Option<Fault>) -> std::io::Result<()> {
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
                Response::Hello(HelloReply { version: PROTOCOL_VERSION, conn_caps: Some([0; 24]), greeting: 0 })
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
            // Far more than there can be.
            Request::GetAllocSize(_) => Response::GetAllocSize(u64::MAX - 7),
            _ => continue,
        };
        let mut bytes = Vec::new();
        reply.encode(&mut bytes);
        if replies == at {
            match fault {
                Some(Fault::Close) => return Ok(()),
                Some(Fault::Stall(n)) => {
                    stream.write_all(&bytes[..n.min(bytes.len() - 1)])?;
                    // Until the client hangs up.
                    return std::io::copy(stream, &mut std::io::sink()).map(drop);
                }
                Some(Fault::Cut(n)) => return stream.write_all(&bytes[..n.min(bytes.len() - 1)]),
                Some(Fault::Garbage(seed)) => {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    // The length of the reply, or not even that.
                    let from = if rng.bool() { RESPONSE_HEADER } else { 0 };
                    bytes[from..].iter_mut().for_each(|b| *b = rng.u8(..));
                }
                Some(Fault::Refuse) if matches!(reply, Response::CopyTensor(_)) => bytes[RESPONSE_HEADER] = 0,
                Some(Fault::Refuse) | None => {}
            }
        }
        replies += 1;
        stream.write_all(&bytes)?;
    }
}

/// Everything that has a reply; how many replies that takes.
fn session(addr: SocketAddr, patience: Duration) -> Result<(), String> {
    let options = options().with_connect_timeout(patience).with_silence_timeout(patience);
    let endpoint = Endpoint::connect(&addr.to_string(), &options).map_err(|e| e.to_string())?;
    let device = &endpoint.devices()[0];
    let account = Account::new(1 << 30);
    let until = Some(Instant::now() + WATCHDOG);
    let run = || -> Result<(), DeviceError> {
        device.memory()?;
        let buffer = device.alloc(4096, &account)?;
        let mut queue = device.queue(&account)?;
        queue.upload(buffer.whole(), None, Source::Borrowed(&[1; 4096]))?;
        // Once to find out whether the server can, then because it can.
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
fn whatever_a_server_does_is_an_error_in_time() {
    session(server(0, None), WATCHDOG).expect("a session without a fault");
    let mut failed = 0;
    for at in 0..15 {
        let faults = [Fault::Close, Fault::Stall(0), Fault::Stall(9), Fault::Cut(4), Fault::Cut(8)];
        let garbage = (0..8).map(|seed| Fault::Garbage(100 * at as u64 + seed));
        for fault in faults.into_iter().chain(garbage) {
            let addr = server(at, Some(fault));
            let patience = if matches!(fault, Fault::Stall(_)) { SHORT } else { WATCHDOG };
            let start = Instant::now();
            let outcome = session(addr, patience);
            assert!(start.elapsed() < WATCHDOG / 2, "reply {at}, {fault:?}");
            // Bytes of a tensor are whatever they are, and so is how much memory is free.
            let may_pass = matches!(fault, Fault::Garbage(_));
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

/// Some devices of llama.cpp's copy nothing, not even within themselves.
#[test]
fn a_server_that_copies_nothing_is_found_out_before_it_is_relied_on() {
    session(server(9, Some(Fault::Refuse)), WATCHDOG).expect("copies by way of this host");
    let addr = server(11, Some(Fault::Refuse));
    let told = session(addr, WATCHDOG).expect_err("a server that copied before");
    assert!(told.contains("COPY_TENSOR") && told.contains(&addr.to_string()), "{told}");
}

#[test]
fn sizes_that_cannot_be_end_the_connection() {
    let addr = server(0, None);
    let endpoint = Endpoint::connect(&addr.to_string(), &options()).unwrap();
    let tensor = TensorDesc::contiguous(DType::Q4_0, [32, 5, 1, 1]).unwrap();
    // The server says that its buffers are as large as any.
    assert_eq!(endpoint.devices()[0].alloc_size(&tensor), tensor.extent() as u64);
    let told = endpoint.devices()[0].memory().unwrap_err().to_string();
    assert!(told.contains(&addr.to_string()) && told.contains(&(u64::MAX - 7).to_string()), "{told}");
}

#[test]
fn silence_is_told_with_the_command_and_the_peer() {
    // Replies before the first GET_TENSOR: HELLO, DEVICE_COUNT, two facts, memory, two for the buffer, two for the probe, a copy.
    let addr = server(10, Some(Fault::Stall(0)));
    let told = session(addr, SHORT).unwrap_err();
    for part in [&*addr.to_string(), "GET_TENSOR", "100ms"] {
        assert!(told.contains(part), "{told}");
    }
}

/// A server that is full closes the connection, and may have room when it is told the same as before version 4.0.
#[test]
fn a_server_that_closes_one_connection_is_not_taken_for_another_version() {
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

#[test]
fn names_and_versions_are_refused_with_a_reason() {
    for name in ["", "host", ":50052", "host:", "host:port", "host:70000", "1.2.3.4"] {
        assert!(matches!(Endpoint::connect(name, &options()), Err(ConnectError::Name(_))), "{name:?}");
    }
    for (major, minor, fault) in
        [(5, 1, "update the server"), (7, 1, "update this client"), (8, 0, "update this client")]
    {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; REQUEST_HEADER + 24]).unwrap();
            let mut bytes = Vec::new();
            let version = Version { major, minor, patch: 3 };
            Response::Hello(HelloReply { version, conn_caps: Some([0; 24]), greeting: 0 }).encode(&mut bytes);
            stream.write_all(&bytes).unwrap();
        });
        let error = Endpoint::connect(&addr, &options()).unwrap_err().to_string();
        thread.join().unwrap();
        for part in [&*addr, &format!("{major}.{minor}.3"), "7.0.0", fault] {
            assert!(error.contains(part), "{error}");
        }
    }
}

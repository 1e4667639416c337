//! Late replies of servers of older versions: the status of a graph, and the reply to a long upload.

use super::version_proxy::{GEN0, V3_0};
use super::{OldServer, budget, deadline, network};
use crate::client::options;
use fanout::device::{DeviceError, Region, UploadSource};
use fanout::rpc::client::Endpoint;
use fanout::tensor::{DType, TensorDesc};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

/// The status of a graph arrives after later commands were submitted. If it is a failure, the reads and marks behind the graph
/// fail, as do queues that wait for them. Other queues do not fail.
#[test]
fn a_failed_graph_fails_the_reads_and_marks_behind_it() {
    for (version, dropped) in [(GEN0, false), (V3_0, false), (V3_0, true)] {
        let what = format!("{}, dropped: {dropped}", version.name);
        let old = OldServer::new(version);
        let device = old.device();
        let graph = Arc::new(network(version.name).0);
        let regions = graph.slot_sizes().iter().map(|&n| device.alloc(n as u64, &budget()).unwrap().whole());
        let bindings: Arc<[Region]> = regions.collect();
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let mut queues = [0; 4].map(|_| device.queue(&budget()).unwrap());
        let gate = old.proxy.state.gate.lock().unwrap();
        old.proxy.state.status.store(255, Ordering::SeqCst);
        // Queues 0 to 2 form a chain of waits. Queue 3 is independent.
        let (mut reads, mut marks) = (Vec::new(), Vec::new());
        queues[0].run(&program, &bindings).unwrap();
        for (at, queue) in queues.iter_mut().enumerate() {
            if (1..3).contains(&at) {
                queue.wait(&marks[at - 1]).unwrap();
            }
            reads.push(queue.download(bindings[0].clone()).unwrap());
            marks.push(queue.mark());
        }
        if dropped {
            drop(queues);
            // Only the pending reads of the dropped queues remain.
            marks.clear();
        }
        drop(gate);
        let check_outcome = |at: usize, outcome: Result<(), DeviceError>| match outcome {
            Ok(()) => assert_eq!(at, 3, "{what}"),
            Err(e) => assert!(at < 3 && e.to_string().contains("GRAPH_COMPUTE"), "{what}: queue {at}: {e}"),
        };
        reads.into_iter().enumerate().for_each(|(at, read)| check_outcome(at, read.wait(deadline()).map(drop)));
        marks.iter().enumerate().for_each(|(at, mark)| check_outcome(at, mark.wait(deadline())));
    }
}

/// Pause of the slow server before it reads each piece.
const PAUSE: Duration = Duration::from_millis(100);
const READ_BYTES: usize = 2 << 20;

/// A server of the oldest version with one client. It reads large uploads slowly.
fn slow_upload_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // A small receive buffer: bytes that the client has sent have nearly been read by the server.
    socket2::SockRef::from(&listener).set_recv_buffer_size(64 << 10).unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // The oldest version has no HELLO, so the first two connections, which try both forms of it, are closed.
        (0..2).for_each(|_| drop(listener.accept()));
        if let Ok((mut stream, _)) = listener.accept() {
            // An error means that the client has closed the connection.
            let _ = serve_slowly(&mut stream);
        }
    });
    addr
}

fn serve_slowly(stream: &mut TcpStream) -> io::Result<()> {
    let (_never, paused) = channel::<()>();
    let mut piece = vec![0; READ_BYTES];
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header)?;
        let mut left = u64::from_le_bytes(header[1..].try_into().unwrap()) as usize;
        while left > 0 {
            if left > READ_BYTES {
                let _ = paused.recv_timeout(PAUSE);
            }
            let len = left.min(READ_BYTES);
            stream.read_exact(&mut piece[..len])?;
            left -= len;
        }
        let numbers: &[u64] = match header[0] {
            // ALLOC_BUFFER: handle and size; GET_ALIGNMENT; GET_MAX_SIZE and BUFFER_GET_BASE.
            0 => &[7, 1 << 30],
            1 => &[64],
            2 | 3 => &[1 << 30],
            4..=6 => &[],
            // GET_TENSOR of one byte: its reply proves a mark.
            7 => {
                stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0, 9])?;
                continue;
            }
            other => panic!("command {other}"),
        };
        let body: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        stream.write_all(&[&(body.len() as u64).to_le_bytes(), &*body].concat())?;
    }
}

/// The server replies to an upload only after it has read all bytes. Until then, the progress of the socket writes shows that
/// the server is alive.
#[test]
fn an_upload_may_take_longer_than_the_silence_timeout() {
    let options = options().with_silence_timeout(15 * PAUSE);
    let endpoint = Endpoint::connect(&slow_upload_server().to_string(), &options).unwrap();
    let device = &endpoint.devices()[0];
    let mut queue = device.queue(&budget()).unwrap();
    let desc = TensorDesc::contiguous(DType::F32, [4096, 4096, 1, 1]).unwrap();
    assert!(PAUSE * (desc.extent() / READ_BYTES) as u32 > 2 * options.silence_timeout);
    let buffer = device.alloc(desc.extent() as u64, &budget()).unwrap();
    let data = vec![3; desc.extent()];
    queue.upload(buffer.whole(), Some(&desc), UploadSource::Borrowed(&data)).unwrap();
    queue.mark().wait(deadline()).unwrap();
}

//! What a server of an older version says late: how a graph ended, and that it has taken a long upload.

use super::version_proxy::{GEN0, V3_0};
use super::{OldServer, account, deadline, network};
use crate::client::options;
use fanout::device::{DeviceError, Region, Source};
use fanout::rpc::client::Endpoint;
use fanout::tensor::{DType, TensorDesc};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

/// What was submitted before a graph is known to have failed fails with it, and what waits for that, and nothing else.
#[test]
fn nothing_is_reached_by_way_of_a_graph_that_failed() {
    for (version, dropped) in [(GEN0, false), (V3_0, false), (V3_0, true)] {
        let what = format!("{}, dropped: {dropped}", version.name);
        let old = OldServer::new(version);
        let device = old.device();
        let graph = Arc::new(network(&version).0);
        let regions = graph.slot_sizes().iter().map(|&n| device.alloc(n as u64, &account()).unwrap().whole());
        let bindings: Arc<[Region]> = regions.collect();
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let mut queues = [0; 4].map(|_| device.queue(&account()).unwrap());
        let gate = old.proxy.state.gate.lock().unwrap();
        old.proxy.state.status.store(255, Ordering::SeqCst);
        // The first three in a chain, the last by itself.
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
            // The tickets are all that is left of the queues.
            marks.clear();
        }
        drop(gate);
        let told = |at: usize, outcome: Result<(), DeviceError>| match outcome {
            Ok(()) => assert_eq!(at, 3, "{what}"),
            Err(e) => assert!(at < 3 && e.to_string().contains("GRAPH_COMPUTE"), "{what}: queue {at}: {e}"),
        };
        reads.into_iter().enumerate().for_each(|(at, read)| told(at, read.wait(deadline()).map(drop)));
        marks.iter().enumerate().for_each(|(at, mark)| told(at, mark.wait(deadline())));
    }
}

/// The pause before each piece that a slow server takes.
const PAUSE: Duration = Duration::from_millis(100);
const PIECE: usize = 2 << 20;

/// A server of the oldest version and one client, which takes uploads slowly.
fn slow_upload_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // So that what has left the client has about been taken.
    socket2::SockRef::from(&listener).set_recv_buffer_size(64 << 10).unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // It knows no HELLO of any form.
        (0..2).for_each(|_| drop(listener.accept()));
        if let Ok((mut stream, _)) = listener.accept() {
            // When the client is gone, this is over.
            let _ = take(&mut stream);
        }
    });
    addr
}

fn take(stream: &mut TcpStream) -> io::Result<()> {
    let (_never, paused) = channel::<()>();
    let mut piece = vec![0; PIECE];
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header)?;
        let mut left = u64::from_le_bytes(header[1..].try_into().unwrap()) as usize;
        while left > 0 {
            if left > PIECE {
                let _ = paused.recv_timeout(PAUSE);
            }
            let len = left.min(PIECE);
            stream.read_exact(&mut piece[..len])?;
            left -= len;
        }
        let numbers: &[u64] = match header[0] {
            // ALLOC_BUFFER: what it is called and its size; GET_ALIGNMENT, GET_MAX_SIZE, BUFFER_GET_BASE.
            0 => &[7, 1 << 30],
            1 => &[64],
            2 | 3 => &[1 << 30],
            4..=6 => &[],
            // GET_TENSOR of the byte that proves.
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

/// Its reply comes when all of it is there: until then, that it goes on is the sign of life.
#[test]
fn an_upload_may_take_longer_than_a_server_may_be_silent() {
    let options = options().with_silence_timeout(15 * PAUSE);
    let endpoint = Endpoint::connect(&slow_upload_server().to_string(), &options).unwrap();
    let device = &endpoint.devices()[0];
    let mut queue = device.queue(&account()).unwrap();
    let desc = TensorDesc::contiguous(DType::F32, [4096, 4096, 1, 1]).unwrap();
    assert!(PAUSE * (desc.extent() / PIECE) as u32 > 2 * options.silence_timeout);
    let buffer = device.alloc(desc.extent() as u64, &account()).unwrap();
    let data = vec![3; desc.extent()];
    queue.upload(buffer.whole(), Some(&desc), Source::Borrowed(&data)).unwrap();
    queue.mark().wait(deadline()).unwrap();
}

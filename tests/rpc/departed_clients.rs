//! Clients that leave while the server works for them: their work ends and their memory is freed, whatever the session's thread
//! is waiting for.

use crate::extended_support::HeldDevice;
use crate::support::*;
use fanout::device::Device;
use fanout::ops::OpCode;
use fanout::registry::{Options, Registry};
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{CloseQueue, ExtRequest};
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::sync::Arc;
use std::time::Duration;

/// Rows and columns of the matrices.
const N: u32 = 1024;

/// Bytes of a matrix.
const MATRIX: u64 = 4 * (N as u64) * (N as u64);

/// Products of the graph. Each takes more than a tenth of a second on any machine in exact mode, so that the whole graph takes
/// several times [`WATCHDOG`].
const PRODUCTS: u64 = 4000;

/// A graph that takes far longer than the test: the same product again and again. Its nodes and tensors.
fn endless_graph(memory: &ClientBuffer) -> (Vec<u64>, Vec<TensorRecord>) {
    let matrix = |id, offset| memory.tensor(id, DType::F32, [N, N, 1, 1], offset);
    let (a, b) = (matrix(1, 0), matrix(2, MATRIX));
    let nodes: Vec<u64> = (10..10 + PRODUCTS).collect();
    let product = |&id: &u64| node(OpCode::MulMat, matrix(id, 2 * MATRIX), &[&a, &b]);
    let tensors = nodes.iter().map(product).chain([a.clone(), b.clone()]).collect();
    (nodes, tensors)
}

/// What the session's thread waits for when the client leaves.
#[derive(Clone, Copy, Debug)]
enum Pending {
    /// The next request.
    Nothing,
    /// The data of a GET_TENSOR behind the graph.
    GetTensor,
    /// Room in the queue, which is full of FILLs behind the graph.
    FullQueue,
    /// A READ beyond the memory for replies, behind the graph.
    Replies,
    /// The memory that the graph uses, into which a second queue writes.
    WriteOnSecondQueue,
}

/// Starts the graph in a new session, and leaves the session's thread in the given state.
fn client_with_endless_graph(server: &TestServer, pending: Pending) -> Client {
    match pending {
        Pending::Nothing | Pending::GetTensor => {
            let mut client = Client::connect(server);
            let memory = client.alloc(0, 3 * MATRIX);
            let (nodes, tensors) = endless_graph(&memory);
            client.compute_graph(0, &nodes, &tensors);
            if let Pending::GetTensor = pending {
                client.send(&get_tensor_request(&memory.byte_tensor(), 0, 64));
            }
            client
        }
        Pending::FullQueue | Pending::Replies | Pending::WriteOnSecondQueue => {
            let mut client = Client::connect_extended(server).0;
            (0..2).for_each(|queue| client.open_queue(queue, 0));
            let memory = client.alloc_ext(0, 3 * MATRIX);
            let (nodes, tensors) = endless_graph(&memory);
            client.prepare_graph(1, 0, &nodes, &tensors);
            client.run_graph(0, 1);
            let whole = memory.whole_span();
            match pending {
                Pending::FullQueue => (0..200).for_each(|_| client.fill_span(0, whole, 0)),
                Pending::Replies => (0..20).for_each(|id| client.read_spans(0, id, &[whole])),
                // Without the data: the session's thread waits for the memory before it reads them.
                _ => client.write_span(1, whole, None, &[]),
            }
            client
        }
    }
}

#[test]
fn the_work_of_a_client_that_leaves_ends() {
    let server = TestServer::start(Config::default());
    let states =
        [Pending::Nothing, Pending::GetTensor, Pending::FullQueue, Pending::Replies, Pending::WriteOnSecondQueue];
    for (pending, reset) in states.into_iter().flat_map(|pending| [(pending, false), (pending, true)]) {
        let client = client_with_endless_graph(&server, pending);
        leave(&server, client, reset, &format!("{pending:?}, reset {reset}"));
        Client::connect(&server).assert_alive();
        eventually("the other session ends", || server.handle.connections() == 0);
    }
}

/// The client has sent many requests, none of which takes long.
#[test]
fn requests_that_have_arrived_are_not_served_when_the_client_has_left() {
    /// All of them would take longer than [`WATCHDOG`].
    const REQUESTS: usize = 1000;
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 3 * MATRIX);
    let (nodes, tensors) = endless_graph(&memory);
    let one = [&tensors[0], &tensors[PRODUCTS as usize], &tensors[PRODUCTS as usize + 1]].map(TensorRecord::clone);
    client.compute_graph(0, &nodes[..1], &one);
    for _ in 0..REQUESTS {
        client.send(&Request::GraphRecompute(GraphRecompute { device: 0, uid: None }));
    }
    leave(&server, client, false, "many requests");
}

/// Closes the connection of a client that has three matrices, and waits until the server has ended its session.
fn leave(server: &TestServer, client: Client, reset: bool, state: &str) {
    eventually("the client's memory is allocated", || server.used_bytes(0) >= 3 * MATRIX);
    if reset {
        // The close sends RST instead of FIN.
        socket2::SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).expect("a live socket");
    }
    drop(client);
    eventually(&format!("{state}: the session ends"), || server.handle.connections() == 0);
    // The running step of a graph ends after the session.
    // The code of the device's kernels stays.
    eventually(&format!("{state}: its memory is freed"), || server.used_bytes(0) < MATRIX);
}

/// What the session's thread waits for when the client of a GPU leaves. The queues of the GPU wait for a point that is never
/// reached.
#[derive(Clone, Copy, Debug)]
enum GpuPending {
    Nothing,
    GetTensor,
    /// A READ beyond the memory for replies.
    Replies,
    /// What the queue holds back, before a large WRITE.
    LargeWrite,
    /// The data of a WRITE.
    WriteData,
}

fn client_with_held_queue(server: &TestServer, pending: GpuPending) -> Client {
    let sum = |memory: &ClientBuffer| {
        let (x, y) = (memory.float_tensor(1, 64, 0), memory.float_tensor(2, 64, MATRIX));
        let sum = node(OpCode::Add, memory.float_tensor(3, 64, 2 * MATRIX), &[&x, &y]);
        ([3], [x, y, sum])
    };
    if let GpuPending::Nothing | GpuPending::GetTensor = pending {
        let mut client = Client::connect(server);
        let memory = client.alloc(0, 3 * MATRIX);
        let (nodes, tensors) = sum(&memory);
        client.compute_graph(0, &nodes, &tensors);
        if let GpuPending::GetTensor = pending {
            client.send(&get_tensor_request(&memory.byte_tensor(), 0, 64));
        }
        return client;
    }
    let mut client = Client::connect_extended(server).0;
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 3 * MATRIX);
    let (nodes, tensors) = sum(&memory);
    client.prepare_graph(1, 0, &nodes, &tensors);
    client.run_graph(0, 1);
    let whole = memory.whole_span();
    match pending {
        GpuPending::Replies => (0..20).for_each(|id| client.read_spans(0, id, &[whole])),
        // More than the queue holds back, and less than the connection's buffers hold.
        GpuPending::LargeWrite => client.write_span(0, whole, None, &vec![1; 3 << 20]),
        _ => client.write_span(0, whole, None, &[]),
    }
    client
}

/// As above, on an emulated GPU with its fallback: an abort drops what the queues hold back.
#[test]
fn the_work_of_a_client_that_leaves_ends_on_a_gpu() {
    use GpuPending::*;
    let emulator = cudaemu::test::start("").expect("the emulator");
    let options = Options::default().with_threads(Some(2)).with_memory(vec![512 << 20]);
    let gpu = Registry::detect().open("0", &options).expect("a device").remove(0);
    let mut server = TestServer::with_device_list(vec![HeldDevice::wrap(gpu) as Arc<dyn Device>], Config::default());
    let states = [Nothing, GetTensor, Replies, LargeWrite, WriteData];
    for (pending, reset) in states.into_iter().flat_map(|pending| [(pending, false), (pending, true)]) {
        let client = client_with_held_queue(&server, pending);
        leave(&server, client, reset, &format!("{pending:?}, reset {reset}"));
    }
    server.stop();
    drop(server);
    assert!(emulator.wait_contexts_released(WATCHDOG), "a context is still held");
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// Queues that wait for points that are never reached have no threads, whether open or closed.
#[cfg(target_os = "linux")]
#[test]
fn waiting_queues_have_no_threads() {
    const QUEUES: u32 = 250;
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_extended(&server).0;
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 3 * MATRIX);
    let (nodes, tensors) = endless_graph(&memory);
    client.prepare_graph(1, 0, &nodes, &tensors);
    client.open_queue(1, 0); // so that the graph does not run inline
    client.run_graph(0, 1);
    client.mark(0, 1);
    for _ in 0..4 {
        for queue in 2..QUEUES {
            client.open_queue(queue, 0);
            client.wait_for_mark(queue, 0, 1);
        }
        client.assert_ping_replied();
        let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process").flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        let threads = names.filter(|name| name.starts_with("cpu-queue")).count();
        // Each device that another test of this process has open has three.
        assert!(threads < QUEUES as usize / 2, "{threads} threads for queues");
        for queue in 2..QUEUES {
            client.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue }));
        }
    }
}

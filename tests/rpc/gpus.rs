//! Servers of emulated GPUs: computation on each GPU, copies between all devices, memory limits, and the device list of the
//! program.

use crate::extended_support::{ReceivedNotification, data_notification};
use crate::server_program::{program, run_to_exit, spawn_server_process};
use crate::support::*;
use fanout::cuda;
use fanout::ops::OpCode;
use fanout::registry::{Options, Registry};
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::ServerState;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::path::Path;
use std::process::Command as Process;
use std::time::Duration;

/// Runs a test against a server of emulated devices. Asserts that all contexts are released and that the emulator reports no
/// fault.
fn with_emulated_server(settings: &str, list: &str, memory: &[u64], test: impl FnOnce(&TestServer, Client)) {
    with_counted_driver_calls(settings, list, memory, |server, client, _| test(server, client));
}

/// As [`with_emulated_server`]; the test also receives a function that returns how often a driver function was called.
fn with_counted_driver_calls(
    settings: &str,
    list: &str,
    memory: &[u64],
    test: impl FnOnce(&TestServer, Client, &dyn Fn(&str) -> u64),
) {
    let emulator = cudaemu::test::start(settings).expect("the emulator");
    let options = Options::default().with_threads(Some(2)).with_memory(memory.to_vec());
    let devices = Registry::detect().open(list, &options).expect("devices");
    let mut server = TestServer::with_device_list(devices, Config::default());
    let client = Client::connect(&server);
    test(&server, client, &|name| emulator.calls(name));
    server.stop();
    drop(server);
    // A dropped queue releases its context on a separate thread. The next test must not start before.
    assert!(emulator.wait_contexts_released(Duration::from_secs(20)), "a context is still held");
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// Computes `a + b` on a device, with operands and sum in `memory`. Returns the record of the sum.
fn compute_sum(client: &mut Client, device: u32, memory: &ClientBuffer, [a, b]: [&[f32]; 2]) -> TensorRecord {
    let n = a.len() as u32;
    let (x, y) = (memory.float_tensor(1, n, 0), memory.float_tensor(2, n, 1 << 18));
    let sum = node(OpCode::Add, memory.float_tensor(3, n, 1 << 19), &[&x, &y]);
    client.set_floats(&x, a);
    client.set_floats(&y, b);
    client.compute_graph(device, &[3], &[x, y, sum.clone()]);
    sum
}

#[test]
fn the_gpus_of_a_server_compute_and_copy_from_each_other() {
    const N: usize = 5000;
    for (settings, list) in [
        ("CUDAEMU_DEVICES=2", "0,1"),
        ("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none", "CUDA1,CUDA0"),
        ("CUDAEMU_DEVICES=1", "0,0"),
    ] {
        with_emulated_server(settings, list, &[64 << 20], |_, mut client| {
            assert_eq!(client.request_number(&Request::DeviceCount(DeviceCount {})), 2);
            let memory = [client.alloc(0, 1 << 20), client.alloc(1, 1 << 20)];
            for round in 0..4 {
                let inputs: Vec<_> = (0..4).map(|i| random_floats(10 * round + i, N)).collect();
                let want =
                    |i: usize| -> Vec<f32> { inputs[i].iter().zip(&inputs[i + 1]).map(|(a, b)| a + b).collect() };
                // Both devices have work before the client reads any bytes.
                let first = compute_sum(&mut client, 0, &memory[0], [&inputs[0], &inputs[1]]);
                let second = compute_sum(&mut client, 1, &memory[1], [&inputs[2], &inputs[3]]);
                assert_eq!(client.get_floats(&first), want(0), "{list} round {round}");
                assert_eq!(client.get_floats(&second), want(2), "{list} round {round}");
                // Each sum is copied to the peer device, as an operand of its next sum.
                for (from, to) in [(0, 1), (1, 0)] {
                    let (a, b) = (random_floats(round, N), random_floats(99, N));
                    let sum = compute_sum(&mut client, from, &memory[from as usize], [&a, &b]);
                    let there = memory[to as usize].float_tensor(4, N as u32, 3 << 18);
                    assert_eq!(client.request_number(&copy_tensor_request(&sum, &there)), 1);
                    // Overwrites the source at once: the copy must be executed before.
                    client.set_floats(&sum, &[0.0; N]);
                    let twice =
                        node(OpCode::Add, memory[to as usize].float_tensor(5, N as u32, 1 << 19), &[&there, &there]);
                    client.compute_graph(to, &[5], &[there, twice.clone()]);
                    let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
                    assert_eq!(client.get_floats(&twice), want, "{list} from {from} to {to}, round {round}");
                }
            }
        });
    }
}

/// The session does not block on a device: work that is spread over two devices takes half the time of the same work on one
/// device.
#[test]
fn devices_of_one_connection_run_concurrently() {
    let makespan = |list: &str, devices: [u32; 2]| {
        let mut end = 0.0;
        with_emulated_server(
            "CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10",
            list,
            &[64 << 20],
            |_, mut client| {
                let memory = devices.map(|device| client.alloc(device, 1 << 20));
                let sums: Vec<_> = (0..40)
                    .map(|i| compute_sum(&mut client, devices[i % 2], &memory[i % 2], [&[1.0; 100], &[2.0; 100]]))
                    .collect();
                for sum in &sums[38..] {
                    assert_eq!(client.get_floats(sum), [3.0; 100]);
                }
                let counts: serde_json::Value = serde_json::from_str(&cuda::emulated_counts().unwrap()).unwrap();
                end = counts["simulated_us"].as_f64().unwrap();
            },
        );
        end
    };
    let (serial, parallel) = (makespan("0,1", [0, 0]), makespan("0,1", [0, 1]));
    assert!(serial >= 4000.0, "{serial} us for 40 kernels of 100 us");
    assert!(parallel <= 0.55 * serial, "{parallel} us on two devices, {serial} us on one");
}

/// Micro-batches over two devices: the results are right for every execution order of the streams.
#[test]
fn results_do_not_depend_on_the_execution_order_of_streams() {
    for seed in 0..100 {
        let peers = ["all", "none"][seed % 2];
        let settings = format!("CUDAEMU_DEVICES=2\nCUDAEMU_SEED={seed}\nCUDAEMU_PEERS={peers}");
        with_emulated_server(&settings, "0,1", &[64 << 20], |_, mut client| {
            let memory = [client.alloc(0, 1 << 20), client.alloc(1, 1 << 20)];
            let mut results = Vec::new();
            for batch in 0..4 {
                // All batches use the same buffers: a batch must not overwrite bytes that an earlier batch still reads.
                let sum = compute_sum(&mut client, 0, &memory[0], [&[batch as f32; 300], &[1.0; 300]]);
                let there = memory[1].float_tensor(4, 300, 3 << 18);
                assert_eq!(client.request_number(&copy_tensor_request(&sum, &there)), 1);
                let twice = node(OpCode::Add, memory[1].float_tensor(5, 300, 4096 * batch), &[&there, &there]);
                client.compute_graph(1, &[5], &[there, twice.clone()]);
                results.push(twice);
            }
            for (batch, result) in results.iter().enumerate() {
                assert_eq!(client.get_floats(result), [2.0 * (batch + 1) as f32; 300], "seed {seed}, batch {batch}");
            }
        });
    }
}

/// GPUs whose streams share connections, and whose driver synchronises: sessions that copy between GPUs and a CPU do not block each
/// other. 50 seeds, or `FANOUT_HARDWARE_SEEDS`.
#[test]
fn sessions_on_real_hardware_do_not_deadlock() {
    let seeds = std::env::var("FANOUT_HARDWARE_SEEDS").map_or(50u64, |text| text.parse().expect("a number"));
    for seed in 0..seeds {
        let settings = format!(
            "CUDAEMU_DEVICES=2\nCUDAEMU_SEED={seed}\nCUDAEMU_CONNECTIONS={}\nCUDAEMU_PEERS={}\nCUDAEMU_ALLOC_SYNC_US=100\n\
             CUDAEMU_POISON=on",
            1 + seed % 4,
            if seed.is_multiple_of(3) { "none" } else { "all" },
        );
        with_emulated_server(&settings, "0,CPU,1", &[64 << 20], |server, client| {
            let session = |mut client: Client, seed: u64| {
                let memory = [0, 1, 2].map(|device| client.alloc(device, 4 << 20));
                let mut rng = fastrand::Rng::with_seed(seed);
                let (a, b) = (random_floats(seed, 5000), random_floats(seed + 1, 5000));
                for _ in 0..4 {
                    let (from, to) = (rng.usize(..3), rng.usize(..3));
                    let sum = compute_sum(&mut client, from as u32, &memory[from], [&a, &b]);
                    let there = memory[to].float_tensor(4, 5000, 3 << 18);
                    assert_eq!(client.request_number(&copy_tensor_request(&sum, &there)), 1, "seed {seed}");
                    let twice = node(OpCode::Add, memory[to].float_tensor(5, 5000, 1 << 20), &[&there, &there]);
                    client.compute_graph(to as u32, &[5], &[there, twice.clone()]);
                    let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
                    assert_eq!(client.get_floats(&twice), want, "seed {seed}, from {from} to {to}");
                }
            };
            std::thread::scope(|scope| {
                for number in 1..3 {
                    let other = Client::connect(server);
                    scope.spawn(move || session(other, 1000 * number + seed));
                }
                session(client, seed);
            });
        });
    }
}

#[test]
fn copies_between_a_gpu_and_the_cpu_preserve_bytes() {
    let sizes: [u32; 4] = [1, 5000, 256 << 10, (3 << 20) + 17];
    with_emulated_server("CUDAEMU_DEVICES=2", "0,CPU,1", &[64 << 20], |_, mut client| {
        let memory = [0, 1, 2].map(|device| client.alloc(device, 8 << 20));
        for (seed, n) in (0..).zip(sizes) {
            for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2)] {
                let bytes = |of: &ClientBuffer, id, at| of.tensor(id, DType::I8, [n, 1, 1, 1], at);
                let (src, dst) = (bytes(&memory[from], 1, 5), bytes(&memory[to], 2, 7));
                let data = random_bytes(seed, n as usize);
                client.set_tensor(&src, 0, &data);
                assert_eq!(client.request_number(&copy_tensor_request(&src, &dst)), 1);
                client.set_tensor(&src, 0, &random_bytes(99, n as usize));
                assert!(client.get_tensor(&dst, 0, n.into()) == data, "{n} bytes from {from} to {to}");
            }
        }
        // Copies are in order with the work of both devices: a sum is copied and is then an operand.
        let (a, b) = (random_floats(1, 5000), random_floats(2, 5000));
        for (from, to) in [(0, 1), (1, 0)] {
            let sum = compute_sum(&mut client, from, &memory[from as usize], [&a, &b]);
            let there = memory[to as usize].float_tensor(4, 5000, 3 << 18);
            assert_eq!(client.request_number(&copy_tensor_request(&sum, &there)), 1);
            let twice = node(OpCode::Add, memory[to as usize].float_tensor(5, 5000, 1 << 19), &[&there, &there]);
            client.compute_graph(to, &[5], &[there, twice.clone()]);
            let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
            assert_eq!(client.get_floats(&twice), want, "from {from} to {to}");
        }
    });
}

/// The client chooses the number of spans of a READ. Whatever their number, the server allocates no pinned memory, which would wait
/// for the GPU.
#[test]
fn a_read_of_many_spans_allocates_no_pinned_memory() {
    with_counted_driver_calls("", "0", &[64 << 20], |server, _, calls| {
        let mut client = Client::connect_with_queues(server);
        let memory = client.alloc_ext(0, 1 << 20);
        let bytes = random_bytes(1, 1 << 20);
        client.write_span(0, memory.whole_span(), None, &bytes);
        client.read_spans(0, 1, &[memory.whole_span()]);
        assert!(client.next_notification() == data_notification(1, &bytes));
        let before = calls("cuMemHostAlloc");
        let spans: Vec<_> = (0..500).map(|i| memory.span(2011 * i, i % 3)).collect();
        let want: Vec<u8> = spans.iter().flat_map(|s| &bytes[s.offset as usize..][..s.len as usize]).copied().collect();
        client.read_spans(0, 2, &spans);
        assert!(client.next_notification() == data_notification(2, &want));
        client.read_spans(0, 3, &spans[..2]);
        assert!(client.next_notification() == data_notification(3, &bytes[2011..][..1]));
        assert_eq!(calls("cuMemHostAlloc"), before);
    });
}

/// More RECEIVE_FROM_PEER commands than a queue holds back: the session's thread waits, and the bytes must still arrive.
#[test]
fn a_queue_may_have_more_receives_than_it_holds_back() {
    with_emulated_server("", "0", &[64 << 20], |server, _| {
        let (mut dst, mut src) = (Client::connect_with_queues(server), Client::connect_with_queues(server));
        let memory = dst.alloc_ext(0, 1010);
        let tokens: Vec<_> = (0..4).flat_map(|_| dst.request_tokens(256)).collect();
        for (at, token) in tokens.iter().take(1010).enumerate() {
            dst.receive_from_peer(memory.span(at as u64, 1), *token);
        }
        dst.read_spans(0, 7, &[memory.whole_span()]);
        assert_eq!(
            dst.next_notification_or_state(),
            ReceivedNotification::ServerState(ServerState::Ready),
            "the session is blocked"
        );
        let bytes = random_bytes(1, 1010);
        for (token, byte) in tokens.iter().zip(&bytes) {
            src.peer_write(*token, 0, &[*byte]);
        }
        src.assert_ping_replied();
        assert!(dst.receive_read_bytes() == bytes);
    });
}

#[test]
fn the_reported_free_memory_can_be_allocated() {
    const M: u64 = 1 << 20;
    let memory = |client: &mut Client, device| {
        client.send(&Request::GetDeviceMemory(GetDeviceMemory { device }));
        let body = client.read_reply(RpcCommand::GetDeviceMemory);
        match Response::decode(RpcCommand::GetDeviceMemory, &body) {
            Ok(Response::GetDeviceMemory(reply)) => (reply.free, reply.total),
            other => panic!("{other:?}"),
        }
    };
    with_emulated_server(
        "CUDAEMU_DEVICES=2\nCUDAEMU_MEMORY=64M,1G",
        "0,1",
        &[40 * M, 100 * M],
        |server, mut client| {
            assert_eq!((memory(&mut client, 0), memory(&mut client, 1)), ((40 * M, 40 * M), (100 * M, 100 * M)));
            let held = client.alloc(1, 30 * M);
            assert_eq!(memory(&mut client, 1), (70 * M, 100 * M));
            assert_eq!(client.try_alloc(1, 71 * M).remote_ptr, 0);
            assert_eq!(client.request_number(&Request::GetMaxSize(GetMaxSize { device: 0 })), 40 * M);
            client.free(&held);
            assert_eq!(memory(&mut client, 1), (100 * M, 100 * M));
            drop(client);
            eventually("the session of the client has ended", || server.handle.connections() == 0);
        },
    );
    // Two devices on one GPU share its memory.
    with_emulated_server("CUDAEMU_MEMORY=64M", "0,0", &[32 * M], |_, mut client| {
        let _held = (client.alloc(0, 30 * M), client.alloc(1, 30 * M));
        for device in 0..2 {
            let (free, total) = memory(&mut client, device);
            assert!(free <= 2 * M && total == 32 * M, "device {device}: {free} of {total}");
            assert_eq!(client.try_alloc(device, 3 * M).remote_ptr, 0, "device {device}");
        }
    });
}

/// The server program with the emulator as its CUDA driver.
pub(crate) fn emulated_program(settings: &[(&str, &str)], args: &[&str]) -> Process {
    let exe = std::env::current_exe().expect("a path");
    let library = exe.with_file_name("libcudaemu.so");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
    std::fs::create_dir_all(&folder).expect("a folder for tests");
    for name in ["libcuda.so", "libcuda.so.1"] {
        // Another test may have created the link.
        let _ = std::os::unix::fs::symlink(&library, folder.join(name));
    }
    let mut process = program(args);
    process.env("LD_LIBRARY_PATH", folder).env_remove("CUDA_VISIBLE_DEVICES").envs(settings.iter().copied());
    process
}

#[test]
fn list_devices_prints_the_visible_devices() {
    let two = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_NAME", "First,Second")];
    let (code, text) = run_to_exit(emulated_program(&two, &["--list-devices"]));
    let lines: Vec<_> = text.lines().collect();
    assert!(code == Some(0) && lines.len() == 3, "{code:?} {text}");
    for (line, start) in lines.iter().zip(["CUDA0: First, 8192 MiB, PCI 0000:01:00.0", "CUDA1: Second", "CPU: "]) {
        assert!(line.starts_with(start), "{text}");
    }
    let (code, text) = run_to_exit(emulated_program(&two, &["--list-devices", "--verbose"]));
    for part in [
        "  norm.sm_75: ",
        "  mul_mat_q4_k.sm_75: ",
        "  mul_mat_mma_q4_k.sm_80: ",
        " modules in ",
        " from the driver's cache\n",
    ] {
        assert_eq!((code, text.matches(part).count() >= 2), (Some(0), true), "{part:?}, for each GPU: {text}");
    }
    // The driver applies CUDA_VISIBLE_DEVICES.
    let chosen = [&two[..], &[("CUDA_VISIBLE_DEVICES", "1")]].concat();
    let (_, text) = run_to_exit(emulated_program(&chosen, &["--list-devices"]));
    assert!(text.starts_with("CUDA0: Second") && text.lines().count() == 2, "{text}");
    let (code, text) = run_to_exit(emulated_program(&chosen, &["-d", "1"]));
    let says = "--device: no device \"1\"; available: CUDA0, CPU";
    assert!(code == Some(2) && text.contains(says), "{code:?} {text}");
    let (code, text) = run_to_exit(program(&["--list-devices"]));
    let says = "no GPU: no CUDA driver was found (libcuda.so.1 cannot be loaded): install";
    assert!(code == Some(0) && text.starts_with("CPU: ") && text.contains(says), "{code:?} {text}");
}

#[test]
fn the_server_program_serves_all_gpus_by_default() {
    let two = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_MEMORY", "64M")];
    let base = ["-p", "0", "-t", "1"];
    for (args, want) in [
        (&[][..], &["device 0: CUDA0 (", "device 1: CUDA1 ("][..]),
        (&["--device", "1,cpu", "--mem", "20M,30M"], &["device 0: CUDA1 (", "device 1: CPU (1 thread, "]),
        (&["--device", "0,0"], &["device 0: CUDA0.0 (", "device 1: CUDA0.1 ("]),
    ] {
        let server = spawn_server_process(emulated_program(&two, &[&base[..], args].concat()));
        let devices: Vec<_> = server.banner.lines().filter(|line| line.starts_with("device ")).collect();
        let right = devices.iter().zip(want).all(|(line, start)| line.starts_with(start));
        assert!(right && devices.len() == want.len() && !server.banner.contains("no GPU"), "{}", server.banner);
        let limits = |line: &str| line.ends_with(", 20 of 20 MiB free") || line.ends_with(", 30 of 30 MiB free");
        assert!(args.len() < 4 || devices.iter().all(|line| limits(line)), "{}", server.banner);
    }
    let visible = [&two[..], &[("CUDA_VISIBLE_DEVICES", "1")]].concat();
    let server = spawn_server_process(emulated_program(&visible, &base));
    assert!(server.banner.contains("device 0: CUDA0 (") && !server.banner.contains("device 1"), "{}", server.banner);
}

#[test]
fn without_a_usable_gpu_the_server_program_prints_the_reason() {
    type Start = fn(&[&str]) -> Process;
    let cases: [(Start, &str); 4] = [
        (program, "no CUDA driver was found (libcuda.so.1 cannot be loaded): install"),
        (
            |args| emulated_program(&[("CUDAEMU_DRIVER_VERSION", "11.4")], args),
            "the CUDA driver is too old: it supports CUDA 11.4, but 12.0",
        ),
        (|args| emulated_program(&[("CUDAEMU_DEVICES", "0")], args), "the CUDA driver reports no device"),
        (|args| emulated_program(&[("CUDA_VISIBLE_DEVICES", "")], args), "the CUDA driver reports no device"),
    ];
    for (program, why) in cases {
        let (code, text) = run_to_exit(program(&["--device", "0"]));
        let start = format!("rpc-server: --device: no device \"0\": {why}");
        assert!(code == Some(1) && text.starts_with(&start) && text.contains("available: CPU"), "{code:?} {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let server = spawn_server_process(program(&["-p", "0", "-t", "1", "--mem", "64M"]));
        let note = format!("no GPU, the CPU is used: {why}");
        let says = |line: &str| line.starts_with(&note);
        assert_eq!(server.banner.lines().filter(|line| says(line)).count(), 1, "{}", server.banner);
        assert!(server.banner.contains("device 0: CPU (1 thread, "), "{}", server.banner);
        drop(server);
        // If only the CPU is requested, the program prints nothing about GPUs.
        let server = spawn_server_process(program(&["-p", "0", "-t", "1", "--mem", "64M", "-d", "CPU"]));
        assert!(!server.banner.contains("GPU"), "{}", server.banner);
    }
}

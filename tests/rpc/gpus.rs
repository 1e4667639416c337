//! GPUs on one endpoint, emulated: each computes, bytes go from any device to any other, the program says what it found.

use crate::greeted_support::{Told, data};
use crate::program::{outcome, program, started};
use crate::support::*;
use fanout::cuda;
use fanout::ops::OpCode;
use fanout::registry::{Options, Registry};
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::State;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::path::Path;
use std::process::Command as Process;
use std::time::Duration;

/// Runs a test against a server of emulated devices. Nothing it made may be left, and no kernel may have done wrong.
fn served(settings: &str, list: &str, memory: &[u64], test: impl FnOnce(&TestServer, Client)) {
    counted(settings, list, memory, |server, client, _| test(server, client));
}

/// As [`served`], for a test that counts calls of the driver's functions.
fn counted(settings: &str, list: &str, memory: &[u64], test: impl FnOnce(&TestServer, Client, &dyn Fn(&str) -> u64)) {
    let emulator = cudaemu::test::start(settings).expect("the emulator");
    let options = Options::default().with_threads(Some(2)).with_memory(memory.to_vec());
    let devices = Registry::detect().open(list, &options).expect("devices");
    let mut server = TestServer::with_device_list(devices, Config::default());
    let client = Client::open(&server);
    test(&server, client, &|name| emulator.calls(name));
    server.stop();
    drop(server);
    // The last work of a dropped queue ends on a thread of its own, and its context with it: before the next test's begin.
    assert!(emulator.wait_contexts_released(Duration::from_secs(20)), "a context is still held");
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

/// `a + b` on a device whose memory holds both, and the sum behind them.
fn add(client: &mut Client, device: u32, memory: &ClientBuffer, [a, b]: [&[f32]; 2]) -> TensorRecord {
    let n = a.len() as u32;
    let (x, y) = (memory.floats(1, n, 0), memory.floats(2, n, 1 << 18));
    let sum = node(OpCode::Add, memory.floats(3, n, 1 << 19), &[&x, &y]);
    client.set_floats(&x, a);
    client.set_floats(&y, b);
    client.compute(device, &[3], &[x, y, sum.clone()]);
    sum
}

#[test]
fn each_gpu_of_an_endpoint_computes_and_they_copy_from_each_other() {
    const N: usize = 5000;
    for (settings, list) in [
        ("CUDAEMU_DEVICES=2", "0,1"),
        ("CUDAEMU_DEVICES=2\nCUDAEMU_PEERS=none", "CUDA1,CUDA0"),
        ("CUDAEMU_DEVICES=1", "0,0"),
    ] {
        served(settings, list, &[64 << 20], |_, mut client| {
            assert_eq!(client.request_number(&Request::DeviceCount(DeviceCount {})), 2);
            let memory = [client.alloc(0, 1 << 20), client.alloc(1, 1 << 20)];
            for round in 0..4 {
                let inputs: Vec<_> = (0..4).map(|i| floats(10 * round + i, N)).collect();
                let want =
                    |i: usize| -> Vec<f32> { inputs[i].iter().zip(&inputs[i + 1]).map(|(a, b)| a + b).collect() };
                // Both are at work before anyone asks for bytes.
                let first = add(&mut client, 0, &memory[0], [&inputs[0], &inputs[1]]);
                let second = add(&mut client, 1, &memory[1], [&inputs[2], &inputs[3]]);
                assert_eq!(client.floats(&first), want(0), "{list} round {round}");
                assert_eq!(client.floats(&second), want(2), "{list} round {round}");
                // Each sum becomes an operand of the other device's next one.
                for (from, to) in [(0, 1), (1, 0)] {
                    let (a, b) = (floats(round, N), floats(99, N));
                    let sum = add(&mut client, from, &memory[from as usize], [&a, &b]);
                    let there = memory[to as usize].floats(4, N as u32, 3 << 18);
                    assert_eq!(client.request_number(&copy(&sum, &there)), 1);
                    // Overwritten at once: the copy must have come first.
                    client.set_floats(&sum, &[0.0; N]);
                    let twice = node(OpCode::Add, memory[to as usize].floats(5, N as u32, 1 << 19), &[&there, &there]);
                    client.compute(to, &[5], &[there, twice.clone()]);
                    let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
                    assert_eq!(client.floats(&twice), want, "{list} from {from} to {to}, round {round}");
                }
            }
        });
    }
}

/// The session does not wait for a device: equal work on two of them takes half the time of all on one.
#[test]
fn devices_of_one_connection_work_at_the_same_time() {
    let makespan = |list: &str, devices: [u32; 2]| {
        let mut end = 0.0;
        served("CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=100\nCUDAEMU_HOST_GBPS=10", list, &[64 << 20], |_, mut client| {
            let memory = devices.map(|device| client.alloc(device, 1 << 20));
            let sums: Vec<_> =
                (0..40).map(|i| add(&mut client, devices[i % 2], &memory[i % 2], [&[1.0; 100], &[2.0; 100]])).collect();
            for sum in &sums[38..] {
                assert_eq!(client.floats(sum), [3.0; 100]);
            }
            let counts: serde_json::Value = serde_json::from_str(&cuda::emulated_counts().unwrap()).unwrap();
            end = counts["simulated_us"].as_f64().unwrap();
        });
        end
    };
    let (serial, parallel) = (makespan("0,1", [0, 0]), makespan("0,1", [0, 1]));
    assert!(serial >= 4000.0, "{serial} us for 40 kernels of 100 us");
    assert!(parallel <= 0.55 * serial, "{parallel} us on two devices, {serial} us on one");
}

/// Micro-batches over two devices: whatever order the streams run in, every one comes out right.
#[test]
fn no_order_of_streams_changes_what_a_client_reads() {
    for seed in 0..100 {
        let peers = ["all", "none"][seed % 2];
        let settings = format!("CUDAEMU_DEVICES=2\nCUDAEMU_SEED={seed}\nCUDAEMU_PEERS={peers}");
        served(&settings, "0,1", &[64 << 20], |_, mut client| {
            let memory = [client.alloc(0, 1 << 20), client.alloc(1, 1 << 20)];
            let mut results = Vec::new();
            for batch in 0..4 {
                // The same places each time: a batch must not overwrite what the one before still needs.
                let sum = add(&mut client, 0, &memory[0], [&[batch as f32; 300], &[1.0; 300]]);
                let there = memory[1].floats(4, 300, 3 << 18);
                assert_eq!(client.request_number(&copy(&sum, &there)), 1);
                let twice = node(OpCode::Add, memory[1].floats(5, 300, 4096 * batch), &[&there, &there]);
                client.compute(1, &[5], &[there, twice.clone()]);
                results.push(twice);
            }
            for (batch, result) in results.iter().enumerate() {
                assert_eq!(client.floats(result), [2.0 * (batch + 1) as f32; 300], "seed {seed}, batch {batch}");
            }
        });
    }
}

#[test]
fn bytes_go_between_a_gpu_and_the_cpu() {
    let sizes: [u32; 4] = [1, 5000, 256 << 10, (3 << 20) + 17];
    served("CUDAEMU_DEVICES=2", "0,CPU,1", &[64 << 20], |_, mut client| {
        let memory = [0, 1, 2].map(|device| client.alloc(device, 8 << 20));
        for (seed, n) in (0..).zip(sizes) {
            for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2)] {
                let bytes = |of: &ClientBuffer, id, at| of.tensor(id, DType::I8, [n, 1, 1, 1], at);
                let (src, dst) = (bytes(&memory[from], 1, 5), bytes(&memory[to], 2, 7));
                let data = noise(seed, n as usize);
                client.set(&src, 0, &data);
                assert_eq!(client.request_number(&copy(&src, &dst)), 1);
                client.set(&src, 0, &noise(99, n as usize));
                assert!(client.get(&dst, 0, n.into()) == data, "{n} bytes from {from} to {to}");
            }
        }
        // In order with the work of both: the one's sum is the other's operand.
        let (a, b) = (floats(1, 5000), floats(2, 5000));
        for (from, to) in [(0, 1), (1, 0)] {
            let sum = add(&mut client, from, &memory[from as usize], [&a, &b]);
            let there = memory[to as usize].floats(4, 5000, 3 << 18);
            assert_eq!(client.request_number(&copy(&sum, &there)), 1);
            let twice = node(OpCode::Add, memory[to as usize].floats(5, 5000, 1 << 19), &[&there, &there]);
            client.compute(to, &[5], &[there, twice.clone()]);
            let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| 2.0 * (a + b)).collect();
            assert_eq!(client.floats(&twice), want, "from {from} to {to}");
        }
    });
}

/// A client chooses how many spans its READs have: the host's memory for them is that of their bytes.
#[test]
fn a_read_of_many_spans_lands_in_one_block() {
    counted("", "0", &[64 << 20], |server, _, calls| {
        let mut client = Client::with_queues(server);
        let memory = client.buffer(0, 1 << 20);
        let bytes = noise(1, 1 << 20);
        client.write_span(0, memory.all(), None, &bytes);
        client.read_spans(0, 1, &[memory.all()]);
        assert!(client.told() == data(1, &bytes));
        let before = calls("cuMemHostAlloc");
        let spans: Vec<_> = (0..500).map(|i| memory.span(2011 * i, i % 3)).collect();
        let want: Vec<u8> = spans.iter().flat_map(|s| &bytes[s.offset as usize..][..s.len as usize]).copied().collect();
        client.read_spans(0, 2, &spans);
        assert!(client.told() == data(2, &want));
        assert_eq!(calls("cuMemHostAlloc") - before, 1);
        // It is used again.
        client.read_spans(0, 3, &spans[..2]);
        assert!(client.told() == data(3, &bytes[2011..][..1]));
        assert_eq!(calls("cuMemHostAlloc") - before, 1);
    });
}

/// More RECEIVEs than a stream can wait for by itself: then the session's thread waits, and their bytes arrive all the same.
#[test]
fn many_arrivals_of_one_queue_are_waited_for() {
    served("", "0", &[64 << 20], |server, _| {
        let (mut dst, mut src) = (Client::with_queues(server), Client::with_queues(server));
        let memory = dst.buffer(0, 1010);
        let tickets: Vec<_> = (0..4).flat_map(|_| dst.tickets(256)).collect();
        for (at, ticket) in tickets.chunks(1).take(1010).enumerate() {
            dst.receive(memory.span(at as u64, 1), ticket);
        }
        dst.read_spans(0, 7, &[memory.all()]);
        assert_eq!(dst.heard(), Told::State(State::Ready), "the session waits");
        let bytes = noise(1, 1010);
        for (ticket, byte) in tickets.iter().zip(&bytes) {
            src.put(*ticket, &[*byte]);
        }
        src.pings();
        assert!(dst.bytes_told() == bytes);
    });
}

#[test]
fn free_memory_is_what_can_be_had() {
    const M: u64 = 1 << 20;
    let memory = |client: &mut Client, device| {
        client.send(&Request::GetDeviceMemory(GetDeviceMemory { device }));
        let body = client.reply(Command::GetDeviceMemory);
        match Response::decode(Command::GetDeviceMemory, &body) {
            Ok(Response::GetDeviceMemory(reply)) => (reply.free, reply.total),
            other => panic!("{other:?}"),
        }
    };
    served("CUDAEMU_DEVICES=2\nCUDAEMU_MEMORY=64M,1G", "0,1", &[40 * M, 100 * M], |server, mut client| {
        assert_eq!((memory(&mut client, 0), memory(&mut client, 1)), ((40 * M, 40 * M), (100 * M, 100 * M)));
        let held = client.alloc(1, 30 * M);
        assert_eq!(memory(&mut client, 1), (70 * M, 100 * M));
        assert_eq!(client.try_alloc(1, 71 * M).remote_ptr, 0);
        assert_eq!(client.request_number(&Request::GetMaxSize(GetMaxSize { device: 0 })), 40 * M);
        client.free(&held);
        assert_eq!(memory(&mut client, 1), (100 * M, 100 * M));
        drop(client);
        eventually("the session ends", || server.handle.connections() == 0);
    });
    // Two devices on one GPU: what the one takes, the other does not have.
    served("CUDAEMU_MEMORY=64M", "0,0", &[60 * M], |_, mut client| {
        let _held = client.alloc(0, 50 * M);
        let (free, total) = memory(&mut client, 1);
        assert!(free <= 14 * M && total == 60 * M, "{free} of {total}");
    });
}

/// The program on emulated devices.
fn emulated(settings: &[(&str, &str)], args: &[&str]) -> Process {
    let exe = std::env::current_exe().expect("a path");
    let library = exe.with_file_name("libcudaemu.so");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
    std::fs::create_dir_all(&folder).expect("a folder for tests");
    for name in ["libcuda.so", "libcuda.so.1"] {
        // Another test may have made it.
        let _ = std::os::unix::fs::symlink(&library, folder.join(name));
    }
    let mut process = program(args);
    process.env("LD_LIBRARY_PATH", folder).env_remove("CUDA_VISIBLE_DEVICES").envs(settings.iter().copied());
    process
}

#[test]
fn the_program_lists_what_there_is() {
    let two = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_NAME", "First,Second")];
    let (code, text) = outcome(emulated(&two, &["--list-devices"]));
    let lines: Vec<_> = text.lines().collect();
    assert!(code == Some(0) && lines.len() == 3, "{code:?} {text}");
    for (line, start) in lines.iter().zip(["CUDA0: First, 8192 MiB, PCI 0000:01:00.0", "CUDA1: Second", "CPU: "]) {
        assert!(line.starts_with(start), "{text}");
    }
    // The driver's own choice.
    let chosen = [&two[..], &[("CUDA_VISIBLE_DEVICES", "1")]].concat();
    let (_, text) = outcome(emulated(&chosen, &["--list-devices"]));
    assert!(text.starts_with("CUDA0: Second") && text.lines().count() == 2, "{text}");
    let (code, text) = outcome(emulated(&chosen, &["-d", "1"]));
    let says = "--device: no device \"1\"; there are: CUDA0, CPU";
    assert!(code == Some(2) && text.contains(says), "{code:?} {text}");
    let (code, text) = outcome(program(&["--list-devices"]));
    let says = "no GPU: no CUDA driver was found (libcuda.so.1 cannot be loaded): install";
    assert!(code == Some(0) && text.starts_with("CPU: ") && text.contains(says), "{code:?} {text}");
}

#[test]
fn the_program_serves_all_gpus_unless_told_otherwise() {
    let two = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_MEMORY", "64M")];
    let base = ["-p", "0", "-t", "1"];
    for (args, want) in [
        (&[][..], &["device 0: CUDA0 (", "device 1: CUDA1 ("][..]),
        (&["--device", "1,cpu", "--mem", "20M,30M"], &["device 0: CUDA1 (", "device 1: CPU (1 thread, "]),
        (&["--device", "0,0"], &["device 0: CUDA0.0 (", "device 1: CUDA0.1 ("]),
    ] {
        let server = started(emulated(&two, &[&base[..], args].concat()));
        let devices: Vec<_> = server.banner.lines().filter(|line| line.starts_with("device ")).collect();
        let right = devices.iter().zip(want).all(|(line, start)| line.starts_with(start));
        assert!(right && devices.len() == want.len() && !server.banner.contains("no GPU"), "{}", server.banner);
        let limits = |line: &str| line.ends_with(", 20 of 20 MiB free") || line.ends_with(", 30 of 30 MiB free");
        assert!(args.len() < 4 || devices.iter().all(|line| limits(line)), "{}", server.banner);
    }
    let visible = [&two[..], &[("CUDA_VISIBLE_DEVICES", "1")]].concat();
    let server = started(emulated(&visible, &base));
    assert!(server.banner.contains("device 0: CUDA0 (") && !server.banner.contains("device 1"), "{}", server.banner);
}

#[test]
fn without_a_usable_gpu_the_program_says_why() {
    type Start = fn(&[&str]) -> Process;
    let cases: [(Start, &str); 4] = [
        (program, "no CUDA driver was found (libcuda.so.1 cannot be loaded): install"),
        (
            |args| emulated(&[("CUDAEMU_DRIVER_VERSION", "11.4")], args),
            "the CUDA driver is too old: it is of CUDA 11.4, and 12.0",
        ),
        (|args| emulated(&[("CUDAEMU_DEVICES", "0")], args), "the CUDA driver shows no device"),
        (|args| emulated(&[("CUDA_VISIBLE_DEVICES", "")], args), "the CUDA driver shows no device"),
    ];
    for (program, why) in cases {
        let (code, text) = outcome(program(&["--device", "0"]));
        let start = format!("rpc-server: --device: no device \"0\": {why}");
        assert!(code == Some(1) && text.starts_with(&start) && text.contains("there are: CPU"), "{code:?} {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let server = started(program(&["-p", "0", "-t", "1", "--mem", "64M"]));
        let note = format!("no GPU, the CPU is used: {why}");
        let says = |line: &str| line.starts_with(&note);
        assert_eq!(server.banner.lines().filter(|line| says(line)).count(), 1, "{}", server.banner);
        assert!(server.banner.contains("device 0: CPU (1 thread, "), "{}", server.banner);
        drop(server);
        // The CPU by name is no reason to speak of GPUs.
        let server = started(program(&["-p", "0", "-t", "1", "--mem", "64M", "-d", "CPU"]));
        assert!(!server.banner.contains("GPU"), "{}", server.banner);
    }
}

//! The devices that every op test runs on.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::cuda::{self, CudaDevice};
use fanout::device::Device;
use fanout::fallback::Fallback;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::server::{Config, Server};
use fanout_testing::op_case::Subject;
use fanout_testing::protocol_relay::ProtocolRelay;
use fanout_testing::real_gpu;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

/// All devices under test, created by the first test that uses them.
pub fn devices() -> &'static [Subject] {
    static ALL: OnceLock<Vec<Subject>> = OnceLock::new();
    ALL.get_or_init(|| {
        let cpu = |threads, math_mode| {
            CpuDevice::new("CPU", threads, math_mode, 4 << 30).expect("a CPU device") as Arc<dyn Device>
        };
        // The last argument: whether the device computes in fast mode.
        vec![
            Subject::new("exact, 1 thread", cpu(1, MathMode::Exact), false),
            Subject::new("exact, 3 threads", cpu(3, MathMode::Exact), false),
            Subject::new("fast, 2 threads", cpu(2, MathMode::Fast), true),
            cuda_with(cpu(1, MathMode::Exact)),
            remote("RPC", cpu(1, MathMode::Exact)),
            remote_ggml_protocol("RPC 7.0", cpu(1, MathMode::Exact)),
        ]
    })
}

/// Starts a server that runs until the process ends.
fn serve(device: Arc<dyn Device>) -> SocketAddr {
    let server = Server::bind("127.0.0.1", 0, vec![device], Config::default()).expect("a free port");
    let addr = server.local_addr();
    std::thread::spawn(move || server.run());
    addr
}

/// The first device of a server, over a new connection.
fn connect(addr: SocketAddr) -> Arc<dyn Device> {
    let endpoint = Endpoint::connect(&addr.to_string(), &Options::default()).expect("a server");
    Arc::clone(&endpoint.devices()[0])
}

/// A device behind a server, over fanout's extended protocol.
fn remote(name: &'static str, device: Arc<dyn Device>) -> Subject {
    let addr = serve(device);
    Subject::remote(name, move || connect(addr), false)
}

/// A device behind a server, over ggml's protocol 7.0: a graph that fails ends the connection there. The graphs that 7.0 cannot
/// express run without the server.
fn remote_ggml_protocol(name: &'static str, device: Arc<dyn Device>) -> Subject {
    let (addr, hide_extension) = (serve(Arc::clone(&device)), true);
    Subject::remote(name, move || connect(ProtocolRelay::start(addr, hide_extension).addr), false)
        .with_substitute(device)
        .that_drops_connections()
}

/// The first GPU: an emulated GPU, or with FANOUT_TEST_GPU=1 a GPU of this machine.
fn cuda_with(cpu: Arc<dyn Device>) -> Subject {
    if !real_gpu::requested() {
        cudaemu::test::load().expect("the emulator is built with the tests");
    }
    let gpus = cuda::detect().expect("a GPU");
    let device = CudaDevice::new("CUDA0", &gpus[0], 4 << 30).expect("a GPU that can be used");
    let both: Arc<dyn Device> = Fallback::new(device.clone(), cpu);
    Subject::new("CUDA", device, true).with_substitute(both)
}

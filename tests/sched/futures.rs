//! Results as futures: on every kind of device a read becomes ready by itself, a callback gets it, and a task that awaits it is
//! woken.

use crate::domains::cpus;
use crate::rpc_servers::TestServer;
use crate::slow_links::DeviceChain;
use fanout::device::{Device, DeviceError, PendingRead};
use fanout_testing::protocol_relay::ProtocolRelay;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

const SHAPE: [usize; 2] = [32, 2];
const RUNS: u64 = 6;
const TIMEOUT: Duration = Duration::from_secs(60);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Drives a future on this thread, and panics if nothing wakes it.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut future, until) = (pin!(future), Instant::now() + TIMEOUT);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park_timeout(TIMEOUT),
        }
        assert!(Instant::now() < until, "the future was not woken");
    }
}

fn with_callback<T: Send + 'static>(read: PendingRead<T>) -> Result<T, DeviceError> {
    let (send, receive) = channel();
    read.on_ready(move |result| send.send(result).unwrap());
    receive.recv_timeout(TIMEOUT).unwrap()
}

fn check(name: &str, devices: Vec<Arc<dyn Device>>) {
    let wanted = DeviceChain::new(cpus(1), SHAPE, devices.len(), 1).unwrap().results(0..RUNS);
    let mut chain = DeviceChain::new(devices, SHAPE, 1, 4).unwrap();
    for (run, wanted) in (0..RUNS).zip(&wanted) {
        let read = chain.submit(run).unwrap();
        let until = Instant::now() + TIMEOUT;
        let bytes = match run % 3 {
            0 => block_on(read),
            1 => with_callback(read),
            _ => {
                while !read.is_ready() {
                    assert!(Instant::now() < until, "{name}: the read is never ready");
                    std::thread::yield_now();
                }
                let mut values = vec![0f32; SHAPE[0] * SHAPE[1]];
                read.read_into(&mut values, Some(Instant::now()))
                    .map(|()| values.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
        };
        assert_eq!(bytes.as_ref(), Ok(wanted), "{name}, run {run}");
    }
    drop(chain.submit(0).unwrap());
    assert_eq!(block_on(chain.scheduler.mark().unwrap()), Ok(()), "{name}");
    drop(chain.submit(0).unwrap());
    assert_eq!(with_callback(chain.scheduler.mark().unwrap()), Ok(()), "{name}");
    let short = chain.submit(0).unwrap().read_into(&mut [0u8; 3], None);
    assert!(matches!(short, Err(DeviceError::Misuse(_))), "{name}: {short:?}");
}

#[test]
fn results_are_futures_on_every_device() {
    check("CPUs", cpus(2));
    let servers = [(); 2].map(|()| TestServer::new(1, true));
    let ggml_only = ProtocolRelay::start(servers[1].addr, true).addr;
    for (name, second) in [("servers", servers[1].addr), ("a server in 7.0", ggml_only)] {
        let endpoints = [servers[0].addr, second].map(TestServer::connect);
        check(name, endpoints.iter().map(|endpoint| endpoint.devices()[0].clone()).collect());
    }
}

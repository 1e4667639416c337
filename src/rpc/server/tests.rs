//! Tests of the accept loop.

use super::*;
use crate::cpu::{CpuDevice, MathMode};
use crate::rpc::transport::memory::LinkConditions;
use crate::rpc::transport::{Connection, Deadline, TransportError};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

/// A listener without file descriptors: each `accept` fails, and the last one stops the server.
struct ExhaustedListener {
    errors_left: AtomicU32,
    lifecycle: Arc<Lifecycle>,
}

impl fmt::Debug for ExhaustedListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ExhaustedListener").field(&self.errors_left).finish()
    }
}

impl Listen for ExhaustedListener {
    fn accept(&self, _: &Deadline) -> Result<Option<Connection>, TransportError> {
        if self.errors_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.lifecycle.begin_shutdown();
        }
        Err(TransportError::Closed)
    }

    fn local_addr(&self) -> Address {
        Address::Tcp((Ipv4Addr::LOCALHOST, 1).into())
    }

    fn waker(&self) -> Box<dyn Fn() + Send + Sync> {
        Box::new(|| {})
    }
}

/// At the limit of descriptors, `accept` fails without end.
#[test]
fn accept_errors_are_one_line_and_a_count() {
    let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 20).unwrap();
    let config = Config::default().with_log_burst(1).with_log_interval(Duration::from_secs(24 * 3600));
    let listener = crate::rpc::transport::memory::listen(LinkConditions { seed: 0, cut_after: None });
    let Server { mut listeners, control, context } =
        Server::bind_with(Box::new(listener), vec![cpu as Arc<dyn Device>], config).unwrap();
    let policy = listeners.remove(0).policy;
    let lifecycle = Arc::clone(&context.lifecycle);
    let listener = Box::new(ExhaustedListener { errors_left: AtomicU32::new(3), lifecycle });
    AcceptLoop {
        listener,
        policy,
        clients: AllowedClients::default(),
        http: super::listen::HttpUse::No,
        control,
        context: Arc::clone(&context),
    }
    .run();
    assert_eq!(context.logs.take_totals(), [(LogKind::AcceptError, 2)]);
}

impl Server {
    /// Counts what sessions hold of the server beside device memory: all zero once the last session has ended.
    pub(in crate::rpc) fn resources_in_use(&self) -> impl Fn() -> [(&'static str, u64); 6] + Send + use<> {
        use tenants::Resource;
        let context = Arc::clone(&self.context);
        move || {
            [
                ("connections", context.tenants.used(Resource::Connections)),
                ("handshakes", context.tenants.used(Resource::Handshakes)),
                ("queues", context.tenants.used(Resource::Queues)),
                ("threads of transfers", context.tenants.used(Resource::TransferThreads)),
                ("bytes of host memory", context.tenants.host_memory.used()),
                ("transfer tokens", context.transfer_tokens.len() as u64),
            ]
        }
    }
}

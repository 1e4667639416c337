//! Of the server: completions, groups, connections to other servers and admission, and fakes of the rest.
#![allow(dead_code, unused_imports, reason = "the library uses what no harness does")]

#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/server/admission.rs"]
pub(crate) mod admission;
#[path = "../harnesses/admissions.rs"]
pub(crate) mod admission_harness;
pub(crate) mod extended;
pub(crate) mod groups;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/server/hangup_watch.rs"]
pub(crate) mod hangup_watch;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/server/lifecycle.rs"]
pub(crate) mod lifecycle;
pub(crate) mod peers;
#[rustfmt::skip] // formatted where the file is
#[path = "../../../../src/rpc/server/pending_handshakes.rs"]
mod pending_handshakes;

mod audit {
    use crate::sync::atomic::{AtomicU64, Ordering};

    /// Counts the bytes of a connection.
    #[derive(Default)]
    pub(crate) struct SessionAudit(pub(crate) AtomicU64);

    impl SessionAudit {
        pub(crate) fn received(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }
}

mod limits {
    pub(crate) struct Config {
        pub(crate) max_connections: usize,
        pub(crate) max_handshakes: usize,
    }
}

mod tenants {
    use super::limits::Config;
    use crate::device::{Budget, Reservation};
    use crate::rpc::transport::PeerAddr;
    use crate::sync::Arc;
    use std::net::IpAddr;
    use std::time::Duration;

    #[derive(Clone, Copy)]
    pub(crate) enum Resource {
        Connections,
        Handshakes,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(crate) struct Tenant(IpAddr);

    impl Tenant {
        pub(crate) fn address(peer: PeerAddr) -> Option<Tenant> {
            peer.ip().map(Tenant)
        }
    }

    #[derive(Debug, thiserror::Error)]
    #[error("a limit is reached")]
    pub(crate) struct LimitReached {
        pub(crate) tenant: Option<Tenant>,
    }

    /// The limits of the process. No tenant has further ones.
    pub(crate) struct Tenants([Arc<Budget>; 2]);

    impl Tenants {
        pub(crate) fn new(config: &Config) -> Arc<Tenants> {
            Arc::new(Tenants([config.max_connections, config.max_handshakes].map(|limit| Budget::new(limit as u64))))
        }

        pub(crate) fn reserve(&self, _: PeerAddr, resource: Resource) -> Result<Reservation, LimitReached> {
            self.0[resource as usize].reserve(1).map_err(|_| LimitReached { tenant: None })
        }

        pub(crate) fn used(&self, resource: Resource) -> u64 {
            self.0[resource as usize].used()
        }

        pub(crate) fn refused_for(&self, _: PeerAddr) -> Option<Duration> {
            None
        }

        pub(crate) fn host_memory_budget(&self, _: PeerAddr) -> Option<Arc<Budget>> {
            None
        }
    }
}

pub(crate) mod client_connection {
    use crate::rpc::transport::TransportError;
    use crate::rpc::wire::ext::{NOTIFICATION_HEADER, Notification};
    use crate::sync::{Mutex, lock};

    /// Records messages, under a lock that is held while the head of a message is made, as the library's.
    #[derive(Default)]
    pub(crate) struct ClientWriter {
        pub(crate) sent: Mutex<Vec<String>>,
    }

    impl ClientWriter {
        pub(crate) fn send(
            &self,
            head: impl FnOnce(&mut Vec<u8>),
            parts: &[impl AsRef<[u8]>],
        ) -> Result<(), TransportError> {
            let (mut sent, mut message) = (lock(&self.sent), Vec::new());
            head(&mut message);
            if !message.is_empty() {
                let data: usize = parts.iter().map(|part| part.as_ref().len()).sum();
                sent.push(match message.get(NOTIFICATION_HEADER..).and_then(|message| message.first_chunk()) {
                    Some(id) if data > 0 => format!("data {}: {data} bytes", u64::from_le_bytes(*id)),
                    _ => String::from_utf8(message).expect("text"),
                });
            }
            Ok(())
        }

        pub(crate) fn send_notification(&self, notification: &Notification<'_>) -> Result<(), TransportError> {
            self.send(|out| notification.encode(out), &[] as &[&[u8]])
        }

        pub(crate) fn fail(&self, message: &'static str, error: TransportError) {
            panic!("{message}: {error}");
        }

        pub(crate) fn close(&self) {
            panic!("the notifier panicked");
        }
    }
}

pub(crate) mod host_memory {
    use crate::device::{Budget, DeviceError};
    use crate::sync::Arc;

    pub(crate) struct BytePermit;

    pub(crate) struct HostMemoryError;

    /// Without a limit.
    pub(crate) struct SessionMemory;

    pub(crate) struct HostCharge;

    impl SessionMemory {
        pub(crate) fn reserve_base(&self, _: Option<Arc<Budget>>) -> Result<(), HostMemoryError> {
            Ok(())
        }

        pub(crate) fn reserve(self: &Arc<Self>, _: u64) -> Result<HostCharge, DeviceError> {
            Ok(HostCharge)
        }
    }
}

pub(crate) mod log_limits {
    pub(crate) enum LogKind {
        Panic,
    }

    pub(crate) struct LogLimits;

    impl LogLimits {
        pub(crate) fn log_server(&self, LogKind::Panic: LogKind, text: std::fmt::Arguments<'_>) {
            panic!("{text}");
        }
    }
}

pub(crate) mod transfer_tokens {
    pub(crate) struct SessionTransfers;

    impl SessionTransfers {
        pub(crate) fn close(&self) {}
    }
}

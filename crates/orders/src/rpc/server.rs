//! Of the server: the completions of a session, and fakes of the rest of the session.
#![allow(dead_code, reason = "the library uses what no harness does")]

pub(crate) mod extended;

pub(crate) mod client_connection {
    use crate::rpc::transport::TransportError;
    use crate::rpc::wire::ext::Notification;
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
                sent.push(match message.first_chunk() {
                    Some(id) if data > 0 => format!("data {}: {data} bytes", u64::from_le_bytes(*id)),
                    _ => String::from_utf8(message).expect("text"),
                });
            }
            Ok(())
        }

        pub(crate) fn send_notification(&self, notification: &Notification) -> Result<(), TransportError> {
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
    pub(crate) struct BytePermit;
}

pub(crate) mod groups {
    pub(crate) struct SessionGroups;

    impl SessionGroups {
        /// Whether one has failed.
        pub(crate) fn check(&self) -> bool {
            false
        }
    }
}

pub(crate) mod hangup_watch {
    pub(crate) struct SessionWatch;

    impl SessionWatch {
        /// The session serves no request.
        pub(crate) fn boundaries(&self) -> u64 {
            0
        }
    }
}

pub(crate) mod lifecycle {
    use crate::rpc::wire::ext::ServerState;

    pub(crate) struct Lifecycle;

    impl Lifecycle {
        pub(crate) fn state(&self) -> ServerState {
            ServerState::Ready
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

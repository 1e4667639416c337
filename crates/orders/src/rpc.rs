//! Files of the library's module `rpc`, and fakes of what they use: a connection that records what is sent.

pub(crate) mod server;

pub(crate) mod transport {
    /// A failed write. Here, none fails.
    #[derive(Debug, thiserror::Error)]
    #[error("the connection is lost")]
    pub struct TransportError;
}

pub(crate) mod wire {
    /// Messages, in a form that harnesses compare.
    pub mod ext {
        use crate::device::DeviceError;

        pub const NOTIFICATION_HEADER: usize = 0;

        pub enum NotificationKind {
            ReadData,
        }

        pub struct NotificationHeader {
            pub kind: NotificationKind,
            pub size: u64,
        }

        impl NotificationHeader {
            pub fn encode(&self) -> [u8; NOTIFICATION_HEADER] {
                let NotificationHeader { kind: NotificationKind::ReadData, size } = self;
                assert!(*size >= 8, "the id");
                []
            }
        }

        #[derive(Clone, Copy)]
        pub enum ServerState {
            Ready,
        }

        pub enum Notification {
            MarkReached { queue: u32, number: u64 },
            QueueFailed { queue: u32, fault: DeviceFault },
            ServerState(ServerState),
        }

        impl Notification {
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    Notification::MarkReached { queue, number } => {
                        assert_eq!(*queue, 0);
                        out.extend(format!("mark {number}").bytes());
                    }
                    Notification::QueueFailed { queue, fault } => {
                        assert_eq!(*queue, 0);
                        out.extend(format!("failed: {}", fault.text).bytes());
                    }
                    Notification::ServerState(ServerState::Ready) => out.extend(b"ready"),
                }
            }
        }

        #[derive(Clone, Debug)]
        pub struct DeviceFault {
            pub text: String,
        }

        impl From<&DeviceError> for DeviceFault {
            fn from(error: &DeviceError) -> DeviceFault {
                DeviceFault { text: error.to_string() }
            }
        }

        #[derive(Clone, Copy)]
        pub enum ExtCommand {
            NotifyReached,
            Read,
            SendToPeer,
        }

        impl ExtCommand {
            pub fn name(self) -> &'static str {
                match self {
                    ExtCommand::NotifyReached => "NOTIFY_REACHED",
                    ExtCommand::Read => "READ",
                    ExtCommand::SendToPeer => "SEND_TO_PEER",
                }
            }
        }
    }
}

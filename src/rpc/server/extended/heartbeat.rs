//! Heartbeat: sends SERVER_STATE once a second while a single request takes long.
//!
//! While the session's thread blocks, for example until a queue has room, it reads no PING, and does not notice a lost client
//! either. If SERVER_STATE cannot be sent, the heartbeat therefore closes the session's receives from other servers: the queue
//! may be blocked on bytes that will never arrive.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use log::info;

use crate::rpc::server::client_connection::ClientWriter;
use crate::rpc::server::hangup_watch::SessionWatch;
use crate::rpc::server::lifecycle::Lifecycle;
use crate::rpc::server::transfer_tokens::PendingReceives;
use crate::rpc::wire::ext::Notification;

/// Time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(1);

/// The heartbeat of a session. Dropping it ends its thread.
pub(super) struct Heartbeat {
    /// Disconnecting this channel ends the thread.
    _stop: Sender<()>,
}

impl Heartbeat {
    /// Starts the heartbeat's thread. Without a thread the session runs without a heartbeat.
    pub(super) fn start(
        lifecycle: &Arc<Lifecycle>,
        writer: &Arc<ClientWriter>,
        watch: &Arc<SessionWatch>,
        pending_receives: &Arc<PendingReceives>,
    ) -> Heartbeat {
        let (stop, stopped) = bounded(0);
        let (lifecycle, writer) = (Arc::clone(lifecycle), Arc::clone(writer));
        let (watch, pending_receives) = (Arc::clone(watch), Arc::clone(pending_receives));
        let thread = std::thread::Builder::new().name("heartbeat".to_owned());
        if let Err(e) = thread.spawn(move || run_heartbeat(&stopped, &watch, &lifecycle, &writer, &pending_receives)) {
            info!("cannot start a thread for a session's heartbeat, its client may time out during long requests: {e}");
        }
        Heartbeat { _stop: stop }
    }
}

fn run_heartbeat(
    stopped: &Receiver<()>,
    watch: &SessionWatch,
    lifecycle: &Lifecycle,
    writer: &ClientWriter,
    pending_receives: &PendingReceives,
) {
    let mut last = 0;
    while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let now = watch.boundaries();
        let busy = now == last && now % 2 == 1;
        if busy && let Err(error) = writer.send_notification(&Notification::ServerState(lifecycle.state())) {
            // Part of the notification may have been sent, so no other message can follow. Closing the connection also ends the
            // session's thread.
            writer.fail("SERVER_STATE", error);
            return pending_receives.close();
        }
        last = now;
    }
}

//! Heartbeat: sends STATE once a second while one request takes long, because the session's thread, which may be waiting for room
//! in a queue, reads no PING meanwhile. Nor does that thread notice that its client is gone: if STATE cannot be sent, the transfers
//! from other servers that the queue may be waiting for are ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use log::info;

use crate::rpc::server::client_connection::Writer;
use crate::rpc::server::lifecycle::Lifecycle;
use crate::rpc::server::transfer_tokens::PendingReceives;
use crate::rpc::wire::ext::Notice;

/// Between two heartbeats.
const EVERY: Duration = Duration::from_secs(1);

/// The heartbeat of a session. Dropping it ends its thread.
pub(super) struct Heartbeat {
    /// Odd while the session serves a request, and another number for each.
    step: Arc<AtomicU64>,
    _end: Sender<()>,
}

impl Heartbeat {
    pub(super) fn start(
        lifecycle: &Arc<Lifecycle>,
        writer: &Arc<Writer>,
        arrivals: &Arc<PendingReceives>,
    ) -> Heartbeat {
        let (end, ended) = bounded(0);
        let heartbeat = Heartbeat { step: Arc::default(), _end: end };
        let (lifecycle, writer) = (Arc::clone(lifecycle), Arc::clone(writer));
        let (step, arrivals) = (Arc::clone(&heartbeat.step), Arc::clone(arrivals));
        let thread = std::thread::Builder::new().name("pulse".to_owned());
        if let Err(e) = thread.spawn(move || beat(&ended, &step, &lifecycle, &writer, &arrivals)) {
            info!("no thread for a session's signs of life: {e}");
        }
        heartbeat
    }

    /// The session begins to serve a request, or has served it.
    pub(super) fn step(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
    }
}

fn beat(ended: &Receiver<()>, step: &AtomicU64, lifecycle: &Lifecycle, writer: &Writer, arrivals: &PendingReceives) {
    let mut last = 0;
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let now = step.load(Ordering::Relaxed);
        let busy = now == last && now % 2 == 1;
        if busy && let Err(broken) = writer.notice(&Notice::State(lifecycle.state())) {
            // Half a notice may have been sent, which nothing can follow. The session's thread finds out by the end.
            writer.give_up("STATE", broken);
            return arrivals.end();
        }
        last = now;
    }
}

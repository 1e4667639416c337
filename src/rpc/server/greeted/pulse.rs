//! Signs of life while a message takes long: the session's thread may wait for room in a queue, and read no PING meanwhile. Nor
//! does it see then that its client is gone: who cannot be told ends what the queue may wait for, the bytes of other servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};
use log::info;

use super::super::Shared;
use super::super::outgoing::Outgoing;
use super::super::tickets::Arrivals;
use crate::rpc::wire::ext::Notice;

/// How often the client of a session that is at one message hears of it.
const EVERY: Duration = Duration::from_secs(1);

/// Tells how a session gets on. Dropped, its thread ends.
pub(super) struct Pulse {
    /// Odd while the session is at a message, and another number for each.
    step: Arc<AtomicU64>,
    _end: Sender<()>,
}

impl Pulse {
    pub(super) fn start(shared: &Arc<Shared>, out: &Arc<Outgoing>, arrivals: &Arc<Arrivals>) -> Pulse {
        let (end, ended) = bounded(0);
        let pulse = Pulse { step: Arc::default(), _end: end };
        let (shared, out, step) = (Arc::clone(shared), Arc::clone(out), Arc::clone(&pulse.step));
        let arrivals = Arc::clone(arrivals);
        let thread = std::thread::Builder::new().name("pulse".to_owned());
        if let Err(e) = thread.spawn(move || beat(&ended, &step, &shared, &out, &arrivals)) {
            info!("no thread for a session's signs of life: {e}");
        }
        pulse
    }

    /// The session begins with a message, or is done with it.
    pub(super) fn step(&self) {
        self.step.fetch_add(1, Ordering::Relaxed);
    }
}

fn beat(ended: &Receiver<()>, step: &AtomicU64, shared: &Shared, out: &Outgoing, arrivals: &Arrivals) {
    let mut last = 0;
    while ended.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
        let now = step.load(Ordering::Relaxed);
        if now == last && now % 2 == 1 && out.notice(&Notice::State(shared.state())).is_err() {
            // The rest the session finds out by itself.
            return arrivals.end();
        }
        last = now;
    }
}

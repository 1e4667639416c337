//! The thread that scans the model folder and computes digests in the background.

use crate::poison::{Unpoisoned, lock};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use log::{debug, info, warn};

use super::digest_file::{DigestFile, KnownDigests};
use super::reader::TensorReader;
use super::scan::{self, IndexSnapshot, MAX_TENSORS};

/// Minimum interval between scans: the duration, or the multiple of the last scan's duration, whichever is longer. A LOAD that
/// finds nothing requests a scan, so that new files are noticed; the interval bounds the cost of clients that request missing
/// tensors.
const SCAN_INTERVAL: (Duration, u32) = (Duration::from_millis(200), 20);

/// Limit of the duration of the first scan, during which the start of the server waits, so that its first clients find their
/// weights. Clients wait in the socket's queue meanwhile if the server replaces one that has died. The thread scans the rest
/// at once.
pub(super) const INITIAL_SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between writes of the digest file while digests are computed: a server that is killed loses as much work.
const WRITE_INTERVAL: Duration = Duration::from_secs(30);

/// Shared by the sessions and the thread.
pub(super) struct Hashing {
    state: Mutex<HashingState>,
    /// Notified when a scan is requested, and at the end.
    changed: Condvar,
}

struct HashingState {
    snapshot: Arc<IndexSnapshot>,
    scan_requested: bool,
    stopping: bool,
}

/// The thread's own state.
struct HashingThread {
    shared: Arc<Hashing>,
    dir: PathBuf,
    digest_file: Option<DigestFile>,
    /// Digests that the file had, and that have not been taken by the file that they belong to.
    known: KnownDigests,
    next_scan: Instant,
}

impl Hashing {
    /// Scans `dir` for up to `timeout`, and starts the thread, which scans the rest.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(dir: &Path, digest_file: Option<DigestFile>, timeout: Duration) -> io::Result<Arc<Hashing>> {
        let mut known = digest_file.as_ref().map(DigestFile::read).unwrap_or_default();
        let start = Instant::now();
        let in_time = || start.elapsed() < timeout;
        let snapshot = scan::scan_folder(dir, &IndexSnapshot::default(), MAX_TENSORS, &mut known, &in_time);
        let is_complete = in_time();
        info!(
            "models: {}: {} tensors in {} files, of which {} are to be hashed{}",
            dir.display(),
            snapshot.tensors(),
            snapshot.files(),
            snapshot.tensors() - snapshot.hashed_tensors(),
            if is_complete { "" } else { "; the scan goes on in the background" }
        );
        let state = HashingState { snapshot: Arc::new(snapshot), scan_requested: !is_complete, stopping: false };
        let shared = Arc::new(Hashing { state: Mutex::new(state), changed: Condvar::new() });
        let pause = if is_complete { scan_pause(start.elapsed()) } else { Duration::ZERO };
        let next_scan = Instant::now() + pause;
        let thread = HashingThread { shared: Arc::clone(&shared), dir: dir.to_owned(), digest_file, known, next_scan };
        std::thread::Builder::new().name("models".to_owned()).spawn(move || thread.run())?;
        Ok(shared)
    }

    /// The current snapshot.
    pub(super) fn snapshot(&self) -> Arc<IndexSnapshot> {
        Arc::clone(&lock(&self.state).snapshot)
    }

    /// Lets the thread scan the folder, as soon as the last scan is long enough ago.
    pub(super) fn request_scan(&self) {
        let mut state = lock(&self.state);
        if !std::mem::replace(&mut state.scan_requested, true) {
            self.changed.notify_all();
        }
    }

    /// Ends the thread. Does not wait for it: it may be reading from a slow disk.
    pub(super) fn stop(&self) {
        lock(&self.state).stopping = true;
        self.changed.notify_all();
    }

    fn is_stopping(&self) -> bool {
        lock(&self.state).stopping
    }
}

impl HashingThread {
    fn run(mut self) {
        lower_priority();
        loop {
            self.hash_files();
            if !self.wait_for_scan() {
                return;
            }
            let start = Instant::now();
            let before = self.shared.snapshot();
            let should_continue = || !self.shared.is_stopping();
            let snapshot = scan::scan_folder(&self.dir, &before, MAX_TENSORS, &mut self.known, &should_continue);
            lock(&self.shared.state).snapshot = Arc::new(snapshot);
            self.next_scan = Instant::now() + scan_pause(start.elapsed());
        }
    }

    /// Hashes the tensors without a digest, file by file, until a scan is due.
    fn hash_files(&mut self) {
        let snapshot = self.shared.snapshot();
        let mut written = (Instant::now(), snapshot.hashed_tensors());
        let should_continue = || !self.shared.is_stopping();
        let mut complete = true;
        for file in snapshot.unhashed_files() {
            // Before the first file: the scan at the start may be incomplete, and hashing a file takes up to minutes.
            if lock(&self.shared.state).scan_requested && Instant::now() >= self.next_scan {
                complete = false;
                break;
            }
            for tensor in IndexSnapshot::unhashed_tensors(&file) {
                match TensorReader::start(&tensor, &should_continue).and_then(TensorReader::hash) {
                    Ok(digest) => snapshot.add_digest(tensor, digest),
                    Err(e) => {
                        debug!("models: {}: {e}", file.path().display());
                        file.mark_stale();
                        break;
                    }
                }
            }
            if self.shared.is_stopping() {
                complete = false;
                break;
            }
            if written.0.elapsed() >= WRITE_INTERVAL {
                self.write_digests(&snapshot, &mut written);
            }
        }
        if self.write_digests(&snapshot, &mut written) && complete {
            info!("models: the digests of {} of {} tensors are known", snapshot.hashed_tensors(), snapshot.tensors());
        }
    }

    /// Writes the digests if there are more than were written last. Returns whether there are.
    fn write_digests(&self, snapshot: &IndexSnapshot, written: &mut (Instant, usize)) -> bool {
        let count = snapshot.hashed_tensors();
        let more = count > written.1;
        if more && let Some(file) = &self.digest_file {
            file.write(snapshot);
        }
        *written = (Instant::now(), count);
        more
    }

    /// Waits until a scan is requested and the last one is long enough ago. Returns false at the end of the server.
    fn wait_for_scan(&self) -> bool {
        let mut state = lock(&self.shared.state);
        loop {
            if state.stopping {
                return false;
            }
            let pause = self.next_scan.saturating_duration_since(Instant::now());
            let changed = &self.shared.changed;
            state = if !state.scan_requested {
                changed.wait(state).unpoisoned()
            } else if !pause.is_zero() {
                changed.wait_timeout(state, pause).unpoisoned().0
            } else {
                state.scan_requested = false;
                return true;
            };
        }
    }
}

/// How long after a scan the next one may begin.
fn scan_pause(last_scan: Duration) -> Duration {
    let (min_interval, duration_factor) = SCAN_INTERVAL;
    min_interval.max(last_scan * duration_factor)
}

/// Lets sessions and devices run first. On Linux the priority is that of the calling thread; elsewhere it would be that of the
/// process.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Err(e) = rustix::process::setpriority_process(None, 19) {
        warn!("models: cannot lower the priority of the thread that hashes: {e}");
    }
}

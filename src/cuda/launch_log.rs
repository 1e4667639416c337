//! The launch log of a queue: launches that the device has not finished, for the messages of failures. CUDA reports faults
//! asynchronously, and a hung kernel not at all.

use crate::device::MemoryBudget;
use crate::poison::lock;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Limit of remembered spans. Later launches extend the last one.
const MAX_SPANS: usize = 64;

/// Limit of queues that a message lists.
const MAX_LISTED: usize = 3;

/// Consecutive launches of a program that a queue has submitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaunchSpan {
    /// Numbers of the first and the last launch within the program.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Entry names of their kernels.
    pub(super) first_kernel: &'static str,
    pub(super) last_kernel: &'static str,
    /// Number of launches of the program.
    pub(super) of: usize,
}

impl fmt::Display for LaunchSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LaunchSpan { first, last, first_kernel, last_kernel, of } = self;
        if first == last {
            write!(f, "kernel {first_kernel}, launch {} of {of} of a graph", first + 1)
        } else {
            write!(f, "launches {} to {} of {of} of a graph, {first_kernel} to {last_kernel}", first + 1, last + 1)
        }
    }
}

/// The spans of a queue that are not known to be done, each with the sequence number of the next event after it.
#[derive(Debug)]
pub(super) struct LaunchLog {
    /// The budget of the queue: of the session that launches.
    session: Arc<MemoryBudget>,
    spans: Mutex<VecDeque<(u64, LaunchSpan)>>,
    /// Launches since the last event.
    count: AtomicU64,
}

impl LaunchLog {
    /// The log of a queue with this budget.
    pub(super) fn new(session: &Arc<MemoryBudget>) -> Arc<LaunchLog> {
        Arc::new(LaunchLog { session: Arc::clone(session), spans: Mutex::default(), count: AtomicU64::new(0) })
    }

    /// Adds a span before event `seq`.
    pub(super) fn push(&self, seq: u64, span: LaunchSpan) {
        let mut spans = lock(&self.spans);
        self.count.fetch_add((span.last - span.first + 1) as u64, Ordering::Relaxed);
        let is_full = spans.len() >= MAX_SPANS;
        match spans.back_mut() {
            // The next launch of the same run.
            Some((at, last)) if *at == seq && last.last + 1 == span.first && last.of == span.of => {
                (last.last, last.last_kernel) = (span.last, span.last_kernel);
            }
            Some((at, last)) if is_full => {
                (*at, last.last, last.last_kernel, last.of) = (seq, span.last, span.last_kernel, span.of);
            }
            _ => spans.push_back((seq, span)),
        }
    }

    /// Number of launches since the last call: since the last event.
    pub(super) fn take_count(&self) -> u64 {
        self.count.swap(0, Ordering::Relaxed)
    }

    /// Forgets the spans before event `seq`, which is reached.
    pub(super) fn forget_until(&self, seq: u64) {
        let mut spans = lock(&self.spans);
        let done = spans.partition_point(|(at, _)| *at <= seq);
        spans.drain(..done);
    }

    /// Whether all launches are known to be done.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.spans).is_empty()
    }

    /// The oldest spans that are not known to be done: those before the next event.
    fn running(&self) -> Option<String> {
        let spans = lock(&self.spans);
        let (next, first) = *spans.front()?;
        let last = spans.iter().take_while(|(at, _)| *at == next).last().map_or(first, |(_, span)| *span);
        Some(if first == last { first.to_string() } else { format!("{first}, up to {last}") })
    }

    /// The budget of a queue that had kernels running, if all queues that had are of one tenant.
    pub(super) fn sole_tenant(logs: &[Weak<LaunchLog>]) -> Option<Arc<MemoryBudget>> {
        let mut running = logs.iter().filter_map(Weak::upgrade).filter(|log| !log.is_empty());
        let first = running.next()?;
        let is_sole = running.all(|log| log.session.is_same_tenant(&first.session));
        is_sole.then(|| Arc::clone(&first.session))
    }

    /// Which kernels the queues with these logs had running.
    pub(super) fn describe_running(logs: &[Weak<LaunchLog>]) -> String {
        let running: Vec<_> = logs.iter().filter_map(Weak::upgrade).filter_map(|log| log.running()).collect();
        match &running[..] {
            [] => "no kernel was running; the cause cannot be known".to_owned(),
            [one] => format!("running: {one}"),
            several => {
                let listed = several[..several.len().min(MAX_LISTED)].join("; ");
                let more = several.len().saturating_sub(MAX_LISTED);
                let more = if more > 0 { format!("; {more} more") } else { String::new() };
                format!("one of these was running, which one cannot be known: {listed}{more}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(first: usize, last: usize) -> LaunchSpan {
        LaunchSpan { first, last, first_kernel: "a", last_kernel: "b", of: 9 }
    }

    #[test]
    fn messages_name_what_was_running() {
        let logs = [(); 5].map(|()| LaunchLog::new(&MemoryBudget::new(0)));
        let describe = || LaunchLog::describe_running(&logs.each_ref().map(Arc::downgrade));
        assert_eq!(describe(), "no kernel was running; the cause cannot be known");
        logs[0].push(1, span(2, 2));
        assert_eq!(describe(), "running: kernel a, launch 3 of 9 of a graph");
        logs[0].push(1, span(3, 4));
        logs[0].push(2, span(5, 5));
        assert_eq!(describe(), "running: launches 3 to 5 of 9 of a graph, a to b");
        logs[0].forget_until(1);
        logs[0].push(2, span(0, 1));
        assert!(describe().ends_with("launch 6 of 9 of a graph, up to launches 1 to 2 of 9 of a graph, a to b"));
        logs[1..].iter().for_each(|log| log.push(1, span(0, 0)));
        assert!(describe().contains("which one cannot be known") && describe().ends_with("; 2 more"), "{}", describe());
    }

    #[test]
    fn the_log_is_bounded() {
        let log = LaunchLog::new(&MemoryBudget::new(0));
        (0..1000).for_each(|seq| log.push(seq, span(0, 3)));
        assert_eq!(lock(&log.spans).len(), MAX_SPANS);
        log.forget_until(998);
        assert!(log.running().is_some());
        log.forget_until(999);
        assert_eq!(log.running(), None);
    }

    /// Several sessions of one tenant count as one; sessions of two do not, since either may be the cause.
    #[test]
    fn a_fault_is_of_the_tenant_that_alone_had_kernels_running() {
        let tenants = [(); 2].map(|()| MemoryBudget::for_client(0));
        let logs = [0, 0, 1].map(|tenant: usize| LaunchLog::new(&MemoryBudget::within(&tenants[tenant], 0)));
        let weak = logs.each_ref().map(Arc::downgrade);
        let sole = || LaunchLog::sole_tenant(&weak).map(|sole| tenants.each_ref().map(|t| t.is_same_tenant(&sole)));
        assert_eq!(sole(), None);
        logs[0].push(1, span(0, 0));
        logs[1].push(3, span(0, 0));
        assert_eq!(sole(), Some([true, false]));
        logs[2].push(1, span(0, 0));
        assert_eq!(sole(), None);
        logs[0].forget_until(1);
        logs[1].forget_until(3);
        assert_eq!(sole(), Some([false, true]));
    }
}

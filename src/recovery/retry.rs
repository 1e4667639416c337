//! Retries with exponential backoff, and a budget of time for each server.

use super::Loss;
use crate::device::Device;
use crate::registry::RegistryError;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Exponential backoff: the first attempt starts at once, the second after this pause, and each later pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Upper limit of the backoff pauses.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A lost server did not come back, or came back with other devices.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReconnectError {
    /// The retry budget is used up: each retry succeeded, and then the same loss occurred again.
    #[error("{lost}; {}", used_up_text(lost, *limit))]
    RetriesUsedUp {
        /// The last loss.
        lost: Loss,
        /// The retry budget.
        limit: Duration,
    },
    /// The server could not be reached within the retry budget.
    #[error("lost, and not back within {limit:?}: {error}")]
    Unreachable {
        /// The retry budget.
        limit: Duration,
        /// The error of the last attempt.
        error: Box<RegistryError>,
    },
    /// The server accepts connections, but its devices or its protocol changed.
    #[error("it is back, but cannot be used: {0}; start it with the devices it had")]
    Changed(Box<RegistryError>),
}

/// The end of [`ReconnectError::RetriesUsedUp`]'s message: what repeated until the budget was used up.
fn used_up_text(lost: &Loss, limit: Duration) -> String {
    match lost {
        Loss::Server { .. } => {
            format!("the server came back and was lost again, for {limit:?} of retries without progress")
        }
        Loss::MemoryHeld { .. } | Loss::PeerTransfer { .. } => {
            format!("the error persisted for {limit:?} of retries without progress")
        }
    }
}

impl ReconnectError {
    fn new(limit: Duration, error: RegistryError) -> ReconnectError {
        let error = Box::new(error);
        if error.is_transient() { ReconnectError::Unreachable { limit, error } } else { ReconnectError::Changed(error) }
    }
}

/// Whether reopening may succeed later: the server cannot be reached yet, or lists its GPU only after the driver is up.
fn is_transient(error: &RegistryError) -> bool {
    matches!(error, RegistryError::UnknownDevice { .. }) || error.is_transient()
}

/// Retry budgets: the time spent on recovering each server since the last progress. All losses of a server share its budget: one that
/// is lost again before there is progress gets only the rest.
#[derive(Debug)]
pub struct RetryBudgets {
    limit: Duration,
    spent_by_server: HashMap<String, RetryBudget>,
}

#[derive(Debug, Default)]
struct RetryBudget {
    spent: Duration,
    pause: Duration,
}

impl RetryBudgets {
    /// A budget of `limit` for each server.
    pub fn new(limit: Duration) -> RetryBudgets {
        RetryBudgets { limit, spent_by_server: HashMap::new() }
    }

    /// The budget of each server.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Whether a server was lost since the last progress.
    pub(super) fn was_lost(&self, endpoint: &str) -> bool {
        self.spent_by_server.contains_key(endpoint)
    }

    /// Restores the full budget of every server. Call it when work has got further than before the last loss, and not earlier: a server
    /// that crashes in each repetition would otherwise be retried for ever.
    pub fn reset(&mut self) {
        self.spent_by_server.clear();
    }

    /// Recovers the devices of a loss. After [`Loss::Server`], opens the server's devices again and puts them into `devices` in place of
    /// the old ones; returns their numbers, whose tensors must be loaded again. After other losses, which keep what is loaded, and if
    /// no device is of the server, only waits, and returns no numbers.
    ///
    /// `open` gets the names of the devices, separated by commas as for [`Registry::open`](crate::registry::Registry::open), and returns
    /// as many, else the server is not ready yet. It is called with exponential backoff until it succeeds or the budget of the server is used up. It also gets the
    /// remaining budget, which it may spend on connection attempts of its own
    /// ([`Options::retry`](crate::rpc::client::Options::retry)). The first attempt after progress starts at once.
    ///
    /// # Errors
    /// [`ReconnectError`].
    pub fn reopen(
        &mut self,
        lost: &Loss,
        devices: &mut [Arc<dyn Device>],
        mut open: impl FnMut(&str, Duration) -> Result<Vec<Arc<dyn Device>>, RegistryError>,
    ) -> Result<Vec<usize>, ReconnectError> {
        let of_server = |&number: &usize| {
            matches!(lost, Loss::Server { .. }) && devices[number].endpoint() == Some(lost.endpoint())
        };
        let numbers: Vec<usize> = (0..devices.len()).filter(of_server).collect();
        let names: Vec<&str> = numbers.iter().map(|&number| &*devices[number].info().name).collect();
        let names = names.join(",");
        let opened = self.retry(lost, |left| {
            let opened = if numbers.is_empty() { Vec::new() } else { open(&names, left)? };
            if opened.len() == numbers.len() {
                return Ok(opened);
            }
            let available: Vec<&str> = opened.iter().map(|device| &*device.info().name).collect();
            Err(RegistryError::UnknownDevice { name: names.clone(), available: available.join(",") })
        })?;
        numbers.iter().zip(opened).for_each(|(&number, device)| devices[number] = device);
        Ok(numbers)
    }

    /// Retries `open` with exponential backoff until it succeeds or the budget of the lost server is used up; sleeps between attempts.
    pub(super) fn retry<T>(
        &mut self,
        lost: &Loss,
        mut open: impl FnMut(Duration) -> Result<T, RegistryError>,
    ) -> Result<T, ReconnectError> {
        let limit = self.limit;
        let budget = self.spent_by_server.entry(lost.endpoint().to_owned()).or_default();
        let mut last = None;
        loop {
            // Rounded to whole milliseconds, because error messages print it.
            let left = limit.saturating_sub(budget.spent + budget.pause).as_millis();
            let left = u64::try_from(left).unwrap_or(u64::MAX);
            if left == 0 {
                let again = || ReconnectError::RetriesUsedUp { lost: lost.clone(), limit };
                return Err(last.map_or_else(again, |source| ReconnectError::new(limit, source)));
            }
            let start = Instant::now();
            thread::sleep(budget.pause);
            budget.pause = (2 * budget.pause).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            let opened = open(Duration::from_millis(left));
            budget.spent += start.elapsed();
            match opened {
                Ok(opened) => return Ok(opened),
                Err(source) if is_transient(&source) => last = Some(source),
                Err(source) => return Err(ReconnectError::new(limit, source)),
            }
        }
    }
}

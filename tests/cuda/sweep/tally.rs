//! What a sweep compared, and the comparisons that failed.

use serde_json::{Value, json};
use std::cell::{Cell, RefCell};
use std::panic::resume_unwind;
use std::time::{Duration, Instant};

/// Counts of one op family. On the emulator, a failed comparison ends the test; on a real GPU, the sweep goes on, so that one
/// run reports all failures.
pub(super) struct Tally {
    ends_at_failure: bool,
    /// Runs each n-th case.
    every: u64,
    /// Ends the family at the first case after this time.
    until: Option<Instant>,
    ended_early: Cell<bool>,
    cases: Cell<u64>,
    /// Name of the case that began last.
    last: RefCell<String>,
    left_out: Cell<u64>,
    compared: Cell<u64>,
    unchecked_launches: Cell<u64>,
    worst: RefCell<Option<Worst>>,
    failures: RefCell<Vec<String>>,
}

/// The payload of the unwinding that ends a family.
pub(super) struct TimeIsUp;

/// The comparison that came closest to its bound, or exceeded it most.
struct Worst {
    nmse: f64,
    bound: f64,
    case: String,
}

impl Tally {
    /// For the emulator: every case, and the first failed comparison panics.
    pub(super) fn strict() -> Tally {
        Tally {
            ends_at_failure: true,
            every: 1,
            until: None,
            ended_early: Cell::new(false),
            cases: Cell::new(0),
            last: RefCell::new(String::new()),
            left_out: Cell::new(0),
            compared: Cell::new(0),
            unchecked_launches: Cell::new(0),
            worst: RefCell::new(None),
            failures: RefCell::new(Vec::new()),
        }
    }

    /// For a real GPU. Under compute-sanitizer, which slows kernels down a hundredfold, FANOUT_TEST_EVERY=N runs each N-th case,
    /// and FANOUT_TEST_SECONDS=S ends the family after S seconds.
    pub(super) fn lenient() -> Tally {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")))
        };
        let until = number("FANOUT_TEST_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let every = number("FANOUT_TEST_EVERY").unwrap_or(1).max(1);
        Tally { ends_at_failure: false, every, until, ..Tally::strict() }
    }

    /// The same, but only each `every`-th case runs.
    pub(super) fn each(self, every: u64) -> Tally {
        Tally { every: self.every * every, ..self }
    }

    /// Whether the next case runs. Unwinds with [`TimeIsUp`] if the time of the family has passed.
    pub(super) fn begin(&self, name: &str) -> bool {
        if self.until.is_some_and(|until| Instant::now() >= until) {
            self.ended_early.set(true);
            resume_unwind(Box::new(TimeIsUp)); // without the message of a panic
        }
        let case = self.cases.replace(self.cases.get() + 1);
        let runs = case.is_multiple_of(self.every);
        if runs {
            name.clone_into(&mut self.last.borrow_mut());
        } else {
            self.left_out.set(self.left_out.get() + 1);
        }
        runs
    }

    /// Records the error of a result relative to the CPU's.
    #[track_caller]
    pub(super) fn compare(&self, nmse: f64, bound: f64, case: &str) {
        self.compared.set(self.compared.get() + 1);
        // Values that are not finite on one side only give a NaN.
        let nmse = if nmse.is_nan() { f64::INFINITY } else { nmse };
        let mut worst = self.worst.borrow_mut();
        if worst.as_ref().is_none_or(|worst| nmse / bound > worst.nmse / worst.bound) {
            *worst = Some(Worst { nmse, bound, case: case.to_owned() });
        }
        drop(worst);
        if nmse > bound {
            self.fail(format!("{case}: the NMSE to the CPU is {nmse:e}, allowed is {bound:e}"));
        }
    }

    /// Records whether a result has the CPU's bytes.
    #[track_caller]
    pub(super) fn compare_bytes(&self, equal: bool, case: &str) {
        self.compared.set(self.compared.get() + 1);
        if !equal {
            self.fail(format!("{case}: the bytes differ from the CPU's"));
        }
    }

    /// Records that a number of launches was not checked, because only the emulator counts them.
    pub(super) fn skip_launches(&self) {
        self.unchecked_launches.set(self.unchecked_launches.get() + 1);
    }

    /// Records that the family ended by a panic: a run that failed, or an assertion.
    pub(super) fn fail_by_panic(&self, message: &str) {
        let last = self.last.borrow().clone();
        self.fail(format!("the family ended in or after the case `{last}`: {message}"));
    }

    /// Records a failure of the family.
    #[track_caller]
    pub(super) fn fail(&self, message: String) {
        assert!(!self.ends_at_failure, "{message}");
        self.failures.borrow_mut().push(message);
    }

    /// The counts of a family, and its first failures, as one line of JSON.
    pub(super) fn line(&self, capability: u32, family: &str) -> Value {
        let worst = self.worst.borrow();
        let worst = worst.as_ref().map(|w| json!({"nmse": w.nmse, "bound": w.bound, "case": w.case}));
        let failures = self.failures.borrow();
        json!({
            "capability": format!("{}.{}", capability / 10, capability % 10), "family": family,
            "compared": self.compared.get(), "left_out": self.left_out.get(), "ended_early": self.ended_early.get(),
            "unchecked_launches": self.unchecked_launches.get(), "failed": failures.len(),
            "first_failures": failures.iter().take(5).collect::<Vec<_>>(), "worst": worst,
        })
    }

    pub(super) fn failures(&self) -> usize {
        self.failures.borrow().len()
    }
}

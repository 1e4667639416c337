//! Measurements that are repeated until they agree.

use anyhow::{Context, bail};
use fanout::sched::planner::{DeviceSpeed, Link};

const NO_ROUNDS: &str = "a measurement without a round (a bug)";

/// How many rounds must agree, and after how many the measurement ends without.
const AGREEING: usize = 3;
const MOST_ROUNDS: usize = 6;

/// Rounds agree if the longest of their times is longer than the shortest by at most this part.
const TOLERANCE: f64 = 0.05;

/// Repeated measurements of one device or link, each with a time by which rounds are compared, shortest first.
#[derive(Clone, Debug)]
pub(super) struct Rounds<T>(Vec<(f64, T)>);

impl<T> Rounds<T> {
    fn push(&mut self, (time, figures): (f64, T)) {
        let at = self.0.partition_point(|(other, _)| *other <= time);
        self.0.insert(at, (time, figures));
    }

    /// The rounds that count: those that differ the least, if they agree, because other programs disturb single rounds; else all.
    fn counted(&self) -> &[(f64, T)] {
        let agreeing = self.0.windows(AGREEING).filter(|rounds| difference(rounds) <= TOLERANCE);
        agreeing.min_by(|a, b| difference(a).total_cmp(&difference(b))).unwrap_or(&self.0)
    }

    fn agree(&self) -> bool {
        self.0.len() >= AGREEING && difference(self.counted()) <= TOLERANCE
    }

    /// The median of the rounds that count. A round counts as a whole, because an error of one of its figures has the opposite sign in
    /// those that are computed from it.
    ///
    /// # Errors
    /// There are no rounds.
    pub(super) fn median(&self) -> anyhow::Result<&T> {
        let counted = self.counted();
        Ok(&counted.get(counted.len() / 2).context(NO_ROUNDS)?.1)
    }

    /// The slowest and the fastest of the rounds that count, each made slower or faster by [`TOLERANCE`]: rounds of some seconds that
    /// agree have still been that far from the rounds of the next minute.
    ///
    /// # Errors
    /// There are no rounds.
    pub(super) fn bounds(&self) -> anyhow::Result<[T; 2]>
    where
        T: Scale,
    {
        let [.., (_, slowest)] = self.counted() else { bail!(NO_ROUNDS) };
        let [(_, fastest), ..] = self.counted() else { bail!(NO_ROUNDS) };
        Ok([slowest.scaled(1.0 / (1.0 + TOLERANCE)), fastest.scaled(1.0 + TOLERANCE)])
    }

    /// By how much the rounds differ, if they do not agree: a note about `name`.
    pub(super) fn disagreement(&self, name: &str) -> Option<String> {
        let percent = 100.0 * difference(&self.0);
        let note = || format!("{name}: {} measurements differ by {percent:.0} %, so the range is wide", self.0.len());
        (!self.agree()).then(note)
    }
}

/// Figures of a device or a link.
pub(super) trait Scale {
    /// The figures of a faster one.
    fn scaled(&self, factor: f64) -> Self;
}

impl Scale for DeviceSpeed {
    fn scaled(&self, factor: f64) -> DeviceSpeed {
        DeviceSpeed {
            read_rate: self.read_rate * factor,
            few_columns_rate: self.few_columns_rate * factor,
            many_columns_rate: self.many_columns_rate * factor,
            kv_read_rate: self.kv_read_rate * factor,
            node_time: self.node_time / factor,
            run_time: self.run_time / factor,
            ..self.clone()
        }
    }
}

impl Scale for Link {
    fn scaled(&self, factor: f64) -> Link {
        Link { round_trip: self.round_trip / factor, bandwidth: self.bandwidth * factor }
    }
}

/// By how much the longest time of sorted rounds exceeds the shortest, as a part of it.
fn difference<T>(rounds: &[(f64, T)]) -> f64 {
    match rounds {
        [(shortest, _), .., (longest, _)] => longest / shortest.max(f64::MIN_POSITIVE) - 1.0,
        _ => 0.0,
    }
}

/// Measures `count` things in turns until the rounds of each agree, or [`MOST_ROUNDS`] times: what slows the machine down for some
/// seconds then does not slow down one of them alone. `measure` returns a time and the figures.
pub(super) fn repeat<T>(
    count: usize,
    mut measure: impl FnMut(usize) -> anyhow::Result<(f64, T)>,
) -> anyhow::Result<Vec<Rounds<T>>> {
    let mut all: Vec<Rounds<T>> = (0..count).map(|_| Rounds(Vec::new())).collect();
    for _ in 0..MOST_ROUNDS {
        for (at, rounds) in all.iter_mut().enumerate().filter(|(_, rounds)| !rounds.agree()) {
            rounds.push(measure(at)?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanout::sched::planner::{BlockSizes, Choice, Host, Machine, ModelSizes, Reason, Workload, choose};

    #[test]
    fn measurements_end_when_three_agree() {
        let times = [
            (&[1.0, 1.01, 1.02][..], 1.01, None),
            // One round was disturbed.
            (&[1.0, 2.0, 1.04, 1.02], 1.02, None),
            // The machine was busy at first.
            (&[2.0, 1.5, 1.0, 1.01, 1.0], 1.0, None),
            (&[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], 1.3, Some("x: 6 measurements differ by 50 %, so the range is wide")),
        ];
        for (times, median, note) in times {
            let mut left = times.iter();
            let rounds = repeat(1, |_| left.next().map(|&time| (time, time)).ok_or(anyhow::anyhow!("one too many")));
            let rounds = rounds.unwrap().remove(0);
            assert_eq!(left.len(), 0, "{times:?}: too few");
            assert_eq!(*rounds.median().unwrap(), median, "{times:?}");
            assert_eq!(rounds.disagreement("x").as_deref(), note, "{times:?}");
        }
    }

    /// GB/s of weights that each of two equal CPU devices has read alone, in measurements one after another on two cores that compilers
    /// used, too.
    const RECORDED: [[f64; 2]; 18] = [
        [8.7, 8.6],
        [25.6, 9.4],
        [9.2, 8.6],
        [8.5, 10.2],
        [8.7, 8.4],
        [9.1, 6.6],
        [9.1, 8.6],
        [8.5, 8.1],
        [8.4, 8.5],
        [8.5, 8.6],
        [7.6, 8.4],
        [10.1, 8.6],
        [9.7, 8.6],
        [8.4, 9.1],
        [7.9, 3.8],
        [6.0, 8.5],
        [4.2, 9.4],
        [7.9, 17.5],
    ];

    /// The choice after measurements that repeat the recorded ones from `first` on. The second device is faster by a factor; a message to
    /// it and back takes `round_trip`.
    fn chosen(first: usize, factor: f64, round_trip: f64) -> Choice {
        let device = |at: usize, read_rate: f64| DeviceSpeed {
            name: at.to_string(),
            host: Host::Client,
            read_rate,
            few_columns_rate: 1e15,
            many_columns_rate: 1e15,
            kv_read_rate: 1e15,
            node_time: 0.0,
            run_time: 0.0,
            cores: None,
            together: 1.0,
            free: 1 << 40,
            collectives: true,
        };
        let mut next = [first; 2];
        let rounds = repeat(2, |at| {
            let rate = 1e9 * RECORDED[next[at]][at] * [1.0, factor][at];
            next[at] += 1;
            Ok((1.0 / rate, device(at, rate)))
        });
        let rounds = rounds.unwrap();
        let machine = |devices: Vec<DeviceSpeed>| {
            Machine::new(devices, Vec::new(), Vec::new(), Link { round_trip, bandwidth: 1e12 }).unwrap()
        };
        let median = rounds.iter().map(|rounds| rounds.median().unwrap().clone()).collect();
        let bound = |at: usize| rounds.iter().map(|rounds| rounds.bounds().unwrap()[at].clone()).collect();
        let machine = machine(median).with_bounds(machine(bound(0)), machine(bound(1)));
        let block = BlockSizes { weight_bytes: 20_000_000, multiply_adds: 2e7, nodes: 1, ..BlockSizes::default() };
        let model = ModelSizes {
            blocks: vec![block; 8],
            width: 1024,
            heads: 8,
            kv_heads: 8,
            vocabulary: 1,
            ..ModelSizes::default()
        };
        choose(&machine, &model, &Workload::default()).unwrap()
    }

    /// Whatever was measured, the choice is the same, or the plan says that no difference was measured.
    #[test]
    fn noise_does_not_change_the_choice() {
        let devices =
            |choice: &Choice| choice.best.stages.iter().flat_map(|stage| stage.devices.clone()).collect::<Vec<_>>();
        let is_open = |choice: &Choice| {
            choice.best.is_tied || matches!(choice.reason, Reason::NoDifference | Reason::NothingGained)
        };
        // By starting point: what was chosen; `None` if no difference was measured.
        let decisions = |factor: f64, round_trip: f64| -> Vec<Option<Vec<usize>>> {
            let choices = (0..=RECORDED.len() - MOST_ROUNDS).map(|first| chosen(first, factor, round_trip));
            choices.map(|choice| (!is_open(&choice)).then(|| devices(&choice))).collect()
        };
        // Slow links, and a device that is faster; then a fast link: clear cases, also with most of these measurements.
        for (factor, round_trip, expected) in [(1.5, 1.0, vec![1]), (0.6, 1.0, vec![0]), (1.0, 1e-5, vec![0, 1])] {
            let found = decisions(factor, round_trip);
            let decided: Vec<_> = found.iter().flatten().collect();
            assert!(decided.len() > found.len() / 2, "{factor} {round_trip}: {found:?}");
            assert!(decided.iter().all(|devices| **devices == expected), "{factor} {round_trip}: {found:?}");
        }
        // Equal devices, and one or both of them.
        assert_eq!(decisions(1.0, 1.0), vec![None; RECORDED.len() - MOST_ROUNDS + 1]);
        let links = (0..20).map(|case| (1.0, 1e-4 * f64::from(case)));
        let factors = (0..20).map(|case| (0.7 + 0.03 * f64::from(case), 1.0));
        for (factor, round_trip) in links.chain(factors) {
            let found = decisions(factor, round_trip);
            let decided: Vec<_> = found.iter().flatten().collect();
            assert!(decided.windows(2).all(|pair| pair[0] == pair[1]), "{factor} {round_trip}: {found:?}");
        }
    }
}

//! Tests of the choice: on machines whose answer is known, near the margin of a gain, and with placements that a check refuses.

use super::tests::{device, layers, link, machine, model, tensor, workload};
use super::*;

/// What is chosen, and why, on machines whose answer is known.
#[test]
fn choices_follow_memory_links_and_batches() {
    let chosen = |machine: &Machine, workload: Workload| {
        let choice = choose(machine, &model(), &workload).unwrap();
        let stages =
            choice.best.stages.iter().map(|stage| (stage.devices.clone(), stage.blocks.len())).collect::<Vec<_>>();
        (stages, choice.reason)
    };
    let cpu = |name, free| DeviceSpeed { free, ..device(name, Host::Client, 10e9, 1e11) };
    let gpu = |free| DeviceSpeed { free, ..device("GPU", Host::Client, 100e9, 1e14) };
    let slow_bus = |devices| Machine::new(devices, vec![], vec![], link(0.1, 1e9)).unwrap();
    let (stages, reason) = chosen(&slow_bus(vec![cpu("CPU", 1 << 40), gpu(1 << 40)]), workload());
    assert_eq!(stages, [(vec![1], 10)]);
    assert!(matches!(reason, Reason::OneIsFastest(Some(ratio)) if ratio > 1.0), "{reason:?}");
    // The GPU has room for 7 blocks: it gets all of them, and the CPU the rest.
    let (stages, reason) = chosen(&slow_bus(vec![cpu("CPU", 900_000_000), gpu(700_000_000)]), workload());
    assert_eq!((stages, reason), (vec![(vec![0], 3), (vec![1], 7)], Reason::TooLargeForOne));
    // A fast bus makes a tensor group of equal devices nearly twice as fast.
    let (stages, reason) = chosen(&machine(vec![cpu("a", 1 << 40), cpu("b", 1 << 40)], &[], None), workload());
    assert_eq!(stages, [(vec![0, 1], 10)]);
    assert!(matches!(reason, Reason::FasterTogether(ratio) if (1.99..2.01).contains(&ratio)), "{reason:?}");
    // On a slow bus, sequences in two groups keep two devices busy.
    let many = Workload { sequences: 16, max_groups: 2, ..workload() };
    let bus = Machine::new(vec![cpu("a", 1 << 40), cpu("b", 1 << 40)], vec![], vec![], link(0.02, 1e9)).unwrap();
    assert_eq!(chosen(&bus, many).0, [(vec![0], 5), (vec![1], 5)]);
    // One group of the same sequences does not.
    assert_eq!(chosen(&bus, Workload { max_groups: 1, ..many }).0.len(), 1);
}

/// Two equal devices. As a tensor group, they are faster by a factor that the link between them decides.
#[test]
fn more_devices_are_chosen_only_for_a_gain_that_can_be_measured() {
    for (round_trip, gain) in [(0.0, 2.0), (4.0e-3, 1.11), (4.6e-3, 1.04), (4.9e-3, 1.01), (5.2e-3, 0.98)] {
        let devices = (0..2).map(|at| device(&at.to_string(), Host::Client, 10e9, 1e15)).collect();
        let bus = Machine::new(devices, vec![], vec![], link(round_trip, 1e12)).unwrap();
        let predicted = |stages: &[Stage]| predict(&bus, &model(), &workload(), stages).unwrap().decode_rate;
        let (one, two) = (predicted(&layers(&[(0, 10)])), predicted(&[tensor(&[0, 1], 10)]));
        assert!((two / one - gain).abs() < 0.01, "{round_trip} s: {two} and {one} tokens/s");
        let Choice { best, reason, runners_up } = choose(&bus, &model(), &workload()).unwrap();
        assert_eq!(best.devices() > 1, gain >= 1.0 + MIN_GAIN, "{round_trip} s");
        assert_eq!(reason == Reason::NothingGained, gain < 1.0 + MIN_GAIN, "{round_trip} s: {reason:?}");
        assert!(
            runners_up
                .iter()
                .all(|other| other.prediction.decode_rate < best.prediction.decode_rate * (1.0 + MIN_GAIN))
        );
    }
    assert!(Reason::NothingGained.to_string().contains("less than 3 %"));
}

/// What repeated measurements cannot tell apart is chosen by simplicity: fewer devices, and of as many the first.
#[test]
fn overlapping_ranges_are_no_difference() {
    let measured = |rates: [f64; 2], round_trip: f64, spread: f64| {
        let machine = |factor: f64| {
            let device = |(at, &rate): (usize, &f64)| device(&at.to_string(), Host::Client, rate * factor, 1e15);
            let devices = rates.iter().enumerate().map(device).collect();
            Machine::new(devices, vec![], vec![], link(round_trip, 1e12)).unwrap()
        };
        let machine = machine(1.0).with_bounds(machine(1.0 - spread), machine(1.0 + spread));
        let Choice { best, reason, .. } = choose(&machine, &model(), &workload()).unwrap();
        (best.stages.iter().flat_map(|stage| stage.devices.clone()).collect::<Vec<_>>(), reason, best.is_tied)
    };
    // One of two devices, because the bus is slow.
    for (rates, spread, chosen, tied) in [
        ([10e9, 11e9], 0.0, 1, false),
        ([10e9, 11e9], 0.04, 1, false),
        ([10e9, 11e9], 0.06, 0, true),
        ([10e9, 9.5e9], 0.06, 0, true),
        ([10e9, 8e9], 0.06, 0, false),
    ] {
        let (devices, _, is_tied) = measured(rates, 0.2, spread);
        assert_eq!((devices, is_tied), (vec![chosen], tied), "{rates:?} {spread}");
    }
    // A tensor group of both is 1.11 times as fast as one.
    for (spread, devices) in [(0.0, vec![0, 1]), (0.02, vec![0, 1]), (0.1, vec![0])] {
        let (chosen, reason, _) = measured([10e9; 2], 4.0e-3, spread);
        assert_eq!((chosen, reason == Reason::NoDifference), (devices, spread > 0.05), "{spread}: {reason:?}");
    }
}

/// Which placements are checked, in order, and which one is chosen, on devices of 30, 20 and 10 GB/s that share a slow bus.
#[test]
fn a_refused_placement_is_followed_by_the_next() {
    let devices = [("a", 30e9), ("b", 20e9), ("c", 10e9)]
        .map(|(name, rate)| DeviceSpeed { free: 1_500_000_000, ..device(name, Host::Client, rate, 1e15) });
    let bus = Machine::new(devices.to_vec(), vec![], vec![], link(0.2, 1e9)).unwrap();
    let chosen = |admit: &dyn Fn(&Candidate) -> Admission| {
        let mut checked = Vec::new();
        let choice = choose_admitted(&bus, &model(), &workload(), &mut |candidate| {
            checked.push(
                candidate.stages.iter().map(|stage| (stage.devices.clone(), stage.blocks.len())).collect::<Vec<_>>(),
            );
            admit(candidate)
        });
        (checked, choice.map(|choice| choice.reason))
    };
    let alone = |device: usize| vec![(vec![device], 10)];
    let uses = |candidate: &Candidate, device: usize| candidate.prediction.memory[device] > 0;
    // Device a lacks 2 GB, more than the estimate of a placement: nothing is planned on it.
    let short = |candidate: &Candidate| {
        let missing = vec![2_000_000_000, 0, 0];
        if uses(candidate, 0) { Admission::LacksMemory(missing) } else { Admission::Admitted }
    };
    assert_eq!(chosen(&short).0, [alone(0), alone(1)]);
    // Each needs 50 MB more than it has.
    let (checked, reason) = chosen(&|candidate| {
        let missing = |&bytes: &u64| (bytes + 550_000_000).saturating_sub(1_500_000_000);
        let missing: Vec<u64> = candidate.prediction.memory.iter().map(missing).collect();
        if missing.iter().any(|&bytes| bytes > 0) { Admission::LacksMemory(missing) } else { Admission::Admitted }
    });
    assert_eq!(checked, [alone(0), alone(1), alone(2), vec![(vec![0], 9), (vec![1], 1)]]);
    assert_eq!(reason, Ok(Reason::TooLargeForOne));
    // Another reason than memory, on device a: others of its kind are tried.
    let without_a = |candidate: &Candidate| if uses(candidate, 0) { Admission::Refused } else { Admission::Admitted };
    assert_eq!(chosen(&without_a).0, [alone(0), alone(1)]);
    // Every placement is refused, with and without a reason that changes the plan: the number of checks is bounded.
    for admission in [Admission::Refused, Admission::LacksMemory(vec![0; 3]), Admission::LacksMemory(vec![1; 3])] {
        let (checked, reason) = chosen(&|_| admission.clone());
        assert!(!checked.is_empty() && checked.len() <= MAX_CHECKS, "{admission:?}");
        assert_eq!(reason, Err(PlannerError::NothingAdmitted { checked: checked.len() }), "{admission:?}");
    }
}

/// The work for the most devices is bounded: so many sets of devices are tried.
#[test]
fn the_number_of_candidates_is_bounded() {
    let sets = |count: usize| {
        let devices = (0..count).map(|at| device(&at.to_string(), Host::Client, 1e9 + at as f64, 1e9)).collect();
        super::candidates::subsets(&machine(devices, &[], None))
    };
    assert_eq!((sets(1).len(), sets(4).len(), sets(MAX_DEVICES).len()), (1, 15, 2516 + 36));
    assert!(sets(MAX_DEVICES).contains(&(0..16).collect()));
    // Of six devices by speed, the fastest five.
    assert!(sets(6).contains(&vec![1, 2, 3, 4, 5]));
}

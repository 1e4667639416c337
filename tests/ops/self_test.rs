//! The self-test of devices: each device passes the cases that it supports.

use crate::devices::devices;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::MemoryBudget;
use fanout::self_test::{Verdict, cases, check};
use std::time::{Duration, Instant};

#[test]
fn every_device_passes_its_self_test() {
    let reference = CpuDevice::new("reference", 1, MathMode::Exact, 64 << 20).unwrap();
    let (budget, cases) = (MemoryBudget::new(64 << 20), cases().unwrap());
    let mut failed = Vec::new();
    for on in devices() {
        let mut refused = 0;
        for case in &cases {
            let deadline = Instant::now() + Duration::from_secs(600);
            match check(case, &*on.device, &*reference, &budget, deadline) {
                Ok(Verdict::Same { .. }) => {}
                Ok(Verdict::Unsupported { .. }) => refused += 1,
                other => failed.push(format!("{}: {}: {other:?}", on.name, case.name())),
            }
        }
        assert!(refused < cases.len() / 2, "{} refuses {refused} of {} cases", on.name, cases.len());
    }
    assert!(failed.is_empty(), "\n{}\n", failed.join("\n"));
}

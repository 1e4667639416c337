//! The cases cover every op; a right device passes all of them, and a wrong byte of any result is found.

use super::{Case, Verdict, check};
use crate::cpu::{CpuDevice, MathMode};
use crate::device::noop::NoopDevice;
use crate::device::{
    Device, DeviceError, DeviceKind, ForwardDevice, ForwardQueue, MemoryBudget, MemoryInfo, PendingRead,
    PendingReadSender, Queue, Region, Support, Unsupported,
};
use crate::ops::NodeView;
use crate::ops::unary::{Unary, UnaryKind};
use crate::ops::{FAMILIES, Op, OpCode};
use crate::tensor::{Capability, DType};
use std::collections::BTreeSet;
use std::mem::discriminant;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const MEMORY: u64 = 64 << 20;

/// Every case, built once for all tests.
fn cases() -> &'static [Case] {
    static ALL: OnceLock<Vec<Case>> = OnceLock::new();
    ALL.get_or_init(|| super::cases().unwrap())
}

fn cpu(math_mode: MathMode) -> Arc<CpuDevice> {
    CpuDevice::new("CPU", 1, math_mode, MEMORY).unwrap()
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

/// The op of a case: that of its first node.
fn code(case: &Case) -> OpCode {
    case.graph().nodes()[0].op.code()
}

#[test]
fn every_op_kind_and_type_of_weights_has_a_case() {
    let cases = cases();
    let names: BTreeSet<&str> = cases.iter().map(Case::name).collect();
    assert_eq!(names.len(), cases.len(), "names are unique");
    let order: Vec<OpCode> = FAMILIES.iter().flat_map(|row| row.codes).copied().collect();
    let mut covered: Vec<OpCode> = cases.iter().map(code).collect();
    let positions = covered.iter().map(|code| order.iter().position(|c| c == code).unwrap());
    assert!(positions.is_sorted(), "cases are in the order of the families");
    covered.dedup();
    let runs_alone = |code: &OpCode| code.stem() != Some("collective");
    assert_eq!(covered, order.into_iter().filter(runs_alone).collect::<Vec<_>>());
    for case in cases {
        assert!(case.graph().nodes().iter().all(|node| node.op.code() == code(case)), "{}: one op", case.name());
        assert!(case.bytes() <= 1 << 20, "{}: {} bytes", case.name(), case.bytes());
    }
    for dtype in DType::with_capability(Capability::Decode) {
        for op in [OpCode::MulMat, OpCode::GetRows] {
            assert!(names.contains(format!("{op} {dtype}").as_str()), "{op} {dtype}");
        }
    }
    for kind in UnaryKind::ALL {
        let same = |op: &Op| matches!(op, Op::Unary(Unary::Kind(k)) if discriminant(k) == discriminant(&kind));
        assert!(cases.iter().any(|case| same(&case.graph().nodes()[0].op)), "{kind:?}");
    }
}

/// The CPU in fast mode passes, and after the alteration of one byte, each result differs. The bytes of inputs and beside tensors are
/// compared too.
#[test]
fn right_results_pass_and_each_wrong_one_is_found() {
    let (device, reference, budget) = (cpu(MathMode::Fast), cpu(MathMode::Exact), MemoryBudget::new(MEMORY));
    let mut failed = Vec::new();
    for case in cases() {
        let got = case.run_on(&*device, &budget, deadline()).unwrap_or_else(|e| panic!("{}: {e}", case.name()));
        let want = case.run_on(&*reference, &budget, deadline()).unwrap_or_else(|e| panic!("{}: {e}", case.name()));
        match case.compare(&got, &want) {
            Verdict::Same { .. } => {}
            verdict => failed.push(format!("{}: {verdict:?}", case.name())),
        }
        let altered = |offset: usize| {
            let mut bytes = got.clone();
            bytes[offset] = if bytes[offset] == 0x7e { 0 } else { 0x7e };
            case.compare(&bytes, &want)
        };
        let nodes = case.graph().nodes().iter();
        let results: Vec<_> = nodes.flat_map(|node| case.results(node)).map(|t| (t.desc, t.place.unwrap())).collect();
        for (desc, place) in &results {
            let offset = place.offset + desc.dtype().block_bytes() - 1;
            if !matches!(altered(offset), Verdict::Differs { nmse, bound } if nmse > bound) {
                failed.push(format!("{}: byte {offset} altered: {:?}", case.name(), altered(offset)));
            }
        }
        // The first tensor is an input, unless the op writes it or has none; after the last one is a gap.
        let is_input = results.iter().all(|(_, place)| place.offset > 0);
        for offset in [0, got.len() - 1].into_iter().filter(|&offset| offset > 0 || is_input) {
            assert_eq!(altered(offset), Verdict::StrayWrite { offset }, "{}", case.name());
        }
    }
    assert!(failed.is_empty(), "\n{}\n", failed.join("\n"));
}

/// What a device does to the bytes of a download; `None`: they never arrive.
type Alter = fn(Vec<u8>) -> Option<Vec<u8>>;

/// A CPU device with other downloads.
#[derive(Debug)]
struct AlteringDevice(Arc<CpuDevice>, Alter);

struct AlteringQueue {
    inner: Box<dyn Queue>,
    alter: Alter,
    /// Of downloads that never arrive.
    unsent: Vec<PendingReadSender>,
}

impl ForwardDevice for AlteringDevice {
    fn inner(&self) -> &dyn Device {
        &*self.0
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.0.queue(budget)?;
        Ok(Box::new(AlteringQueue { inner, alter: self.1, unsent: Vec::new() }))
    }
}

impl ForwardQueue for AlteringQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.inner)
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        let bytes = self.inner.download(src)?.wait(None)?;
        Ok((self.alter)(bytes).map_or_else(
            || {
                let (sender, pending) = PendingRead::new();
                self.unsent.push(sender);
                pending
            },
            PendingRead::ready,
        ))
    }
}

#[test]
fn verdicts_and_errors_name_what_is_wrong() {
    let cases = cases();
    let case = cases.iter().find(|case| case.name() == "ADD").unwrap();
    let (reference, budget) = (cpu(MathMode::Exact), MemoryBudget::new(MEMORY));
    let check =
        |device: &dyn Device, reference: &dyn Device, deadline| check(case, device, reference, &budget, deadline);
    let altering = |alter| AlteringDevice(cpu(MathMode::Fast), alter);
    let verdict = |device: &dyn Device| check(device, &*reference, deadline()).unwrap();

    assert_eq!(verdict(&altering(Some)), Verdict::Same { nmse: 0.0 });
    let stray = altering(|mut bytes| {
        bytes[0] ^= 1;
        Some(bytes)
    });
    assert_eq!(verdict(&stray), Verdict::StrayWrite { offset: 0 });
    // The last tensor is the result, and the pattern of the gap follows.
    let negated = altering(|mut bytes| {
        let last = bytes.iter().rposition(|&b| b != 0xa5).unwrap();
        bytes[last] ^= 0x80;
        Some(bytes)
    });
    assert!(matches!(verdict(&negated), Verdict::Differs { nmse, bound } if nmse > bound), "{:?}", verdict(&negated));

    let noop = || NoopDevice::new("GPU0", DeviceKind::Gpu);
    assert_eq!(verdict(&noop()), Verdict::StrayWrite { offset: 0 }, "its memory reads as zeros");
    let refused = verdict(&noop().without_ops(&[OpCode::Add]));
    assert!(matches!(&refused, Verdict::Unsupported { reason } if !reason.is_empty()), "{refused:?}");

    // Downloads of `immediate` are complete when it returns them, so that the deadline, which has passed, concerns `silent` alone.
    let (immediate, silent) = (altering(Some), altering(|_| None));
    assert_eq!(check(&silent, &immediate, Instant::now()), Err(DeviceError::Deadline("a download")));
    let named = check(&immediate, &silent, Instant::now());
    assert!(matches!(&named, Err(DeviceError::OnDevice { device, .. }) if device == "CPU"), "{named:?}");
    let small = MemoryBudget::new(case.bytes() - 1);
    let refused = super::check(case, &*reference, &*reference, &small, deadline());
    assert!(matches!(refused, Err(DeviceError::OutOfMemory { .. })), "{refused:?}");
}

/// A device whose server is lost: it supports nothing, and fails.
#[derive(Debug)]
struct LostDevice(Arc<CpuDevice>);

impl ForwardDevice for LostDevice {
    fn inner(&self) -> &dyn Device {
        &*self.0
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        Support::No(Unsupported { op: node.op.code(), reason: "the server is lost".to_owned() })
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Err(DeviceError::Ended)
    }
}

#[test]
fn a_lost_device_is_no_device_without_support() {
    let (device, budget) = (LostDevice(cpu(MathMode::Fast)), MemoryBudget::new(MEMORY));
    let verdict = check(&cases()[0], &device, &*cpu(MathMode::Exact), &budget, deadline());
    assert_eq!(verdict, Err(DeviceError::Ended));
}

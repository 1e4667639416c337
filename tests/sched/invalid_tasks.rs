//! Invalid tasks, plans and inputs, failing devices and aborted runs: each is an error, and the scheduler stays usable.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, ForwardDevice, MemoryBudget, Queue, Region, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::OutputSpec;
use fanout::ops::binary::Binary;
use fanout::ops::concat::Concat;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::unary::Unary;
use fanout::sched::{ObservedNode, Observer, Options, Plan, SchedError, Scheduler, Task, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::forwarding_device::ForwardingDevice;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Memory of each device in bytes.
const MEMORY: u64 = 1 << 24;

fn cpu(name: &str) -> Arc<dyn Device> {
    CpuDevice::new(name, 1, MathMode::Exact, MEMORY).unwrap()
}

fn scheduler(devices: Vec<Arc<dyn Device>>, depth: usize) -> Scheduler {
    Scheduler::new(devices, Options::default().with_depth(depth), &MemoryBudget::new(MEMORY)).unwrap()
}

/// A task that squares `n` numbers repeatedly: one node on each of these devices, in order. Returns the task, its input and its
/// output.
fn squares(n: usize, on: &[usize]) -> (Arc<Task>, TensorId, TensorId) {
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [n, 1, 1, 1]).unwrap();
    let mut last = x;
    for &device in on {
        last = b.node(Unary::Sqr, &[Some(last)]).unwrap();
        b.pin(device).unwrap();
    }
    b.name(last, "y");
    b.output(last).unwrap();
    (Arc::new(b.build().unwrap()), x, last)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// A device that refuses to open queues while its flag is false.
#[derive(Debug)]
struct QueueRefusingDevice(Arc<dyn Device>, AtomicBool);

impl ForwardDevice for QueueRefusingDevice {
    fn inner(&self) -> &dyn Device {
        &*self.0
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        if self.1.load(Ordering::Relaxed) { self.0.queue(budget) } else { Err(DeviceError::Ended) }
    }
}

#[test]
fn a_failed_switch_of_plans_keeps_other_plans_usable() {
    let refusing =
        Arc::new(QueueRefusingDevice(ForwardingDevice::isolated("refusing", MEMORY).shared(), AtomicBool::new(false)));
    let mut scheduler = scheduler(vec![cpu("CPU"), Arc::clone(&refusing) as _], 1);
    let [(one, x, y), (other, ..)] = [squares(2, &[0]), squares(2, &[1, 0])];
    let [mut one, mut other] = [one, other].map(|task| scheduler.build(&task).unwrap());
    let values = bytes(&[2.0, 3.0]);
    scheduler.run(&mut one, &[(x, &values)]).unwrap();
    assert!(scheduler.run(&mut other, &[(x, &values)]).is_err());
    scheduler.run(&mut one, &[(x, &values)]).unwrap();
    assert_eq!(scheduler.read(&one, y).unwrap().wait(None).unwrap(), bytes(&[4.0, 9.0]));
    refusing.1.store(true, Ordering::Relaxed);
    scheduler.run(&mut other, &[(x, &values)]).unwrap();
}

#[test]
fn reading_an_expired_output_is_an_error() {
    for depth in [1, 2] {
        let mut scheduler = scheduler(vec![cpu("CPU0"), cpu("CPU1")], depth);
        let (task, x, y) = squares(2, &[0, 1]);
        let mut small = scheduler.build(&task).unwrap();
        let values = bytes(&[2.0, 3.0]);
        let expired = |error: Result<_, SchedError>| matches!(error.unwrap_err(), SchedError::OutputExpired { .. });
        assert!(expired(scheduler.read(&small, y)), "before the first run");
        scheduler.run(&mut small, &[(x, &values)]).unwrap();
        let mut equal = scheduler.build(&task).unwrap();
        assert_eq!(scheduler.read(&small, y).unwrap().wait(None).unwrap(), bytes(&[16.0, 81.0]));
        scheduler.run(&mut equal, &[(x, &values)]).unwrap();
        assert!(expired(scheduler.read(&small, y)), "another plan ran");
        scheduler.run(&mut small, &[(x, &values)]).unwrap();
        let pending_read = scheduler.read(&small, y).unwrap();
        let (large, ..) = squares(1 << 16, &[0, 1]);
        scheduler.build(&large).unwrap();
        assert!(expired(scheduler.read(&small, y)), "its memory was reallocated for a larger plan");
        assert_eq!(pending_read.wait(None).unwrap(), bytes(&[16.0, 81.0]));
        scheduler.run(&mut small, &[(x, &values)]).unwrap();
        assert_eq!(scheduler.read(&small, y).unwrap().wait(None).unwrap(), bytes(&[16.0, 81.0]));
        scheduler.reset();
        assert!(expired(scheduler.read(&small, y)), "after a reset");
    }
}

/// Ends the run at a node: returns `Break`, or raises the abort flag if it has one.
struct StoppingObserver(usize, Option<Arc<AtomicBool>>);

impl Observer for StoppingObserver {
    fn selects(&mut self, _: ObservedNode<'_>) -> bool {
        true
    }

    fn on_result(&mut self, node: ObservedNode<'_>, _: &[u8]) -> ControlFlow<()> {
        match &self.1 {
            _ if node.node != self.0 => ControlFlow::Continue(()),
            None => ControlFlow::Break(()),
            Some(flag) => {
                flag.store(true, Ordering::Relaxed);
                ControlFlow::Continue(())
            }
        }
    }
}

#[test]
fn after_an_incomplete_run_only_a_reset_allows_further_runs() {
    for depth in [1, 3] {
        for isolated in [false, true] {
            for at in 0..4 {
                let device = |i| {
                    if isolated {
                        ForwardingDevice::isolated(&format!("I{i}"), MEMORY).shared()
                    } else {
                        cpu(&format!("CPU{i}"))
                    }
                };
                let mut scheduler = scheduler((0..2).map(device).collect(), depth);
                let (task, x, y) = squares(1, &[0, 1, 0, 1]);
                let mut prepared = scheduler.build(&task).unwrap();
                let two = bytes(&[2.0]);
                // An observer may end a run at any node: the next run is complete.
                let flow =
                    scheduler.run_observed(&mut prepared, &[(x, &two)], &mut StoppingObserver(at, None)).unwrap();
                assert_eq!(flow, ControlFlow::Break(()));
                assert!(matches!(scheduler.read(&prepared, y), Err(SchedError::OutputExpired { .. })));
                scheduler.run(&mut prepared, &[(x, &two)]).unwrap();
                assert_eq!(scheduler.read(&prepared, y).unwrap().wait(None).unwrap(), bytes(&[65536.0]));
                // An abort leaves the run incomplete, except at the last node.
                let flag = scheduler.abort_flag();
                let mut aborting = StoppingObserver(at, Some(Arc::clone(&flag)));
                let ended = scheduler.run_observed(&mut prepared, &[(x, &two)], &mut aborting);
                flag.store(false, Ordering::Relaxed);
                if at < 3 {
                    assert!(matches!(ended, Err(SchedError::Aborted)), "{ended:?}");
                    assert!(matches!(
                        scheduler.submit(&mut prepared, &[(x, &two)]),
                        Err(SchedError::RunIncomplete { stopped_by: None })
                    ));
                    assert!(matches!(scheduler.read(&prepared, y), Err(SchedError::OutputExpired { .. })));
                    scheduler.reset();
                }
                scheduler.run(&mut prepared, &[(x, &two)]).unwrap();
                assert_eq!(scheduler.read(&prepared, y).unwrap().wait(None).unwrap(), bytes(&[65536.0]));
            }
        }
    }
}

#[test]
fn plans_for_other_devices_are_rejected() {
    let budget = MemoryBudget::new(MEMORY);
    let many = [cpu("CPU0"), cpu("CPU1"), cpu("CPU2")];
    let (task, ..) = squares(2, &[0, 1, 2]);
    let plan = || Plan::new(Arc::clone(&task), &many, &Options::default()).unwrap();
    let mut few = scheduler(vec![cpu("CPU0")], 1);
    assert!(matches!(few.prepare(plan()), Err(SchedError::ForeignPlan)));
    assert!(matches!(few.reserve(&plan()), Err(SchedError::ForeignPlan)));
    assert!(matches!(plan().check_memory(few.devices()), Err(SchedError::ForeignPlan)));
    let mut all = scheduler(many.to_vec(), 1);
    let prepared = all.build(&task).unwrap();
    assert!(matches!(few.copy_stored_to(&prepared, &cpu("other"), &budget), Err(SchedError::ForeignPlan)));
}

#[test]
fn a_region_on_another_device_than_declared_is_rejected() {
    let budget = MemoryBudget::new(MEMORY);
    let devices = vec![cpu("CPU0"), cpu("CPU1")];
    let desc = TensorDesc::contiguous(DType::F32, [4, 1, 1, 1]).unwrap();
    for (device, fault) in [(0, true), (1, false)] {
        let region = devices[1].alloc(16, &budget).unwrap().whole();
        let mut b = TaskBuilder::new();
        let w = b.stored("w", desc, device, Some(region)).unwrap();
        b.node(Unary::Sqr, &[Some(w)]).unwrap();
        let built = scheduler(devices.clone(), 1).build(&Arc::new(b.build().unwrap()));
        match built.map(drop) {
            Err(e) if fault => {
                assert_eq!(e.to_string(), "stored tensor \"w\" is declared on CPU0, but its region is on CPU1")
            }
            done => done.unwrap(),
        }
    }
}

#[test]
fn bytes_for_a_non_input_or_for_an_input_twice_are_rejected() {
    let mut scheduler = scheduler(vec![cpu("CPU")], 1);
    let mut b = TaskBuilder::new();
    let (x, unread) = (b.input("x", DType::F32, [1; 4]).unwrap(), b.input("unread", DType::F32, [1; 4]).unwrap());
    let y = b.node(Unary::Sqr, &[Some(x)]).unwrap();
    b.name(y, "y");
    b.output(y).unwrap();
    let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
    let two = bytes(&[2.0]);
    for (more, name) in [(x, "x"), (y, "y")] {
        let error = scheduler.run(&mut prepared, &[(x, &two), (more, &two)]).unwrap_err();
        let text = format!("a run was given bytes for tensor {name:?}, which is not an input or was given twice");
        assert_eq!(error.to_string(), text);
    }
    scheduler.run(&mut prepared, &[(x, &two), (unread, &two)]).unwrap();
    scheduler.run(&mut prepared, &[(x, &two)]).unwrap();
}

#[test]
fn an_invalid_node_adds_no_tensor() {
    let mut other = TaskBuilder::new();
    let ids: Vec<_> = (0..9).map(|_| other.input("", DType::F32, [1; 4]).unwrap()).collect();
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [1; 4]).unwrap();
    let out = OutputSpec { dtype: DType::F32, ne: [1; 4] };
    assert!(b.node(Unary::Sqr, &[Some(x); 11]).is_err());
    assert!(b.node_as(Unary::Sqr, &[Some(x); 11], out).is_err());
    assert!(b.node_as(Unary::Sqr, &[Some(ids[8])], out).is_err());
    assert!(b.node(Binary::Add, &[Some(x), Some(ids[8])]).is_err());
    let y = b.node(Unary::Sqr, &[Some(x)]).unwrap();
    assert!(b.node_onto(Unary::Sqr, &[Some(ids[8])], y).is_err());
    b.output(y).unwrap();
    let task = Arc::new(b.build().unwrap());
    assert_eq!((task.storage().len(), task.graph().slot_sizes().len(), task.graph().nodes().len()), (2, 2, 1));
    let mut scheduler = scheduler(vec![cpu("CPU")], usize::MAX);
    let mut prepared = scheduler.build(&task).unwrap();
    assert_eq!(prepared.plan().depth(), Options::MAX_DEPTH);
    scheduler.run(&mut prepared, &[(x, &bytes(&[3.0]))]).unwrap();
    assert_eq!(scheduler.read(&prepared, y).unwrap().wait(None).unwrap(), bytes(&[9.0]));
}

#[test]
fn tasks_without_nodes_run() {
    let budget = MemoryBudget::new(MEMORY);
    for depth in [0, 1, 2] {
        let devices = vec![cpu("CPU0"), cpu("CPU1")];
        let region = devices[1].alloc(8, &budget).unwrap().whole();
        let mut scheduler = scheduler(devices, depth);
        let mut b = TaskBuilder::new();
        let (x, none) = (b.input("x", DType::F32, [1; 4]).unwrap(), b.input("", DType::F32, [2, 0, 1, 1]).unwrap());
        let desc = TensorDesc::contiguous(DType::F32, [2, 1, 1, 1]).unwrap();
        let w = b.stored("w", desc, 1, Some(region)).unwrap();
        let view = b.reshape(w, [1, 2, 1, 1]).unwrap();
        b.output(view).unwrap();
        assert!(b.output(x).is_err(), "an input cannot be an output");
        let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
        scheduler.run(&mut prepared, &[(x, &bytes(&[1.0])), (none, &[])]).unwrap();
        scheduler.run(&mut prepared, &[]).unwrap();
        assert_eq!(scheduler.read(&prepared, view).unwrap().wait(None).unwrap(), [0; 8]);
        assert!(matches!(scheduler.read(&prepared, x), Err(SchedError::NotAnOutput { .. })));
    }
}

/// Concatenates two empty tensors, and the result with a tensor that is not empty, on the same and on another device.
#[test]
fn empty_tensors_can_be_computed_copied_and_read() {
    for depth in [1, 2] {
        for homes in [[0, 0], [0, 1]] {
            let mut scheduler = scheduler(vec![cpu("CPU0"), ForwardingDevice::isolated("I", MEMORY).shared()], depth);
            let mut b = TaskBuilder::new();
            let (x, none) =
                (b.input("x", DType::F32, [2, 1, 1, 1]).unwrap(), b.input("", DType::F32, [2, 0, 1, 1]).unwrap());
            let both = b.node(Concat::Concat { dim: 1 }, &[Some(none), Some(none)]).unwrap();
            b.pin(homes[0]).unwrap();
            let y = b.node(Concat::Concat { dim: 1 }, &[Some(both), Some(x)]).unwrap();
            b.pin(homes[1]).unwrap();
            [both, y].into_iter().for_each(|id| b.output(id).unwrap());
            let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
            let values = bytes(&[1.0, 2.0]);
            scheduler.run(&mut prepared, &[(x, &values)]).unwrap();
            assert_eq!(scheduler.read(&prepared, y).unwrap().wait(None).unwrap(), values);
            assert_eq!(scheduler.read(&prepared, both).unwrap().wait(None).unwrap(), [0; 0]);
            let flow = scheduler.run_observed(&mut prepared, &[(x, &values)], &mut StoppingObserver(9, None)).unwrap();
            assert_eq!(flow, ControlFlow::Continue(()));
        }
    }
}

/// In a permuted tensor the rows of the experts interleave, so the bytes of an expert are not contiguous.
#[test]
fn experts_with_interleaved_bytes_are_copied_as_a_whole_tensor() {
    const K: usize = 8;
    let results: Vec<_> = [1, 0]
        .map(|on| {
            let budget = MemoryBudget::new(MEMORY);
            let devices = vec![ForwardingDevice::isolated("I", MEMORY).shared(), cpu("CPU")];
            let desc = TensorDesc::contiguous(DType::F32, [K, 4, 2, 1]).unwrap();
            let region: Region = devices[1].alloc(desc.extent() as u64, &budget).unwrap().whole();
            let values: Vec<f32> = (0..desc.elements()).map(|i| i as f32).collect();
            let mut queue = devices[1].queue(&budget).unwrap();
            queue.upload(region.clone(), None, UploadSource::Borrowed(bytemuck::cast_slice(&values))).unwrap();
            queue.mark().wait(None).unwrap();
            let mut b = TaskBuilder::new();
            let w = b.stored("w", desc, 1, Some(region)).unwrap();
            let experts = b.permute(w, [0, 2, 1, 3]).unwrap();
            let x = b.input("x", DType::F32, [K, 1, 1, 1]).unwrap();
            let ids = b.input("ids", DType::I32, [2, 1, 1, 1]).unwrap();
            let y = b.node(MulMat::BY_ID, &[Some(experts), Some(x), Some(ids)]).unwrap();
            b.pin(on).unwrap();
            b.output(y).unwrap();
            let mut scheduler = scheduler(devices, 1);
            let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
            let (chosen, ones) = ([2i32, 1], [1.0f32; K]);
            let inputs = [(x, bytemuck::cast_slice(&ones)), (ids, bytemuck::cast_slice(&chosen))];
            scheduler.run(&mut prepared, &inputs).unwrap();
            scheduler.read(&prepared, y).unwrap().wait(None).unwrap()
        })
        .into();
    assert_eq!(results[0], results[1]);
}

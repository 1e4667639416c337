//! Offload of MUL_MAT_ID: weights in CPU memory are used on another device, and each run copies only the experts that it uses.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceKind, Domain, MemoryBudget, UploadSource};
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use fanout::ops::mul_mat::MulMat;
use fanout::ops::unary::Unary;
use fanout::sched::{AssignReason, Options, PreparedPlan, SchedError, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::forwarding_device::ForwardingDevice;
use std::sync::Arc;

/// Memory of each device in bytes.
const MEMORY: u64 = 1 << 24;
/// Columns of an expert's matrix.
const K: usize = 32;
/// Rows of an expert's matrix.
const M: usize = 16;
const EXPERTS: usize = 8;
/// Tokens of a run.
const TOKENS: usize = 3;
/// Experts that each token uses.
const USED: usize = 2;
const EXPERT_BYTES: u64 = (4 * K * M) as u64;

/// A GPU that prefers to offload matrix products, and a CPU that stores the weights.
fn devices(same_domain: bool) -> Vec<Arc<dyn Device>> {
    let offloading = ForwardingDevice::isolated("GPU", MEMORY).with_offload(&[OpCode::MulMat, OpCode::MulMatId]);
    let gpu = offloading.with_info(|info| {
        info.kind = DeviceKind::Gpu;
        if same_domain {
            info.domain = Domain::named("host");
        }
    });
    vec![gpu.shared(), CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap()]
}

/// A task with one node on the GPU (node 0) and a MUL_MAT_ID with weights on the CPU (node 1), and its scheduler.
struct ExpertTask {
    scheduler: Scheduler,
    prepared: PreparedPlan,
    inputs: [TensorId; 2],
    y: TensorId,
}

impl ExpertTask {
    fn new(devices: Vec<Arc<dyn Device>>, options: Options) -> ExpertTask {
        let budget = MemoryBudget::new(MEMORY);
        let desc = TensorDesc::contiguous(DType::F32, [K, M, EXPERTS, 1]).unwrap();
        let cpu = devices.len() - 1;
        let region = devices[cpu].alloc(desc.extent() as u64, &budget).unwrap().whole();
        let mut rng = fastrand::Rng::with_seed(5);
        let values: Vec<f32> = (0..desc.elements()).map(|_| rng.f32() - 0.5).collect();
        let mut queue = devices[cpu].queue(&budget).unwrap();
        queue.upload(region.clone(), Some(&desc), UploadSource::Borrowed(bytemuck::cast_slice(&values))).unwrap();
        queue.mark().wait(None).unwrap();
        let mut b = TaskBuilder::new();
        let w = b.stored("experts", desc, cpu, Some(region)).unwrap();
        let x = b.input("x", DType::F32, [K, USED, TOKENS, 1]).unwrap();
        let ids = b.input("ids", DType::I32, [USED, TOKENS, 1, 1]).unwrap();
        // A node on the GPU before the product, so that the copy of the experts is not the first work of the GPU's queue.
        let scaled = b.node(Unary::Scale { scale: 2.0, bias: 0.0 }, &[Some(x)]).unwrap();
        b.pin(0).unwrap();
        let y = b.node(MulMat::BY_ID, &[Some(w), Some(scaled), Some(ids)]).unwrap();
        b.output(y).unwrap();
        let task = Arc::new(b.build().unwrap());
        let mut scheduler = Scheduler::new(devices, options, &budget).unwrap();
        let prepared = scheduler.build(&task).unwrap();
        ExpertTask { scheduler, prepared, inputs: [x, ids], y }
    }

    fn run(&mut self, chosen: [i32; USED * TOKENS]) -> Result<Vec<u8>, SchedError> {
        let x: Vec<f32> = (0..K * USED * TOKENS).map(|i| (i % 7) as f32 - 3.0).collect();
        let [x_id, ids] = self.inputs;
        let inputs = [(x_id, bytemuck::cast_slice(&x)), (ids, bytemuck::cast_slice(&chosen))];
        self.scheduler.run(&mut self.prepared, &inputs)?;
        Ok(self.scheduler.read(&self.prepared, self.y)?.wait(None).unwrap())
    }
}

fn floats(bytes: Result<Vec<u8>, SchedError>) -> Vec<f32> {
    bytes.unwrap().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn only_used_experts_are_copied() {
    let without_offload = Options::default().with_offload(false);
    let mut host = ExpertTask::new(devices(false), without_offload);
    assert_eq!(host.prepared.plan().device_of(1), Some((1, AssignReason::Stored)));
    for same_domain in [true, false] {
        for depth in [1, 3] {
            let options = Options::default().with_depth(depth);
            let mut offloaded = ExpertTask::new(devices(same_domain), options);
            assert_eq!(offloaded.prepared.plan().device_of(1), Some((0, AssignReason::Offload)));
            for (chosen, used) in
                [([0, 1, 1, 0, 0, 1], 2), ([7, 2, 7, 3, 2, 7], 3), ([5; 6], 1), ([0, 1, 2, 3, 4, 5], 6)]
            {
                // Device 0 is the GPU.
                let before = offloaded.scheduler.transfer_counts().copied[0];
                assert_eq!(
                    floats(offloaded.run(chosen)),
                    floats(host.run(chosen)),
                    "{chosen:?}\n{}",
                    offloaded.prepared.plan()
                );
                let copied = offloaded.scheduler.transfer_counts().copied[0] - before;
                assert_eq!(copied, used * EXPERT_BYTES, "{chosen:?}, one domain: {same_domain}, depth {depth}");
            }
        }
    }
}

#[test]
fn expert_ids_out_of_range_are_rejected() {
    for bad in [8, -2, i32::MIN] {
        let mut offloaded = ExpertTask::new(devices(false), Options::default());
        let error = offloaded.run([0, 1, 2, bad, 0, 1]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("GPU: MUL_MAT_ID: expert id {bad} is out of range: the first source has 8 experts")
        );
        offloaded.scheduler.reset();
        assert!(offloaded.run([0, 1, 2, 3, 0, 1]).is_ok());
    }
}

//! Decoding on a group of emulated GPUs, in simulated time: kernels take as long as their bytes.

use crate::fixture::CudaFixture;
use fanout::device::Device;
use fanout::tensor::DType;
use fanout_testing::compare;
use fanout_testing::transformer::{LoadedModel, Model, SMALL, Shape, group, model};
use std::sync::Arc;

/// One token. The weights of a block have 6.4 MB, and the bandwidth is such that a block takes 400 µs, as a block of 400 MB at
/// 1 TB/s.
const DECODE: Shape = Shape {
    width: 512,
    heads: 8,
    kv_heads: 8,
    head: 64,
    ff: 1408,
    vocab: 512,
    tokens: 1,
    context: 16,
    weight: DType::F16,
    cache: DType::F16,
    ..SMALL
};
const SETTINGS: &str = "CUDAEMU_DEVICES=2\nCUDAEMU_KERNEL_US=2\nCUDAEMU_KERNEL_GBPS=16\nCUDAEMU_COPY_US=4\n\
                        CUDAEMU_PEER_GBPS=50\nCUDAEMU_HOST_GBPS=25\nCUDAEMU_DEVICE_GBPS=16";

/// Driver calls in which the calling thread waits for a device. The emulator reports unknown names as 0 calls.
const WAITS: [&str; 5] =
    ["cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"];

/// The makespan of a token in microseconds, and the logits.
fn decode(model: &Model, ranks: usize) -> (f64, Vec<f64>) {
    let fixture = CudaFixture::new(SETTINGS);
    let devices: Vec<Arc<dyn Device>> = fixture.devices[..ranks].iter().map(|device| device.clone() as _).collect();
    let mut loaded = LoadedModel::new(model, devices, vec![group(0..ranks, &vec![1.0; ranks])], 0, false);
    loaded.run().unwrap();
    fixture.emulator.restart_simulated_time();
    let calls = |names: &[&str]| names.iter().map(|name| fixture.driver_calls(name)).sum::<u64>();
    let before = [calls(&WAITS), calls(&["cuStreamWaitEvent"])];
    loaded.submit().unwrap();
    let logits = loaded.logits().unwrap();
    // Devices wait for each other by events. The thread that polls events of finished work holds up no submission.
    assert_eq!(calls(&WAITS), before[0], "{ranks} GPUs");
    assert_eq!(calls(&["cuStreamWaitEvent"]) > before[1], ranks > 1);
    let logits = logits.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()).into()).collect();
    (fixture.emulator.simulated_time().makespan_us, logits)
}

/// With 4 all-reduces by copies of 4 µs and additions, in 2 blocks.
#[test]
fn two_gpus_decode_in_0_6_of_the_time_of_one() {
    let model = model(DECODE, &[0, 0]);
    let ((one, want), (two, got)) = (decode(&model, 1), decode(&model, 2));
    assert!(two <= 0.6 * one, "{two} of {one} µs");
    let error = compare::nmse(&got, &want);
    assert!(error < 1e-6, "{error}");
}

//! Errors of driver calls: any code of any call fails at most the request, and the queue goes on, unless the code means that the device
//! is lost.

use crate::fixture::{
    CudaFixture, DOUBLE, INCREMENT, MEMORY, chain, floats, read, test_deadline, upload, whole_buffer,
};
use fanout::cuda::{self, CudaDevice};
use fanout::device::{Buffer, Device, DeviceError, Queue, Region, UploadSource};
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::softmax::SoftMax;
use fanout::tensor::DType::{F32, Q4_0, Q8_0};
use fanout_testing::compare::nmse;
use fanout_testing::transformer::{encode, noise};
use std::sync::Arc;

/// Codes that fail a call and nothing else: no memory, no resources, and one that no driver has.
const RECOVERABLE: [u32; 3] = [2, 701, 12345];

/// Codes after which the context is gone: a contained error, an illegal address, leaked tensor memory, an unknown error.
const LOSING: [u32; 4] = [226, 700, 721, 999];

/// Products in rows and packed weights differ in the order of their sums.
const MAX_NMSE: f64 = 1e-9;

/// A small layer with weights that are packed, in one buffer, and a queue.
struct Layer {
    graph: Arc<Graph>,
    /// The weights and the input, which each request uploads.
    values: Vec<(TensorId, Vec<u8>)>,
    result: TensorId,
    buffer: Buffer,
    queue: Box<dyn Queue>,
}

impl Layer {
    fn new(fixture: &CudaFixture) -> Layer {
        let mut b = Builder::new();
        let mut values = Vec::new();
        let mut leaf = |b: &mut Builder, dtype, ne: [usize; 4]| {
            let id = b.leaf(dtype, ne).unwrap();
            values.push((id, encode(dtype, &noise(values.len() as u64, ne.iter().product()))));
            id
        };
        let x = leaf(&mut b, F32, [256, 1, 1, 1]);
        let up = leaf(&mut b, Q8_0, [256, 64, 1, 1]);
        let down = leaf(&mut b, Q4_0, [64, 512, 1, 1]);
        let h = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
        let h = b.node(MulMat::PLAIN, &[Some(up), Some(h)]).unwrap();
        let h = b.node(SoftMax { scale: 1.0, max_bias: 0.0 }, &[Some(h)]).unwrap();
        let h = b.node(MulMat::PLAIN, &[Some(down), Some(h)]).unwrap();
        let result = b.node(DOUBLE, &[Some(h)]).unwrap();
        let graph = Arc::new(b.build());
        let buffer = fixture.buffer(0, graph.slot_sizes()[0] as u64);
        Layer { graph, values, result, buffer, queue: fixture.queue(0) }
    }

    fn region(&self, id: TensorId) -> Region {
        let tensor = self.graph.tensor(id).unwrap();
        self.buffer.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64).unwrap()
    }

    /// Prepares the program, uploads weights and input, runs it by launches, by a new graph and by a replayed one, and reads the result.
    fn request(&mut self, fixture: &CudaFixture) -> Result<Vec<f64>, DeviceError> {
        let program = fixture.devices[0].prepare(Arc::clone(&self.graph))?;
        for (id, bytes) in &self.values {
            let to = self.region(*id);
            self.queue.upload(to, None, UploadSource::Borrowed(bytes))?;
        }
        for _ in 0..3 {
            self.queue.run(&program, &whole_buffer(&self.buffer))?;
        }
        self.queue.mark().wait(test_deadline())?;
        let bytes = self.queue.download(self.region(self.result))?.wait(test_deadline())?;
        Ok(floats(&bytes).into_iter().map(f64::from).collect())
    }
}

/// Each call of a request fails in turn. The request then has the right result or an error, and the next one on the same queue is right.
#[test]
fn a_call_that_fails_fails_at_most_its_request() {
    for (seed, code) in RECOVERABLE.into_iter().enumerate() {
        let fixture =
            CudaFixture::new(&format!("CUDAEMU_CAPABILITY=9.0\nCUDAEMU_FUNCTION_BYTES=4K\nCUDAEMU_SEED={seed}"));
        let mut layer = Layer::new(&fixture);
        let want = layer.request(&fixture).unwrap();
        let mut failed = 0;
        for number in 1.. {
            fixture.emulator.fail_calls(&format!("*:{number}:{code}")).unwrap();
            let got = layer.request(&fixture);
            let was_last = fixture.emulator.fail_calls("").unwrap() > 0;
            match got {
                Ok(got) => assert!(nmse(&got, &want) <= MAX_NMSE, "code {code} of call {number}"),
                Err(DeviceError::Lost { .. }) => panic!("code {code} of call {number}: the device is lost"),
                Err(_) => failed += 1,
            }
            let next = layer.request(&fixture).unwrap_or_else(|e| panic!("code {code} of call {number}: then {e}"));
            assert!(nmse(&next, &want) <= MAX_NMSE, "code {code} of call {number}: the request after it");
            if was_last {
                break;
            }
        }
        assert!(failed > 20, "{failed} requests failed by code {code}");
        assert_eq!(fixture.devices[0].lost(), None);
        assert_eq!(fixture.emulator.reports(), Vec::<String>::new());
    }
}

/// If any driver call returns a code that means a lost device, the device is lost. Codes of newer drivers are among them.
#[test]
fn a_code_of_a_lost_device_loses_it() {
    let places = [("cuEventQuery", 1), ("cuLaunchKernel", 2), ("cuGraphInstantiateWithFlags", 1), ("cuGraphLaunch", 2)];
    for (code, (function, number)) in LOSING.into_iter().flat_map(|code| places.map(|place| (code, place))) {
        let fixture = CudaFixture::new("");
        let mut layer = Layer::new(&fixture);
        fixture.emulator.fail_calls(&format!("{function}:{number}:{code}")).unwrap();
        let lost = layer.request(&fixture).unwrap_err();
        assert!(
            matches!(&lost, DeviceError::Lost { reason, .. } if reason.starts_with("cu")),
            "{function}, {code}: {lost}"
        );
        assert_eq!(layer.request(&fixture).unwrap_err(), lost, "{function}, {code}");
        assert_eq!(fixture.devices[0].lost(), Some(lost));
    }
}

#[test]
fn a_code_that_the_driver_does_not_name_is_an_error_with_its_number() {
    let fixture = CudaFixture::new("");
    let mut layer = Layer::new(&fixture);
    for code in [918, 12345, u32::MAX] {
        fixture.emulator.fail_calls(&format!("cuLaunchKernel:1:{code}")).unwrap();
        let text = layer.request(&fixture).unwrap_err().to_string();
        assert!(text.contains(&format!("error {code}, which the driver does not name")), "{text}");
    }
    layer.request(&fixture).unwrap();
}

/// A graph that cannot be built is replaced by launches in the same run; one that cannot be launched, from the next run on. Later it is
/// tried again.
#[test]
fn launches_replace_a_graph_that_fails() {
    for (function, fails) in [("cuGraphCreate", false), ("cuGraphInstantiateWithFlags", false), ("cuGraphLaunch", true)]
    {
        let fixture = CudaFixture::new("");
        let graph = chain(16, &[INCREMENT, DOUBLE]);
        let (program, mut queue) = (fixture.program(0, &graph), fixture.queue(0));
        let buffer = fixture.buffer(0, graph.slot_sizes()[0] as u64);
        let mut token = || {
            upload(&mut *queue, &buffer.whole(), &[1.0])?;
            (0..2).try_for_each(|_| queue.run(&program, &whole_buffer(&buffer)))?;
            Ok::<_, DeviceError>(read(&mut *queue, &buffer.whole(), 1)?[0])
        };
        fixture.emulator.fail_calls(&format!("{function}:1:2")).unwrap();
        match token() {
            Ok(result) => assert!(!fails && result == 10.0, "{function}: {result}"),
            Err(e) => assert!(fails && e.to_string().contains("out of memory"), "{function}: {e}"),
        }
        let launches = fixture.driver_calls("cuLaunchKernel");
        assert_eq!(token(), Ok(10.0), "{function}");
        assert_eq!(fixture.driver_calls("cuLaunchKernel") - launches, 4, "{function}");
        let graphs = fixture.driver_calls("cuGraphLaunch");
        assert!((0..130).all(|_| token() == Ok(10.0)), "{function}");
        assert!(fixture.driver_calls("cuGraphLaunch") > graphs, "{function}");
    }
}

/// A point without an event fails alone: the queue goes on.
#[test]
fn a_point_that_cannot_be_recorded_fails_alone() {
    let fixture = CudaFixture::new("");
    let (mut queue, buffer) = (fixture.queue(0), fixture.buffer(0, 64));
    queue.fill(buffer.whole(), 1).unwrap();
    fixture.emulator.fail_calls("cuEventRecord:1:2").unwrap();
    let failed = queue.mark();
    assert!(matches!(failed.wait(test_deadline()), Err(DeviceError::Driver { call: "cuEventRecord", .. })));
    queue.mark().wait(test_deadline()).unwrap();
    assert_eq!(queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap(), [1; 64]);
}

/// If a stream cannot be made to wait, later work is held back until the point is reached.
#[test]
fn a_wait_that_the_stream_refuses_is_one_of_the_host() {
    let fixture = CudaFixture::new("");
    let [mut first, mut second] = [fixture.queue(0), fixture.queue(0)];
    let [from, to] = [0x11, 0x22].map(|value| {
        let buffer = fixture.buffer(0, 1 << 20);
        first.fill(buffer.whole(), value).unwrap();
        buffer
    });
    first.mark().wait(test_deadline()).unwrap();
    first.fill(from.whole(), 0x33).unwrap();
    let written = first.mark();
    fixture.emulator.fail_calls("cuStreamWaitEvent:1:2").unwrap();
    second.wait(&written).unwrap();
    let _ = second.copy_from(from.whole(), to.whole(), None).unwrap();
    let bytes = second.download(to.whole()).unwrap().wait(test_deadline()).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0x33));
}

/// An attribute that the driver does not report hides at most the GPU whose capability it is.
#[test]
fn an_unsupported_attribute_hides_no_gpu() {
    let mut hidden = 0;
    for number in 1.. {
        let settings = format!("CUDAEMU_DEVICES=2\nCUDAEMU_FAIL_CALL=cuDeviceGetAttribute:{number}:801");
        let emulator = cudaemu::test::start(&settings).unwrap();
        let gpus = cuda::detect().unwrap();
        let was_last = emulator.fail_calls("").unwrap() > 0;
        assert!(!gpus.is_empty(), "attribute {number}");
        hidden += 2 - gpus.len();
        if was_last {
            break;
        }
    }
    assert_eq!(hidden, 4, "major and minor capability of two GPUs");
    // The first query after those of `detect` is whether there are memory pools.
    let emulator = cudaemu::test::start("").unwrap();
    let gpu = cuda::detect().unwrap().swap_remove(0);
    emulator.fail_calls("cuDeviceGetAttribute:1:801").unwrap();
    let device = CudaDevice::new("CUDA0", &gpu, MEMORY).unwrap();
    assert_eq!(emulator.fail_calls("").unwrap(), 0);
    drop(device);
    assert!(emulator.wait_contexts_released(std::time::Duration::from_secs(5)));
}

/// Kernels are loaded when a program is prepared, so that no launch loads one, and a lack of memory fails that call.
#[test]
fn no_launch_loads_a_kernel() {
    for driver in ["12.3", "12.9"] {
        let settings = format!("CUDAEMU_CAPABILITY=9.0\nCUDAEMU_FUNCTION_BYTES=1M\nCUDAEMU_DRIVER_VERSION={driver}");
        let fixture = CudaFixture::new(&settings);
        let mut layer = Layer::new(&fixture);
        layer.request(&fixture).unwrap();
        assert_eq!(fixture.emulator.lazy_loads(), 0, "{driver}");
    }
    let fixture = CudaFixture::new("CUDAEMU_FUNCTION_BYTES=2G\nCUDAEMU_MEMORY=1G");
    let prepared = fixture.devices[0].prepare(chain(16, &[INCREMENT]));
    assert!(prepared.err().is_some_and(|e| e.to_string().contains("cuFuncLoad failed: CUDA_ERROR_OUT_OF_MEMORY")));
}

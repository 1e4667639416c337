//! Errors of the public interface: chains of sources without repeated texts, and the loss that they name.

use fanout::device::{DeviceError, SourceError, UploadError};
use fanout::registry::RegistryError;
use fanout::sched::SchedError;
use std::error::Error;

const ENDPOINT: &str = "10.0.0.5:50052";

fn loss() -> DeviceError {
    DeviceError::ConnectionLost { endpoint: ENDPOINT.to_owned(), reason: "the cable was cut".to_owned() }
}

fn on(device: &str, error: DeviceError) -> DeviceError {
    DeviceError::OnDevice { device: device.to_owned(), error: Box::new(error) }
}

fn sched(error: DeviceError) -> SchedError {
    SchedError::Device { device: format!("{ENDPOINT}/0"), error }
}

/// The texts of an error and of its sources, as `{:#}` of an `anyhow::Error` prints them.
fn chain(error: &dyn Error) -> String {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    texts.join(": ")
}

#[test]
fn a_chain_of_errors_prints_a_lost_connection_once() {
    let text = "10.0.0.5:50052: connection lost: the cable was cut";
    assert_eq!(chain(&loss()), text);
    assert_eq!(chain(&sched(loss())), text, "the device's name begins with the endpoint");
    let rank = DeviceError::RankFailed { rank: 1, device: "b".to_owned(), error: Box::new(loss()) };
    let stopped_by = Some((format!("{ENDPOINT}/0"), loss()));
    let errors: [Box<dyn Error>; 7] = [
        Box::new(on("GPU0 + CPU", loss())),
        Box::new(on("GPU0 + CPU", rank.clone())),
        Box::new(sched(on("GPU0 + CPU", loss()))),
        Box::new(SchedError::RunIncomplete { stopped_by }),
        Box::new(RegistryError::from(loss())),
        Box::new(UploadError::<SourceError>::Device(loss())),
        Box::new(DeviceError::from(SourceError::new(loss()))),
    ];
    for error in errors {
        let chain = chain(&*error);
        assert_eq!(chain.matches("the cable was cut").count(), 1, "{chain}");
    }
    assert_eq!(rank.root(), &loss());
}

#[test]
fn the_name_of_a_device_is_printed_once() {
    let driver = || DeviceError::Driver { device: "GPU0".to_owned(), call: "cuCtxCreate", reason: "no".to_owned() };
    let on_gpu = |error| SchedError::Device { device: "GPU0".to_owned(), error }.to_string();
    assert_eq!(on_gpu(driver()), "GPU0: cuCtxCreate failed: no");
    assert_eq!(on_gpu(on("GPU0", driver())), "GPU0: cuCtxCreate failed: no");
    assert_eq!(on_gpu(DeviceError::Misuse("a")), "GPU0: misuse: a");
    assert_eq!(on("GPU1", driver()).to_string(), "GPU1: GPU0: cuCtxCreate failed: no");
    assert_eq!(on_gpu(on("GPU0", DeviceError::Ended)).matches("GPU0").count(), 1);
    let lost = DeviceError::Lost { device: "GPU0".to_owned(), reason: "no".to_owned() };
    assert_eq!(on_gpu(lost), "GPU0 is lost until its process is started again: no");
    let limit = DeviceError::CapabilityMissing { device: "GPU0".to_owned(), limitation: "cannot" };
    assert_eq!(on_gpu(limit), "GPU0 cannot");
    let remote = DeviceError::Remote { device: format!("{ENDPOINT}/0"), reason: "no".to_owned() };
    assert_eq!(sched(remote).to_string(), "10.0.0.5:50052/0: no");
}

#[test]
fn scheduler_errors_name_the_lost_server() {
    let incomplete = |error| SchedError::RunIncomplete { stopped_by: Some(("b".to_owned(), error)) };
    for error in [sched(loss()), sched(on("b", loss())), incomplete(loss())] {
        assert_eq!(error.lost_endpoint(), Some(ENDPOINT), "{error}");
    }
    for error in [sched(DeviceError::Ended), incomplete(DeviceError::Ended), SchedError::Aborted] {
        assert_eq!(error.lost_endpoint(), None, "{error}");
    }
    let text = incomplete(loss()).to_string();
    assert!(text.contains(ENDPOINT) && text.contains("connect again") && !text.contains("reset"), "{text}");
    let text = incomplete(DeviceError::Lost { device: "b".to_owned(), reason: "no".to_owned() }).to_string();
    assert!(text.contains("start the process") && !text.contains("reset"), "{text}");
    let text = incomplete(DeviceError::Ended).to_string();
    assert!(text.contains("the device's queue was closed") && text.contains("Scheduler::reset"), "{text}");
}

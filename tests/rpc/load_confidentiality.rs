//! Confidentiality of LOAD: a client whose digest does not match a file must never be able to read the file's bytes, even if a
//! queue fails.

use crate::extended_support::*;
use crate::load_by_digest::*;
use crate::support::*;
use fanout::cpu::{CpuDevice, MathMode as Arithmetic};
use fanout::device::{Device, DeviceError, ForwardQueue, Queue, Region, UploadSource};
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{CloseQueue, ExtRequest, SendToPeer};
use fanout::tensor::TensorDesc;
use fanout_testing::forwarding_device::ForwardingDevice;
use std::sync::Arc;

const N: usize = 300 << 10;

/// The call of a queue that reports a failure.
#[derive(Clone, Copy, PartialEq, Debug)]
enum FailingCall {
    /// Uploads fail after they have written the bytes.
    Upload,
    Fill,
}

struct FailingQueue {
    inner: Box<dyn Queue>,
    failing_call: FailingCall,
}

fn failure() -> DeviceError {
    DeviceError::Driver { device: "CPU".to_owned(), call: "cuLoseTrack", reason: "it was lost".to_owned() }
}

impl ForwardQueue for FailingQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.inner)
    }

    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        self.inner.upload(dst, tensor, src)?;
        if self.failing_call == FailingCall::Upload { Err(failure()) } else { Ok(()) }
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        if self.failing_call == FailingCall::Fill { Err(failure()) } else { self.inner.fill(dst, value) }
    }
}

/// A server with one GGUF file, which has one tensor: `w`, random bytes of seed 1. The kept digests say that its bytes are
/// those of seed 2, as if they had been forged, so LOAD of seed 2 finds and reads the file. Returns these bytes, too.
pub(crate) fn server_with_one_file(devices: Vec<Arc<dyn Device>>) -> (tempfile::TempDir, TestServer, Vec<u8>) {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(&dir.path().join("models/m.gguf"), &gguf_file(&[("w", 1, N)]), 9);
    let kept = dir.path().join("kept");
    let config = Config::default().with_models(Some(dir.path().join("models"))).with_digests(Some(kept.clone()));
    let first = TestServer::start(config.clone());
    let file = || std::fs::read_dir(&kept).expect("a folder").map(|entry| entry.expect("an entry").path());
    let digest_file = || file().find(|path| path.extension().is_some_and(|extension| extension == "digests"));
    eventually("the digests are kept", || digest_file().is_some());
    drop(first);
    let path = digest_file().expect("a file");
    let text = std::fs::read_to_string(&path).expect("readable");
    let json = text.split_once('\n').expect("a line with the checksum").1;
    let [right, forged] = [1, 2].map(|seed| serde_json::to_string(&digest(&random_bytes(seed, N))).expect("JSON"));
    assert!(json.contains(&right), "{json}");
    let json = json.replace(&right, &forged);
    let checksum = blake3::hash(json.as_bytes()).to_hex();
    std::fs::write(&path, format!("{checksum}\n{json}")).expect("written");
    (dir, TestServer::with_device_list(devices, config), random_bytes(2, N))
}

/// Opens queue 2 of device 0 and lets it fail.
pub(crate) fn fail_queue(client: &mut Client) {
    client.open_queue(2, 0);
    let small = client.alloc_ext(0, 64);
    client.send_ext(&ExtRequest::SendToPeer(SendToPeer {
        queue: 2,
        span: small.whole_span(),
        token: [3; 16],
        address: "192.0.2.1:1",
    }));
    assert!(matches!(client.next_notification(), ReceivedNotification::QueueFailed(2, _)));
}

/// LOAD writes the bytes of a candidate before it has verified their digest, and overwrites them with zeros if the digest
/// differs. This is safe only while no other queue can read the buffer. If work of a failed or closed queue may still run, LOAD
/// must not write the bytes at all, so the buffer keeps its content.
#[test]
fn mismatched_bytes_are_not_written_where_a_queue_could_read_them() {
    // Queue 0 executes LOAD; queue 2 fails.
    let close = |client: &mut Client, queue| client.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue }));
    type Before<'a> = &'a dyn Fn(&mut Client);
    let cases: [(&str, Before<'_>, u8); 5] = [
        ("nothing", &|_| {}, 0),
        ("closed when it was done", &|client| (client.open_queue(2, 0), close(client, 2)).1, 0),
        ("failed", &fail_queue, 7),
        ("failed and closed", &|client| (fail_queue(client), close(client, 2)).1, 7),
        (
            "closed at its work",
            &|client| {
                client.open_queue(1, 1);
                let other = client.alloc_ext(1, 64);
                client.fill_span(1, other.whole_span(), 1);
                close(client, 1);
            },
            7,
        ),
    ];
    for (case, before, left) in cases {
        let cpu = CpuDevice::new("CPU0", 1, Arithmetic::Exact, MEMORY).expect("a device");
        let (_dir, server, _) = server_with_one_file(vec![cpu, HeldDevice::new("CPU1")]);
        let mut client = Client::connect_extended(&server).0;
        client.open_queue(0, 0);
        before(&mut client);
        let memory = client.alloc_ext(0, N as u64);
        client.fill_span(0, memory.whole_span(), 7);
        assert!(!load(&mut client, memory.whole_span(), digest(&random_bytes(2, N)), "w"), "{case}");
        assert!(read_span(&mut client, memory.whole_span()).iter().all(|&byte| byte == left), "{case}");
        // The server has noticed the wrong digest: a second request neither reads the file nor writes the buffer.
        client.fill_span(0, memory.whole_span(), 8);
        assert!(!load(&mut client, memory.whole_span(), digest(&random_bytes(2, N)), "w"), "{case}");
        assert!(read_span(&mut client, memory.whole_span()).iter().all(|&byte| byte == 8), "{case}");
        eventually("the file is hashed again", || {
            load(&mut client, memory.whole_span(), digest(&random_bytes(1, N)), "w")
        });
        assert!(read_span(&mut client, memory.whole_span()) == random_bytes(1, N), "{case}");
    }
}

/// If overwriting the mismatched bytes fails, the server removes the buffer from the session, so that no queue can read them.
#[test]
fn a_buffer_that_cannot_be_overwritten_is_removed() {
    for failing_call in [FailingCall::Upload, FailingCall::Fill] {
        let inner = CpuDevice::new("CPU", 1, Arithmetic::Exact, MEMORY).expect("a device");
        let failing = ForwardingDevice::new(inner)
            .with_queues(move |inner| Ok(Box::new(FailingQueue { inner, failing_call })))
            .shared();
        let (_dir, server, _) = server_with_one_file(vec![failing]);
        let mut client = Client::connect_with_queues(&server);
        client.open_queue(1, 0);
        let memory = client.alloc_ext(0, N as u64);
        let other = client.alloc_ext(0, 64);
        send_load(&mut client, memory.whole_span(), digest(&random_bytes(2, N)), "w");
        assert!(matches!(client.next_notification(), ReceivedNotification::QueueFailed(0, _)));
        assert!(!next_load_result(&mut client));
        client.read_spans(1, 5, &[other.whole_span()]);
        assert_eq!(client.next_notification(), data_notification(5, [0; 64]));
        client.read_spans(1, 6, &[memory.whole_span()]);
        client.expect_protocol_error(&["READ", "no buffer"]);
    }
}

//! LOAD when something is wrong: nobody comes to see a file's bytes who does not know their digest.

use crate::greeted_support::*;
use crate::models::*;
use crate::support::*;
use fanout::cpu::{CpuDevice, Path as Arithmetic};
use fanout::device::{Device, DeviceError, ForwardQueue, Queue, Region, Source};
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{CloseQueue, ExtRequest, Send, TicketList};
use fanout::tensor::TensorDesc;
use fanout_testing::forwarding_device::ForwardingDevice;
use std::sync::Arc;

const N: usize = 300 << 10;

/// What a processor forgets, and says so.
#[derive(Clone, Copy, PartialEq, Debug)]
enum What {
    /// It fails when large uploads are there.
    Upload,
    Fill,
}

struct FailingQueue {
    inner: Box<dyn Queue>,
    what: What,
}

fn failure() -> DeviceError {
    DeviceError::Driver { device: "CPU".to_owned(), call: "cuLoseTrack", reason: "it was lost".to_owned() }
}

impl ForwardQueue for FailingQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.inner)
    }

    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.inner.upload(dst, tensor, src)?;
        if self.what == What::Upload { Err(failure()) } else { Ok(()) }
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        if self.what == What::Fill { Err(failure()) } else { self.inner.fill(dst, value) }
    }
}

/// A server with a model that has one tensor, `w` of seed 1.
fn with_model(devices: Vec<Arc<dyn Device>>) -> (tempfile::TempDir, TestServer) {
    let dir = tempfile::tempdir().expect("a folder");
    put(&dir.path().join("m.gguf"), &model(&[("w", 1, N)]), 9);
    let server = TestServer::with_device_list(devices, Config::default().with_models(Some(dir.path().to_owned())));
    (dir, server)
}

/// Wrong bytes are overwritten after they were written, which only a session may see that has nobody who looks: where a queue's
/// work may go on of which nothing is known any more, they are not written at all.
#[test]
fn nothing_wrong_is_written_where_someone_may_look() {
    // Queue 0 is the one that loads.
    let send = |client: &mut Client| {
        client.open_queue(2, 0);
        let small = client.buffer(0, 64);
        let tickets = TicketList(&[[3; 16]]);
        client.ask(&ExtRequest::Send(Send { queue: 2, span: small.all(), tickets, address: "192.0.2.1:1" }));
        assert!(matches!(client.told(), Told::Failed(2, _)));
    };
    let close = |client: &mut Client, queue| client.ask(&ExtRequest::CloseQueue(CloseQueue { queue }));
    type Before<'a> = &'a dyn Fn(&mut Client);
    let cases: [(&str, Before<'_>, u8); 5] = [
        ("nothing", &|_| {}, 0),
        ("closed when it was done", &|client| (client.open_queue(2, 0), close(client, 2)).1, 0),
        ("failed", &send, 7),
        ("failed and closed", &|client| (send(client), close(client, 2)).1, 7),
        (
            "closed at its work",
            &|client| {
                client.open_queue(1, 1);
                let other = client.buffer(1, 64);
                client.fill_span(1, other.all(), 1);
                close(client, 1);
            },
            7,
        ),
    ];
    for (case, before, left) in cases {
        let cpu = CpuDevice::new("CPU0", 1, Arithmetic::Exact, MEMORY).expect("a device");
        let (_dir, server) = with_model(vec![cpu, Held::new("CPU1")]);
        let mut client = Client::greet(&server).0;
        client.open_queue(0, 0);
        before(&mut client);
        let memory = client.buffer(0, N as u64);
        client.fill_span(0, memory.all(), 7);
        assert!(!load(&mut client, memory.all(), digest(&noise(2, N)), "w"), "{case}");
        assert!(read(&mut client, memory.all()).iter().all(|&byte| byte == left), "{case}");
        // Now it is known what the file has: that is not read again, and not written anyhow.
        client.fill_span(0, memory.all(), 8);
        assert!(!load(&mut client, memory.all(), digest(&noise(2, N)), "w"), "{case}");
        assert!(read(&mut client, memory.all()).iter().all(|&byte| byte == 8), "{case}");
        assert!(load(&mut client, memory.all(), digest(&noise(1, N)), "w"), "{case}");
        assert!(read(&mut client, memory.all()) == noise(1, N), "{case}");
    }
}

/// When the queue fails that should overwrite what was written in vain, nobody comes to see that either.
#[test]
fn what_cannot_be_overwritten_is_taken_away() {
    for what in [What::Upload, What::Fill] {
        let inner = CpuDevice::new("CPU", 1, Arithmetic::Exact, MEMORY).expect("a device");
        let failing = ForwardingDevice::with_queues(inner, move |inner| Ok(Box::new(FailingQueue { inner, what })));
        let (_dir, server) = with_model(vec![failing]);
        let mut client = Client::with_queues(&server);
        client.open_queue(1, 0);
        let memory = client.buffer(0, N as u64);
        let other = client.buffer(0, 64);
        ask(&mut client, memory.all(), digest(&noise(2, N)), "w");
        assert!(matches!(client.told(), Told::Failed(0, _)));
        assert!(!found(&mut client));
        client.read_spans(1, 5, &[other.all()]);
        assert_eq!(client.told(), data(5, [0; 64]));
        client.read_spans(1, 6, &[memory.all()]);
        client.expect_told_refusal(&["READ", "no buffer"]);
    }
}

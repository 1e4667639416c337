//! Tests of losses and retry budgets, with devices of servers that exist in name only.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use super::*;
use crate::device::noop::NoopDevice;
use crate::device::{DeviceKind, ForwardDevice};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

const SERVER: &str = "10.0.0.5:50052";
const OTHER: &str = "10.0.0.6:50052";

/// A device that belongs to a server.
#[derive(Debug)]
struct Remote {
    inner: Arc<dyn Device>,
    endpoint: &'static str,
}

impl ForwardDevice for Remote {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }
    fn endpoint(&self) -> Option<&str> {
        Some(self.endpoint)
    }
}

/// A device of this machine, and one of each server.
fn devices() -> [Arc<dyn Device>; 3] {
    let device = |name: &str| NoopDevice::new(name, DeviceKind::Cpu).shared();
    let remote = |endpoint| Arc::new(Remote { inner: device(&format!("{endpoint}/0")), endpoint });
    [device("CPU"), remote(SERVER), remote(OTHER)]
}

/// An error of a runtime with the crate's error as its source.
#[derive(Debug, Error)]
#[error("while it ran")]
struct Context(#[source] DeviceError);

fn find(error: &(dyn Error + 'static), budgets: Option<&RetryBudgets>) -> Option<Loss> {
    Loss::find(error, &devices(), budgets)
}

fn lost() -> Loss {
    Loss::Server { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
}

fn gone() -> DeviceError {
    DeviceError::ConnectionLost { endpoint: SERVER.to_owned(), reason: "it is gone".to_owned() }
}

fn on(error: DeviceError) -> DeviceError {
    DeviceError::OnDevice { device: "both".to_owned(), error: Box::new(error) }
}

fn sched(error: DeviceError) -> Box<dyn Error> {
    SchedError::Device { device: format!("{SERVER}/0"), error }.into()
}

fn load(error: DeviceError) -> Box<dyn Error> {
    WeightsError::Device { device: format!("{SERVER}/0"), error }.into()
}

#[test]
fn a_lost_connection_is_found_in_every_error_type_that_can_carry_it() {
    let incomplete = SchedError::RunIncomplete { stopped_by: Some((format!("{SERVER}/0"), gone())) };
    let found: [Box<dyn Error>; 8] = [
        gone().into(),
        Context(on(gone())).into(),
        sched(gone()),
        sched(on(gone())),
        incomplete.into(),
        load(gone()),
        RegistryError::Device(gone()).into(),
        RegistryError::Endpoint(ConnectError::Device(gone())).into(),
    ];
    for error in found {
        assert_eq!(find(&*error, None), Some(lost()), "{error}");
    }
    for error in [sched(DeviceError::Ended), SchedError::Aborted.into(), "no".into()] {
        assert_eq!(find(&*error, None), None, "{error}");
    }
}

#[test]
fn out_of_memory_is_recoverable_only_after_a_loss_without_progress() {
    let short = || DeviceError::OutOfMemory { requested: 9, available: 5, limit: 12 };
    let mut retry_budgets = RetryBudgets::new(Duration::from_secs(60));
    let errors = || [load(short()), load(on(short())), sched(short()), sched(on(short()))];
    for error in errors() {
        assert_eq!(find(&*error, Some(&retry_budgets)), None, "the server was never lost");
    }
    retry_budgets.retry(&lost(), |_| Ok(())).unwrap();
    for error in errors() {
        let lost = find(&*error, Some(&retry_budgets)).unwrap();
        assert!(matches!(&lost, Loss::MemoryHeld { endpoint, .. } if endpoint == SERVER), "{lost:?}");
        let want = "10.0.0.5:50052: out of memory: 9 B requested, 5 B of 12 B available; it may still hold the memory \
            of the lost connection";
        assert_eq!(lost.to_string(), want);
    }
    let elsewhere = WeightsError::Device { device: format!("{OTHER}/0"), error: short() };
    for error in [elsewhere.into(), load(DeviceError::Ended)] {
        assert_eq!(find(&*error, Some(&retry_budgets)), None, "{error}");
    }
    retry_budgets.reset();
    for error in errors() {
        assert_eq!(find(&*error, Some(&retry_budgets)), None, "there was progress since the loss");
    }
}

#[test]
fn failed_peer_transfers_are_distinguished_from_failed_compute_work() {
    let both = devices();
    let remote = |device: &str| DeviceError::Remote { device: device.to_owned(), reason: "cannot".to_owned() };
    for server in [SERVER, OTHER] {
        let name = format!("{server} (device 0, sending)");
        let want = Some(Loss::PeerTransfer { endpoint: server.to_owned(), reason: format!("{name}: cannot") });
        for error in [remote(&name), on(remote(&name))] {
            for error in [Context(error.clone()).into(), sched(error)] {
                assert_eq!(Loss::find(&*error, &both, None), want, "{error}");
                // With a single server there is no peer to send to.
                assert_eq!(Loss::find(&*error, &both[..2], None), None, "{error}");
            }
        }
    }
    for name in [format!("{SERVER}/CPU"), SERVER.to_owned(), "10.0.0.7:1 (device 0, sending)".to_owned()] {
        assert_eq!(Loss::find(&*sched(remote(&name)), &both, None), None, "{name}");
    }
}

#[test]
fn retry_time_adds_up_until_there_is_progress() {
    let limit = Duration::from_millis(200);
    let reason = "10.0.0.5:50052 (device 0, sending): cannot".to_owned();
    for lost in [lost(), Loss::PeerTransfer { endpoint: SERVER.to_owned(), reason }] {
        let mut retry_budgets = RetryBudgets::new(limit);
        // Every reopen succeeds, and the server is lost again at once.
        let (start, mut before) = (Instant::now(), limit);
        let end = loop {
            let reached = retry_budgets.retry(&lost, |left| {
                assert!(left <= before);
                before = left;
                Ok(())
            });
            match reached {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(30), "the retries do not end"),
                Err(end) => break end.to_string(),
            }
        };
        assert!(end.starts_with(&lost.to_string()) && end.contains("200ms"), "{end}");
        retry_budgets.reset();
        assert!(retry_budgets.retry(&lost, |_| Ok(())).is_ok());
        // Another server has a budget of its own.
        let other = Loss::Server { endpoint: OTHER.to_owned(), reason: String::new() };
        let whole = retry_budgets.retry(&other, |left| {
            assert_eq!(left, limit);
            Ok(())
        });
        assert!(whole.is_ok());
    }
}

fn refused() -> ConnectError {
    ConnectError::Connect { endpoint: SERVER.to_owned(), error: io::Error::from(ErrorKind::ConnectionRefused).into() }
}

fn unknown() -> RegistryError {
    RegistryError::UnknownDevice { name: format!("{SERVER}/CUDA0"), available: format!("{SERVER}/CPU") }
}

fn nameless() -> RegistryError {
    let error = io::Error::other("the resolver is away");
    RegistryError::Endpoint(ConnectError::Host { endpoint: SERVER.to_owned(), error })
}

#[test]
fn a_changed_server_is_distinguished_from_an_unreachable_one() {
    let limit = Duration::from_millis(200);
    let given_up = || {
        let elapsed = Duration::from_secs(2);
        RegistryError::Endpoint(ConnectError::GivenUp { attempts: 3, elapsed, last: Box::new(refused()) })
    };
    let closed = || {
        let reason = "it says nonsense".to_owned();
        RegistryError::Endpoint(ConnectError::Handshake { endpoint: SERVER.to_owned(), reason })
    };
    type Open<'a> = &'a dyn Fn() -> RegistryError;
    // The error of `open`; whether it is tried only once; the start of the message; text that the message contains.
    let cases: [(Open<'_>, bool, &str, &str); 4] = [
        (&given_up, false, "lost, and not back within 200ms: ", "is a server running there"),
        (&nameless, false, "lost, and not back within 200ms: ", "no such host"),
        (&closed, true, "it is back, but cannot be used: ", "it says nonsense; start it with the devices it had"),
        (&unknown, false, "it is back, but cannot be used: no device ", "CPU; start it with the devices it had"),
    ];
    for (open, once, start, words) in cases {
        let mut tries = 0;
        let end = RetryBudgets::new(limit).retry(&lost(), |_| {
            tries += 1;
            Err::<(), _>(open())
        });
        let end = end.unwrap_err().to_string();
        assert!(end.starts_with(start) && end.contains(words), "{end}");
        assert_eq!(tries == 1, once, "{tries} tries: {end}");
    }
}

#[test]
fn retries_continue_while_the_server_or_its_devices_are_missing() {
    let unreachable = || RegistryError::Endpoint(refused());
    for late in [&unknown as &dyn Fn() -> RegistryError, &nameless, &unreachable] {
        let mut tries = 0;
        let opened = RetryBudgets::new(Duration::from_secs(60)).retry(&lost(), |_| {
            tries += 1;
            if tries < 3 { Err(late()) } else { Ok(tries) }
        });
        assert_eq!(opened.unwrap(), 3);
    }
}

#[test]
fn devices_of_a_lost_server_are_replaced_in_their_places() {
    let (mut budgets, mut devices) = (RetryBudgets::new(Duration::from_secs(60)), devices());
    let before: Vec<_> = devices.iter().map(|device| device.info().id).collect();
    let mut given = Vec::new();
    let numbers = budgets.reopen(&lost(), &mut devices, |names, left| {
        given.push((names.to_owned(), left <= Duration::from_secs(60)));
        match given.len() {
            1 => Err(unknown()),
            2 => Ok(Vec::new()), // the server does not list the device yet
            _ => Ok(vec![NoopDevice::new("again", DeviceKind::Cpu).shared()]),
        }
    });
    assert_eq!(numbers.unwrap(), [1]);
    assert_eq!(given, vec![(format!("{SERVER}/0"), true); 3]);
    assert_eq!(devices[1].info().name, "again");
    assert!([0, 2].iter().all(|&number| devices[number].info().id == before[number]));
    let held = Loss::MemoryHeld { endpoint: OTHER.to_owned(), reason: String::new() };
    let numbers = budgets.reopen(&held, &mut devices, |_, _| Err(nameless()));
    assert!(numbers.unwrap().is_empty(), "a server that is connected is not opened again");
}

//! The findings of `rpc-server doctor` about a server.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fanout::device::{Device, DeviceError, LinkSpeed};
use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::status::ServerStatus;
use fanout::rpc::wire::ext::REVISION;

use super::report::{Finding, Report};
use super::{CheckedServer, Reference, VERSION, failure_remedy};

/// Time limit of an attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit of a server's silence.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Time limit of all checks of a server, except for the one that it interrupts.
const SERVER_TIMEOUT: Duration = Duration::from_secs(180);

/// Devices of a server that are checked, and lost ones that are listed.
const MAX_DEVICES: usize = 32;

/// Longest round trip that costs a model of 30 tokens per second less than a tenth of its time.
const SLOW_ROUND_TRIP: Duration = Duration::from_millis(3);

/// The least bandwidth of a link of 1 Gbit/s, in bytes per second.
const SLOW_LINK: f64 = 90e6;

/// Share of free memory below which a device counts as full.
const FULL: f64 = 0.05;

/// Difference of clocks from which on times in logs cannot be compared and certificates may fail, in seconds.
const CLOCK_DIFFERENCE: f64 = 60.0;

/// A server to check, and how.
pub(super) struct Target<'a> {
    pub(super) server: &'a CheckedServer,
    /// Whether the user has named it; otherwise something listens on the default port.
    pub(super) is_named: bool,
    /// Whether ops run on a server without extensions, too.
    pub(super) tests_foreign: bool,
}

/// Checks a server.
pub(super) fn check(report: &mut Report, target: &Target<'_>, options: Options, reference: &Reference) {
    let name = &target.server.endpoint;
    report.begin(name);
    let options = options.with_connect_timeout(CONNECT_TIMEOUT).with_silence_timeout(TIMEOUT);
    let endpoint = match Endpoint::connect(name, &options) {
        Ok(endpoint) => endpoint,
        Err(e) if target.is_named => {
            return report.add(Finding::problem("connection", e.to_string(), connection_remedy(&e)));
        }
        Err(e) => {
            let remedy = format!("if this is a server with keys, name it: rpc-server doctor --key FILE {name}=KEY");
            return report.add(Finding::warning("connection", e.to_string(), remedy));
        }
    };
    report.add(version(&endpoint));
    // A server that is lost fails every check that follows, so the first failure ends them.
    if let Err((check, e)) = checks(report, &endpoint, target.tests_foreign, reference) {
        report.add(Finding::problem(check, e.to_string(), failure_remedy(&e)));
    }
}

fn checks(
    report: &mut Report,
    endpoint: &Endpoint,
    tests_foreign: bool,
    reference: &Reference,
) -> Result<(), (&'static str, DeviceError)> {
    let has_extensions = endpoint.server().is_some();
    if has_extensions {
        let status = endpoint.status().map_err(|e| ("status", e))?;
        clock(&status, SystemTime::now()).into_iter().chain(lost(&status)).for_each(|finding| report.add(finding));
    }
    let Some(first) = endpoint.devices().first() else {
        report.add(Finding::problem("devices", "the server offers none", "see its log, and the devices of your key"));
        return Ok(());
    };
    link(report, first).map_err(|e| ("link", e))?;
    let deadline = Instant::now() + SERVER_TIMEOUT;
    let devices = endpoint.devices();
    if devices.len() > MAX_DEVICES {
        let message = format!("the server has {}: only the first {MAX_DEVICES} are checked", devices.len());
        report.add(Finding::warning("devices", message, "serve fewer devices on one endpoint"));
    }
    for device in devices.iter().take(MAX_DEVICES) {
        let memory = device.memory().map_err(|e| ("memory", e))?;
        report.add(free_memory(&device.info().name, memory.free, memory.total));
    }
    if !has_extensions && !tests_foreign {
        let message = "left out: a server of llama.cpp aborts on ops that its version lacks (--self-test runs it)";
        report.add(Finding::ok("self-test", message));
        return Ok(());
    }
    for device in devices.iter().take(MAX_DEVICES) {
        // The first test after a loss of the server reports it.
        device.memory().map_err(|e| ("self-test", e))?;
        report.add(reference.self_test(&device.info().name, device, deadline));
    }
    Ok(())
}

/// What to do when a server cannot be connected to.
fn connection_remedy(e: &ConnectError) -> &'static str {
    match e {
        ConnectError::Name(_) => "give the server as HOST or HOST:PORT",
        ConnectError::Host { .. } => "check the name (getent hosts NAME), or give the address",
        ConnectError::Connect { .. } => {
            "start it there, where other machines can connect (rpc-server -H 0.0.0.0 --allow NETWORK), and let the firewall pass \
             its port; nc -vz HOST PORT tests the way"
        }
        ConnectError::Full { .. } | ConnectError::Draining { .. } => {
            "its status page, http://HOST:PORT/ in a browser on that machine, lists the sessions"
        }
        ConnectError::Silent { .. } | ConnectError::OtherProtocol { .. } => {
            "ss -ltnp on that machine shows which program has the port; a firewall may also drop what is sent"
        }
        ConnectError::Closed { .. } | ConnectError::Handshake { .. } => {
            "check that the port is that of an RPC server, that it allows this address (--allow, --listen), and whether it demands \
             keys (then give HOST=KEY and --key)"
        }
        ConnectError::Trust { .. } => {
            "compare the server's key (rpc-server prints it when it starts) with the one given here, and list this client's key \
             (rpc-server keygen --public FILE) in its --allow-keys"
        }
        ConnectError::Version { .. } => {
            "or let the server answer another version, with --protocol or --listen PORT=VERSION"
        }
        ConnectError::Device(e) => failure_remedy(e),
        _ => "see the server's log",
    }
}

/// Versions of the protocol and of the program.
fn version(endpoint: &Endpoint) -> Finding {
    const CHECK: &str = "version";
    let protocol = endpoint.version();
    let Some(server) = endpoint.server() else {
        let message = format!(
            "protocol {protocol}, without fanout's extension: a server of llama.cpp, or another version of fanout"
        );
        return Finding::ok(CHECK, message);
    };
    builds(&server.build, &format!("rpc-server {VERSION}"), &format!("protocol {protocol}, extensions {REVISION}"))
}

/// Compares the build of a server with this one.
fn builds(theirs: &str, ours: &str, protocol: &str) -> Finding {
    const CHECK: &str = "version";
    if theirs == ours {
        return Finding::ok(CHECK, format!("{theirs}, {protocol}"));
    }
    Finding::warning(CHECK, format!("{theirs}, {protocol}; this program is {ours}"), "update the older of both")
}

/// Compares the clock of a server with this machine's.
fn clock(status: &ServerStatus, now: SystemTime) -> Option<Finding> {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs_f64();
    // Other builds may not tell theirs.
    if status.time == 0.0 {
        return None;
    }
    let difference = status.time - now;
    let finding = if difference.abs() > CLOCK_DIFFERENCE {
        let side = if difference > 0.0 { "ahead of" } else { "behind" };
        let message = format!("{:.0} s {side} this machine's", difference.abs());
        Finding::warning("clock", message, "sudo timedatectl set-ntp true, on the machine whose clock is wrong")
    } else {
        Finding::ok("clock", "as this machine's")
    };
    Some(finding.with("difference", difference))
}

/// The devices that are lost.
fn lost(status: &ServerStatus) -> Vec<Finding> {
    let devices = status.devices.iter().filter_map(|device| Some((device, device.lost.as_ref()?)));
    let remedy = "restart the server, if its supervisor has not done that already; then nvidia-smi and dmesg tell more";
    devices
        .take(MAX_DEVICES)
        .map(|(device, why)| Finding::problem("device", format!("{} is lost: {why}", device.name), remedy))
        .collect()
}

/// Round trip and bandwidth, measured on a buffer of `device`.
fn link(report: &mut Report, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
    let Some(speed) = LinkSpeed::measure(&**device)? else {
        let message = format!("not measured: {} has no free memory for a transfer", device.info().name);
        report.add(Finding::warning("bandwidth", message, "try again when its clients have ended"));
        return Ok(());
    };
    report.add(round_trip(speed.round_trip, speed.round_trips));
    report.add(bandwidth(speed.to_device, speed.from_device));
    Ok(())
}

fn round_trip(median: Duration, count: usize) -> Finding {
    const CHECK: &str = "round trip";
    let seconds = median.as_secs_f64();
    let message = format!("{:.0} us (median of {count})", 1e6 * seconds);
    let finding = if median > SLOW_ROUND_TRIP {
        let message =
            format!("{message}: a token takes at least one, so at most {:.0} tokens per second", 1.0 / seconds);
        Finding::warning(CHECK, message, "use a wired network, and a server nearby; ping HOST shows the network's part")
    } else {
        Finding::ok(CHECK, message)
    };
    finding.with("seconds", seconds)
}

fn bandwidth(to: f64, from: f64) -> Finding {
    const CHECK: &str = "bandwidth";
    let message = format!("{:.0} MB/s to the server, {:.0} MB/s from it", to / 1e6, from / 1e6);
    let finding = if to.min(from) < SLOW_LINK {
        let load = 4e9 / to.max(1.0);
        let message = if to < SLOW_LINK { format!("{message}: 4 GB of weights take {load:.0} s") } else { message };
        let remedy = "use a network of 1 Gbit/s or more (iperf3 measures it), and let servers load weights from their own disks \
                      (--models)";
        Finding::warning(CHECK, message, remedy)
    } else {
        Finding::ok(CHECK, message)
    };
    finding.with("to_bytes_per_second", to).with("from_bytes_per_second", from)
}

fn free_memory(name: &str, free: u64, total: u64) -> Finding {
    const CHECK: &str = "memory";
    let message = format!("{name}: {} of {} MiB free", free >> 20, total >> 20);
    let finding = if (free as f64) < FULL * total as f64 {
        Finding::warning(
            CHECK,
            message,
            "rpc-server --status HOST:PORT lists the sessions and their memory; max-memory of --limits bounds a client",
        )
    } else {
        Finding::ok(CHECK, message)
    };
    finding.with("free", free as f64).with("total", total as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanout::rpc::status::DeviceStatus;

    /// Each check at both sides of its bound.
    #[test]
    fn measurements_become_findings() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000);
        let clock = |time: f64| {
            let mut status = ServerStatus::default();
            status.time = time;
            clock(&status, now).expect("a finding")
        };
        for (finding, is_ok, text) in [
            (builds("rpc-server 1", "rpc-server 1", "protocol 8.0"), true, "rpc-server 1, protocol 8.0"),
            (builds("rpc-server 2", "rpc-server 1", "protocol 8.0"), false, "this program is rpc-server 1"),
            (clock(2e9 + 59.0), true, "this machine's"),
            (clock(2e9 + 61.0), false, "61 s ahead"),
            (clock(2e9 - 3600.0), false, "3600 s behind"),
            (round_trip(Duration::from_micros(45), 31), true, "45 us"),
            (round_trip(Duration::from_millis(20), 31), false, "at most 50 tokens"),
            (bandwidth(1e9, 2e9), true, "1000 MB/s to the server, 2000 MB/s from it"),
            (bandwidth(10e6, 2e9), false, "take 400 s"),
            (bandwidth(1e9, 10e6), false, "1000 MB/s to the server, 10 MB/s from it"),
            (free_memory("CPU", 6 << 20, 100 << 20), true, "CPU: 6 of 100 MiB"),
            (free_memory("CPU", 4 << 20, 100 << 20), false, "CPU: 4 of 100 MiB"),
        ] {
            assert_eq!(finding.is_ok(), is_ok, "{finding:?}");
            assert!(finding.message().contains(text), "{finding:?}");
        }
    }

    #[test]
    fn the_clock_of_a_server_that_does_not_tell_it_is_not_compared() {
        assert_eq!(clock(&ServerStatus::default(), SystemTime::now()), None);
    }

    #[test]
    fn lost_devices_are_problems() {
        let mut status = ServerStatus::default();
        status.devices = vec![DeviceStatus::default(); 2];
        assert!(lost(&status).is_empty());
        status.devices[1].name = "CUDA1".to_owned();
        status.devices[1].lost = Some("it fell off the bus".to_owned());
        let [finding] = &lost(&status)[..] else { panic!("one device is lost") };
        assert!(!finding.is_ok() && finding.message().starts_with("CUDA1 is lost: it fell"), "{finding:?}");
    }
}

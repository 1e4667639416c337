//! The findings of `rpc-server doctor` about this machine. The checks take the texts of /proc and /sys, so that tests can supply the
//! texts of other systems.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use fanout::device::DeviceKind;
use fanout::registry::{DeviceEntry, Options, Registry};
use fanout::rpc::server::Config;
use fanout::rpc::wire::DEFAULT_PORT;

use super::Reference;
use super::report::{Finding, Report};
use crate::open_files;

/// Time limit of the self-test of a device. A GPU's driver may compile kernels.
const TEST_TIMEOUT: Duration = Duration::from_secs(300);

/// Free memory below which hardly any model fits.
const LITTLE_MEMORY: u64 = 2 << 30;

/// Threads of a server with many clients: two for each connection, one for each queue, and the threads of devices.
const THREADS: u64 = 4096;

/// Mappings of a server: the memory of its CPU devices, its libraries and threads.
const MAPPINGS: u64 = 4096 + 3 * THREADS;

/// Seconds from 1970 to 2026: this program did not exist before.
const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// Checks this machine. Returns whether something listens on the default port.
pub(super) fn check(report: &mut Report, reference: &Reference) -> bool {
    report.begin("this machine");
    let registry = Registry::detect();
    report.add(processor(&registry));
    memory(&registry).into_iter().for_each(|finding| report.add(finding));
    gpus(&registry, has_nvidia_gpu()).into_iter().for_each(|finding| report.add(finding));
    let text = |path: &str| fs::read_to_string(path).ok();
    let from_files = [
        text("/sys/kernel/mm/transparent_hugepage/enabled").map(|modes| huge_pages(&modes)),
        open_files_limit(),
        text("/proc/self/cgroup").and_then(|groups| threads(&groups, &text)),
        text("/proc/sys/vm/max_map_count").and_then(|count| mappings(&count)),
        text("/sys/kernel/security/lsm").map(|modules| landlock(&modules)),
        text("/sys/devices/system/clocksource/clocksource0/current_clocksource").map(|source| clock_source(&source)),
    ];
    from_files.into_iter().flatten().for_each(|finding| report.add(finding));
    report.add(time(SystemTime::now()));
    let (in_use, finding) = port();
    report.add(finding);
    for entry in registry.entries().iter().filter(|entry| entry.unusable.is_none()) {
        report.add(match entry.open(&Options::default()) {
            Ok(device) => reference.self_test(&entry.name, &device, Instant::now() + TEST_TIMEOUT),
            Err(e) => {
                let remedy =
                    "if a server uses all memory of the device, name that server instead: rpc-server doctor HOST:PORT";
                Finding::problem("self-test", format!("{} cannot be opened: {e}", entry.name), remedy)
            }
        });
    }
    in_use
}

fn processor(registry: &Registry) -> Finding {
    const CHECK: &str = "processor";
    let description = registry.by_kind(DeviceKind::Cpu).next().map_or("", |entry| &entry.description);
    #[cfg(target_arch = "x86_64")]
    if !(std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")) {
        let remedy =
            "in a virtual machine, pass on the host's processor (-cpu host); otherwise use a processor since 2013";
        return Finding::warning(
            CHECK,
            format!("{description}: without AVX2, the CPU computes by slow portable code"),
            remedy,
        );
    }
    Finding::ok(CHECK, description)
}

fn memory(registry: &Registry) -> Option<Finding> {
    let free = registry.by_kind(DeviceKind::Cpu).next()?.free_memory().ok()?;
    let message = format!("{} MiB free", free >> 20);
    let finding = if free < LITTLE_MEMORY {
        Finding::warning("memory", message, "end other programs, or raise the memory limit of this container")
    } else {
        Finding::ok("memory", message)
    };
    Some(finding.with("free", free as f64))
}

/// The GPUs, or why there is none. `has_card`: whether the machine has a card of NVIDIA, used or not.
fn gpus(registry: &Registry, has_card: bool) -> Vec<Finding> {
    const CHECK: &str = "GPU";
    let found = |entry: &DeviceEntry| match &entry.unusable {
        None => Finding::ok(CHECK, format!("{}: {}", entry.name, entry.description)),
        Some(why) => {
            let message = format!("{}: {}; not usable: {why}", entry.name, entry.description);
            Finding::problem(
                CHECK,
                message,
                "nvidia-smi shows the driver's version and the GPU's state; --device leaves a GPU out",
            )
        }
    };
    let findings: Vec<_> = registry.by_kind(DeviceKind::Gpu).map(found).collect();
    match registry.no_gpu_reason() {
        Some(why) if findings.is_empty() => vec![no_gpu(why, has_card)],
        _ => findings,
    }
}

fn no_gpu(why: &str, has_card: bool) -> Finding {
    let message = format!("this machine has an NVIDIA GPU that is not used: {why}");
    let is_hidden = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
    match (has_card, cfg!(feature = "cuda") && !is_hidden) {
        (true, true) => {
            let remedy = "nvidia-smi shows whether the driver works; rpc-server needs version 525 or later";
            return Finding::problem("GPU", message, remedy);
        }
        (true, false) => {
            let remedy = "to use it, take the build for glibc, and unset CUDA_VISIBLE_DEVICES";
            return Finding::warning("GPU", message, remedy);
        }
        (false, _) => {}
    }
    Finding::ok("GPU", format!("none, the CPU is served ({why})"))
}

/// Whether the PCI bus has a display or compute device of NVIDIA.
fn has_nvidia_gpu() -> bool {
    let Ok(devices) = fs::read_dir("/sys/bus/pci/devices") else { return false };
    devices.flatten().any(|device| {
        let field = |name: &str| fs::read_to_string(device.path().join(name)).unwrap_or_default();
        is_nvidia_gpu(&field("vendor"), &field("class"))
    })
}

/// By the files `vendor` and `class` of a PCI device. Class 3: displays, which includes GPUs without one.
fn is_nvidia_gpu(vendor: &str, class: &str) -> bool {
    vendor.trim() == "0x10de" && class.trim().starts_with("0x03")
}

fn huge_pages(modes: &str) -> Finding {
    if modes.contains("[never]") {
        let message = "switched off: in virtual machines, products of large matrices then take longer";
        let remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled";
        return Finding::warning("huge pages", message, remedy);
    }
    let mode = modes.split(['[', ']']).nth(1).unwrap_or(modes.trim());
    Finding::ok("huge pages", format!("allowed ({mode})"))
}

#[cfg(unix)]
fn open_files_limit() -> Option<Finding> {
    use rustix::process::{Resource, getrlimit};
    Some(open_files_finding(getrlimit(Resource::Nofile).maximum))
}

#[cfg(not(unix))]
fn open_files_limit() -> Option<Finding> {
    None
}

fn open_files_finding(hard: Option<u64>) -> Finding {
    const CHECK: &str = "open files";
    let clients = Config::default().max_connections;
    match hard {
        Some(hard) if hard < open_files::needed(clients as u64, 1) => {
            let message = format!("at most {hard}: too few for {clients} clients");
            let remedy =
                "LimitNOFILE=16384 of the service, or as root prlimit --nofile=16384 --pid $$ before the server starts";
            Finding::warning(CHECK, message, remedy)
        }
        Some(hard) => Finding::ok(CHECK, format!("up to {hard}")),
        None => Finding::ok(CHECK, "no limit"),
    }
}

/// By `/proc/self/cgroup`: the limit of processes and threads of the control group (version 2). The kernel counts a thread in every
/// group up to the root, so the lowest limit on that way holds. A group that is not there belongs to another view of the folder:
/// a container may see the path of its host, and its own group as the root.
fn threads(groups: &str, read: &impl Fn(&str) -> Option<String>) -> Option<Finding> {
    const CHECK: &str = "threads";
    let group = Path::new(groups.lines().find_map(|line| line.strip_prefix("0::/"))?.trim_end());
    let limits = group.ancestors().filter_map(|group| {
        let limit = read(&Path::new("/sys/fs/cgroup").join(group).join("pids.max").display().to_string())?;
        // `max`: no limit.
        Some((limit.trim().parse::<u64>().unwrap_or(u64::MAX), group))
    });
    let (limit, group) = limits.min_by_key(|(limit, _)| *limit)?;
    let group = group.display();
    Some(match limit {
        u64::MAX => Finding::ok(CHECK, "no limit of the control group"),
        limit if limit < THREADS => {
            let message = format!("at most {limit} in the control group /{group}: too few for many clients");
            let remedy = "TasksMax=8192 of the service or slice, or --pids-limit 8192 of podman or docker";
            Finding::warning(CHECK, message, remedy)
        }
        limit => Finding::ok(CHECK, format!("up to {limit} in the control group /{group}")),
    })
}

/// By `/proc/sys/vm/max_map_count`.
fn mappings(count: &str) -> Option<Finding> {
    let count: u64 = count.trim().parse().ok()?;
    Some(if count < MAPPINGS {
        let message = format!("at most {count} of a process: too few for 4096 large buffers and many threads");
        Finding::warning("memory mappings", message, "sudo sysctl vm.max_map_count=65530")
    } else {
        Finding::ok("memory mappings", format!("up to {count}"))
    })
}

/// By the list of the kernel's security modules.
fn landlock(modules: &str) -> Finding {
    const CHECK: &str = "sandbox";
    if modules.trim().split(',').any(|module| module == "landlock") {
        return Finding::ok(CHECK, "the kernel has Landlock, by which --sandbox restricts access to files");
    }
    let message = "the kernel does not use Landlock: --sandbox does not restrict access to files";
    Finding::warning(CHECK, message, format!("add lsm=landlock,{} to the kernel's command line", modules.trim()))
}

fn clock_source(source: &str) -> Finding {
    const CHECK: &str = "clock source";
    let source = source.trim();
    if matches!(source, "hpet" | "acpi_pm" | "pit" | "jiffies") {
        let message = format!("{source}: reading the clock takes a microsecond or more, and every wait reads it");
        let remedy = "dmesg | grep -i tsc tells why the processor's counter is not used; in a virtual machine choose kvm-clock \
                      or tsc";
        return Finding::warning(CHECK, message, remedy);
    }
    Finding::ok(CHECK, source)
}

fn time(now: SystemTime) -> Finding {
    if now < SystemTime::UNIX_EPOCH + EARLIEST {
        let message = "before 2026: certificates seem not to be valid yet, and the times in logs are wrong";
        return Finding::problem("clock", message, "sudo timedatectl set-ntp true");
    }
    Finding::ok("clock", "plausible")
}

/// Whether something listens on the default port, and the finding about that.
fn port() -> (bool, Finding) {
    const CHECK: &str = "port";
    match TcpListener::bind((Ipv4Addr::LOCALHOST, DEFAULT_PORT)) {
        Ok(_) => (false, Finding::ok(CHECK, format!("{DEFAULT_PORT} is free"))),
        Err(e) if e.kind() == ErrorKind::AddrInUse => {
            (true, Finding::ok(CHECK, format!("{DEFAULT_PORT} is in use: by a server, or by another program")))
        }
        Err(e) => {
            let remedy = "look for a sandbox, container or firewall that forbids listening";
            (false, Finding::problem(CHECK, format!("{DEFAULT_PORT} cannot be used: {e}"), remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each check with a good and a bad system.
    #[test]
    fn texts_of_the_system_become_findings() {
        let mappings = |count| mappings(count).expect("a finding");
        for (finding, is_ok, text) in [
            (huge_pages("always [madvise] never\n"), true, "madvise"),
            (huge_pages("always madvise [never]\n"), false, "switched off"),
            (open_files_finding(None), true, "no limit"),
            (open_files_finding(Some(1536)), true, "1536"),
            (open_files_finding(Some(1535)), false, "1535"),
            (mappings("65530\n"), true, "65530"),
            (mappings("8192\n"), false, "8192"),
            (landlock("lockdown,capability,landlock,yama\n"), true, "has Landlock"),
            (landlock("lockdown,capability,yama"), false, "Landlock"),
            (clock_source("tsc\n"), true, "tsc"),
            (clock_source("hpet\n"), false, "hpet"),
            (time(SystemTime::now()), true, "plausible"),
            (time(SystemTime::UNIX_EPOCH), false, "2026"),
            (no_gpu("no driver", false), true, "no driver"),
            (no_gpu("no driver", true), false, "no driver"),
        ] {
            assert_eq!(finding.is_ok(), is_ok, "{finding:?}");
            assert!(finding.message().contains(text), "{finding:?}");
        }
    }

    /// The limits in the files of control groups, from the root to the process's group.
    #[test]
    fn the_lowest_limit_of_threads_up_to_the_root_holds() {
        const OWN: &str = "/a.slice/b.service";
        /// The process's group, the files, and whether the finding is good, with a part of its text.
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], Option<(bool, &'a str)>);
        let cases: [Row<'_>; 9] = [
            (OWN, &[("/a.slice", "max\n"), (OWN, "max\n")], Some((true, "no limit"))),
            (
                OWN,
                &[("/a.slice", "max\n"), (OWN, "4096\n")],
                Some((true, "up to 4096 in the control group /a.slice/b.service")),
            ),
            (
                OWN,
                &[("/a.slice", "max\n"), (OWN, "512\n")],
                Some((false, "at most 512 in the control group /a.slice/b.service:")),
            ),
            (
                OWN,
                &[("/a.slice", "512\n"), (OWN, "max\n")],
                Some((false, "at most 512 in the control group /a.slice:")),
            ),
            (OWN, &[("/a.slice", "8192\n"), (OWN, "9000\n")], Some((true, "up to 8192 in the control group /a.slice"))),
            // A container: its own group is the root, whatever the path says.
            ("/", &[("", "100\n")], Some((false, "at most 100 in the control group /:"))),
            ("/host/of/it", &[("", "100\n")], Some((false, "at most 100 in the control group /:"))),
            ("/../c.scope", &[("", "max\n")], Some((true, "no limit"))),
            (OWN, &[], None),
        ];
        for (own, limits, want) in cases {
            let read = |path: &str| {
                let limit = limits.iter().find(|(group, _)| path == format!("/sys/fs/cgroup{group}/pids.max"));
                limit.map(|(_, limit)| (*limit).to_owned())
            };
            let finding = threads(&format!("1:cpu:/\n0::{own}\n"), &read);
            let found = finding.as_ref().map(|finding| (finding.is_ok(), finding.message()));
            let is_same = match (found, want) {
                (Some((is_ok, message)), Some((is_wanted, part))) => is_ok == is_wanted && message.contains(part),
                (found, want) => found.is_none() && want.is_none(),
            };
            assert!(is_same, "{own}, {limits:?}: {finding:?}, expected {want:?}");
        }
        assert_eq!(threads("1:cpu:/\n", &|_: &str| Some("1".to_owned())), None, "only version 1 of control groups");
    }

    #[test]
    fn gpus_of_nvidia_are_known_by_the_bus() {
        for (vendor, class, want) in [
            ("0x10de\n", "0x030000\n", true),
            ("0x10de\n", "0x030200\n", true),
            // The sound device of a GPU, and a GPU of another maker.
            ("0x10de\n", "0x040300\n", false),
            ("0x1002\n", "0x030000\n", false),
        ] {
            assert_eq!(is_nvidia_gpu(vendor, class), want, "{vendor} {class}");
        }
    }
}

//! The list of settings: names, help texts, parsers.

use super::parse_values::{
    bytes, choice, driver_version, failing_calls, fault_at, launch_number, list, number, pairs, pci, peers,
    positive_float, replaced_line, store_parsed,
};
use super::spec::Spec;
use super::{CountsOutput, ProgrammaticEdges, Raw};

/// One setting: its name, its help text and its parser.
pub struct Setting {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Help text with unit and default.
    pub help: &'static str,
    pub(super) read: fn(&mut Raw, &str) -> Result<(), String>,
}

/// All settings.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "CUDAEMU_DEVICES",
        help: "number of devices, 0 to 64 (1)",
        read: |raw, text| store_parsed(&mut raw.devices, number(text, 0, 64)),
    },
    Setting {
        name: "CUDAEMU_CAPABILITY",
        help: "compute capability, per device: 7.5, 8.0, 8.6, 8.9 or 9.0 (8.0); it decides all limits",
        read: |raw, text| store_parsed(&mut raw.capability, list(text, Spec::parse_capability)),
    },
    Setting {
        name: "CUDAEMU_NAME",
        help: "name, per device (\"CUDA emulator sm_80\")",
        read: |raw, text| store_parsed(&mut raw.name, list(text, |name| Ok(name.to_owned()))),
    },
    Setting {
        name: "CUDAEMU_MEMORY",
        help: "bytes of memory, per device, with K, M or G (8G)",
        read: |raw, text| store_parsed(&mut raw.memory, list(text, bytes)),
    },
    Setting {
        name: "CUDAEMU_SMS",
        help: "multiprocessors, per device, 1 to 1024 (as the real one of the capability: 108 for 8.0)",
        read: |raw, text| store_parsed(&mut raw.sms, list(text, |text| number(text, 1, 1024).map(|n| n as u32))),
    },
    Setting {
        name: "CUDAEMU_PCI",
        help: "PCI address domain:bus:device, hexadecimal, per device (0000:01:00, 0000:02:00, …)",
        read: |raw, text| store_parsed(&mut raw.pci, list(text, pci)),
    },
    Setting {
        name: "CUDAEMU_PEERS",
        help: "pairs of devices that can access each other: all, none, or a list such as 0-1,2-3 (all)",
        read: |raw, text| store_parsed(&mut raw.peers, peers(text)),
    },
    Setting {
        name: "CUDAEMU_SEED",
        help: "chooses among the legal orders of streams (0)",
        read: |raw, text| store_parsed(&mut raw.seed, number(text, 0, u64::MAX)),
    },
    Setting {
        name: "CUDAEMU_CHECK",
        help: "what a fault does that only the checker sees: stop (the launch fails) or report (stderr only) (stop)",
        read: |raw, text| store_parsed(&mut raw.report_only, choice(text, &[("stop", false), ("report", true)])),
    },
    Setting {
        name: "CUDAEMU_COUNTS",
        help: "memory traffic is counted, and counts per kernel are shown when the process ends: table (stderr), a file (JSON), on (not shown) (off)",
        read: |raw, text| {
            raw.counts = Some(match text {
                "" | "off" => CountsOutput::Off,
                "on" => CountsOutput::On,
                "table" => CountsOutput::Table,
                path => CountsOutput::File(path.into()),
            });
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_MAX_INSTRUCTIONS",
        help: "warp instructions of one block after which a launch counts as endless, with K, M or G (4G)",
        read: |raw, text| store_parsed(&mut raw.max_instructions, bytes(text)),
    },
    Setting {
        name: "CUDAEMU_THREADS",
        help: "threads that execute a kernel's blocks, 1 to 1024 (one per core)",
        read: |raw, text| store_parsed(&mut raw.threads, number(text, 1, 1024)),
    },
    Setting {
        name: "CUDAEMU_DRIVER_VERSION",
        help: "what cuDriverGetVersion answers: 12090 or 12.9 (12.9)",
        read: |raw, text| store_parsed(&mut raw.driver_version, driver_version(text)),
    },
    Setting {
        name: "CUDAEMU_KERNEL_US",
        help: "simulated time: microseconds a kernel takes, beside its bytes (off)",
        read: |raw, text| store_parsed(&mut raw.time.kernel_us, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_KERNEL_GBPS",
        help: "simulated time: gigabytes a second that a kernel moves between a device and its memory (off)",
        read: |raw, text| store_parsed(&mut raw.time.kernel_gbps, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_KERNELS_AT_ONCE",
        help: "simulated time: kernels that a device runs at once, 1 to 128 (1)",
        read: |raw, text| {
            raw.time.kernels_at_once = number(text, 1, 128)? as u32;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_LAUNCH_US",
        help: "simulated time: microseconds that the launch of a kernel or graph takes the calling thread, before it can start (off)",
        read: |raw, text| store_parsed(&mut raw.time.launch_us, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_COPY_US",
        help: "simulated time: microseconds a copy or fill takes, beside its bytes (off)",
        read: |raw, text| store_parsed(&mut raw.time.copy_us, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_HOST_GBPS",
        help: "simulated time: gigabytes a second between host and device (off)",
        read: |raw, text| store_parsed(&mut raw.time.host_gbps, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_PEER_GBPS",
        help: "simulated time: gigabytes a second between two devices (off)",
        read: |raw, text| store_parsed(&mut raw.time.peer_gbps, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_DEVICE_GBPS",
        help: "simulated time: gigabytes a second of copies and fills within a device (off)",
        read: |raw, text| store_parsed(&mut raw.time.device_gbps, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_ALLOC_SYNC_US",
        help: "simulated time: cuMemAlloc, cuMemFree, cuMemHostAlloc and cuMemFreeHost wait for the context's work, and then hold the driver's lock for these microseconds (off)",
        read: |raw, text| store_parsed(&mut raw.time.alloc_sync_us, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_COMPILE_MS",
        help: "simulated time: milliseconds that loading a module takes the calling thread (off)",
        read: |raw, text| store_parsed(&mut raw.time.compile_ms, positive_float(text)),
    },
    Setting {
        name: "CUDAEMU_POOLS",
        help: "whether devices have memory pools, as all but some virtual ones do: on or off (on)",
        read: |raw, text| {
            raw.hardware.pools = choice(text, &[("off", false), ("on", true)])?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_PROGRAMMATIC_EDGES",
        help: "whether edges of graphs may be programmatic: on, off (such edges are refused as not supported), or fixed (changing a \
               kernel behind one in an executable graph is refused) (on)",
        read: |raw, text| {
            use ProgrammaticEdges::{Allowed, Fixed, Refused};
            raw.hardware.programmatic_edges = choice(text, &[("off", Refused), ("fixed", Fixed), ("on", Allowed)])?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_POISON",
        help: "whether a fault makes its device unusable for the rest of the process: on or off (off)",
        read: |raw, text| {
            raw.hardware.poison = choice(text, &[("off", false), ("on", true)])?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_FAULT_AT",
        help: "launches that fail and make their device unusable, as NUMBER:KIND@DEVICE, counted from 1 on each device; KIND is address (assumed), ecc, launch or lost, DEVICE 0 if omitted (none)",
        read: |raw, text| {
            raw.hardware.faults = list(text, fault_at)?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_HANG_AT",
        help: "launches that never end, as NUMBER@DEVICE, counted as for CUDAEMU_FAULT_AT (none)",
        read: |raw, text| {
            raw.hardware.hangs = list(text, launch_number)?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_FAIL_CALL",
        help: "calls that do nothing and return a code, as FUNCTION:NUMBER:CODE, counted from 1; FUNCTION is a name such as cuGraphLaunch, \
               or * for calls of all functions, CODE any number but 0 (none)",
        read: |raw, text| {
            raw.hardware.failing_calls = failing_calls(text)?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_FUNCTION_BYTES",
        help: "bytes of device memory, with K, M or G, that loading a kernel takes by a synchronising allocation: in cuFuncLoad or else in the \
               first launch or graph node, before CUDA 12.4 in cuModuleGetFunction (off: modules load their kernels)",
        read: |raw, text| store_parsed(&mut raw.hardware.function_bytes, bytes(text)),
    },
    Setting {
        name: "CUDAEMU_CONNECTIONS",
        help: "hardware connections of each context, 1 to 128: its streams share them in turn (unlimited)",
        read: |raw, text| {
            raw.hardware.connections = Some(number(text, 1, 128)? as u32);
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_DEADLOCK_MS",
        help: "real milliseconds without progress after which a deadlock of streams that share a connection is reported (1000)",
        read: |raw, text| {
            raw.hardware.deadlock_ms = number(text, 1, 3_600_000)?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_PEER_CORRUPT",
        help: "pairs of devices between which copies with peer access write wrong bytes, such as 0-1,2-3 (none)",
        read: |raw, text| {
            raw.hardware.corrupt = pairs(text)?;
            Ok(())
        },
    },
    Setting {
        name: "CUDAEMU_PTX_LINE",
        help: "what a line of PTX is replaced by when its module is loaded, as ENTRY:LINE:TEXT; line 1 is the one after the entry's name (none)",
        read: |raw, text| {
            raw.replaced_line = Some(replaced_line(text)?);
            Ok(())
        },
    },
    Setting {
        name: "CUDA_VISIBLE_DEVICES",
        help: "which devices a program sees, and in which order: numbers or UUIDs (all), as with the real driver",
        read: |raw, text| {
            raw.visible = Some(text.to_owned());
            Ok(())
        },
    },
];

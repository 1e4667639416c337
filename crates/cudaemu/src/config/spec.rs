//! Device limits by compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability") and the
//! values of `cuDeviceGetAttribute`.

use super::DeviceConfig;
use crate::error::{Error, Result};

/// Limits of a device. Sizes are in bytes, clock rates in kHz.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    pub capability: (u32, u32),
    pub sms: u32,
    pub threads_per_sm: u32,
    pub blocks_per_sm: u32,
    pub shared_per_sm: u32,
    /// Maximum shared memory of a block after opting in with `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
    pub shared_optin: u32,
    /// Shared memory that the system reserves in each block.
    pub shared_reserved: u32,
    pub l2: u32,
    pub clock: u32,
    pub memory_clock: u32,
    pub bus_bits: u32,
}

/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`
pub const MEMORY_POOLS: u32 = 115;
/// Maximum number of threads in a block.
pub const MAX_THREADS_PER_BLOCK: u32 = 1024;
/// Maximum extents of a block in x, y, z.
pub const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Maximum extents of a grid in x, y, z.
pub const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
/// Maximum shared memory of a block without opting in, in bytes.
pub const DEFAULT_SHARED_PER_BLOCK: u32 = 48 << 10;
/// 32-bit registers of a multiprocessor, which is also the maximum of one block.
pub const REGISTERS_PER_SM: u32 = 65536;
/// Granularity of register allocation: a warp gets a multiple of this many registers.
pub const REGISTER_ALLOC_UNIT: u32 = 256;
/// Threads of a warp.
pub const WARP_SIZE: u32 = 32;
/// Maximum bytes of `.const` memory in a module.
pub const CONSTANT_BYTES: u32 = 65536;

impl Spec {
    /// Parses `8.0` to (8, 0); fails if no device of this compute capability is supported.
    pub fn parse_capability(text: &str) -> std::result::Result<(u32, u32), String> {
        let pair = text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let pair = pair.ok_or_else(|| format!("{text:?} is no capability"))?;
        Self::of(pair).map(|spec| spec.capability)
    }

    /// The device of a compute capability. Limits follow from the capability; multiprocessor count and clock rates are those of
    /// a common card (T4, A100, RTX 3090, RTX 4090, H100).
    pub fn of(capability: (u32, u32)) -> std::result::Result<Self, String> {
        let k = 1024;
        let (sms, threads, blocks, shared, optin, l2, clock, memory_clock, bus_bits) = match capability {
            (7, 5) => (40, 1024, 16, 64, 64, 4, 1_590_000, 5_001_000, 256),
            (8, 0) => (108, 2048, 32, 164, 163, 40, 1_410_000, 1_593_000, 5120),
            (8, 6) => (82, 1536, 16, 100, 99, 6, 1_695_000, 9_751_000, 384),
            (8, 9) => (128, 1536, 24, 100, 99, 72, 2_520_000, 10_501_000, 384),
            (9, 0) => (132, 2048, 32, 228, 227, 50, 1_980_000, 2_619_000, 5120),
            (major, minor) => return Err(format!("no device of capability {major}.{minor} is emulated")),
        };
        Ok(Self {
            capability,
            sms,
            threads_per_sm: threads,
            blocks_per_sm: blocks,
            shared_per_sm: shared * k,
            shared_optin: optin * k,
            shared_reserved: if capability.0 >= 8 { k } else { 0 },
            l2: l2 * k * k,
            clock,
            memory_clock,
            bus_bits,
        })
    }

    /// The capability as one number: 80 for 8.0.
    pub fn sm(&self) -> u32 {
        self.capability.0 * 10 + self.capability.1
    }

    /// Maximum bytes of a kernel's parameters. The larger limit needs Volta or later and a toolkit of 12.1 or later, which the
    /// emulator assumes.
    pub fn parameter_bytes(&self) -> u32 {
        if self.capability.0 >= 7 { 32764 } else { 4096 }
    }
}

/// The value of `cuDeviceGetAttribute`. `attribute` is a `CUdevice_attribute`; an unknown number fails with `InvalidValue`.
pub fn device_attribute(device: &DeviceConfig, attribute: u32) -> Result<i32> {
    let spec = &device.spec;
    let since = |major: u32| u32::from(spec.capability.0 >= major);
    let value = match attribute {
        1 => MAX_THREADS_PER_BLOCK,
        2..=4 => MAX_BLOCK[attribute as usize - 2],
        5..=7 => MAX_GRID[attribute as usize - 5],
        8 => DEFAULT_SHARED_PER_BLOCK,
        9 => CONSTANT_BYTES,
        10 => WARP_SIZE,
        11 => i32::MAX as u32, // pitch
        12 => REGISTERS_PER_SM,
        13 => spec.clock,
        15 => 1, // copies and kernels overlap
        16 => spec.sms,
        17 => 0,                                    // no watchdog
        18 => 0,                                    // not integrated
        19 => 1,                                    // maps host memory
        20 => 0,                                    // default compute mode
        14 | 21..=30 | 42..=49 | 51..=74 | 77 => 0, // no textures and surfaces
        31 => 1,                                    // concurrent kernels
        32 => 1,                                    // error correction
        33 => device.pci.bus,
        34 => device.pci.device,
        35 => 0, // no TCC
        36 => spec.memory_clock,
        37 => spec.bus_bits,
        38 => spec.l2,
        39 => spec.threads_per_sm,
        40 => 3, // copy engines
        41 => 1, // unified addressing
        50 => device.pci.domain,
        75 => spec.capability.0,
        76 => spec.capability.1,
        78 => 0,      // no stream priorities
        79 | 80 => 1, // L1 caches
        81 => spec.shared_per_sm,
        82 => REGISTERS_PER_SM,
        83 => 1, // managed memory
        84 => 0, // one device a board
        85 => device.index as u32,
        86 => 0, // atomics on host memory are not native
        87 => {
            if spec.capability.1 == 0 {
                2
            } else {
                32
            }
        }
        88 => 0, // no access to pageable memory
        89 => 1, // concurrent managed access
        90 => 1, // compute preemption
        91 => 0, // host memory cannot be registered
        92 => 1, // stream memory operations
        93 => 0, // of 32 bits only
        94 => since(7),
        95 | 96 => 0, // no cooperative launches
        97 => spec.shared_optin,
        98 => 0, // remote writes cannot be flushed
        99 => 0, // host memory cannot be registered
        100 | 101 => 0,
        102..=105 => 0, // no virtual memory management, no shareable handles
        106 => spec.blocks_per_sm,
        107 => 0, // no compression
        108 => {
            if since(8) == 1 {
                spec.l2 / 4 * 3
            } else {
                0
            }
        }
        109 => {
            if since(8) == 1 {
                134_213_632
            } else {
                0
            }
        }
        110 => 0,
        111 => spec.shared_reserved,
        112..=114 => 0,
        MEMORY_POOLS => 1,
        116..=119 => 0, // no direct access of other devices, no handles of pools
        120 => since(9),
        121 => 0,
        122 => 0, // stream memory operations of 32 bits only
        123 => 1, // wait for NOR
        124 | 125 => 0,
        126 => {
            if since(9) == 1 {
                4
            } else {
                1
            }
        }
        127 => 0, // tensor maps come with the instructions that use them
        128 => 0,
        129 => 0, // no function pointers
        130 => 0, // no memory node of its own
        131 => return Ok(-1),
        132 | 133 => 0,
        134 => 0,
        135..=138 => 0,
        139 => 0x10de,
        140..=158 | 161 => 0,
        _ => return Err(Error::InvalidValue),
    };
    Ok(i32::try_from(value).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn attributes_of_two_capabilities() {
        let settings = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_CAPABILITY", "8.0,9.0")];
        let config = Config::from_settings(settings.map(|(a, b)| (a.to_owned(), b.to_owned()))).unwrap();
        for (number, on_80, on_90) in [
            (1, 1024, 1024),
            (4, 64, 64),
            (8, 49152, 49152),
            (16, 108, 132),
            (33, 1, 2),
            (39, 2048, 2048),
            (75, 8, 9),
            (81, 167_936, 233_472),
            (97, 166_912, 232_448),
            (106, 32, 32),
            (111, 1024, 1024),
            (120, 0, 1),
        ] {
            let [a, b] = [0, 1].map(|device| device_attribute(&config.devices[device], number));
            assert_eq!((a, b), (Ok(on_80), Ok(on_90)), "attribute {number}");
        }
        for number in (1..=158).filter(|n| ![159, 160].contains(n)) {
            assert!(device_attribute(&config.devices[0], number).is_ok(), "attribute {number}");
        }
        for number in [0, 159, 160, 162, 100_000, u32::MAX] {
            assert_eq!(device_attribute(&config.devices[0], number), Err(Error::InvalidValue));
        }
    }
}

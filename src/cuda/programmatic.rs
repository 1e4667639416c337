//! Programmatic dependent launch: in a CUDA graph, the GPU launches a kernel while the one before it still runs.
//!
//! Without it, a kernel is launched once the one before has ended and its writes are flushed, which leaves a gap of about a
//! microsecond. With it, the blocks of the next kernel become resident and run their prologue in that gap. Two parts belong
//! together: the edges between the nodes of a graph are *programmatic* (`graph_exec`), and every kernel waits for the one before by
//! itself ([`with_grid_waits`]).
//!
//! Why no kernel reads or overwrites too early:
//!
//! - Every kernel begins with `griddepcontrol.wait`, and ptxas keeps all accesses of global memory after it: each thread blocks until
//!   the kernel before has ended, and sees all that it wrote. That kernel has waited in the same way, so all kernels before it have
//!   ended too. Therefore a kernel may also overwrite what any earlier one reads.
//! - `griddepcontrol.launch_dependents` stands before the wait, so only launch and prologue overlap. It makes no promise about
//!   memory, and needs none, since the next kernel waits for the end of this one.
//! - The next kernel is launched once all blocks of this one are resident or have ended. So waiting blocks never take the place of a
//!   block that they wait for, however many kernels of a chain are resident.
//! - The first kernel of a graph has no programmatic edge, nor has a launch outside of a graph: both instructions then do nothing.
//!
//! Hazard: ptxas may move a load through the read-only path (`ld.global.nc`, from `__ldg` or `const … *__restrict__`) ahead of the
//! wait. Our kernels use it only for tables of their module.
//!
//! It is on or off for the life of a device, because kernels that do not wait must never get a programmatic edge. A driver that
//! refuses such edges only turns off the edges: kernels that wait are correct with any.

use super::CudaOptions;
use super::driver::{self, Gpu};
use std::sync::atomic::{AtomicBool, Ordering};

/// Lowest compute capability, times ten, whose GPUs have `griddepcontrol`; and the lowest version of PTX that has it.
const MIN_CAPABILITY: u32 = 90;
const MIN_PTX: (u32, u32) = (7, 8);

/// The instructions at the start of every kernel. PTX allows declarations after instructions.
const GRID_WAIT: &str = "griddepcontrol.launch_dependents;griddepcontrol.wait;";

/// Whether a device uses programmatic dependent launch.
pub(super) struct ProgrammaticLaunch {
    /// Kernels are loaded with waits.
    waits: bool,
    /// The driver has refused a programmatic edge.
    refused: AtomicBool,
}

impl ProgrammaticLaunch {
    /// On if the GPU, the driver and the options allow it. The launch check builds no graphs, so kernels need no waits.
    pub(super) fn new(gpu: &Gpu, options: &CudaOptions) -> ProgrammaticLaunch {
        let wanted = options.programmatic_launch && !options.launch_check && gpu.capability >= MIN_CAPABILITY;
        ProgrammaticLaunch { waits: wanted && driver::has_edge_data(gpu), refused: AtomicBool::new(false) }
    }

    /// Whether all kernels of the device must be loaded with waits.
    pub(super) fn kernels_wait(&self) -> bool {
        self.waits
    }

    /// Whether graphs shall have programmatic edges.
    pub(super) fn has_edges(&self) -> bool {
        self.waits && !self.refused.load(Ordering::Relaxed)
    }

    /// From now on, graphs have plain edges.
    pub(super) fn refuse(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }
}

/// PTX whose kernels begin with [`GRID_WAIT`], for a target that has these instructions. Text without a kernel is unchanged. Every line
/// keeps its number, so that an error of the driver's compiler points into the committed file.
pub(super) fn with_grid_waits(ptx: &str) -> String {
    if !ptx.contains(ENTRY) {
        return ptx.to_owned();
    }
    let mut text = String::with_capacity(ptx.len() + ptx.len() / 16);
    // Between the head of a kernel and its body: parameters and limits of the block.
    let mut in_head = false;
    for line in ptx.split_inclusive('\n') {
        if let Some(version) = line.strip_prefix(".version ") {
            text.push_str(if is_below(version, MIN_PTX) { ".version 7.8\n" } else { line });
            continue;
        }
        if let Some(target) = line.strip_prefix(".target sm_") {
            let is_old = target.trim_end().parse().is_ok_and(|target: u32| target < MIN_CAPABILITY);
            text.push_str(if is_old { ".target sm_90\n" } else { line });
            continue;
        }
        in_head |= line.starts_with(ENTRY);
        match line.split_once('{').filter(|_| in_head) {
            Some((before, after)) => {
                text.extend([before, "{", GRID_WAIT, after]);
                in_head = false;
            }
            None => text.push_str(line),
        }
    }
    text
}

/// How a kernel begins in the PTX of NVRTC; `build.rs` finds the entries by the same text.
const ENTRY: &str = ".visible .entry ";

/// Whether a version of PTX such as `6.3` is below another.
fn is_below(version: &str, least: (u32, u32)) -> bool {
    let numbers = version.trim_end().split_once('.');
    let numbers = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    numbers.is_some_and(|version: (u32, u32)| version < least)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::IMAGES;

    #[test]
    fn every_kernel_of_every_image_waits_first() {
        for image in IMAGES {
            let (ptx, name) = (image.text().unwrap(), image.name());
            let text = with_grid_waits(&ptx);
            assert_eq!(text.matches(GRID_WAIT).count(), image.entries.len(), "{name}");
            assert_eq!(text.matches("griddepcontrol").count(), 2 * image.entries.len(), "{name}");
            for (entry, _) in image.entries {
                let (_, body) = text.split_once(&format!("{ENTRY}{entry}(")).unwrap();
                let (_, body) = body.split_once('{').unwrap();
                assert!(body.starts_with(GRID_WAIT), "{name}: {entry}");
            }
            // Nothing else changes but version and target.
            let lines: Vec<_> = text.lines().map(|line| line.replace(GRID_WAIT, "")).collect();
            let changed: Vec<_> = ptx.lines().zip(&lines).filter(|(old, new)| old != new).map(|(_, new)| new).collect();
            assert_eq!(changed, [".version 7.8", ".target sm_90"], "{name}");
            assert_eq!(lines.len(), ptx.lines().count(), "{name}");
        }
    }

    /// See the hazard at the head of this file.
    #[test]
    fn loads_through_the_read_only_path_are_of_modules_with_tables() {
        for image in IMAGES {
            let ptx = image.text().unwrap();
            let has_table = ptx.lines().any(|line| line.starts_with(".global ") && line.contains("] = {"));
            assert!(has_table || !ptx.contains("ld.global.nc"), "{}", image.name());
        }
    }

    #[test]
    fn only_kernels_and_older_targets_change() {
        let module = |version: &str, target: &str, wait: &str| {
            format!(
                "// .visible .entry {{ of a comment\n.version {version}\n.target {target}\n.func f(\n)\n{{\nret;\n}}\n\
                 .visible .entry k(\n.param .b64 p\n)\n.maxntid 32, 1, 1\n{{{wait}\n.reg .b32 %r<2>;\n{{\nret;\n}}\n}}\n"
            )
        };
        for (version, target, new_version, new_target) in [
            ("6.3", "sm_75", "7.8", "sm_90"),
            ("7.0", "sm_80", "7.8", "sm_90"),
            ("8.0", "sm_80", "8.0", "sm_90"),
            ("10.1", "sm_90", "10.1", "sm_90"),
            ("8.0", "sm_90a", "8.0", "sm_90a"),
            ("8.6", "sm_100", "8.6", "sm_100"),
        ] {
            let want = module(new_version, new_target, GRID_WAIT);
            assert_eq!(with_grid_waits(&module(version, target, "")), want, "{version} {target}");
        }
        for text in ["", ".version 6.3\n.target sm_75\n.func f()\n{\nret;\n}\n"] {
            assert_eq!(with_grid_waits(text), text);
        }
    }

    #[test]
    fn it_needs_the_option_the_gpu_and_the_driver() {
        let on = CudaOptions::default();
        for (capability, options) in [
            (90, CudaOptions { programmatic_launch: false, ..on }),
            (90, CudaOptions { launch_check: true, ..on }),
            (89, on),
            // `with_capability` has a driver of CUDA 12.0.
            (90, on),
        ] {
            let launch = ProgrammaticLaunch::new(&Gpu::with_capability(capability), &options);
            assert!(!launch.kernels_wait() && !launch.has_edges(), "{capability} {options:?}");
        }
    }
}

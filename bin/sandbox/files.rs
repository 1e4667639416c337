//! Landlock: the files that the process can open in the sandbox. A rule holds for a file or folder itself (its inode), with all
//! that is in the folder, by whatever path it is opened. Open files, sockets and queries of metadata are not restricted.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use fanout::rpc::server::model_link_targets;
use landlock::{
    ABI, Access as _, AccessFs, BitFlags, LandlockStatus, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, make_bitflags, path_beneath_rules,
};

use super::Access;

/// Kinds of access that need a rule, as far as the kernel has them. Those of a later ABI concern Unix sockets by path, which the
/// filter of system calls denies on every kernel.
const HANDLED: ABI = ABI::V6;

const READ: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir});

/// The right to read and write files, without those to execute them and to create devices, pipes, sockets and links.
const WRITE: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | Truncate | MakeReg | RemoveFile | MakeDir | RemoveDir});

/// For the files of a GPU's driver.
const DEVICES: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | IoctlDev});

/// For the named pipes of the daemon of MPS.
const MPS: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile});

/// Files of the system that are read at run time, where they exist.
///
/// - `/proc` and `/sys`: memory, CPUs, limits of the control group. `/proc/self` alone would not last: the kernel may drop the
///   inode of a process's folder, and with it the rule. Landlock itself keeps the process from reading the memory and the
///   environment of others.
/// - The program, with its libraries: backtraces.
/// - The resolver of host names, whose modules are libraries.
const SYSTEM_FILES: [&str; 19] = [
    "/proc",
    "/sys",
    "/dev/null",
    "/dev/random",
    "/dev/urandom",
    "/proc/self/exe",
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
];

/// Restricts this thread, and those that it starts, to the files in `access`. Returns the version of Landlock's interface in
/// the kernel.
pub(super) fn restrict(access: &Access) -> Result<i32, String> {
    // A rule needs the folder. If it cannot be created, the server reports that.
    for folder in &access.writable {
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    }
    let status = enforce(access).map_err(|e| e.to_string())?;
    match (status.landlock, status.ruleset) {
        (LandlockStatus::NotImplemented, _) => Err("the kernel does not have it, or a container forbids it".to_owned()),
        (LandlockStatus::NotEnabled, _) => Err("the kernel has not enabled it (lsm=landlock,…)".to_owned()),
        (LandlockStatus::Available { .. }, RulesetStatus::NotEnforced) => {
            Err("the kernel does not enforce it".to_owned())
        }
        (LandlockStatus::Available { effective_abi, kernel_abi }, _) => Ok(kernel_abi.unwrap_or(effective_abi as i32)),
    }
}

fn enforce(access: &Access) -> Result<RestrictionStatus, RulesetError> {
    let (driver_devices, driver_cache) = if access.gpu {
        // The driver keeps compiled kernels in ~/.nv.
        (Some("/dev"), std::env::home_dir().map(|home| home.join(".nv")))
    } else {
        (None, None)
    };
    Ruleset::default()
        .handle_access(AccessFs::from_all(HANDLED))?
        // No signals to processes outside, and no connections to their abstract Unix sockets.
        .scope(Scope::from_all(HANDLED))?
        .create()?
        .add_rules(path_beneath_rules(SYSTEM_FILES, READ))?
        .add_rules(path_beneath_rules(access.models.iter().flat_map(|models| model_files(models)), READ))?
        .add_rules(path_beneath_rules(&access.keys, READ))?
        .add_rules(path_beneath_rules(access.writable.iter().chain(&driver_cache), WRITE))?
        .add_rules(path_beneath_rules(driver_devices, DEVICES))?
        .add_rules(path_beneath_rules(access.mps.then(mps_folder), MPS))?
        .restrict_self()
}

/// Where the daemon of MPS has its pipes and sockets, as NVIDIA documents it.
fn mps_folder() -> PathBuf {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from)
}

/// The folder of models, and what its links lead to. A file in a folder `blobs` stands for that folder: model hubs keep their
/// files there, and a model that is added while the server runs can be read then. Elsewhere only the file itself can be read:
/// the link may lead to a home folder, whose other files are not meant to be served.
fn model_files(models: &Path) -> Vec<PathBuf> {
    let blobs = |file: &Path| file.parent().filter(|folder| folder.ends_with("blobs")).map(Path::to_owned);
    let targets = model_link_targets(models).into_iter().map(|target| blobs(&target).unwrap_or(target));
    let mut files: Vec<_> = targets.chain([models.to_owned()]).collect();
    files.sort();
    files.dedup();
    files
}

//! The sandbox of the process that serves (`--sandbox`, Linux): drops what an attacker who has taken over the process could use
//! and the server does not need. Clients are not trusted; this is the second line of defence, after memory safety.
//!
//! - `no_new_privs`: no program that this process starts gains privileges from its file (setuid, capabilities).
//! - Landlock (`files.rs`): only the listed files can be opened, and none can be executed.
//! - Capabilities: none, so that user 0 has only the rights of the files' owner. The user itself is not changed: a service
//!   manager or container sets it.
//! - seccomp (`system_calls.rs`): a deny list of system calls, and of families of sockets.
//!
//! The parts hold for the calling thread and the threads that it starts, so [`enter`] precedes the first of these. If a GPU's
//! driver is loaded, it may have started threads already, which stay outside; nothing of a client runs on them. The supervisor
//! stays outside, because it starts workers; it reads one byte at a time from its worker and nothing from clients.

#[cfg(target_os = "linux")]
mod files;
#[cfg(target_os = "linux")]
mod system_calls;
#[cfg(all(test, target_os = "linux"))]
mod tests;

use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use fanout::rpc::server::Config;
#[cfg(target_os = "linux")]
use system_calls::SocketFamilies;

/// The options of a server.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// Restrict the process that serves to what it needs, on Linux: no capabilities and no new privileges, no files beside those of
    /// --models, the cache and the folder of --allow-keys (Landlock), a filter of system calls, and no sockets but those of IPv4 and
    /// IPv6 (seccomp), so that names that only mDNS or another local daemon knows are not found. auto: as far as the kernel can, and
    /// not if a GPU is used, because its driver may need more; on: exit with status 1 if a part is missing; off: for debugging.
    #[arg(long, value_enum, value_name = "MODE", default_value = "auto")]
    pub(crate) sandbox: SandboxMode,

    /// With --sandbox on and GPUs under NVIDIA's MPS: also allow Unix sockets, and the folder of its pipes
    /// (CUDA_MPS_PIPE_DIRECTORY, or else /tmp/nvidia-mps). Without it, the driver does not find MPS.
    #[arg(long)]
    pub(crate) sandbox_mps: bool,
}

/// Whether the process enters the sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum SandboxMode {
    /// As far as the kernel can, unless a GPU is used.
    Auto,
    /// With all parts; a missing one is an error.
    On,
    Off,
}

/// The files and sockets that the process needs in the sandbox.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // there is no sandbox
pub(crate) struct Access {
    /// The folder of models, which is only read.
    models: Option<PathBuf>,
    /// The folders of the list of allowed keys, and of the file to which it may be a link: an editor replaces the list by another
    /// file.
    keys: Vec<PathBuf>,
    /// Folders whose files are read and written: the cache and the digests.
    writable: Vec<PathBuf>,
    /// A GPU's driver.
    gpu: bool,
    /// The daemon of NVIDIA's MPS.
    mps: bool,
}

impl Access {
    /// No files.
    pub(crate) fn none() -> Access {
        Access { models: None, keys: Vec::new(), writable: Vec::new(), gpu: false, mps: false }
    }

    pub(crate) fn of(config: &Config, allow_keys: Option<&Path>, gpu: bool, mps: bool) -> Access {
        let cache = config.cache.as_ref().map(|cache| cache.dir.clone());
        Access {
            models: config.models.clone(),
            keys: allow_keys.map(folders_of).unwrap_or_default(),
            writable: cache.into_iter().chain(config.digests.clone()).collect(),
            gpu,
            mps: gpu && mps,
        }
    }

    #[cfg(target_os = "linux")]
    fn sockets(&self) -> SocketFamilies {
        match (self.gpu, self.mps) {
            (false, _) => SocketFamilies::Internet,
            (true, false) => SocketFamilies::Driver,
            (true, true) => SocketFamilies::Mps,
        }
    }

    /// Also reads and writes files of `folder`, if there is one.
    pub(crate) fn allow_writing(&mut self, folder: Option<&Path>) {
        self.writable.extend(folder.map(Path::to_owned));
    }
}

/// The folder of a file, and that of its target if it is a symbolic link.
fn folders_of(file: &Path) -> Vec<PathBuf> {
    let files = [std::path::absolute(file), file.canonicalize()];
    files.into_iter().flatten().filter_map(|file| file.parent().map(Path::to_owned)).collect()
}

/// The state of the sandbox, for the banner.
#[derive(Debug)]
pub(crate) enum Sandbox {
    /// It was not entered; the reason.
    Off(&'static str),
    /// The parts that are on, and those that are missing, with the reasons.
    #[cfg(target_os = "linux")]
    Entered { parts: Vec<String>, missing: Vec<String> },
}

impl Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sandbox::Off(why) => write!(f, "sandbox: off ({why})"),
            #[cfg(target_os = "linux")]
            Sandbox::Entered { parts, missing } => {
                write!(f, "sandbox: {}", parts.join(", "))?;
                if missing.is_empty() { Ok(()) } else { write!(f, "; missing: {}", missing.join("; ")) }
            }
        }
    }
}

/// Enters the sandbox, as far as `mode` demands it. Cannot be undone.
///
/// # Errors
/// With [`SandboxMode::On`]: the parts that are missing, with the reasons.
pub(crate) fn enter(mode: SandboxMode, access: &Access) -> Result<Sandbox, String> {
    match mode {
        SandboxMode::Off => return Ok(Sandbox::Off("--sandbox off")),
        SandboxMode::Auto if access.gpu => return Ok(Sandbox::Off("a GPU is used; --sandbox on enforces it")),
        SandboxMode::Auto | SandboxMode::On => {}
    }
    #[cfg(target_os = "linux")]
    return restrict(mode, access);
    #[cfg(not(target_os = "linux"))]
    match mode {
        SandboxMode::On => Err("only on Linux".to_owned()),
        _ => Ok(Sandbox::Off("only on Linux")),
    }
}

#[cfg(target_os = "linux")]
fn restrict(mode: SandboxMode, access: &Access) -> Result<Sandbox, String> {
    use rustix::thread::set_no_new_privs;
    let (mut parts, mut missing) = (Vec::new(), Vec::new());
    let mut add = |name: &str, result: Result<String, String>| match result {
        Ok(part) => parts.push(part),
        Err(why) => missing.push(format!("{name}: {why}")),
    };
    // In this order: without capabilities, the kernel accepts Landlock and seccomp only after `no_new_privs`, and bounds
    // capabilities not at all. The filter of system calls comes last, because the others need some.
    let fixed = set_no_new_privs(true).map(|()| "no new privileges".to_owned()).map_err(|e| e.to_string());
    add("no new privileges", fixed);
    add("Landlock", files::restrict(access).map(|abi| format!("Landlock (ABI {abi})")));
    add("no capabilities", drop_capabilities().map(|()| "no capabilities".to_owned()).map_err(|e| e.to_string()));
    add("system calls", system_calls::filter(access.sockets()).map(|()| "system calls filtered".to_owned()));
    if mode == SandboxMode::On && !missing.is_empty() {
        Err(missing.join("; "))
    } else {
        Ok(Sandbox::Entered { parts, missing })
    }
}

/// Drops all capabilities, also those that a program that this thread starts could have.
#[cfg(target_os = "linux")]
fn drop_capabilities() -> std::io::Result<()> {
    use rustix::thread::{
        CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
    };
    if capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        // Numbers that the kernel does not have fail.
        for capability in (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number)) {
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    let none = CapabilitySet::empty();
    // Without permitted capabilities, the kernel empties the ambient set, too.
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

//! seccomp: system calls that fail in the sandbox, a deny list. An allow list would be stricter, but would break with versions of
//! the C library that use other calls. Each call of the process costs about 0.1 µs more; since 5.11 the kernel remembers which
//! calls a filter always allows, so the length of the list does not matter.
//!
//! The filter kills a process that makes calls of another architecture, such as 32-bit calls on x86-64.

use libc::{
    SYS_acct, SYS_add_key, SYS_adjtimex, SYS_bpf, SYS_chroot, SYS_clock_adjtime, SYS_clock_settime, SYS_clone,
    SYS_clone3, SYS_delete_module, SYS_execve, SYS_execveat, SYS_fanotify_init, SYS_finit_module, SYS_fsconfig,
    SYS_fsmount, SYS_fsopen, SYS_fspick, SYS_init_module, SYS_io_uring_enter, SYS_io_uring_register,
    SYS_io_uring_setup, SYS_kcmp, SYS_kexec_load, SYS_keyctl, SYS_mount, SYS_mount_setattr, SYS_move_mount,
    SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_open_tree, SYS_perf_event_open, SYS_personality, SYS_pidfd_getfd,
    SYS_pivot_root, SYS_process_madvise, SYS_process_vm_readv, SYS_process_vm_writev, SYS_ptrace, SYS_quotactl,
    SYS_reboot, SYS_request_key, SYS_setdomainname, SYS_sethostname, SYS_setns, SYS_settimeofday, SYS_swapoff,
    SYS_swapon, SYS_syslog, SYS_umount2, SYS_unshare, SYS_userfaultfd, SYS_vhangup,
};
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

/// The number of `kexec_file_load`, which the crate libc lacks for musl on AArch64: AArch64 and RISC-V have the numbers of the generic
/// table.
const KEXEC_FILE_LOAD: libc::c_long = if cfg!(target_arch = "x86_64") { 320 } else { 294 };

#[cfg(not(all(target_arch = "aarch64", target_env = "musl")))]
const _: () = assert!(KEXEC_FILE_LOAD == libc::SYS_kexec_file_load);

/// System calls that fail with EPERM. The server makes none of them after its start.
const DENIED: &[libc::c_long] = &[
    // Programs, and the memory of other processes.
    SYS_execve,
    SYS_execveat,
    SYS_kcmp,
    SYS_pidfd_getfd,
    SYS_process_madvise,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_ptrace,
    // File systems and namespaces.
    SYS_chroot,
    SYS_fanotify_init,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fsopen,
    SYS_fspick,
    SYS_mount,
    SYS_mount_setattr,
    SYS_move_mount,
    SYS_name_to_handle_at,
    SYS_open_by_handle_at,
    SYS_open_tree,
    SYS_pivot_root,
    SYS_quotactl,
    SYS_setns,
    SYS_umount2,
    SYS_unshare,
    // Large interfaces of the kernel in which vulnerabilities are frequent.
    SYS_add_key,
    SYS_bpf,
    SYS_io_uring_enter,
    SYS_io_uring_register,
    SYS_io_uring_setup,
    SYS_keyctl,
    SYS_perf_event_open,
    SYS_personality,
    SYS_request_key,
    SYS_userfaultfd,
    // The machine as a whole.
    SYS_acct,
    SYS_adjtimex,
    SYS_clock_adjtime,
    SYS_clock_settime,
    SYS_delete_module,
    SYS_finit_module,
    SYS_init_module,
    KEXEC_FILE_LOAD,
    SYS_kexec_load,
    SYS_reboot,
    SYS_setdomainname,
    SYS_sethostname,
    SYS_settimeofday,
    SYS_swapoff,
    SYS_swapon,
    SYS_syslog,
    SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// The numbers of a call: the usual one and that of the x32 ABI, which the kernel does not tell from x86-64 by its
/// architecture.
fn numbers(call: libc::c_long) -> impl Iterator<Item = i64> {
    const X32: libc::c_long = 0x4000_0000;
    [Some(call), cfg!(target_arch = "x86_64").then_some(call | X32)].into_iter().flatten()
}

/// The calls of [`DENIED`] that have a number of their own in the x32 ABI, from 512: `execve`, `ptrace`, `kexec_load`,
/// `process_vm_readv`, `process_vm_writev`, `execveat`.
#[cfg(target_arch = "x86_64")]
const X32_DENIED: &[libc::c_long] = &[520, 521, 528, 539, 540, 545];
#[cfg(not(target_arch = "x86_64"))]
const X32_DENIED: &[libc::c_long] = &[];

/// Filters the system calls of this thread and those that it starts.
pub(super) fn filter() -> Result<(), String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| format!("no filter for {}", std::env::consts::ARCH))?;
    let programs = denied(arch).and_then(|denied| Ok([denied, without_clone3(arch)?]));
    programs
        .and_then(|programs| programs.iter().try_for_each(|program| apply_filter(program)))
        .map_err(|e| e.to_string())
}

/// Denies [`DENIED`], and `clone` with a new user namespace, in which a process has all capabilities.
fn denied(arch: TargetArch) -> Result<BpfProgram, Error> {
    let user_namespace = libc::CLONE_NEWUSER as u64;
    let is_set = SeccompCmpOp::MaskedEq(user_namespace);
    let creates = SeccompCondition::new(0, SeccompCmpArgLen::Dword, is_set, user_namespace)?;
    let creates = SeccompRule::new(vec![creates])?;
    let always = DENIED.iter().chain(X32_DENIED).flat_map(|&call| numbers(call)).map(|number| (number, Vec::new()));
    let rules = always.chain(numbers(SYS_clone).map(|number| (number, vec![creates.clone()]))).collect();
    let denies = SeccompAction::Errno(libc::EPERM as u32);
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, denies, arch)?.try_into()?)
}

/// Lets `clone3` fail as on a kernel without it, so that the C library uses `clone`: a filter cannot read the flags of `clone3`,
/// which are in memory.
fn without_clone3(arch: TargetArch) -> Result<BpfProgram, Error> {
    let rules = numbers(SYS_clone3).map(|number| (number, Vec::new())).collect();
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, absent, arch)?.try_into()?)
}

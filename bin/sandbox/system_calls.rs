//! seccomp: system calls that fail in the sandbox, a deny list. An allow list would be stricter, but would break with versions of
//! the C library that use other calls. Each call of the process costs about 0.1 µs more; since 5.11 the kernel remembers which
//! calls a filter always allows, so the length of the list does not matter.
//!
//! `socket` is not denied but limited: to the families of the internet, and with a GPU to those that its driver needs
//! ([`SocketFamilies`]). `socketpair` stays, whose sockets have no address.
//!
//! The filter kills a process that makes calls of another architecture, such as 32-bit calls on x86-64.

use libc::{
    SYS_acct, SYS_add_key, SYS_adjtimex, SYS_bpf, SYS_chroot, SYS_clock_adjtime, SYS_clock_settime, SYS_clone,
    SYS_clone3, SYS_delete_module, SYS_execve, SYS_execveat, SYS_fanotify_init, SYS_fchmod, SYS_fchmodat, SYS_fchown,
    SYS_fchownat, SYS_finit_module, SYS_fremovexattr, SYS_fsconfig, SYS_fsetxattr, SYS_fsmount, SYS_fsopen, SYS_fspick,
    SYS_init_module, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup, SYS_kcmp, SYS_kexec_load,
    SYS_keyctl, SYS_lremovexattr, SYS_lsetxattr, SYS_mount, SYS_mount_setattr, SYS_move_mount, SYS_name_to_handle_at,
    SYS_open_by_handle_at, SYS_open_tree, SYS_perf_event_open, SYS_personality, SYS_pidfd_getfd, SYS_pivot_root,
    SYS_process_madvise, SYS_process_vm_readv, SYS_process_vm_writev, SYS_ptrace, SYS_quotactl, SYS_reboot,
    SYS_removexattr, SYS_request_key, SYS_setdomainname, SYS_sethostname, SYS_setns, SYS_settimeofday, SYS_setxattr,
    SYS_socket, SYS_swapoff, SYS_swapon, SYS_syslog, SYS_umount2, SYS_unshare, SYS_userfaultfd, SYS_vhangup,
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

/// `fchmodat2`, `setxattrat`, `removexattrat` and `file_setattr`, which the crate libc lacks for some targets. All architectures
/// number the calls of the last years alike.
const NEW_FILE_CALLS: [libc::c_long; 4] = [452, 463, 466, 469];

#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
const _: () = assert!(NEW_FILE_CALLS[0] == libc::SYS_fchmodat2);

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
    // Modes, owners and attributes of files, which Landlock does not restrict, not even for files that cannot be opened.
    SYS_fchmod,
    SYS_fchmodat,
    SYS_fchown,
    SYS_fchownat,
    SYS_fremovexattr,
    SYS_fsetxattr,
    SYS_lremovexattr,
    SYS_lsetxattr,
    SYS_removexattr,
    SYS_setxattr,
    NEW_FILE_CALLS[0],
    NEW_FILE_CALLS[1],
    NEW_FILE_CALLS[2],
    NEW_FILE_CALLS[3],
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
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

/// The sockets that the process may create.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SocketFamilies {
    /// IPv4 and IPv6. The resolver of the C library does without the others (NETLINK, and Unix sockets for nscd).
    Internet,
    /// Also the sockets of NVIDIA's driver: NETLINK, by which it finds the GPUs, and Unix sockets of the type SEQPACKET. It binds an
    /// abstract one, `@cuda-uvmfd-NAMESPACE-PROCESS`, and cannot be initialised without it.
    Driver,
    /// Also all Unix sockets, by which the driver reaches the daemon of MPS.
    Mps,
}

/// Filters the system calls of this thread and those that it starts.
pub(super) fn filter(families: SocketFamilies) -> Result<(), String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| format!("no filter for {}", std::env::consts::ARCH))?;
    let programs = denied(arch, families).and_then(|denied| Ok([denied, without_clone3(arch)?]));
    programs
        .and_then(|programs| programs.iter().try_for_each(|program| apply_filter(program)))
        .map_err(|e| e.to_string())
}

/// The sockets that are denied: each rule has a family, or a type of Unix sockets.
fn denied_sockets(families: SocketFamilies) -> Result<Vec<SeccompRule>, Error> {
    const TYPE: u64 = 15; // without SOCK_CLOEXEC and SOCK_NONBLOCK
    let argument = |number, is, value: i32| SeccompCondition::new(number, SeccompCmpArgLen::Dword, is, value as u64);
    let drivers: &[i32] = if families == SocketFamilies::Internet { &[] } else { &[libc::AF_NETLINK, libc::AF_UNIX] };
    let allowed = [libc::AF_INET, libc::AF_INET6].iter().chain(drivers);
    let others = allowed.map(|&family| argument(0, SeccompCmpOp::Ne, family)).collect::<Result<_, _>>()?;
    let mut rules = vec![SeccompRule::new(others)?];
    if families == SocketFamilies::Driver {
        for other in (0..=TYPE as i32).filter(|&kind| kind != libc::SOCK_SEQPACKET) {
            let is_unix = argument(0, SeccompCmpOp::Eq, libc::AF_UNIX)?;
            rules.push(SeccompRule::new(vec![is_unix, argument(1, SeccompCmpOp::MaskedEq(TYPE), other)?])?);
        }
    }
    Ok(rules)
}

/// Denies [`DENIED`], sockets of other families, and `clone` with a new user namespace, in which a process has all capabilities.
fn denied(arch: TargetArch, families: SocketFamilies) -> Result<BpfProgram, Error> {
    let user_namespace = libc::CLONE_NEWUSER as u64;
    let is_set = SeccompCmpOp::MaskedEq(user_namespace);
    let creates = SeccompCondition::new(0, SeccompCmpArgLen::Dword, is_set, user_namespace)?;
    let creates = SeccompRule::new(vec![creates])?;
    let always = DENIED.iter().chain(X32_DENIED).flat_map(|&call| numbers(call)).map(|number| (number, Vec::new()));
    let sockets = denied_sockets(families)?;
    let sometimes = [(SYS_clone, vec![creates]), (SYS_socket, sockets)];
    let sometimes = sometimes.iter().flat_map(|(call, rules)| numbers(*call).map(|number| (number, rules.clone())));
    let rules = always.chain(sometimes).collect();
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

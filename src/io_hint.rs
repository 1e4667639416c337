//! What a user can do about an error of the operating system, whose own text names only the cause.

use std::io::{Error, ErrorKind};

/// The next step for each kind of error that an argument or the machine causes.
const HINTS: &[(ErrorKind, &str)] = &[
    (ErrorKind::NotFound, "; check the path"),
    (
        ErrorKind::PermissionDenied,
        "; this user has no permission: ls -ld shows the owner and the mode, chmod and chown change them",
    ),
    // From the creation of folders; code that creates files reports an existing one itself.
    (ErrorKind::AlreadyExists, "; a file has this name: give a folder, or remove the file"),
    (ErrorKind::NotADirectory, "; a part of the path is a file: give a folder"),
    (ErrorKind::IsADirectory, "; give a file, not a folder"),
    (ErrorKind::ReadOnlyFilesystem, "; give a path on a writable file system"),
    (ErrorKind::StorageFull, FREE_SPACE),
    (ErrorKind::QuotaExceeded, FREE_SPACE),
    (
        ErrorKind::FileTooLarge,
        "; the limit is that of ulimit -f, or of the file system: raise it, or give another path",
    ),
    (ErrorKind::AddrInUse, "; another program listens there: stop it (ss -ltnp lists them), or choose another port"),
    (ErrorKind::AddrNotAvailable, "; give an address of this machine (ip addr lists them), or 0.0.0.0 for all"),
];

const FREE_SPACE: &str = "; free space there (df -h), or give a path on another disk";

/// EMFILE on Linux, the BSDs and macOS; it has no [`ErrorKind`].
const TOO_MANY_OPEN_FILES: i32 = 24;

/// The next step after an error, as the end of a message: `; ` and a text. Empty if none is known.
pub fn io_hint(error: &Error) -> &'static str {
    if cfg!(unix) && error.raw_os_error() == Some(TOO_MANY_OPEN_FILES) {
        return "; raise the limit of open files (ulimit -n)";
    }
    HINTS.iter().find(|(kind, _)| *kind == error.kind()).map_or("", |(_, hint)| hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are Linux's.
    #[cfg(target_os = "linux")]
    #[test]
    fn every_kind_in_the_table_comes_from_a_number_of_the_system() {
        let numbers = 1..=133;
        for (kind, hint) in HINTS {
            let comes = |&number: &i32| Error::from_raw_os_error(number).kind() == *kind;
            let number = numbers.clone().find(comes);
            let number = number.unwrap_or_else(|| panic!("{kind:?}"));
            assert_eq!(io_hint(&Error::from_raw_os_error(number)), *hint);
        }
        assert!(io_hint(&Error::from_raw_os_error(24)).contains("ulimit -n"));
        assert_eq!(io_hint(&ErrorKind::BrokenPipe.into()), "");
    }
}

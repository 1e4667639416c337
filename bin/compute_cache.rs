//! Whether the GPU driver can keep the kernels that it compiles on disk (its compute cache).

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

/// Why the driver keeps no compiled kernels, given the environment; `None` if it does. Creates the folder, as the driver would.
fn missing_reason(variable: impl Fn(&str) -> Option<OsString>) -> Option<String> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    if set("CUDA_CACHE_DISABLE").is_some_and(|value| value != "0") {
        return Some("CUDA_CACHE_DISABLE is set".to_owned());
    }
    let home = || set("HOME").map(|home| Path::new(&home).join(".nv/ComputeCache"));
    let Some(folder) = set("CUDA_CACHE_PATH").map(PathBuf::from).or_else(home) else {
        return Some("neither HOME nor CUDA_CACHE_PATH is set".to_owned());
    };
    // Only an attempt tells: a sandbox or a read-only file system may deny what the permissions allow.
    let probe = folder.join(format!(".rpc-server-{}", std::process::id()));
    let written = fs::create_dir_all(&folder)
        .and_then(|()| OpenOptions::new().write(true).create_new(true).open(&probe))
        .and_then(|_| fs::remove_file(&probe));
    written.err().map(|e| format!("{} cannot be written: {e}", folder.display()))
}

/// Logs what it costs if the driver keeps no compiled kernels.
pub(crate) fn warn_if_missing() {
    if let Some(reason) = missing_reason(|name| std::env::var_os(name)) {
        log::warn!(
            "the GPU driver keeps no compiled kernels on disk ({reason}), so it compiles them at each start, which takes several \
             seconds: set CUDA_CACHE_PATH to a folder that this process can write to"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_names_the_variable_or_the_folder() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("file");
        fs::write(&file, "").expect("a file");
        let (home, file) = (dir.path().as_os_str(), file.as_os_str());
        for (set, want) in [
            (&[("HOME", home)][..], None),
            (&[("CUDA_CACHE_PATH", home)], None),
            (&[("CUDA_CACHE_PATH", "".as_ref()), ("HOME", home), ("CUDA_CACHE_DISABLE", "0".as_ref())], None),
            (&[("CUDA_CACHE_PATH", file), ("HOME", home)], Some("cannot be written: ")),
            (&[("HOME", file)], Some("cannot be written: ")),
            (&[("HOME", home), ("CUDA_CACHE_DISABLE", "1".as_ref())], Some("CUDA_CACHE_DISABLE is set")),
            (&[], Some("neither HOME nor CUDA_CACHE_PATH is set")),
        ] {
            let find = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
            let reason = missing_reason(find);
            match want {
                None => assert_eq!(reason, None, "{set:?}"),
                Some(part) => {
                    assert!(reason.as_ref().is_some_and(|reason| reason.contains(part)), "{set:?}: {reason:?}")
                }
            }
        }
        assert!(dir.path().join(".nv/ComputeCache").is_dir());
        assert_eq!(fs::read_dir(dir.path().join(".nv/ComputeCache")).expect("a folder").count(), 0);
    }
}

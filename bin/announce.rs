//! `--announce DIR`: a file in a folder that runtimes share, with the addresses of this server while it serves, so that
//! `generate --rpc file:DIR` finds servers whose ports the system has chosen. A supervisor removes it when the worker begins to drain.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use fanout::io_hint::io_hint;
use thiserror::Error;

/// Why a server cannot announce itself.
#[derive(Debug, Error)]
pub(crate) enum AnnounceError {
    /// The folder or a file in it cannot be written.
    #[error("--announce {folder}: {error}{}", io_hint(.error))]
    Io { folder: String, error: io::Error },
    /// The server listens on all addresses of a machine without a name.
    #[error(
        "--announce: the server listens on all addresses, and this machine's name is not known ({0}): give one address with \
         --host"
    )]
    NoHostName(io::Error),
}

/// The file; removed when this value is dropped. A server that is killed leaves it.
pub(crate) struct Announcement {
    file: PathBuf,
}

impl Announcement {
    /// Writes the file of a server that listens on `addresses`: a line `HOST:PORT` for each, loopback last, because
    /// readers take the first one. Creates the folder if need be.
    ///
    /// The file's name has the name of this machine, and the address: servers of other machines never replace it, even if they
    /// listen on the same address of loopback, and the next server on this address replaces what a killed one has left.
    ///
    /// # Errors
    /// [`AnnounceError`].
    pub(crate) fn write(folder: &Path, addresses: &[SocketAddr]) -> Result<Announcement, AnnounceError> {
        let mut addresses = addresses.to_vec();
        addresses.sort_by_key(|address| address.ip().to_canonical().is_loopback());
        let io = |error| AnnounceError::Io { folder: folder.display().to_string(), error };
        let Some(&first) = addresses.first() else { return Err(io(io::ErrorKind::InvalidInput.into())) };
        if first.ip().to_canonical().is_loopback() {
            log::warn!(
                "--announce: {first} is an address of loopback, which only programs on this machine can reach: for those of other \
                 machines, listen on another address (--host, with --allow or keys)"
            );
        }
        let host = host_name();
        let lines: Result<Vec<_>, _> = addresses.iter().map(|&address| reachable(address, &host)).collect();
        let text = lines.map_err(AnnounceError::NoHostName)?.join("\n") + "\n";
        let name = file_name(host.as_deref().unwrap_or("host"), first);
        Ok(Announcement { file: write_file(folder, &name, &text).map_err(io)? })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.file) {
            log::warn!("cannot remove {}: {e}", self.file.display());
        }
    }
}

/// `HOST-ADDRESS-PORT`, without characters that mean something in a path, or a point at the start, which would hide the file.
fn file_name(host: &str, address: SocketAddr) -> String {
    let name = format!("{}-{}-{}", host.trim_start_matches('.'), address.ip(), address.port());
    name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | ':') { c } else { '_' }).collect()
}

/// Writes a file atomically: readers see all lines, or no file. The temporary file has a hidden, random name: under a name that can be
/// predicted, another user of the folder could leave a link to a file of this user.
fn write_file(folder: &Path, name: &str, text: &str) -> io::Result<PathBuf> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let (file, unfinished) = (folder.join(name), folder.join(format!(".{:032x}.part", u128::from_le_bytes(random))));
    fs::create_dir_all(folder)?;
    let mut out = OpenOptions::new().write(true).create_new(true).open(&unfinished)?;
    let written = out.write_all(text.as_bytes()).and_then(|()| fs::rename(&unfinished, &file));
    if let Err(e) = written {
        let _ = fs::remove_file(&unfinished);
        return Err(e);
    }
    Ok(file)
}

/// The name of this machine.
fn host_name() -> io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned())
}

/// The address as other machines use it: an unspecified one has the name of this machine.
fn reachable(address: SocketAddr, host: &io::Result<String>) -> io::Result<String> {
    match host {
        _ if !address.ip().is_unspecified() => Ok(address.to_string()),
        Ok(host) => Ok(format!("{host}:{}", address.port())),
        Err(e) => Err(io::Error::new(e.kind(), e.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_every_address_until_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = || -> Vec<(String, String)> {
            let entries = fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("a file").path());
            let name = |path: &PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
            entries.map(|path| (name(&path), fs::read_to_string(&path).expect("text"))).collect()
        };
        let addresses = ["[::1]:7", "10.0.0.5:50052"].map(|address| address.parse().expect("an address"));
        let announcement = Announcement::write(folder.path(), &addresses).expect("a file");
        let [(name, text)] = &files()[..] else { panic!("{:?}", files()) };
        assert!(name.ends_with("-10.0.0.5-50052"), "{name}");
        assert_eq!(text, "10.0.0.5:50052\n[::1]:7\n", "loopback comes last");
        let next = Announcement::write(folder.path(), &addresses[1..]).expect("a file");
        assert_eq!(
            files(),
            [(name.clone(), "10.0.0.5:50052\n".to_owned())],
            "what a killed server has left is replaced"
        );
        std::mem::forget(announcement);
        drop(next);
        assert_eq!(files(), []);
        let unspecified = "0.0.0.0:7".parse().expect("an address");
        let _announcement = Announcement::write(folder.path(), &[unspecified]).expect("a file");
        assert!(files()[0].0.ends_with("-0.0.0.0-7") && !files()[0].1.contains("0.0.0.0"), "{:?}", files());
        let within_file = folder.path().join(&files()[0].0);
        let error = Announcement::write(&within_file, &addresses).err().expect("an error").to_string();
        assert!(error.ends_with("; a file has this name: give a folder, or remove the file"), "{error}");
    }

    #[test]
    fn names_of_files_are_those_of_the_machine_and_the_address() {
        for (host, address, name) in [
            ("gpu-1", "127.0.0.1:50052", "gpu-1-127.0.0.1-50052"),
            ("gpu-2", "127.0.0.1:50052", "gpu-2-127.0.0.1-50052"),
            ("../x y", "[fd00::5]:7", "_x_y-fd00::5-7"),
        ] {
            assert_eq!(file_name(host, address.parse().expect("an address")), name);
        }
    }

    /// Readers skip files whose names begin with a point.
    #[test]
    fn a_failed_write_leaves_no_file() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("name")).expect("a folder in the place of the file");
        fs::write(folder.path().join("name/x"), "").expect("a file, so that the folder is not replaced");
        assert!(write_file(folder.path(), "name", "text").is_err());
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}

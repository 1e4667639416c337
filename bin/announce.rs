//! `--announce DIR`: a file in a folder that runtimes share, with the addresses of this server while it serves, so that
//! `generate --rpc file:DIR` finds servers whose ports the system has chosen. A supervisor removes it when the worker begins to drain.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The file; removed when this value is dropped. A server that is killed leaves it.
pub(crate) struct Announcement {
    file: PathBuf,
}

impl Announcement {
    /// Writes the file `HOST-PORT` of a server that listens on `addresses`: a line `HOST:PORT` for each. Creates the folder if need
    /// be.
    ///
    /// # Errors
    /// The folder cannot be written, or an address is unspecified (0.0.0.0) and the host's name is not known.
    pub(crate) fn write(folder: &Path, addresses: &[SocketAddr]) -> io::Result<Announcement> {
        let lines = addresses.iter().map(|&address| reachable(address)).collect::<io::Result<Vec<_>>>()?;
        let name = lines.first().map_or(String::new(), |first| first.replace(['[', ']'], "").replace(':', "-"));
        let (file, unfinished) = (folder.join(&name), folder.join(format!(".{name}")));
        fs::create_dir_all(folder)?;
        // A reader sees all lines or no file.
        fs::write(&unfinished, lines.join("\n") + "\n")?;
        fs::rename(&unfinished, &file)?;
        Ok(Announcement { file })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.file) {
            log::warn!("cannot remove {}: {e}", self.file.display());
        }
    }
}

/// The address as other machines use it: an unspecified one has the name of this host.
fn reachable(address: SocketAddr) -> io::Result<String> {
    if !address.ip().is_unspecified() {
        return Ok(address.to_string());
    }
    let name = fs::read_to_string("/proc/sys/kernel/hostname").map_err(|e| {
        io::Error::new(e.kind(), format!("this host's name is not known ({e}); --host gives an address"))
    })?;
    Ok(format!("{}:{}", name.trim(), address.port()))
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
        let addresses = ["10.0.0.5:50052", "[::1]:7"].map(|address| address.parse().expect("an address"));
        let announcement = Announcement::write(folder.path(), &addresses).expect("a file");
        assert_eq!(files(), [("10.0.0.5-50052".to_owned(), "10.0.0.5:50052\n[::1]:7\n".to_owned())]);
        drop(announcement);
        assert_eq!(files(), []);
        let unspecified = "0.0.0.0:7".parse().expect("an address");
        let _announcement = Announcement::write(folder.path(), &[unspecified]).expect("a file");
        assert!(files()[0].0.ends_with("-7") && !files()[0].1.contains("0.0.0.0"), "{:?}", files());
        let within_file = folder.path().join(&files()[0].0);
        assert!(Announcement::write(&within_file, &addresses).is_err());
    }
}

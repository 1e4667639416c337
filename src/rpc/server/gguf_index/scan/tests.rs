use super::*;
use crate::gguf::Writer;
use crate::tensor::DType;
use std::cell::Cell;
use std::fs;

/// Writes a GGUF file with `tensors` tensors into a folder.
fn write_gguf(dir: &Path, name: &str, tensors: usize) {
    let file = (0..tensors).fold(Writer::new(), |file, i| file.tensor(&i.to_string(), &[8], DType::I8));
    fs::write(dir.join(name), file.to_bytes().expect("a valid file")).expect("written");
}

/// The files of a snapshot: name, number of tensors, and whether the entry was reused from `before`.
fn file_summary(snapshot: &IndexSnapshot, before: &IndexSnapshot) -> Vec<(String, usize, bool)> {
    let file = |(path, file): (&PathBuf, &Arc<IndexedFile>)| {
        let reused = before.files.get(path).is_some_and(|before| Arc::ptr_eq(before, file));
        (path.file_name().expect("a name").to_string_lossy().into_owned(), file.tensors.len(), reused)
    };
    let mut files: Vec<_> = snapshot.files.iter().map(file).collect();
    files.sort();
    files
}

#[track_caller]
fn assert_files(snapshot: &IndexSnapshot, before: &IndexSnapshot, expected: &[(&str, usize, bool)]) {
    let expected: Vec<_> = expected.iter().map(|&(name, tensors, reused)| (name.to_owned(), tensors, reused)).collect();
    assert_eq!(file_summary(snapshot, before), expected);
    assert_eq!(snapshot.tensors, snapshot.files.values().map(|file| file.tensors.len()).sum::<usize>());
}

#[test]
fn file_without_room_is_read_only_once() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, tensors) in [("a.gguf", 3), ("b.gguf", 4), ("c.gguf", 2), ("d.gguf", 1)] {
        write_gguf(dir.path(), name, tensors);
    }
    let scan = |before: &IndexSnapshot| scan_folder(dir.path(), before, 6, &mut KnownDigests::new(), &|| true);
    let first = scan(&IndexSnapshot::default());
    assert_files(
        &first,
        &IndexSnapshot::default(),
        &[("a.gguf", 3, false), ("b.gguf", 0, false), ("c.gguf", 2, false), ("d.gguf", 1, false)],
    );
    let second = scan(&first);
    assert_files(
        &second,
        &first,
        &[("a.gguf", 3, true), ("b.gguf", 0, true), ("c.gguf", 2, true), ("d.gguf", 1, true)],
    );
    // Removing a file makes room: b is read again, and d no longer fits.
    fs::remove_file(dir.path().join("a.gguf")).expect("removed");
    let third = scan(&second);
    assert_files(&third, &second, &[("b.gguf", 4, false), ("c.gguf", 2, true), ("d.gguf", 0, false)]);
}

#[test]
fn aborted_scan_is_resumed_by_the_next_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let names: Vec<_> = (0..6).map(|i| format!("{i}.gguf")).collect();
    names.iter().for_each(|name| write_gguf(dir.path(), name, 1));
    // `should_continue` returns true for the first `calls` calls: one call per directory entry, then one per file.
    let scan = |before: &IndexSnapshot, calls: usize| {
        let count = Cell::new(0);
        scan_folder(dir.path(), before, 100, &mut KnownDigests::new(), &|| count.replace(count.get() + 1) < calls)
    };
    let first = scan(&IndexSnapshot::default(), 6 + 2);
    assert_files(&first, &IndexSnapshot::default(), &[("0.gguf", 1, false), ("1.gguf", 1, false)]);
    let second = scan(&first, 6 + 4);
    let reused = |n: usize, of: usize| (0..n).map(|i| (&*names[i], 1, i < of)).collect::<Vec<_>>();
    assert_files(&second, &first, &reused(4, 2));
    // Aborted while listing entries, or before the first file: the entries of `before` remain.
    for calls in [0, 3, 6] {
        let third = scan(&second, calls);
        assert_files(&third, &second, &reused(4, 4));
    }
    assert_files(&scan(&second, usize::MAX), &second, &reused(6, 4));
}

/// Links that other users may have created are left out, so that they cannot extend a program's sandbox.
#[cfg(unix)]
#[test]
fn link_targets_are_those_of_links_that_a_scan_follows() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name);
    for folder in ["models/open", "library"] {
        fs::create_dir_all(at(folder)).expect("a folder");
    }
    fs::write(at("file"), "").expect("written");
    fs::write(at("library/d.gguf"), "").expect("written");
    let links =
        [("file", "a.gguf"), ("file", "open/b.gguf"), ("file", "text"), ("none", "c.gguf"), ("library", "library")];
    for (target, link) in links {
        symlink(at(target), at("models").join(link)).expect("a link");
    }
    fs::set_permissions(at("models/open"), fs::Permissions::from_mode(0o777)).expect("permissions");
    let real = |name: &str| fs::canonicalize(at(name)).expect("a path");
    assert_eq!(model_link_targets(&at("models")), [real("file"), real("library")]);
    assert!(model_link_targets(&at("missing")).is_empty());
}

#[cfg(unix)]
#[test]
fn named_pipe_is_rejected_without_blocking() {
    let dir = tempfile::tempdir().expect("a folder");
    let [path, other] = ["pipe.gguf", "pipe2.gguf"].map(|name| dir.path().join(name));
    assert!(std::process::Command::new("mkfifo").args([&path, &other]).status().expect("mkfifo").success());
    // The pipe has no writer: a blocking open would never return.
    assert!(ListedFile::new(&path, false).open().is_err() && ListedFile::new(&path, true).open().is_err());
    let snapshot = scan_folder(dir.path(), &IndexSnapshot::default(), 9, &mut KnownDigests::new(), &|| true);
    assert_files(&snapshot, &IndexSnapshot::default(), &[]);
    let line = format!("models: {}: not a regular file: ignored (and 1 more)", path.display());
    assert!(snapshot.problems.len() == 1 && snapshot.problems.contains(&line), "{:?}", snapshot.problems);
}

/// In a folder that others may write to, a symbolic link may be anyone's: it could lead to a device, or to files of the server.
#[cfg(unix)]
#[test]
fn links_are_followed_only_in_folders_of_one_user() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (dir, store) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    write_gguf(store.path(), "blob", 1);
    fs::create_dir(store.path().join("more")).expect("a folder");
    write_gguf(&store.path().join("more"), "b.gguf", 2);
    symlink(store.path().join("blob"), dir.path().join("a.gguf")).expect("a link");
    symlink(store.path().join("more"), dir.path().join("sub")).expect("a link");
    write_gguf(dir.path(), "c.gguf", 3);
    let own = ("c.gguf", 3, false);
    for (mode, files) in [
        (0o755, &[("a.gguf", 1, false), ("b.gguf", 2, false), own][..]),
        (0o775, &[own]),
        (0o757, &[own]),
        // The sticky bit keeps others from removing files, but not from adding links.
        (0o1777, &[own]),
    ] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("permissions");
        let snapshot = scan_folder(dir.path(), &IndexSnapshot::default(), 9, &mut KnownDigests::new(), &|| true);
        assert_files(&snapshot, &IndexSnapshot::default(), files);
        assert_eq!(snapshot.problems.len(), usize::from(mode != 0o755), "{:?}", snapshot.problems);
    }
}

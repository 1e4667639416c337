use super::*;
use crate::gguf::Writer;
use crate::tensor::DType;
use std::cell::Cell;

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
    assert_eq!(snapshot.tensors, snapshot.by_bytes.values().map(Vec::len).sum::<usize>());
}

#[test]
fn file_without_room_is_read_only_once() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, tensors) in [("a.gguf", 3), ("b.gguf", 4), ("c.gguf", 2), ("d.gguf", 1)] {
        write_gguf(dir.path(), name, tensors);
    }
    let scan = |before: &IndexSnapshot| scan_folder(dir.path(), before, 6, &|| true);
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
        scan_folder(dir.path(), before, 100, &|| count.replace(count.get() + 1) < calls)
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

#[cfg(unix)]
#[test]
fn named_pipe_is_rejected_without_blocking() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
    // The pipe has no writer: a blocking open would never return.
    assert!(read_tensor_list(&path).is_err() && super::super::file::open(&path).is_err());
    assert_files(&scan_folder(dir.path(), &IndexSnapshot::default(), 9, &|| true), &IndexSnapshot::default(), &[]);
}

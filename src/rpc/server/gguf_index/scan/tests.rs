use super::*;
use crate::gguf::Writer;
use crate::tensor::DType;
use std::cell::Cell;

/// Puts a file with so many tensors into a folder.
fn put(dir: &Path, name: &str, tensors: usize) {
    let file = (0..tensors).fold(Writer::new(), |file, i| file.tensor(&i.to_string(), &[8], DType::I8));
    fs::write(dir.join(name), file.to_bytes().expect("a valid file")).expect("written");
}

/// The files of a library: name, tensors, and whether another one has the very same.
fn files(library: &Library, before: &Library) -> Vec<(String, usize, bool)> {
    let file = |(path, file): (&PathBuf, &Arc<ModelFile>)| {
        let known = before.files.get(path).is_some_and(|before| Arc::ptr_eq(before, file));
        (path.file_name().expect("a name").to_string_lossy().into_owned(), file.tensors.len(), known)
    };
    let mut files: Vec<_> = library.files.iter().map(file).collect();
    files.sort();
    files
}

#[track_caller]
fn expect(library: &Library, before: &Library, expected: &[(&str, usize, bool)]) {
    let expected: Vec<_> = expected.iter().map(|&(name, tensors, known)| (name.to_owned(), tensors, known)).collect();
    assert_eq!(files(library, before), expected);
    assert_eq!(library.tensors, library.by_bytes.values().map(Vec::len).sum::<usize>());
}

#[test]
fn what_has_no_room_is_read_once() {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, tensors) in [("a.gguf", 3), ("b.gguf", 4), ("c.gguf", 2), ("d.gguf", 1)] {
        put(dir.path(), name, tensors);
    }
    let look = |before: &Library| look(dir.path(), before, 6, &|| true);
    let first = look(&Library::default());
    expect(
        &first,
        &Library::default(),
        &[("a.gguf", 3, false), ("b.gguf", 0, false), ("c.gguf", 2, false), ("d.gguf", 1, false)],
    );
    let second = look(&first);
    expect(&second, &first, &[("a.gguf", 3, true), ("b.gguf", 0, true), ("c.gguf", 2, true), ("d.gguf", 1, true)]);
    // Once there is room it is read again; what has none then is not there any more.
    fs::remove_file(dir.path().join("a.gguf")).expect("removed");
    let third = look(&second);
    expect(&third, &second, &[("b.gguf", 4, false), ("c.gguf", 2, true), ("d.gguf", 0, false)]);
}

#[test]
fn a_look_that_is_cut_short_goes_on_the_next_time() {
    let dir = tempfile::tempdir().expect("a folder");
    let names: Vec<_> = (0..6).map(|i| format!("{i}.gguf")).collect();
    names.iter().for_each(|name| put(dir.path(), name, 1));
    // So many questions are answered by yes: one for each name in the folder, then one for each file.
    let look = |before: &Library, yes: usize| {
        let asked = Cell::new(0);
        look(dir.path(), before, 100, &|| asked.replace(asked.get() + 1) < yes)
    };
    let first = look(&Library::default(), 6 + 2);
    expect(&first, &Library::default(), &[("0.gguf", 1, false), ("1.gguf", 1, false)]);
    let second = look(&first, 6 + 4);
    let known = |n: usize, of: usize| (0..n).map(|i| (&*names[i], 1, i < of)).collect::<Vec<_>>();
    expect(&second, &first, &known(4, 2));
    // Cut off among the names, or before the first file: what is known stays.
    for yes in [0, 3, 6] {
        let third = look(&second, yes);
        expect(&third, &second, &known(4, 4));
    }
    expect(&look(&second, usize::MAX), &second, &known(6, 4));
}

#[cfg(unix)]
#[test]
fn a_pipe_is_no_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
    // Nobody writes into it: whoever waits for that waits for ever.
    assert!(read(&path).is_err() && super::super::file::open(&path).is_err());
    expect(&look(dir.path(), &Library::default(), 9, &|| true), &Library::default(), &[]);
}

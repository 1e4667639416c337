use super::*;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

fn make_fifo(path: &Path) {
    rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).expect("a pipe");
}

/// Opening a named pipe without another end would never return.
#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = Folder::open(dir.path()).expect("an open folder");
    fs::write(dir.path().join("file"), b"data").expect("written");
    fs::create_dir(dir.path().join("folder")).expect("a folder");
    make_fifo(&dir.path().join("pipe"));
    for (link, target) in [("to-file", "file"), ("to-pipe", "pipe"), ("to-folder", "folder"), ("to-nothing", "missing")]
    {
        symlink(target, dir.path().join(link)).expect("a link");
    }
    for (name, refusing, following) in [
        ("file", true, true),
        ("folder", false, false),
        ("pipe", false, false),
        ("to-file", false, true),
        ("to-pipe", false, false),
        ("to-folder", false, false),
        ("to-nothing", false, false),
        ("missing", false, false),
    ] {
        let opens = |links| folder.open_file(OsStr::new(name), links).is_ok();
        assert_eq!((opens(Links::Refuse), opens(Links::Follow)), (refusing, following), "{name}");
        let opens = |links| folder.open_folder(OsStr::new(name), links).is_ok();
        let is_folder = name == "folder";
        assert_eq!(
            (opens(Links::Refuse), opens(Links::Follow)),
            (is_folder, is_folder || name == "to-folder"),
            "{name}"
        );
    }
    let mut kinds: Vec<_> = folder.entries().expect("a listing").map(|entry| entry.expect("an entry")).collect();
    kinds.sort_by(|a, b| a.0.cmp(&b.0));
    let kinds: Vec<_> = kinds.iter().map(|(name, kind)| (name.to_str().expect("text"), *kind)).collect();
    let link = EntryKind::Link;
    assert_eq!(
        kinds,
        [
            ("file", EntryKind::File),
            ("folder", EntryKind::Folder),
            ("pipe", EntryKind::Other),
            ("to-file", link),
            ("to-folder", link),
            ("to-nothing", link),
            ("to-pipe", link)
        ]
    );
}

#[test]
fn partial_file_appears_when_it_is_renamed() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = Folder::open_or_create(&dir.path().join("a/b")).expect("a new folder");
    let mode = |path: &Path| fs::metadata(path).expect("an entry").mode() & 0o777;
    assert_eq!((mode(&dir.path().join("a")), mode(folder.path())), (0o700, 0o700));
    let names = || folder.entries().expect("a listing").map(|entry| entry.expect("an entry").0).collect::<Vec<_>>();
    drop(folder.create_partial().expect("a file"));
    assert_eq!(names(), [""; 0]);
    let mut partial = folder.create_partial().expect("a file");
    partial.file().write_all(b"data").expect("written");
    // A server that starts meanwhile removes only the file of a server that has ended.
    fs::write(folder.path().join("0123.part"), b"abandoned").expect("written");
    assert_eq!(names().len(), 2);
    folder.remove_abandoned().expect("a listing");
    assert_eq!(names().len(), 1);
    // The name of an entry that is a link is replaced, and its target is not.
    fs::write(dir.path().join("target"), b"other").expect("written");
    symlink(dir.path().join("target"), folder.path().join("name")).expect("a link");
    partial.rename_to(OsStr::new("name")).expect("renamed");
    assert_eq!(names(), ["name"]);
    assert_eq!(mode(&folder.path().join("name")), 0o600);
    assert_eq!(fs::read(dir.path().join("target")).expect("readable"), b"other");
    assert_eq!(fs::read(folder.path().join("name")).expect("readable"), b"data");
}

#[test]
fn a_file_that_cannot_be_removed_is_an_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = Folder::open(dir.path()).expect("an open folder");
    fs::write(dir.path().join("file"), b"data").expect("written");
    // A folder is not removed like a file, whatever the user may do.
    fs::create_dir(dir.path().join("folder")).expect("a folder");
    for (name, is_gone) in [("file", true), ("file", true), ("folder", false)] {
        assert_eq!(folder.remove_if_exists(OsStr::new(name)).is_ok(), is_gone, "{name}");
    }
    let mut partial = folder.create_partial().expect("a file");
    let path = partial.path();
    fs::remove_file(&path).expect("removed");
    fs::create_dir(&path).expect("a folder");
    assert!(partial.discard().is_err(), "it is still there");
    assert!(partial.discard().is_ok(), "tried once");
}

#[test]
fn folder_is_used_by_its_handle_after_it_was_replaced() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("cache");
    let folder = Folder::open_or_create(&path).expect("a new folder");
    fs::rename(&path, dir.path().join("moved")).expect("renamed");
    fs::create_dir(dir.path().join("victim")).expect("a folder");
    symlink(dir.path().join("victim"), &path).expect("a link");
    folder.create_partial().expect("a file").rename_to(OsStr::new("name")).expect("renamed");
    assert!(dir.path().join("moved/name").exists() && !dir.path().join("victim/name").exists());
}

#[test]
fn write_permission_of_others_is_seen() {
    let dir = tempfile::tempdir().expect("a folder");
    for (mode, want) in [(0o700, false), (0o755, false), (0o775, true), (0o757, true), (0o1777, true)] {
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).expect("permissions");
        let folder = Folder::open(dir.path()).expect("an open folder");
        assert_eq!(folder.is_writable_by_others().expect("permissions"), want, "{mode:o}");
    }
}

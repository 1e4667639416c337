//! Lists of keys in files: what the server reads again, and what it refuses.

use super::*;

/// A folder with a key and a list, which a server has read.
fn read(list: &str) -> (tempfile::TempDir, ServerKeys) {
    let dir = tempfile::tempdir().unwrap();
    let (key, file) = (dir.path().join("key"), dir.path().join("list"));
    SecretKey::generate().unwrap().create_file(&key).unwrap();
    std::fs::write(&file, list).unwrap();
    let keys = ServerKeys::read_files(&key, &file).unwrap();
    (dir, keys)
}

/// What a full disk leaves, or an editor that writes in place: `eve revoked` without the last word, or without a part of it.
#[test]
fn a_list_that_is_cut_at_any_byte_allows_no_revoked_key() {
    let [alice, eve] = [(); 2].map(|()| SecretKey::generate().unwrap().public_key());
    let list = format!("{alice} alice\n# left in May\n{eve} eve revoked\n");
    let (dir, keys) = read(&list);
    let verdict_of = |key: &PublicKey| keys.list.as_ref().unwrap().check(&key.to_string().parse().unwrap());
    for end in 0..=list.len() {
        std::fs::write(dir.path().join("list"), &list[..end]).unwrap();
        let is_whole_lines = end == 0 || list[..end].ends_with('\n');
        match keys.reread(1) {
            Ok(_) => assert!(is_whole_lines, "{end}"),
            Err(e) => assert!(!is_whole_lines && e.to_string().contains("list:"), "{end}: {e}"),
        }
        assert!(!matches!(verdict_of(&eve), Verdict::Allowed(_)), "{end}: {:?}", &list[..end]);
        // An error leaves the former list, which is restored for the next cut.
        std::fs::write(dir.path().join("list"), &list).unwrap();
        keys.reread(1).unwrap();
        assert!(matches!(verdict_of(&alice), Verdict::Allowed(_)) && verdict_of(&eve) == Verdict::Revoked);
    }
}

/// A named pipe has no writer: opening it for reading would wait for ever.
#[cfg(unix)]
#[test]
fn a_list_that_is_no_regular_file_is_refused_at_once() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let alice = SecretKey::generate().unwrap().public_key();
    let (dir, keys) = read(&format!("{alice} alice\n"));
    let list = dir.path().join("list");
    type Replace = fn(&Path);
    let kinds: [(&str, Replace); 3] = [
        ("pipe", |list| mknodat(CWD, list, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap()),
        ("device", |list| std::os::unix::fs::symlink("/dev/zero", list).unwrap()),
        ("folder", |list| std::fs::create_dir(list).unwrap()),
    ];
    for (kind, replace) in kinds {
        std::fs::remove_file(&list).unwrap();
        replace(&list);
        let error = keys.reread(1).unwrap_err().to_string();
        assert!(error.ends_with("list: not a regular file"), "{kind}: {error}");
        assert_eq!(keys.allowed(), Some(1), "{kind}");
        let key = dir.path().join("key");
        assert!(ServerKeys::read_files(&key, &list).is_err(), "{kind}: at the start");
        if kind == "folder" {
            std::fs::remove_dir(&list).unwrap();
            std::fs::write(&list, "").unwrap();
        }
    }
}

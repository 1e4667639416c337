//! Decodes all PTX files in `kernels/ptx`.

use std::path::Path;

use super::decode;
use crate::ptx;

/// Name and text of all files in kernels/ptx.
pub(super) fn kernel_texts() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    let mut texts: Vec<(String, String)> = std::fs::read_dir(folder)
        .expect("kernels/ptx exists")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).expect("a readable file")))
        .collect();
    texts.sort();
    texts
}

#[test]
fn every_committed_kernel_decodes() {
    let mut errors = Vec::new();
    let texts = kernel_texts();
    assert!(!texts.is_empty());
    for (path, text) in &texts {
        let module = ptx::parse(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        match decode(&module, text) {
            Ok(code) => assert_eq!(code.functions.iter().filter(|f| f.entry).count(), text.matches(".entry").count()),
            Err(error) => errors.push(format!("{path}: {error}")),
        }
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

//! Tests of the parser. `trees`: syntax trees of valid texts; `errors`: messages; `robust`: truncated, mutated and hostile
//! texts.

mod errors;
mod robust;
mod trees;

use std::fs;
use std::path::Path;

/// Name and text of every PTX file of the test kernels.
fn kernel_files() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx");
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "ptx"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), fs::read_to_string(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

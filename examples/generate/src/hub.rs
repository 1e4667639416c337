//! `-hf REPO[:QUANT]`: a model of Hugging Face, or of another server with its interface (`HF_ENDPOINT`). Its files are downloaded once, into
//! the cache that Hugging Face's own programs share (`HF_HOME`), and used from there when the server cannot be reached.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow};
use fanout::weights::ModelFile;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

const ENDPOINT: &str = "https://huggingface.co";
/// What is taken of a repository that has it, unless a quantisation is named.
const USUAL: &str = "Q4_K_M";
const BRANCH: &str = "main";

/// A repository with GGUF files, and which of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    repo: String,
    quant: Option<String>,
}

impl FromStr for HubModel {
    type Err = String;

    fn from_str(text: &str) -> Result<HubModel, String> {
        let (repo, quant) = text.split_once(':').map_or((text, None), |(repo, quant)| (repo, Some(quant)));
        let is_name = |name: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !name.is_empty() && !name.starts_with('.') && name.chars().all(allowed)
        };
        match repo.split_once('/') {
            Some((owner, name)) if [owner, name].into_iter().chain(quant).all(is_name) => {
                Ok(HubModel { repo: repo.to_owned(), quant: quant.map(str::to_owned) })
            }
            _ => Err("expected OWNER/NAME or OWNER/NAME:QUANT, such as ggml-org/gemma-3-270m-GGUF:Q8_0".to_owned()),
        }
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.quant.as_ref().map_or(Ok(()), |quant| write!(f, ":{quant}"))
    }
}

impl HubModel {
    /// The path of the model in the cache, of its first part if it is split. Downloads what the cache lacks.
    ///
    /// # Errors
    /// A server that cannot be reached while the cache lacks the model, a repository without such a model, and a failed download.
    pub fn fetch(&self) -> anyhow::Result<PathBuf> {
        let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| ENDPOINT.to_owned());
        let (cache, repo) = (Cache::from_env(), self.repo());
        let token = std::env::var("HF_TOKEN").ok().or_else(|| cache.token());
        let api = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.clone()).with_token(token).build();
        let api = api.with_context(|| format!("-hf {self}"))?.repo(repo);
        match api.info() {
            Ok(info) => {
                let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
                self.download(&api, &names)
            }
            Err(error) => {
                let cached = self.cached(&cache);
                let cached = cached.ok_or_else(|| self.unreachable(&endpoint, &error))?;
                log::warn!("-hf {self}: {endpoint} cannot be asked ({error}): {} is used as it is", cached.display());
                Ok(cached)
            }
        }
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, BRANCH.to_owned())
    }

    fn download(&self, api: &ApiRepo, names: &[String]) -> anyhow::Result<PathBuf> {
        let files = self.files(names).ok_or_else(|| {
            let found: Vec<&str> = models(names).collect();
            let found = if found.is_empty() { "no GGUF file".to_owned() } else { found.join(", ") };
            anyhow!("-hf {self}: the repository has no such model, but {found}")
        })?;
        let fetch = |name: &String| api.get(name).with_context(|| format!("-hf {self}: {name}"));
        let paths = files.iter().map(fetch).collect::<anyhow::Result<Vec<_>>>()?;
        paths.into_iter().next().context("a model has a file")
    }

    /// The model in the cache, if all of its files are there.
    fn cached(&self, cache: &Cache) -> Option<PathBuf> {
        let folder = cache.path().join(self.repo().folder_name());
        let commit = std::fs::read_to_string(folder.join("refs").join(BRANCH)).ok()?;
        let snapshot = folder.join("snapshots").join(commit.trim());
        let mut names = Vec::new();
        // Repositories have a folder for each quantisation, if any.
        for entry in std::fs::read_dir(&snapshot).ok()?.flatten() {
            let inner = std::fs::read_dir(entry.path()).into_iter().flatten().flatten();
            let paths = inner.map(|inner| inner.path()).chain([entry.path()]);
            names.extend(paths.filter_map(|path| Some(path.strip_prefix(&snapshot).ok()?.to_str()?.to_owned())));
        }
        names.sort();
        let files = self.files(&names)?;
        let paths: Vec<PathBuf> = files.iter().map(|name| snapshot.join(name)).collect();
        paths.iter().all(|path| path.is_file()).then(|| paths.into_iter().next())?
    }

    /// The files of the model among those of the repository, all parts if it is split; `None` if there is no such model.
    fn files(&self, names: &[String]) -> Option<Vec<String>> {
        let of = |quant: &str| models(names).find(|name| has_quant(name, quant));
        let first = match &self.quant {
            Some(quant) => of(quant),
            None => of(USUAL).or_else(|| models(names).next()),
        }?;
        let parts = ModelFile::paths(first);
        Some(parts.iter().map(|path| path.display().to_string()).collect())
    }

    fn unreachable(&self, endpoint: &str, error: &ApiError) -> anyhow::Error {
        let text = error.to_string();
        let hint = if text.contains("404") || text.contains("401") {
            "is the name right? Repositories that are not public need a token in HF_TOKEN"
        } else {
            "without a network, give the path of a file instead; HF_ENDPOINT names another server"
        };
        anyhow!("-hf {self}: {endpoint} cannot be asked for the model: {text}: {hint}")
    }
}

/// The GGUF files of language models by name, without encoders of images.
fn models(names: &[String]) -> impl Iterator<Item = &str> {
    let is_model = |name: &&str| {
        let inside = !name.contains('\\')
            && Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
        inside && name.ends_with(".gguf") && !name.contains("mmproj")
    };
    names.iter().map(String::as_str).filter(is_model)
}

/// Whether a file's name has this quantisation: as a word, since Q4_K is no Q4_K_M.
fn has_quant(name: &str, quant: &str) -> bool {
    name.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word.eq_ignore_ascii_case(quant))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use super::*;

    fn chosen(model: &str, names: &[&str]) -> Option<Vec<String>> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        model.parse::<HubModel>().unwrap().files(&names)
    }

    #[test]
    fn a_quantisation_is_a_word_of_the_name() {
        let names = ["README.md", "mmproj-Q4_K_M.gguf", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "m.q8_0.gguf"];
        let cases = [
            ("o/m", Some("m-Q4_K_M.gguf")),
            ("o/m:Q4_K", Some("m-Q4_K.gguf")),
            ("o/m:q8_0", Some("m.q8_0.gguf")),
            ("o/m:Q5_0", None),
        ];
        for (model, file) in cases {
            assert_eq!(chosen(model, &names), file.map(|file| vec![file.to_owned()]), "{model}");
        }
        assert_eq!(chosen("o/m", &["b.gguf", "a.gguf"]), Some(vec!["b.gguf".to_owned()]));
        assert_eq!(chosen("o/m", &["../x.gguf", "/x.gguf", "a\\x.gguf", "mmproj.gguf"]), None);
        let split = ["Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"];
        let both = [split[1].to_owned(), split[0].to_owned()];
        assert_eq!(chosen("o/m:Q8_0", &split), Some(both.to_vec()));
    }

    #[test]
    fn a_repository_has_an_owner_and_a_name() {
        for wrong in ["m", "o/", "/m", "o/m/x", "o/m:", "../m", "o/..", "o/m:a/b", "o/m x"] {
            assert!(wrong.parse::<HubModel>().is_err(), "{wrong}");
        }
        assert_eq!("o.x/m-1_2:Q4_0".parse::<HubModel>().unwrap().to_string(), "o.x/m-1_2:Q4_0");
    }
}

//! The command line: options, their validation, and their defaults.

mod error;
mod sampling;
mod split;

pub use error::ArgsError;
pub use split::{GroupShares, Split};

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::hub::HubModel;
use crate::model::KV_PAD;
use crate::servers::ServerSource;
use clap::{ArgGroup, Parser, ValueEnum};
use fanout::log_level::parse_log_level;
use fanout::registry::parse_nonzero_bytes;
use fanout::rpc::keys::PublicKey;
use fanout::sched::batching::KvCells;
use fanout::sched::sampling::Sampling;
use fanout::sched::tensor_group::TensorGroup;
use fanout::tensor::DType;
use log::LevelFilter;
use split::{number, split};

/// Tokens to generate at most, if neither `--predict` nor `--chat` is given.
const TEXT_PREDICT: usize = 64;

/// Capacity of the KV cache for a conversation, in tokens.
const CHAT_CONTEXT: usize = 4096;

/// Examples, printed below the options.
pub const EXAMPLES: &str = "\
Examples:
  generate model.gguf -p 'Once upon a time'         on all GPUs, or on the CPU where there is none
  generate model.gguf --chat                        a conversation, by the model's own chat template
  generate model.gguf -p 'Once' -d 0,1 --split 3,1  three quarters of the layers on the first GPU
  generate model.gguf --tokens 1,5,9 -d CPU,CPU     two devices, token ids instead of text
  generate model.gguf -p 'Once' --temp 0.8 --top-p 0.95 --seed 7
  generate model.gguf --tokens 1,5,9 --json         token ids, rates and bytes, as one line of JSON
  generate model.gguf --tokens 1,5,9 -d 0 --compare each node of the graph against the exact CPU
  generate model.gguf -p 'Once' --rpc host-a,host-b:50053 --retry   two servers, which may be lost and come back
  generate model.gguf --prompts prompts.txt --parallel 16  many prompts, 16 at a time
  generate -hf ggml-org/gemma-3-270m-GGUF:Q8_0 -p 'Once'    a model of Hugging Face, downloaded once
  generate models                                   architectures, and models that were tried
  generate model.gguf --info                        architecture, sizes and tensor types of the file";

/// Generates text with a GGUF language model over any set of devices, of this machine and of RPC servers. `generate models` lists the
/// architectures.
#[derive(Clone, Debug, Parser)]
#[command(name = "generate", version, after_help = EXAMPLES, max_term_width = 100)]
#[command(group = ArgGroup::new("sampled").args(["temperature", "chat"]).multiple(true))]
pub struct Args {
    /// The model: a GGUF file, or any part of a split one.
    #[arg(value_name = "MODEL", required_unless_present_any = ["model_option", "hf_repo"])]
    pub model_argument: Option<PathBuf>,

    /// The same as MODEL.
    #[arg(short, long = "model", value_name = "FILE", conflicts_with = "model_argument")]
    pub model_option: Option<PathBuf>,

    /// A model of Hugging Face, in place of MODEL: its Q4_K_M file, or the quantisation that is named. It is downloaded once, into the
    /// cache of Hugging Face's programs (HF_HOME). HF_ENDPOINT names another server, HF_TOKEN has a token. `-hf` is the same.
    #[arg(long, value_name = "REPO[:QUANT]", conflicts_with_all = ["model_argument", "model_option"])]
    pub hf_repo: Option<HubModel>,

    /// Text to continue, or with --chat the message to reply to; special tokens in the text are recognised.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "tokens", required_unless_present_any = ["tokens", "prompts", "perplexity", "chat", "info"])]
    pub prompt: Option<String>,

    /// Token ids to continue, separated by commas, instead of text. No begin-of-text token is added.
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token)]
    pub tokens: Option<Vec<u32>>,

    /// File with prompts, one per line: text, or `tokens:` and token ids. Several are continued at the same time, see --parallel.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "tokens", "chat", "echo", "warm_up", "compare", "info"])]
    pub prompts: Option<PathBuf>,

    /// Print how well the model predicts the text of a file: the perplexity of its tokens, which are evaluated one by one.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["prompt", "tokens", "prompts", "chat", "echo", "warm_up", "compare", "info", "plan", "auto", "stop", "json"])]
    pub perplexity: Option<PathBuf>,

    /// Sequences at a time, each with a KV cache of --ctx tokens [default: 8].
    #[arg(long, value_name = "N", requires = "prompts", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: Option<u16>,

    /// Groups of sequences, each with a batch of its own in flight, so that devices with whole layers do not wait for each other
    /// [default: one for each device or group of devices].
    #[arg(long = "groups", value_name = "N", requires = "prompts", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub sequence_groups: Option<u16>,

    /// Reply to messages instead of continuing text: to --prompt, and then to each line that is typed; without --prompt to each line of
    /// standard input. Messages are formatted by the model's own chat template. Ctrl-C ends a reply, and twice the program.
    #[arg(long, conflicts_with_all = ["tokens", "compare", "info"])]
    pub chat: bool,

    /// File with a chat template (Jinja), in place of the model's.
    #[arg(long, value_name = "FILE", requires = "chat")]
    pub chat_template: Option<PathBuf>,

    /// System prompt: instructions at the start of the conversation.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,

    /// Tell the template that the model should reply without thinking first, for models that can do both.
    #[arg(long, requires = "chat")]
    pub no_thinking: bool,

    /// Print the prompt before the generated text, with --chat as the model gets it.
    #[arg(long, conflicts_with_all = ["json", "compare", "info"])]
    pub echo: bool,

    /// Tokens to generate, at most; 0 to evaluate the prompt only [default: 64; with --chat until the end of the reply].
    #[arg(short = 'n', long, value_name = "N")]
    pub predict: Option<usize>,

    /// End a reply where this text begins; may be given several times.
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompts", "json"], value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,

    /// Continue generating after an end-of-text token.
    #[arg(long)]
    pub ignore_eos: bool,

    /// Devices, separated by commas: GPUs by number or name (0, CUDA0), the CPU by name, a server's devices as host:port (all)
    /// or host:port/0 (one). A GPU or CPU named twice counts as two devices [default: the devices of --rpc, else all GPUs, else
    /// the CPU].
    #[arg(short, long, value_name = "LIST")]
    pub device: Option<String>,

    /// Accepted for command lines of llama.cpp: all layers are on the devices of --device and --rpc. Without these, 0 means the CPU.
    /// `-ngl N` is the same.
    #[arg(long, value_name = "N", alias = "n-gpu-layers", allow_negative_numbers = true)]
    pub gpu_layers: Option<GpuLayers>,

    /// RPC servers, separated by commas: host or host:port, where the port is 50052 unless given; dns:NAME:PORT for all addresses of
    /// a name, ordered by address; file:DIR for those that `rpc-server --announce DIR` announces. With --retry, names and folders
    /// are read again when a server is lost, and another server that they list takes its place. All devices of the servers are
    /// used, before the devices of --device.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub rpc: Vec<ServerSource>,

    /// Keys of the servers of --rpc, separated by commas: connections use TLS, and each server must prove one of them.
    #[arg(long, value_name = "KEYS", value_delimiter = ',', requires = "key", group = "expected")]
    pub server_key: Vec<PublicKey>,

    /// File with the secret key that is proved to servers; `rpc-server keygen` writes one. Needs --server-key or --cert.
    #[arg(long, value_name = "FILE", requires = "expected")]
    pub key: Option<PathBuf>,

    /// File with the certificate (PEM) that is proved to servers, of --key: each server must prove one of the same CA, for the
    /// host by which --rpc names it.
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"], group = "expected")]
    pub cert: Option<PathBuf>,

    /// File with the certificates of that CA (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub ca: Option<PathBuf>,

    /// Wait for servers, and recover from lost ones: connect for up to this many seconds, reload the lost weights, recompute the state, and
    /// continue with the same tokens. Without this option, a lost server ends the run. [default if given without a value: 60]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "60", conflicts_with_all = ["compare", "info"],
        value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub retry: Option<u32>,

    /// Seconds after which a server is considered lost if no message from it arrives while a reply is pending.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub rpc_timeout: u32,

    /// How the model is split over the devices. SHARES: each device has whole layers, and its share of their number, one share
    /// for each device, separated by commas. tensor or tensor=SHARES: all devices have a part of every layer, and compute at the
    /// same time (tensor parallelism). tensor=SHARES/SHARES: the devices form several groups, each of which has whole layers,
    /// split over its devices; tensor=LAYERS:SHARES/LAYERS:SHARES also gives each group's share of their number [default: whole
    /// layers, by free memory].
    #[arg(long, value_name = "SPLIT", value_parser = split)]
    pub split: Option<Split>,

    /// Measure the devices and links, and print what the model is predicted to reach on them: the best placement, its memory and
    /// loading time, a command that uses it, and the placements that are slower. Loads nothing. Takes some seconds per device and server.
    #[arg(long, conflicts_with_all = ["split", "sequence_groups", "compare", "info", "auto"])]
    pub plan: bool,

    /// Choose the placement as --plan does, and use it. The report has the predicted rates beside the measured ones.
    #[arg(long, conflicts_with_all = ["split", "sequence_groups", "compare", "info"])]
    pub auto: bool,

    /// With --split tensor: round the partial sums of the devices to BF16 before they are exchanged, which halves the bytes between
    /// servers. Results change slightly, and stay the same in every run.
    #[arg(long, requires = "split")]
    pub bf16_sums: bool,

    /// Memory limit of this machine's devices: one size per device of the list, separated by commas, or one size for all
    /// [default: the free memory]. A server's limit is set when the server is started; sizes at its positions are ignored.
    #[arg(long, value_name = "SIZES", value_parser = parse_nonzero_bytes, value_delimiter = ',')]
    pub mem: Vec<u64>,

    /// How CPU devices hold the weights [default: packed where they fit into the free memory, else mapped]. Other devices always
    /// get copies.
    #[arg(long, value_name = "HOW")]
    pub weights: Option<WeightStorage>,

    /// Threads of each CPU device [default: this machine's cores, shared among its CPU devices].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,

    /// Tokens per micro-batch of the prompt.
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub ubatch: u32,

    /// Pipeline depth: micro-batches of a prompt in flight at a time, each on another device or group of devices [default: 1 with one
    /// of them or with --prompts, else 4].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub depth: Option<u32>,

    /// Capacity of the KV cache in tokens [default: the prompt plus --predict; with --chat at least 4096, or the context of the
    /// model if that is shorter].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,

    /// Element type of the KV cache.
    #[arg(long, value_name = "TYPE", default_value = "f16")]
    pub kv_type: KvType,

    /// Compute attention in one op (FLASH_ATTN_EXT) that does not store the matrix of scores.
    #[arg(long)]
    pub flash_attn: bool,

    /// Sampling temperature; 0 always picks the likeliest token [default: 0, with --chat what the model recommends, else 0.8].
    #[arg(long = "temp", value_name = "T", allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: Option<f32>,

    /// The temperature of the run. 0 until [`Args::with_sampling`] has chosen it.
    #[arg(skip)]
    pub temp: f32,

    /// Top-k sampling: draw only from this many of the likeliest tokens; 0: all. Needs --temp or --chat [default with --chat: what the
    /// model recommends, else 40].
    #[arg(long, value_name = "K", requires = "sampled", value_parser = top_k)]
    pub top_k: Option<NonZeroUsize>,

    /// Top-p sampling: draw only from the smallest set of likely tokens with this total probability; needs --temp or --chat [default
    /// with --chat: what the model recommends, else 0.95].
    #[arg(long, value_name = "P", requires = "sampled", value_parser = probability)]
    pub top_p: Option<f32>,

    /// Min-p sampling: draw only tokens that have at least this part of the likeliest token's probability; 0: all. Needs --temp or --chat
    /// [default with --chat: what the model recommends, else 0.05].
    #[arg(long, value_name = "P", requires = "sampled", value_parser = part)]
    pub min_p: Option<f32>,

    /// Make tokens less likely that are among the last 64, or with --chat among as many as the model recommends: divides their logits
    /// by this number, or multiplies them if they are negative; 1: no change. The client then samples, and reads all logits of each
    /// token [default: 1; with --chat what the model recommends].
    #[arg(long, value_name = "X", value_parser = penalty)]
    pub repeat_penalty: Option<f32>,

    /// Tokens at the end of a sequence that the repeat penalty makes less likely: llama.cpp's default, or in a chat what the
    /// model recommends.
    #[arg(skip = 64usize)]
    pub penalised_tokens: usize,

    /// Seed of the random draws; the same seed gives the same tokens; needs --temp or --chat.
    #[arg(long, value_name = "N", requires = "sampled")]
    pub seed: Option<u64>,

    /// Print token ids, rates, and each device's times and bytes as one line of JSON instead of text.
    #[arg(long, conflicts_with = "info")]
    pub json: bool,

    /// Evaluate the prompt and one token once before anything is timed, as llama-bench does: the times then include neither the
    /// planning of the graphs nor the first use of memory.
    #[arg(long, conflicts_with_all = ["compare", "info"])]
    pub warm_up: bool,

    /// Compute every node of the graph also on the exact CPU device, from the same sources, and print the error of each node.
    #[arg(long, conflicts_with_all = ["json", "info"])]
    pub compare: bool,

    /// Print the file's architecture, sizes and tensor types, and exit.
    #[arg(long, conflicts_with_all = ["prompt", "tokens"])]
    pub info: bool,

    /// Verbose log: same as --log-level debug.
    #[arg(short, long, conflicts_with = "log_level")]
    pub verbose: bool,

    /// Log level: off, error, warn, info, debug or trace [default: RUST_LOG, else warn].
    #[arg(long, value_name = "LEVEL", value_parser = parse_log_level)]
    pub log_level: Option<LevelFilter>,
}

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvType {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// Blocks of 8-bit codes; needs --flash-attn.
    #[value(name = "q8_0")]
    Q8_0,
}

impl KvType {
    /// The element type of the cache tensors.
    pub fn dtype(self) -> DType {
        match self {
            KvType::F32 => DType::F32,
            KvType::F16 => DType::F16,
            KvType::Q8_0 => DType::Q8_0,
        }
    }
}

/// The value of `--gpu-layers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLayers {
    /// No layer: the CPU.
    None,
    /// Any other number, `auto` or `all`.
    Some,
}

impl FromStr for GpuLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<GpuLayers, String> {
        match text {
            "0" => Ok(GpuLayers::None),
            "auto" | "all" => Ok(GpuLayers::Some),
            number if number.parse::<i32>().is_ok() => Ok(GpuLayers::Some),
            _ => Err("expected a number, auto or all".to_owned()),
        }
    }
}

/// How CPU devices hold the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightStorage {
    /// Copies in the device's memory, which the device repacks: fastest.
    Packed,
    /// The pages of the file itself, read-only: nothing to load, shared between processes, may be larger than the memory.
    Mapped,
}

impl Args {
    /// The path of the model.
    pub fn model(&self) -> &Path {
        // The parser requires one of them.
        self.model_argument.as_ref().or(self.model_option.as_ref()).map_or(Path::new(""), PathBuf::as_path)
    }

    /// The list of devices from `servers`, which are the servers of `--rpc`, and `--device`; `None` if there are neither.
    ///
    /// # Errors
    /// [`ArgsError::Memory`] for `--mem` with devices of servers only.
    pub fn devices<'a>(&'a self, servers: impl Iterator<Item = &'a str>) -> Result<Option<String>, ArgsError> {
        let mut names: Vec<&str> = servers.chain(self.device.as_deref()).collect();
        if names.is_empty() && self.gpu_layers == Some(GpuLayers::None) {
            names.push("CPU");
        }
        let list = names.join(",");
        // Only names of remote devices contain a colon.
        let remote = list.split(',').all(|name| name.contains(':'));
        if remote && !self.mem.is_empty() { Err(ArgsError::Memory) } else { Ok((!names.is_empty()).then_some(list)) }
    }

    /// The groups of devices, and each group's share of the layers, normalised to a sum of 1; `None` to place layers by memory.
    ///
    /// # Errors
    /// [`ArgsError`] if the number of shares differs from `devices`, or all shares are 0.
    pub fn tensor_groups(&self, devices: usize) -> Result<(Vec<TensorGroup>, Option<Vec<f32>>), ArgsError> {
        let all = || vec![vec![1.0; devices]];
        let (groups, shares) = match &self.split {
            None => (vec![vec![1.0]; devices], None),
            Some(Split::Layers(shares)) => (vec![vec![1.0]; shares.len()], Some(shares.clone())),
            Some(Split::Tensor(groups)) if groups.is_empty() => (all(), None),
            Some(Split::Tensor(groups)) => (
                groups.iter().map(|group| group.devices.clone()).collect(),
                groups.iter().map(|group| group.layers).collect(),
            ),
        };
        let named = groups.iter().map(Vec::len).sum();
        if named != devices {
            return Err(ArgsError::Shares { shares: named, devices });
        }
        let total = shares.as_ref().map_or(1.0, |shares: &Vec<f32>| shares.iter().sum::<f32>());
        if total <= 0.0 {
            return Err(ArgsError::NoShare);
        }
        let mut next = 0..;
        let group = |shares: Vec<f32>| TensorGroup::new(next.by_ref().take(shares.len()).collect(), shares);
        let groups =
            groups.into_iter().map(group).collect::<Result<_, _>>().map_err(|e| ArgsError::Group(e.to_string()))?;
        Ok((groups, shares.map(|shares| shares.iter().map(|share| share / total).collect())))
    }

    /// The retry budget of a lost server; `None` without `--retry`.
    pub fn retry(&self) -> Option<Duration> {
        self.retry.map(|seconds| Duration::from_secs(seconds.into()))
    }

    /// The time without a message after which a server is considered lost.
    pub fn rpc_timeout(&self) -> Duration {
        Duration::from_secs(self.rpc_timeout.into())
    }

    /// Most sequences at a time.
    pub fn sequences(&self) -> usize {
        if self.prompts.is_some() { self.parallel.unwrap_or(8).into() } else { 1 }
    }

    /// The pipeline depth for a number of stages (devices or groups of devices) and of groups of sequences: micro-batches of a prompt
    /// in flight at a time, and so copies of a graph's inputs. Several groups of sequences keep the stages busy without it.
    pub fn depth(&self, stages: usize, sequence_groups: usize) -> usize {
        self.depth.map_or(if stages > 1 && sequence_groups == 1 { 4 } else { 1 }, |depth| depth as usize)
    }

    /// The capacity of the KV cache in tokens, for a first prompt of `prompt` tokens and a model that was trained for `trained`.
    ///
    /// # Errors
    /// [`ArgsError::Context`] if `--ctx` is too small for the prompt and `--predict`.
    pub fn context(&self, prompt: usize, trained: usize) -> Result<usize, ArgsError> {
        let predict = self.predict.unwrap_or(if self.chat { 1 } else { TEXT_PREDICT });
        let needed = prompt.saturating_add(predict);
        match self.ctx.map(|ctx| ctx as usize) {
            Some(ctx) if ctx < needed => Err(ArgsError::Context { ctx, prompt, predict, needed }),
            Some(ctx) => Ok(ctx),
            None if self.chat => Ok(needed.max(trained.min(CHAT_CONTEXT))),
            None => Ok(needed),
        }
    }

    /// As [`Args::context`], rounded up to whole steps of [`KV_PAD`].
    ///
    /// # Errors
    /// Also [`ArgsError::LargeContext`], if not all sequences fit into a cache.
    pub fn padded_context(&self, prompt: usize, trained: usize) -> Result<usize, ArgsError> {
        let context = self.context(prompt, trained)?;
        let (sequences, most) = (self.sequences(), KvCells::MAX_CELLS);
        let large = ArgsError::LargeContext { context, sequences, most };
        let padded = context.checked_next_multiple_of(KV_PAD).ok_or_else(|| large.clone())?;
        if padded.saturating_mul(sequences) > most { Err(large) } else { Ok(padded) }
    }

    /// The most tokens to generate after a prompt of `prompt` tokens, in a KV cache of `context` tokens.
    ///
    /// # Errors
    /// [`ArgsError::ContextFull`] if not even one token fits.
    pub fn predict(&self, prompt: usize, context: usize) -> Result<usize, ArgsError> {
        let left = context.saturating_sub(prompt);
        if prompt > context || (self.chat && left == 0) {
            return Err(ArgsError::ContextFull { ctx: context, prompt });
        }
        Ok(self.predict.unwrap_or(if self.chat { usize::MAX } else { TEXT_PREDICT }).min(left))
    }

    /// Checks that a prompt is valid for a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// [`ArgsError`] if the prompt is empty, or contains an id outside the vocabulary.
    pub fn check_prompt(&self, prompt: &[u32], vocab: usize) -> Result<(), ArgsError> {
        if prompt.is_empty() {
            return Err(ArgsError::NoPrompt);
        }
        match prompt.iter().find(|&&token| token as usize >= vocab) {
            Some(&token) => Err(ArgsError::Token { token, vocab }),
            None => Ok(()),
        }
    }
}

fn token(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "expected token ids such as 1,5,9".to_owned())
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, "a temperature, 0 or at least 0.000001", |x| x == 0.0 || x >= Sampling::MIN_TEMPERATURE)
}

/// 0 is all tokens.
fn top_k(text: &str) -> Result<NonZeroUsize, String> {
    let count: usize = text.parse().map_err(|_| "expected a number of tokens".to_owned())?;
    Ok(NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MAX))
}

fn part(text: &str) -> Result<f32, String> {
    number(text, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, "a number from 0.01 to 100", |x| (0.01..=100.0).contains(&x))
}

fn probability(text: &str) -> Result<f32, String> {
    number(text, "a probability, above 0 and up to 1", |x| x > 0.0 && x <= 1.0)
}

#[cfg(test)]
mod tests;

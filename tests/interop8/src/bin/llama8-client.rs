//! A llama.cpp client of protocol 8.0.1: evaluates a prompt and further tokens, and writes their logits.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use interop8::{Args, Context, ContextOptions, Error, Model, Placement, SplitMode, init_log, rpc_devices};

const USAGE: &str = "\
Usage: llama8-client --model MODEL.gguf --tokens 1,2,3 [OPTION...]

Evaluates a prompt with llama.cpp, then tokens one by one: forced ones, then greedy ones. The last line of stdout is one JSON
object: load_s, prompt_tok_s, gen_tok_s, vocab, tokens (evaluated behind the prompt) and greedy (for each of these, the token
that had the largest logit).

  --rpc A[,B]           servers (HOST:PORT, loopback only) whose devices hold all layers (default: none, only this CPU)
  --fit                 fit the parameters to the devices' free memory, as llama.cpp's programs do unless told not to; without the
                        options of the placement
  --split MODE          none, layer or tensor (default layer)
  --tensor-split N,M    share of each device (default: by free memory)
  --no-kv-offload       keep the KV cache in the memory of this process
  --flash-attn on|off   (default: llama.cpp decides)
  --tokens LIST         the prompt, at most 512 tokens
  --generate N          number of tokens to evaluate behind the prompt (default 16)
  --forced LIST         the first of these tokens (default: all are greedy)
  --context N           length of the context (default 1024; 0: that for which the model was trained)
  --threads N           threads of this CPU (default 1)
  --logits-out FILE     write the logits of all tokens as raw f32, a row per token: prompt first
  --barrier             print `ready` when the model is loaded, wait for a line on stdin, print `token N` after each
  --verbose             print what llama.cpp calls information to stderr
  -h, --help            this text
";

const WITH_VALUE: [&str; 11] = [
    "--model",
    "--rpc",
    "--split",
    "--tensor-split",
    "--flash-attn",
    "--tokens",
    "--generate",
    "--forced",
    "--context",
    "--threads",
    "--logits-out",
];

fn main() -> ExitCode {
    match run(&Args::from_env(USAGE, &WITH_VALUE, &["--fit", "--no-kv-offload", "--barrier", "--verbose"])) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("llama8-client: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Error> {
    init_log(args.has("--verbose"));
    let prompt: Vec<i32> = args.numbers("--tokens")?;
    let start = Instant::now();
    let path = Path::new(args.required("--model")?);
    let (placement, mut options) = (placement(args)?, context_options(args)?);
    let model =
        if args.has("--fit") { Model::load_fitted(path, &mut options)? } else { Model::load(path, &placement)? };
    let mut context = Context::new(&model, &options)?;
    let load_s = start.elapsed().as_secs_f64();
    let barrier = args.has("--barrier");
    if barrier {
        print_line("ready")?;
        io::stdin().read_line(&mut String::new())?;
    }
    let mut rows = LogitsFile::create(args.text("--logits-out"))?;

    let start = Instant::now();
    let mut logits = context.decode(&prompt)?;
    let prompt_s = start.elapsed().as_secs_f64();
    rows.write(&logits)?;

    let forced: Vec<i32> = args.numbers("--forced")?;
    let count: usize = args.number("--generate", 16)?;
    let (mut tokens, mut greedy) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for n in 0..count {
        let largest = argmax(&logits[logits.len() - model.vocab()..]);
        greedy.push(largest);
        tokens.push(forced.get(n).copied().unwrap_or(largest));
        logits = context.decode(&tokens[n..])?;
        rows.write(&logits)?;
        if barrier {
            print_line(&format!("token {n}"))?;
        }
    }
    let gen_s = start.elapsed().as_secs_f64();
    rows.finish()?;
    print_line(&format!(
        "{{\"load_s\": {load_s:.3}, \"prompt_tok_s\": {:.2}, \"gen_tok_s\": {:.2}, \"vocab\": {}, \"tokens\": {tokens:?}, \
         \"greedy\": {greedy:?}}}",
        prompt.len() as f64 / prompt_s.max(1e-9),
        count as f64 / gen_s.max(1e-9),
        model.vocab(),
    ))
}

fn placement(args: &Args) -> Result<Placement, Error> {
    let mut devices = Vec::new();
    for endpoint in args.text("--rpc").unwrap_or("").split(',').filter(|endpoint| !endpoint.is_empty()) {
        devices.extend(rpc_devices(endpoint)?);
    }
    let split = SplitMode::from_name(args.text("--split").unwrap_or("layer"))?;
    Ok(Placement { devices, split, shares: args.numbers("--tensor-split")? })
}

fn context_options(args: &Args) -> Result<ContextOptions, Error> {
    let flash_attention = match args.text("--flash-attn") {
        None => None,
        Some("on") => Some(true),
        Some("off") => Some(false),
        Some(other) => return Err(Error::new(format!("--flash-attn: {other} is neither on nor off"))),
    };
    Ok(ContextOptions {
        tokens: args.number("--context", 1024)?,
        threads: args.number("--threads", 1)?,
        kv_on_device: !args.has("--no-kv-offload"),
        flash_attention,
    })
}

/// The index of the first largest value.
fn argmax(row: &[f32]) -> i32 {
    let mut best = 0;
    for (i, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = i;
        }
    }
    best as i32
}

/// Prints a line at once: a test waits for it.
fn print_line(line: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// The file of `--logits-out`, if there is one.
struct LogitsFile(Option<BufWriter<File>>);

impl LogitsFile {
    fn create(path: Option<&str>) -> Result<Self, Error> {
        let file = path.map(|path| File::create(path).map_err(|e| Error::new(format!("{path}: {e}")))).transpose()?;
        Ok(Self(file.map(BufWriter::new)))
    }

    fn write(&mut self, logits: &[f32]) -> Result<(), Error> {
        if let Some(file) = &mut self.0 {
            for value in logits {
                file.write_all(&value.to_le_bytes())?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<(), Error> {
        self.0.map_or(Ok(()), |mut file| Ok(file.flush()?))
    }
}

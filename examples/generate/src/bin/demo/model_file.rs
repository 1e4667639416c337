//! The model: a GGUF file of a llama with random weights.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use fanout::gguf::Writer;
use fanout::tensor::DType;
use fanout::tensor::quant::quantiser;
use generate::progress::{Progress, Unit};

/// Seed of the weights.
const SEED: u32 = 1;

/// The sizes of a model: in elements, `vocab` in tokens. Heads have 64 channels or fewer; shapes suit a split over two devices.
pub struct RandomModel {
    name: &'static str,
    layers: u32,
    width: u32,
    heads: u32,
    kv_heads: u32,
    ff: u32,
    vocab: u32,
}

/// A tensor of the file.
struct Weight {
    name: String,
    /// Columns, and for a matrix rows.
    ne: Vec<u64>,
}

impl Weight {
    /// Matrices are F16, whose results differ less than quantised ones between one device and two. Norms are vectors in F32, as in
    /// every model.
    fn dtype(&self) -> DType {
        if self.ne.len() > 1 { DType::F16 } else { DType::F32 }
    }

    fn elements(&self) -> u64 {
        self.ne.iter().product()
    }

    fn bytes(&self) -> u64 {
        self.dtype().row_bytes(self.elements() as usize).unwrap_or(0) as u64
    }

    /// The data: a norm is 1, a row of a matrix has random values and a length of about 1.
    fn data(&self, random: &mut fastrand::Rng) -> Option<Vec<u8>> {
        let bound = (3.0 / self.ne[0] as f32).sqrt();
        let mut value = || if self.ne.len() > 1 { bound * (2.0 * random.f32() - 1.0) } else { 1.0 };
        let values: Vec<f32> = (0..self.elements()).map(|_| value()).collect();
        let mut bytes = vec![0; self.bytes() as usize];
        quantiser(self.dtype())?(&values, &mut bytes);
        Some(bytes)
    }
}

impl RandomModel {
    /// Number of tokens.
    pub fn vocab(&self) -> u32 {
        self.vocab
    }

    /// 300 MB: large enough that reading the weights takes longer than the exchange of partial sums.
    pub const FULL: RandomModel =
        RandomModel { name: "full", layers: 5, width: 1536, heads: 24, kv_heads: 8, ff: 4096, vocab: 8192 };

    /// 3 MB, for a quick test.
    pub const TINY: RandomModel =
        RandomModel { name: "tiny", layers: 2, width: 256, heads: 8, kv_heads: 4, ff: 512, vocab: 512 };

    fn weights(&self) -> Vec<Weight> {
        let [width, ff, vocab] = [self.width, self.ff, self.vocab].map(u64::from);
        let kv_width = width / u64::from(self.heads) * u64::from(self.kv_heads);
        let weight = |name: String, ne: &[u64]| Weight { name, ne: ne.to_vec() };
        let mut weights = vec![
            weight("token_embd.weight".to_owned(), &[width, vocab]),
            weight("output_norm.weight".to_owned(), &[width]),
            weight("output.weight".to_owned(), &[width, vocab]),
        ];
        for layer in 0..self.layers {
            for (name, ne) in [
                ("attn_norm", &[width][..]),
                ("attn_q", &[width, width]),
                ("attn_k", &[width, kv_width]),
                ("attn_v", &[width, kv_width]),
                ("attn_output", &[width, width]),
                ("ffn_norm", &[width]),
                ("ffn_gate", &[width, ff]),
                ("ffn_up", &[width, ff]),
                ("ffn_down", &[ff, width]),
            ] {
                weights.push(weight(format!("blk.{layer}.{name}.weight"), ne));
            }
        }
        weights
    }

    /// The file without its data. It has no tokenizer: the demo has token ids and no words.
    fn writer(&self) -> Writer {
        let writer = Writer::new()
            .text("general.architecture", "llama")
            .text("general.name", "fanout's demo: random weights")
            .int("fanout.demo.seed", SEED)
            .int("llama.vocab_size", self.vocab)
            .int("llama.context_length", 4096)
            .int("llama.embedding_length", self.width)
            .int("llama.block_count", self.layers)
            .int("llama.feed_forward_length", self.ff)
            .int("llama.attention.head_count", self.heads)
            .int("llama.attention.head_count_kv", self.kv_heads)
            .float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        self.weights().iter().fold(writer, |writer, weight| writer.tensor(&weight.name, &weight.ne, weight.dtype()))
    }

    /// The path of the file in `folder`, which is written unless it is there from an earlier run. A file that is there is replaced,
    /// never changed, because another demo may have mapped it.
    pub fn make(&self, folder: &Path) -> anyhow::Result<PathBuf> {
        let path = folder.join(format!("{}.gguf", self.name));
        let head = self.writer().head()?;
        if self.is_complete(&path, &head) {
            return Ok(path);
        }
        fs::create_dir_all(folder)?;
        // The lock has a file of its own, which stays. A lock on the file that is written would follow it to the model's name: another
        // demo that had opened it before would lock it afterwards, and write to a model that is mapped.
        let lock = File::create(path.with_extension("lock"))?;
        lock.try_lock().context("another demo is writing it: try again when that one has started its runs")?;
        // Again, since another demo may have completed it before the lock was free.
        if !self.is_complete(&path, &head) {
            let partial = path.with_extension("partial");
            // From a demo that was killed.
            if let Err(e) = fs::remove_file(&partial)
                && e.kind() != ErrorKind::NotFound
            {
                return Err(e.into());
            }
            // Renamed when complete, so that an interrupted run leaves no damaged model.
            let written = self.write(&File::create_new(&partial)?, &head);
            if written.is_err() {
                // Disk space is what is most likely missing.
                let _ = fs::remove_file(&partial);
            }
            written?;
            fs::rename(&partial, &path)?;
        }
        Ok(path)
    }

    /// Whether the file is the one that [`RandomModel::write`] writes, judged by its length and its head, which has the seed.
    fn is_complete(&self, path: &Path, head: &[u8]) -> bool {
        let bytes = head.len() as u64 + self.weights().iter().map(Weight::bytes).sum::<u64>();
        let mut found = vec![0; head.len()];
        let Ok(mut file) = File::open(path) else { return false };
        let long = file.metadata().is_ok_and(|metadata| metadata.len() == bytes);
        long && file.read_exact(&mut found).is_ok() && found == head
    }

    fn write(&self, file: &File, head: &[u8]) -> anyhow::Result<()> {
        let mut out = BufWriter::new(file);
        out.write_all(head)?;
        let mut random = fastrand::Rng::with_seed(SEED.into());
        let weights = self.weights();
        let progress =
            Progress::new(true).start("making the model", Unit::Bytes, weights.iter().map(Weight::bytes).sum());
        for weight in weights {
            let data = weight.data(&mut random).context("the type of the weights has no quantiser (a bug)")?;
            // No padding is needed between tensors.
            ensure!(data.len().is_multiple_of(32), "{} ends at an unaligned byte (a bug)", weight.name);
            out.write_all(&data)?;
            progress.add(weight.bytes());
        }
        Ok(out.flush()?)
    }
}

impl fmt::Display for RandomModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let weights = self.weights();
        let (elements, bytes) = (weights.iter().map(Weight::elements), weights.iter().map(Weight::bytes));
        let millions = |sum: u64| sum as f64 / 1e6;
        write!(f, "{:.0} million random weights, {:.0} MB", millions(elements.sum()), millions(bytes.sum()))
    }
}

//! Contexts: the KV cache of a model, and its evaluation.

use std::marker::PhantomData;
use std::ptr::NonNull;

use llama_cpp_sys_4 as sys;

use crate::{Error, Model};

/// Options of a context.
#[derive(Debug, Clone, Copy)]
pub struct ContextOptions {
    /// Length of the context in tokens; 0: the length for which the model was trained.
    pub tokens: u32,
    /// Threads of the CPU of this process.
    pub threads: i32,
    /// Keep the KV cache on the devices of the weights rather than in the memory of this process.
    pub kv_on_device: bool,
    /// Flash attention: `None` if llama.cpp decides.
    pub flash_attention: Option<bool>,
}

impl ContextOptions {
    /// The parameters that llama.cpp's functions take.
    pub(crate) fn params(&self) -> sys::llama_context_params {
        // SAFETY: no arguments.
        let mut params = unsafe { sys::llama_context_default_params() };
        params.n_ctx = self.tokens;
        params.n_threads = self.threads;
        params.n_threads_batch = self.threads;
        params.offload_kqv = self.kv_on_device;
        params.flash_attn_type = match self.flash_attention {
            None => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
            Some(false) => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
            Some(true) => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
        };
        params
    }
}

/// A KV cache and everything else that evaluating a model needs.
#[derive(Debug)]
pub struct Context<'m> {
    raw: NonNull<sys::llama_context>,
    vocab: usize,
    length: usize,
    model: PhantomData<&'m Model>,
}

impl<'m> Context<'m> {
    /// A context with an empty cache.
    pub fn new(model: &'m Model, options: &ContextOptions) -> Result<Self, Error> {
        let params = options.params();
        // SAFETY: the model is loaded and outlives the context, by the lifetime `'m`.
        let raw = unsafe { sys::llama_init_from_model(model.raw(), params) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::new("llama.cpp cannot create a context"))?;
        Ok(Self { raw, vocab: model.vocab(), length: 0, model: PhantomData })
    }

    /// Evaluates tokens behind those of the calls before. Returns the logits of every token: `vocab` values each, the first
    /// token's first. At most 512 tokens per call, llama.cpp's micro-batch.
    pub fn decode(&mut self, tokens: &[i32]) -> Result<Vec<f32>, Error> {
        let batch = Batch::new(tokens, self.length)?;
        // SAFETY: the context is alive, and `batch` has as many tokens as it says.
        let code = unsafe { sys::llama_decode(self.raw.as_ptr(), batch.0) };
        if code != 0 {
            return Err(Error::new(format!("llama_decode fails with {code} at token {}", self.length)));
        }
        let mut logits = Vec::with_capacity(tokens.len() * self.vocab);
        for index in 0..tokens.len() {
            // SAFETY: the batch asked for the logits of each of its tokens; the call waits until they are there.
            let row = unsafe { sys::llama_get_logits_ith(self.raw.as_ptr(), index as i32) };
            if row.is_null() {
                return Err(Error::new(format!("no logits of token {index} of the batch")));
            }
            // SAFETY: a row has one value per token of the vocabulary and is valid until the next call of `decode`.
            logits.extend_from_slice(unsafe { std::slice::from_raw_parts(row, self.vocab) });
        }
        self.length += tokens.len();
        Ok(logits)
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `new` and freed once; the model is still loaded.
        unsafe { sys::llama_free(self.raw.as_ptr()) };
    }
}

/// Largest batch: the default of llama.cpp's micro-batch.
const MAX_BATCH: usize = 512;

/// A batch of one sequence that asks for the logits of all its tokens.
struct Batch(sys::llama_batch);

impl Batch {
    fn new(tokens: &[i32], position: usize) -> Result<Self, Error> {
        if tokens.is_empty() || tokens.len() > MAX_BATCH {
            return Err(Error::new(format!("{} tokens in a batch; it holds 1 to {MAX_BATCH}", tokens.len())));
        }
        let count = tokens.len() as i32;
        // SAFETY: no pointers.
        let mut batch = unsafe { sys::llama_batch_init(count, 0, 1) };
        batch.n_tokens = count;
        for (i, token) in tokens.iter().enumerate() {
            // SAFETY: `llama_batch_init` has allocated arrays of `count` elements, and of one sequence id per token.
            unsafe {
                *batch.token.add(i) = *token;
                *batch.pos.add(i) = (position + i) as sys::llama_pos;
                *batch.n_seq_id.add(i) = 1;
                **batch.seq_id.add(i) = 0;
                *batch.logits.add(i) = 1;
            }
        }
        Ok(Self(batch))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: from `llama_batch_init`, freed once.
        unsafe { sys::llama_batch_free(self.0) };
    }
}

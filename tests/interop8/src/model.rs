//! Models: loading onto devices, and quantising.

use std::path::Path;
use std::ptr::{self, NonNull};

use llama_cpp_sys_4 as sys;

use crate::devices::c_string;
use crate::fit::FittedModel;
use crate::{ContextOptions, Device, Error};

/// How llama.cpp splits a model over devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitMode {
    /// Everything on the first device.
    None,
    /// Whole layers.
    Layer,
    /// Each layer, by rows and columns of its matrices.
    Tensor,
}

impl SplitMode {
    /// The mode that llama.cpp's `--split-mode` names so.
    pub fn from_name(name: &str) -> Result<Self, Error> {
        match name {
            "none" => Ok(Self::None),
            "layer" => Ok(Self::Layer),
            "tensor" => Ok(Self::Tensor),
            _ => Err(Error::new(format!("no split mode {name}; there are none, layer and tensor"))),
        }
    }
}

/// Where the weights go.
#[derive(Debug)]
pub struct Placement {
    /// Devices that get all layers. With none, llama.cpp computes everything on the CPU of this process.
    pub devices: Vec<Device>,
    /// How the layers are split.
    pub split: SplitMode,
    /// Share of each device, in the order of `devices`; empty: by free memory.
    pub shares: Vec<f32>,
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    raw: NonNull<sys::llama_model>,
    /// Shares of the devices, to which llama.cpp keeps a pointer. Dropped after the model is freed.
    _shares: Vec<f32>,
    /// The end of the list of tensors with a buffer type of their own, likewise.
    _overrides: Vec<sys::llama_model_tensor_buft_override>,
}

impl Model {
    /// Loads a GGUF file onto all devices in ggml's registry as llama.cpp's programs do: it first fits the parameters to the
    /// devices' free memory. Sets the length of the context if it is 0.
    pub fn load_fitted(path: &Path, context: &mut ContextOptions) -> Result<Self, Error> {
        let text = c_string(&path.to_string_lossy())?;
        let FittedModel { params, shares, overrides } = FittedModel::new(path, context)?;
        // SAFETY: `text` is NUL-terminated and outlives the call; the model keeps the arrays to which the parameters point.
        let raw = unsafe { sys::llama_model_load_from_file(text.as_ptr(), params) };
        Self::new(raw, path, shares, overrides)
    }

    /// Loads a GGUF file.
    pub fn load(path: &Path, placement: &Placement) -> Result<Self, Error> {
        let text = c_string(&path.to_string_lossy())?;
        // SAFETY: no arguments.
        let max_devices = unsafe { sys::llama_max_devices() };
        if placement.devices.len() > max_devices || placement.shares.len() > placement.devices.len() {
            return Err(Error::new("more devices than llama.cpp supports, or more shares than devices"));
        }
        // A null ends the list. An empty list means no device beside the CPU, whatever ggml's registry has.
        let mut devices: Vec<_> =
            placement.devices.iter().map(|device| device.raw()).chain([ptr::null_mut()]).collect();
        let mut shares = placement.shares.clone();
        shares.resize(max_devices, 0.0);
        // SAFETY: no arguments.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.devices = devices.as_mut_ptr();
        params.n_gpu_layers = if placement.devices.is_empty() { 0 } else { -1 };
        params.split_mode = match placement.split {
            SplitMode::None => sys::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => sys::LLAMA_SPLIT_MODE_LAYER,
            SplitMode::Tensor => sys::LLAMA_SPLIT_MODE_TENSOR,
        };
        if !placement.shares.is_empty() {
            params.tensor_split = shares.as_ptr();
        }
        // SAFETY: `text` is NUL-terminated; `devices` ends with a null; `shares` has llama.cpp's maximum number of elements.
        // All outlive the call. Under a tensor split llama.cpp reads the shares also later, so the model keeps them.
        let raw = unsafe { sys::llama_model_load_from_file(text.as_ptr(), params) };
        Self::new(raw, path, shares, Vec::new())
    }

    fn new(
        raw: *mut sys::llama_model,
        path: &Path,
        shares: Vec<f32>,
        overrides: Vec<sys::llama_model_tensor_buft_override>,
    ) -> Result<Self, Error> {
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::new(format!("{}: llama.cpp cannot load it", path.display())))?;
        Ok(Self { raw, _shares: shares, _overrides: overrides })
    }

    /// The handle that llama.cpp's functions take.
    pub(crate) fn raw(&self) -> *mut sys::llama_model {
        self.raw.as_ptr()
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        // SAFETY: the model is loaded, and its vocabulary lives as long.
        let tokens = unsafe { sys::llama_vocab_n_tokens(sys::llama_model_get_vocab(self.raw())) };
        usize::try_from(tokens).unwrap_or(0)
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: loaded by `load` and freed once; contexts borrow the model, so none is left.
        unsafe { sys::llama_model_free(self.raw()) };
    }
}

/// Quantises the f16 model `source` to `target` with llama.cpp's quantiser. The only `dtype` is `q4_k_m`, which the Python
/// package gguf cannot write.
pub fn quantise(source: &Path, target: &Path, dtype: &str) -> Result<(), Error> {
    if dtype != "q4_k_m" {
        return Err(Error::new(format!("{dtype}: only q4_k_m is supported")));
    }
    let (from, to) = (c_string(&source.to_string_lossy())?, c_string(&target.to_string_lossy())?);
    // SAFETY: no arguments.
    let mut params = unsafe { sys::llama_model_quantize_default_params() };
    params.ftype = sys::LLAMA_FTYPE_MOSTLY_Q4_K_M;
    params.nthread = 1;
    // SAFETY: both texts are NUL-terminated and outlive the call, as the parameters do.
    let code = unsafe { sys::llama_model_quantize(from.as_ptr(), to.as_ptr(), &params) };
    if code == 0 { Ok(()) } else { Err(Error::new(format!("{}: quantising fails with {code}", source.display()))) }
}

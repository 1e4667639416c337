//! Memory fitting: what llama.cpp's programs do before they load a model, unless they are started with `-fit off`.

use std::path::Path;
use std::ptr;

use llama_cpp_sys_4 as sys;

use crate::devices::c_string;
use crate::{ContextOptions, Error};

/// Memory that stays free on each device, as `--fit-target` has it by default.
const MARGIN: usize = 1 << 30;
/// Shortest context to which fitting reduces a context of length 0, as `--fit-ctx` has it by default.
const MIN_CONTEXT: u32 = 4096;

/// Parameters of a model, fitted to the free memory of all devices in ggml's registry.
#[derive(Debug)]
pub(crate) struct FittedModel {
    pub(crate) params: sys::llama_model_params,
    /// What `params` points to.
    pub(crate) shares: Vec<f32>,
    /// As above.
    pub(crate) overrides: Vec<sys::llama_model_tensor_buft_override>,
}

impl FittedModel {
    /// Measures the model with `context` by loading it without memory, and fits both, in the same order as `llama-server`: the
    /// order decides which connections a server sees. Sets the length of the context if it is 0.
    pub(crate) fn new(path: &Path, context: &mut ContextOptions) -> Result<Self, Error> {
        let text = c_string(&path.to_string_lossy())?;
        let mut context_params = context.params();
        // SAFETY: no arguments.
        let (max_devices, max_overrides) =
            unsafe { (sys::llama_max_devices(), sys::llama_max_tensor_buft_overrides()) };
        let mut shares = vec![0.0; max_devices];
        let mut margins = vec![MARGIN; max_devices];
        let end = sys::llama_model_tensor_buft_override { pattern: ptr::null(), buft: ptr::null_mut() };
        let mut overrides = vec![end; max_overrides];
        // SAFETY: no arguments.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.tensor_split = shares.as_ptr();
        params.tensor_buft_overrides = overrides.as_ptr();
        // SAFETY: `text` is NUL-terminated. The arrays have as many elements as llama.cpp asks for, the overrides end with a
        // null pattern, there is no second model, and all outlive the call. The function catches C++ exceptions.
        let status = unsafe {
            sys::common_fit_params(
                text.as_ptr(),
                &mut params,
                &mut context_params,
                shares.as_mut_ptr(),
                overrides.as_mut_ptr(),
                margins.as_mut_ptr(),
                MIN_CONTEXT,
                ptr::null(),
                sys::GGML_LOG_LEVEL_ERROR,
            )
        };
        // A model that does not fit is loaded all the same, as by llama.cpp's programs.
        if status == sys::COMMON_PARAMS_FIT_STATUS_ERROR {
            return Err(Error::new(format!("{}: llama.cpp cannot measure it", path.display())));
        }
        context.tokens = context_params.n_ctx;
        Ok(Self { params, shares, overrides })
    }
}

//! Numbers of ops and types. They move between versions of ggml, so the plug-in reads the host's name of each of its
//! numbers, and finds fanout's number by the name. What has no name in fanout has no number here, and no device supports it.

use crate::host::{Libraries, Tested};
use fanout::ops::OpCode;
use fanout::tensor::DType;
use std::ffi::{CStr, c_char, c_int, c_void};

/// Names of the kinds of UNARY, by fanout's number.
const UNARY_OPS: &[&str] = &[
    "ABS",
    "SGN",
    "NEG",
    "STEP",
    "TANH",
    "ELU",
    "RELU",
    "SIGMOID",
    "GELU",
    "GELU_QUICK",
    "SILU",
    "HARDSWISH",
    "HARDSIGMOID",
    "EXP",
    "EXPM1",
    "SOFTPLUS",
    "GELU_ERF",
    "XIELU",
    "FLOOR",
    "CEIL",
    "ROUND",
    "TRUNC",
];

/// Names of the kinds of GLU, by fanout's number.
const GATED_UNITS: &[&str] = &["REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP"];

/// fanout's numbers, by the host's.
pub(crate) struct Numbers {
    ops: Vec<Option<OpCode>>,
    unary_ops: Vec<Option<i32>>,
    gated_units: Vec<Option<i32>>,
    types: Vec<Option<DType>>,
}

type NameFunction = unsafe extern "C" fn(c_int) -> *const c_char;
type BlockLengthFunction = unsafe extern "C" fn(c_int) -> i64;
type BlockBytesFunction = unsafe extern "C" fn(c_int) -> usize;

impl Numbers {
    /// Reads the host's names of all its numbers.
    ///
    /// # Safety
    /// The libraries have ggml of the version `tested`.
    pub(crate) unsafe fn of_host(libraries: &Libraries, tested: &Tested) -> Result<Numbers, String> {
        let function = |name: &CStr| -> Result<NameFunction, String> {
            let address = libraries.required(name)?;
            // SAFETY: the functions below take a number and return a static string.
            Ok(unsafe { std::mem::transmute::<*mut c_void, NameFunction>(address) })
        };
        let names = |function: NameFunction, count: u32| {
            (0..count as c_int).map(move |number| {
                // SAFETY: the number is below the version's count.
                let name = unsafe { function(number) };
                // SAFETY: ggml's names are static strings, or null for numbers without a name.
                (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
            })
        };
        let position = |list: &[&str], name: Option<String>| {
            list.iter().position(|&known| Some(known) == name.as_deref()).and_then(|at| i32::try_from(at).ok())
        };
        let op_code = |name: Option<String>| OpCode::ALL.iter().copied().find(|op| Some(op.name()) == name.as_deref());
        // SAFETY: the functions of ggml with these names have these signatures.
        let (block_length, block_bytes) = unsafe {
            (
                std::mem::transmute::<*mut c_void, BlockLengthFunction>(libraries.required(c"ggml_blck_size")?),
                std::mem::transmute::<*mut c_void, BlockBytesFunction>(libraries.required(c"ggml_type_size")?),
            )
        };
        let dtype = |(number, name): (c_int, Option<String>)| {
            let name = name?;
            let dtype = DType::ALL.iter().copied().find(|dtype| dtype.name().eq_ignore_ascii_case(&name))?;
            // SAFETY: the number is below the version's count of types.
            let (length, bytes) = unsafe { (block_length(number), block_bytes(number)) };
            // A type whose blocks have another layout is another type.
            (usize::try_from(length).ok()? == dtype.block_len() && bytes == dtype.block_bytes()).then_some(dtype)
        };
        Ok(Numbers {
            ops: names(function(c"ggml_op_name")?, tested.ops).map(op_code).collect(),
            unary_ops: names(function(c"ggml_unary_op_name")?, tested.unary_ops)
                .map(|name| position(UNARY_OPS, name))
                .collect(),
            gated_units: names(function(c"ggml_glu_op_name")?, tested.gated_units)
                .map(|name| position(GATED_UNITS, name))
                .collect(),
            types: (0..).zip(names(function(c"ggml_type_name")?, tested.types)).map(dtype).collect(),
        })
    }

    /// fanout's op and its parameters, for those of the host.
    pub(crate) fn op(&self, number: u32, params: &[i32; 16]) -> Option<(OpCode, [i32; 16])> {
        let op = (*self.ops.get(number as usize)?)?;
        let kind = |kinds: &[Option<i32>]| *kinds.get(usize::try_from(params[0]).ok()?)?;
        let mut params = *params;
        match op {
            OpCode::Unary => params[0] = kind(&self.unary_ops)?,
            OpCode::Glu => params[0] = kind(&self.gated_units)?,
            _ => {}
        }
        Some((op, params))
    }

    /// fanout's type.
    pub(crate) fn dtype(&self, number: u32) -> Option<DType> {
        *self.types.get(number as usize)?
    }
}

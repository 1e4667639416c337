//! Tests of the decoder on short PTX modules. `programs`: bytecode of valid modules; `links`: call graphs; `errors`: messages;
//! `kernels`: every committed PTX file; `robust`: fuzzing.

mod errors;
mod kernels;
mod links;
mod programs;
mod robust;

use super::{Error, decode};
use crate::bytecode::{DecodedModule, Function, Inst};
use crate::ptx;

/// Decodes a text that the parser must accept.
fn try_decode(text: &str) -> Result<DecodedModule, Error> {
    let module = ptx::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    decode(&module, text)
}

/// Decodes a text that must be valid.
#[track_caller]
fn decoded(text: &str) -> DecodedModule {
    try_decode(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The text of a module with this content.
fn module(text: &str) -> String {
    format!(".version 7.0\n.target sm_80\n.address_size 64\n{text}")
}

/// The text of a module whose kernel `k` has a few registers, parameters and variables, and this body, which starts in line 14.
fn kernel(body: &str) -> String {
    module(&format!(
        ".global .align 4 .b8 table[64];\n.const .align 8 .f64 half = 0d3FE0000000000000;\n\
         .shared .align 8 .b8 tile[256];\n.extern .shared .align 16 .b8 dynamic[];\n\
         .visible .entry k(.param .u64 k_0, .param .u32 k_1)\n{{\n\
         .reg .pred %p<5>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .f64 %fd<9>;\n\
         .local .align 16 .b8 depot[40];\n{body}\n}}\n"
    ))
}

/// The decoded module of [`kernel`] with this body.
#[track_caller]
fn kernel_code(body: &str) -> DecodedModule {
    decoded(&kernel(body))
}

/// The instructions of [`kernel`] with this body, without the `ret` that the decoder adds.
#[track_caller]
fn insts(body: &str) -> Vec<Inst> {
    let mut code = kernel_code(body);
    code.insts.pop();
    code.insts
}

/// The function of this name.
#[track_caller]
fn function<'a>(code: &'a DecodedModule, name: &str) -> &'a Function {
    code.functions.iter().find(|function| &*function.name == name).unwrap_or_else(|| panic!("no function {name}"))
}

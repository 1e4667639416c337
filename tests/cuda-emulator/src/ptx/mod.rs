//! PTX text → [`ast::Module`]. Everything that is not understood is an error with its line; nothing panics.

pub mod ast;

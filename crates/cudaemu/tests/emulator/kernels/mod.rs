//! Every committed kernel, for every target it is compiled for, through cudarc: what it leaves in memory against what the
//! host computes another way, over several shapes; and not one report.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

mod asm_forms;
mod basics;
mod courses;
mod formats;
mod matrices;
mod matvec;

//! Every committed kernel, for every target it is compiled for, through cudarc: what it leaves in memory against what the
//! host computes another way, over several shapes; and not one report.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
#[path = "../common/mod.rs"]
mod common;

mod asm_forms;
mod basics;
mod courses;
mod formats;
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod gpu;
mod matrices;
mod matvec;
#[allow(unreachable_pub, reason = "as gpu")]
mod reference;

//! Every committed kernel, for every target, through cudarc: compares the results in memory with an independent computation on
//! the host, for several shapes. Any report fails the test.

#![allow(unsafe_code, reason = "launches are unsafe calls of cudarc")]

mod basics;
mod formats;
mod matrices;
mod matvec;

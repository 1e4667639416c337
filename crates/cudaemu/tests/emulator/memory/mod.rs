//! Loads, stores, atomics and asynchronous copies: every row of the instruction table, executed on a device.

mod access;
mod atomics;
mod memcpy;

/// Lanes of a warp.
const LANES: usize = 32;

/// The head of a module.
fn header() -> String {
    String::from(".version 8.6\n.target sm_90\n.address_size 64\n")
}

/// Size in bytes of a PTX type name, such as `u32`.
fn bytes_of(ty: &str) -> usize {
    ty.trim_start_matches(|c: char| c.is_ascii_alphabetic()).parse::<usize>().unwrap() / 8
}

/// `n` pseudo-random bytes, of which about half are negative as signed bytes.
fn noise(n: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| random.u8(..)).collect()
}

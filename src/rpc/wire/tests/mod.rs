//! Tests of the wire codec: layouts byte by byte, round trips, truncation at each length, limits, mutated bytes.

mod canonical;
mod ext;
mod headers;
mod hostile;
mod inputs;
mod long_names;
mod requests;
mod responses;
mod vectors;
mod version_codec;
mod version_decode;

//! The wire codec against the protocol's text: layouts, round trips, truncation, limits, hostile bytes.

mod decode;
mod dialect;
mod ext;
mod headers;
mod hostile;
mod inputs;
mod requests;
mod responses;
mod vectors;

//! The front end of ggml's messages: protocol 7.0 as llama.cpp's clients send it.
//!
//! One request at a time, on one implicit queue per device. The protocol has no error reply: a request that fails ends the
//! session, and the log has one line that names client, command and reason.

mod device_queues;
mod error;
mod graphs;
mod prefault;
mod session;
mod tensors;

pub(super) use session::run;

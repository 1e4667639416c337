//! Copies from server to server: tickets, who may use them, and which servers are dialled.

mod dialling;
mod receiving;
mod support;

pub(crate) use support::dialling;

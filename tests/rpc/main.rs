//! The server over loopback: what it serves, what it refuses, and that one client never feels another.

mod cache;
mod commands;
mod graphs;
mod hostile;
mod limits;
mod sessions;
mod support;

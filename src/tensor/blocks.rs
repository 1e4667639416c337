//! Quantisation blocks as they lie in memory and on the wire.

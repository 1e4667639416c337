//! Allocations and device addresses.

//! Steps on lanes, and what they wait for.

//! The arithmetic of PTX on scalars.

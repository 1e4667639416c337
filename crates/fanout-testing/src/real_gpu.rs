//! The switch between the emulated GPU and a real one.

/// Whether tests of the CUDA device run on the first GPU of this machine instead of an emulated GPU: FANOUT_TEST_GPU=1. A
/// process that runs them there must not load the emulator, which would take the place of the driver.
pub fn requested() -> bool {
    std::env::var("FANOUT_TEST_GPU").as_deref() == Ok("1")
}

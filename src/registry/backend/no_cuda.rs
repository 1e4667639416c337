//! CUDA's place in a build without the feature `cuda`: no devices, and the reason for users that name one.

use super::{Backend, Found};

pub(super) struct Cuda;

impl Cuda {
    pub(super) fn detect() -> Cuda {
        Cuda
    }
}

impl Backend for Cuda {
    fn stem(&self) -> &'static str {
        "CUDA"
    }

    fn enumerate(&self) -> Vec<Found> {
        Vec::new()
    }

    fn missing(&self) -> Option<String> {
        Some("this program is built without CUDA (the crate's feature `cuda`)".to_owned())
    }
}

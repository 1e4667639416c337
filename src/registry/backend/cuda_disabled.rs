//! Stand-in for the CUDA backend in a build without the feature `cuda`: it finds no devices, and reports why.

use super::{Backend, FoundDevice};

pub(super) struct Cuda;

impl Cuda {
    pub(super) fn detect() -> Cuda {
        Cuda
    }
}

impl Backend for Cuda {
    fn name_prefix(&self) -> &'static str {
        "CUDA"
    }

    fn enumerate(&self) -> Vec<FoundDevice> {
        Vec::new()
    }

    fn missing_reason(&self) -> Option<String> {
        let why = "this program is built without CUDA, as every static build is: use the build for glibc, or build it with the \
                   feature `cuda`";
        Some(why.to_owned())
    }
}

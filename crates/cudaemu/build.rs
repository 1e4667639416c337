//! Names the shared library as the driver's, so that a program which loads it first gets it again for "libcuda.so".

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}

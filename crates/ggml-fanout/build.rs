//! Linker options of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // Threads of devices run until the process ends, so the code must stay mapped after dlclose.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}

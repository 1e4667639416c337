//! Lists all CUDA devices, real or emulated: `scripts/emulate.sh -n 3 target/release/examples/devices`.

use cudarc::driver::{CudaContext, sys};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !driver_is_there() {
        return Err("there is no CUDA driver here; scripts/emulate.sh puts one in place".into());
    }
    let count = CudaContext::device_count()?;
    println!("{count} device{}", if count == 1 { "" } else { "s" });
    for index in 0..count as usize {
        let device = CudaContext::new(index)?;
        let (major, minor) = device.compute_capability()?;
        let (free, total) = device.mem_get_info()?;
        let attribute = |attribute| device.attribute(attribute);
        use sys::CUdevice_attribute as Attribute;
        println!(
            "{index}: {}, capability {major}.{minor}, {} multiprocessors, {} of {} MiB free, PCI {:04x}:{:02x}:{:02x}.0",
            device.name()?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            free >> 20,
            total >> 20,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
        );
    }
    Ok(())
}

#[allow(unsafe_code, reason = "cudarc declares it so")]
fn driver_is_there() -> bool {
    // SAFETY: only loads the CUDA driver library.
    unsafe { sys::is_culib_present() }
}

//! Kernel launches: `cuLaunchKernel` and `cuLaunchKernelEx`, its attributes, and parameter blocks.

use std::ffi::c_uint;

use super::ffi_guard::{In, api};
use crate::bytecode;
use crate::driver::driver;
use crate::driver::launch::LaunchRequest;
use crate::error::{Error, Result};
use crate::handle::{FunctionId, StreamId};
use crate::mem::HostMemory;

/// `CUlaunchConfig`
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: StreamId,
    attributes: In<Attribute>,
    attribute_count: c_uint,
}

/// `CUlaunchAttribute`
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    id: c_uint,
    pad: [u8; 4],
    value: [u64; 8],
}

api! {
    fn cuLaunchKernel(
        function: FunctionId,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: StreamId,
        params: In<HostMemory>,
        extra: In<u64>,
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let request = LaunchRequest { function, grid, block, shared, stream, cluster: [1; 3] };
        driver()?.launch(request, |kernel| parameters(kernel, params, extra))
    }

    fn cuLaunchKernelEx(config: In<Config>, function: FunctionId, params: In<HostMemory>, extra: In<u64>) {
        let Config { grid, block, shared, stream, attributes, attribute_count } = config.get()?;
        let mut request = LaunchRequest { function, grid, block, shared, stream, cluster: [1; 3] };
        for Attribute { id, value, .. } in attributes.read_array(attribute_count as usize)? {
            match id {
                // Attributes without effect (see `CUlaunchAttributeID` in cuda.h). 6 only permits this kernel to overlap the
                // preceding one.
                0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 11 | 14 => {}
                // 4: cluster dimension.
                4 => request.cluster = [value[0] as u32, (value[0] >> 32) as u32, value[1] as u32],
                // 2: cooperative launch; 7, 12: events; 13: device-updatable kernel node.
                2 | 7 | 12 | 13 => return Err(Error::NotSupported),
                _ => return Err(Error::InvalidValue),
            }
        }
        driver()?.launch(request, |kernel| parameters(kernel, params, extra))
    }
}

/// The kernel's parameter block, built from an array of pointers to each parameter. A buffer of all parameters in `extra` is not
/// supported.
pub(super) fn parameters(kernel: &bytecode::Function, params: In<HostMemory>, extra: In<u64>) -> Result<Vec<u8>> {
    let mut block = vec![0; kernel.param_bytes as usize];
    if extra.is_given() {
        return Err(Error::NotSupported);
    }
    for (index, param) in kernel.params.iter().enumerate() {
        let value = params.at(index)?;
        let place = block.get_mut(param.offset as usize..(param.offset + param.bytes) as usize);
        match place {
            Some(place) if value.address() != 0 => place.copy_from_slice(&value.read(place.len())),
            _ => return Err(Error::InvalidValue),
        }
    }
    Ok(block)
}

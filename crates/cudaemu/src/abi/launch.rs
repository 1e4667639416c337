//! Kernel launches: `cuLaunchKernel`, `cuLaunchCooperativeKernel` and `cuLaunchKernelEx`, their attributes and parameter
//! blocks.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, api};
use crate::bytecode;
use crate::driver::driver;
use crate::driver::launch::LaunchRequest;
use crate::error::{Error, Result};
use crate::handle::{EventId, FunctionId, Handle, StreamId};
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
        let request = LaunchRequest { function, grid, block, shared, stream, cooperative: false, cluster: [1; 3] };
        driver()?.launch(request, |kernel| parameters(kernel, params, extra))
    }

    fn cuLaunchCooperativeKernel(
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
    ) {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let request = LaunchRequest { function, grid, block, shared, stream, cooperative: true, cluster: [1; 3] };
        driver()?.launch(request, |kernel| parameters(kernel, params, In::null()))
    }

    fn cuLaunchKernelEx(config: In<Config>, function: FunctionId, params: In<HostMemory>, extra: In<u64>) {
        let Config { grid, block, shared, stream, attributes, attribute_count } = config.get()?;
        let mut request = LaunchRequest { function, grid, block, shared, stream, cooperative: false, cluster: [1; 3] };
        let mut events = Vec::new();
        for Attribute { id, value, .. } in attributes.read_array(attribute_count as usize)? {
            match id {
                // Attributes without effect (see `CUlaunchAttributeID` in cuda.h). 6 only permits this kernel to overlap the
                // preceding one.
                0 | 1 | 3 | 5 | 6 | 8 | 9 | 10 | 11 | 14 => {}
                // 2: cooperative; 4: cluster dimension.
                2 => request.cooperative = value[0] as c_int != 0,
                4 => request.cluster = [value[0] as u32, (value[0] >> 32) as u32, value[1] as u32],
                // 7, 12: events that may be recorded before the kernel ends. Recording them at its end is allowed.
                7 | 12 => events.push(EventId::from_raw(value[0])),
                // 13: device-updatable kernel node.
                13 => return Err(Error::NotSupported),
                _ => return Err(Error::InvalidValue),
            }
        }
        let driver = driver()?;
        driver.launch(request, |kernel| parameters(kernel, params, extra))?;
        events.into_iter().try_for_each(|event| driver.record_event(event, stream, 0))
    }
}

/// The kernel's parameter block, built from an array of pointers to each parameter or from a buffer that `extra` describes.
pub(super) fn parameters(kernel: &bytecode::Function, params: In<HostMemory>, extra: In<u64>) -> Result<Vec<u8>> {
    let mut block = vec![0; kernel.param_bytes as usize];
    if extra.is_given() {
        if params.is_given() {
            return Err(Error::InvalidValue);
        }
        let (buffer, bytes) = buffer_of_extra(extra)?;
        if bytes < block.len() {
            return Err(Error::InvalidValue);
        }
        block.copy_from_slice(&buffer.read(0, kernel.param_bytes as usize));
        return Ok(block);
    }
    for (index, param) in kernel.params.iter().enumerate() {
        let value = params.at(index)?;
        let place = block.get_mut(param.offset as usize..(param.offset + param.bytes) as usize);
        match place {
            Some(place) if value.address() != 0 => place.copy_from_slice(&value.read(0, place.len())),
            _ => return Err(Error::InvalidValue),
        }
    }
    Ok(block)
}

/// Reads the buffer and its size from `{1, buffer, 2, &bytes, 0}`.
fn buffer_of_extra(extra: In<u64>) -> Result<(HostMemory, usize)> {
    let (mut buffer, mut bytes) = (None, None);
    let mut at = 0;
    loop {
        match extra.at(at)? {
            0 => break,
            1 => buffer = Some(HostMemory::at(extra.at(at + 1)?)),
            2 => {
                let size = HostMemory::at(extra.at(at + 1)?);
                if size.address() == 0 {
                    return Err(Error::InvalidValue);
                }
                let size = size.read(0, 8).try_into().map_err(|_| Error::InvalidValue)?;
                bytes = Some(u64::from_le_bytes(size) as usize);
            }
            _ => return Err(Error::InvalidValue),
        }
        at += 2;
    }
    match (buffer.filter(|buffer| buffer.address() != 0), bytes) {
        (Some(buffer), Some(bytes)) => Ok((buffer, bytes)),
        _ => Err(Error::InvalidValue),
    }
}

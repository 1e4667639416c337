//! fanout: a tensor backend that pools devices, local and remote, behind one interface.

#[cfg(not(all(target_pointer_width = "64", target_endian = "little")))]
compile_error!("fanout needs a 64-bit little-endian target: the wire and the quantised formats are defined as such");

pub mod cpu;
pub mod device;
pub mod graph;
pub mod ops;
pub mod registry;
pub mod rpc;
pub mod tensor;

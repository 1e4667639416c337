//! Arguments of the products in ggml's layout, and of the conversions of columns, with their accesses.

use super::super::{Access, Grid, KernelArguments, Shape, saturating_product};
use crate::tensor::DType;
use bytemuck::{Pod, Zeroable};

/// `struct MulMatArgs` of kernels/mul_mat.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MulMatArgs {
    pub(super) k: u32,
    pub(super) m: u32,
    pub(super) n: u32,
    pub(super) log2_lanes: u32,
    pub(super) planes: u32,
    pub(super) b2: u32,
    pub(super) r2: u32,
    pub(super) r3: u32,
    pub(super) a: [u64; 3],
    pub(super) b: [u64; 3],
    pub(super) dst: [u64; 4],
}

impl MulMatArgs {
    /// The accesses of a, b and the destination, aligned to their elements.
    pub(super) fn aligned_accesses(&self) -> [Access; 3] {
        let &MulMatArgs { k, m, n, planes, b2, r2, r3, a, b, dst, .. } = self;
        let b3 = planes.div_ceil(b2.max(1));
        let weights = Access::run(0, &[k]).along(m, a[0]).along(b2.div_ceil(r2.max(1)), a[1]);
        let columns = Access::column(1, k).along(n, b[0]).along(b2, b[1]).along(b3, b[2]);
        let result = Access::one(2).along(m, dst[0]).along(n, dst[1]).along(b2, dst[2]).along(b3, dst[3]);
        [weights.along(b3.div_ceil(r3.max(1)), a[2]), columns, result]
    }

    /// The accesses of kernels that accept any address.
    pub(super) fn accesses(&self) -> [Access; 3] {
        self.aligned_accesses().map(Access::unaligned)
    }
}

impl KernelArguments for MulMatArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(self.accesses().into())
    }
}

/// `struct MulMatIdArgs` of kernels/mul_mat.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MulMatIdArgs {
    pub(super) k: u32,
    pub(super) m: u32,
    pub(super) experts: u32,
    pub(super) log2_lanes: u32,
    pub(super) used: u32,
    pub(super) tokens: u32,
    pub(super) nb: u32,
    pub(super) padding: u32,
    pub(super) a: [u64; 2],
    pub(super) b: [u64; 2],
    pub(super) dst: [u64; 3],
    pub(super) ids: [u64; 2],
}

impl KernelArguments for MulMatIdArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let &MulMatIdArgs { k, m, experts, used, tokens, nb, a, b, dst, ids, .. } = self;
        let accesses = [
            Access::run(0, &[k]).along(m, a[0]).along(experts, a[1]),
            Access::column(1, k).along(nb, b[0]).along(tokens, b[1]),
            Access::one(2).along(m, dst[0]).along(used, dst[1]).along(tokens, dst[2]),
            Access::one(3).along(used, ids[0]).along(tokens, ids[1]),
        ];
        Ok(accesses.map(Access::unaligned).into())
    }
}

/// `struct WidenArgs` of kernels/mul_mat.cu, and the fields of `struct QuantizeArgs` and `struct HalvesArgs`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ConvertColumnsArgs {
    pub(super) b: Shape,
    /// From one converted row to the next: elements in WidenArgs, otherwise bytes.
    pub(super) stride: u64,
    /// QuantizeArgs: the elements per group; otherwise: the type of b.
    pub(super) type_or_group: u32,
    /// HalvesArgs: the type of the result; otherwise 0.
    pub(super) to: u32,
}

impl KernelArguments for ConvertColumnsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(self.accesses_with_strides_in(DType::F32.block_bytes() as u64))
    }
}

impl ConvertColumnsArgs {
    /// The accesses, if strides count units of so many bytes.
    fn accesses_with_strides_in(&self, unit: u64) -> Vec<Access> {
        let rows = saturating_product(&self.b.ne[1..]);
        let bytes = self.stride.saturating_mul(unit).saturating_mul(rows);
        vec![self.b.access(0).unaligned(), Access::bytes(1, bytes)]
    }
}

/// `struct QuantizeArgs` and `struct HalvesArgs` of kernels/mul_mat.cu: the stride counts bytes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct RoundColumnsArgs(pub(super) ConvertColumnsArgs);

impl KernelArguments for RoundColumnsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(self.0.accesses_with_strides_in(1))
    }
}

//! Cases of products: mul_mat, flash_attn, out_prod.

use super::elementwise::causal;
use super::{Draft, IN_BF16, IN_F16, IN_F32, QUANTISED, case, product_bound, weight_types};
use crate::ops::flash_attn::FlashAttn;
use crate::ops::mul_mat::{MulMat, NO_EXPERT};
use crate::ops::out_prod::OutProd;
use crate::tensor::DType::{self, BF16, F16, F32, Q4_0, Q4_K, Q5_0, Q6_K, Q8_0};

pub(super) fn cases() -> Vec<Draft> {
    let mut cases: Vec<Draft> = weight_types().map(mul_mat).collect();
    cases.extend([F32, F16, Q8_0, Q4_K, Q6_K].map(mul_mat_id));
    cases.extend(flash_attn());
    cases.push(case(IN_F32).normal(F32, [37, 19, 1, 1]).normal(F32, [23, 19, 3, 1]).node(OutProd));
    cases.push(case(IN_F32).variant(Q5_0).normal(Q5_0, [64, 19, 1, 1]).normal(F32, [23, 19, 3, 1]).node(OutProd));
    cases
}

/// A token, a few tokens and a prompt. Devices repack weights from 16 KiB on, for which they have other kernels: the first weight
/// is so large, and the second one has a number of rows that fills no tile.
fn mul_mat(dtype: DType) -> Draft {
    let k = 512;
    // An odd number of panels of 16 rows.
    let rows = (16 << 10) / dtype.row_bytes(k).unwrap_or(k) / 32 * 32 + 48;
    case(product_bound(dtype))
        .variant(dtype)
        .normal(dtype, [k, rows, 1, 1])
        .normal(dtype, [k, 21, 1, 1])
        .normal(F32, [k, 1, 1, 1])
        .normal(F32, [k, 3, 1, 1])
        .normal(F32, [k, 33, 1, 1])
        .node_of(MulMat::PLAIN, &[0, 2])
        .node_of(MulMat::PLAIN, &[0, 3])
        .node_of(MulMat::PLAIN, &[0, 4])
        .node_of(MulMat::PLAIN, &[1, 2])
        .node_of(MulMat::PLAIN, &[1, 3])
}

/// Two of five experts for each token; one token has one expert only.
fn mul_mat_id(dtype: DType) -> Draft {
    let id = |k: i32| if k == 3 { NO_EXPERT as i32 } else { k * k % 5 };
    case(product_bound(dtype))
        .variant(dtype)
        .normal(dtype, [256, 37, 5, 1])
        .normal(F32, [256, 1, 1, 1])
        .indices([2, 1, 1, 1], [4, 1])
        .normal(F32, [256, 2, 9, 1])
        .indices([2, 9, 1, 1], (0..18).map(id))
        .node_of(MulMat::BY_ID, &[0, 1, 2])
        .node_of(MulMat::BY_ID, &[0, 3, 4])
}

/// K and V are views of a cache, in which the heads of a position lie side by side.
fn attention(variant: impl ToString, bound: f64, dtype: DType, size: usize, tokens: usize) -> Draft {
    const POSITIONS: usize = 70;
    let cache = |draft: Draft| draft.normal(dtype, [size, 2, POSITIONS, 1]).permuted([0, 2, 1, 3]);
    let q = case(bound).variant(variant).normal(F32, [size, 8, tokens, 1]).permuted([0, 2, 1, 3]);
    cache(cache(q)).listed(F16, [POSITIONS, tokens, 1, 1], causal(POSITIONS, tokens))
}

fn flash_attn() -> Vec<Draft> {
    let op = FlashAttn { scale: 0.125, max_bias: 0.0, softcap: 0.0, f32_accumulation: true, n_kv_max: 0 };
    let types = [(F32, IN_F16), (F16, IN_F16), (BF16, IN_BF16), (Q8_0, QUANTISED), (Q4_0, QUANTISED)];
    let mut cases: Vec<Draft> =
        types.map(|(dtype, bound)| attention(dtype, bound, dtype, 64, 5).node(op)).into_iter().collect();
    cases.extend([
        attention("F16 for 1 token", IN_F16, F16, 128, 1).node(op),
        attention("with ALiBi and sinks", IN_F16, F16, 40, 3)
            .normal(F32, [8, 1, 1, 1])
            .node(FlashAttn { max_bias: 8.0, ..op }),
        attention("with softcap", IN_F16, F16, 64, 3).node(FlashAttn { softcap: 1.5, ..op }),
    ]);
    cases
}

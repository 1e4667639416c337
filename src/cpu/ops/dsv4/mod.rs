//! The ops of DeepSeek V4: the lightning indexer, and hyper-connections.

mod hyper_connections;
mod indexer;

use super::{Kernel, bounded, unsupported_types};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::dsv4::Dsv4;

/// Most streams, and most heads of the indexer.
const MAX_SUMMED: usize = 1 << 16;

pub(super) fn select(op: Dsv4, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    // Sums over streams and over heads run in one piece.
    let summed = match op {
        Dsv4::LightningIndexer => node.srcs.get(0).map(|q| ("heads", q.ne()[1])),
        Dsv4::HcComb { .. } => None,
        Dsv4::HcPre { .. } => node.srcs.get(0).map(|x| ("streams", x.ne()[1])),
        Dsv4::HcPost => node.srcs.get(1).map(|residual| ("streams", residual.ne()[1])),
    };
    if let Some((what, count)) = summed {
        bounded(node.op.code(), what, count, MAX_SUMMED)?;
    }
    let kernel = match op {
        Dsv4::LightningIndexer => indexer::kernel(node),
        Dsv4::HcComb { eps, iterations } => Some(hyper_connections::comb(node, eps, iterations as usize)),
        Dsv4::HcPre { scale, gated } => hyper_connections::pre(node, scale, gated),
        Dsv4::HcPost => hyper_connections::post(node),
    };
    kernel.ok_or_else(|| unsupported_types(node))
}

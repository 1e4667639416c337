//! The ops of DeepSeek V4: the lightning indexer, and hyper-connections.

mod hyper_connections;
mod indexer;

use super::{Kernel, unsupported_types};
use crate::device::Unsupported;
use crate::ops::NodeView;
use crate::ops::dsv4::Dsv4;

pub(super) fn select(op: Dsv4, node: &NodeView<'_>) -> Result<Kernel, Unsupported> {
    let kernel = match op {
        Dsv4::LightningIndexer => indexer::kernel(node),
        Dsv4::HcComb { eps, iterations } => Some(hyper_connections::comb(node, eps, iterations as usize)),
        Dsv4::HcPre { scale, gated } => hyper_connections::pre(node, scale, gated),
        Dsv4::HcPost => hyper_connections::post(node),
    };
    kernel.ok_or_else(|| unsupported_types(node))
}

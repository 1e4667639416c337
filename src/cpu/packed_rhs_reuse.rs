//! Reuse of a packed right-hand side: consecutive products of the same source 1 (the Q, K and V projections of one input) pack
//! its columns once. The first product leaves them in shared scratch, the others skip the packing.

use super::program::Operand;
use super::simd::RhsPacking;
use crate::graph::SlotOffset;
use crate::tensor::TensorDesc;

/// The right-hand side that lies packed in shared scratch after the steps recorded so far: its place, description and packing.
/// `None` if shared scratch holds no packed right-hand side.
#[derive(Default)]
pub(super) struct PackedRhs(Option<(SlotOffset, TensorDesc, RhsPacking)>);

impl PackedRhs {
    /// Records a product that packs source 1 into shared scratch. Returns whether it is packed there already, so that the
    /// product can skip packing.
    pub(super) fn after_product(&mut self, packing: RhsPacking, dst: &Operand, b: &Operand) -> bool {
        let columns = Some((b.place, b.desc, packing));
        let found = self.0 == columns;
        self.0 = columns;
        // The product's result may overwrite the source.
        self.after_other(false, [dst]);
        found
    }

    /// Records any other step. The step invalidates the packed data if it uses shared scratch (`uses_shared`), or if one of its
    /// `operands` overlaps the source, because a step may write any of them.
    pub(super) fn after_other<'a>(&mut self, uses_shared: bool, operands: impl IntoIterator<Item = &'a Operand>) {
        let Some((place, desc, _)) = &self.0 else { return };
        let end = place.offset.saturating_add(desc.extent());
        let overlaps = |o: &Operand| {
            o.place.slot == place.slot && o.place.offset < end && place.offset < o.place.offset + o.desc.extent()
        };
        if uses_shared || operands.into_iter().any(overlaps) {
            self.0 = None;
        }
    }
}

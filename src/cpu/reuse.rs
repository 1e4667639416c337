//! Products of the same source: its columns are packed once, by the first of them, and stay in shared scratch.

use super::program::Operand;
use super::simd::Packing;
use crate::graph::SlotOffset;
use crate::tensor::TensorDesc;

/// What shared scratch holds between two steps.
#[derive(Default)]
pub(super) struct Held(Option<(SlotOffset, TensorDesc, Packing)>);

impl Held {
    /// Takes note of a product that leaves source 1 packed in shared scratch: whether it finds it there already.
    pub(super) fn product(&mut self, packing: Packing, dst: &Operand, b: &Operand) -> bool {
        let columns = Some((b.place, b.desc, packing));
        let found = self.0 == columns;
        self.0 = columns;
        self.other(false, [dst]);
        found
    }

    /// Takes note of any other step, which may write each of `operands`, and `shared` scratch.
    pub(super) fn other<'a>(&mut self, shared: bool, operands: impl IntoIterator<Item = &'a Operand>) {
        let Some((place, desc, _)) = &self.0 else { return };
        let end = place.offset.saturating_add(desc.extent());
        let meets = |o: &Operand| {
            o.place.slot == place.slot && o.place.offset < end && place.offset < o.place.offset + o.desc.extent()
        };
        if shared || operands.into_iter().any(meets) {
            self.0 = None;
        }
    }
}

//! SET and ACC: write or add a tensor into a region of another one.

use super::{NodeView, OpCode, OpFamily, OpParams, OutputSpec, ParamError, ShapeError, Sources, ensure};
use crate::tensor::{DIMS, TensorDesc};

/// `dst = a`, with b written (SET) or added (ACC) in a region of dst. Source 0 is a, source 1 is b; a and dst are contiguous and
/// have one shape and type, which is also b's. In place on a, only the region is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assign {
    /// Whether b is added to the region (ACC) instead of written there (SET).
    pub accumulate: bool,
    /// Byte strides of the region in dimensions 1 to 3. Elements of dimension 0 follow each other. The stride of a dimension
    /// in which b has one element is not used; a client truncates larger strides to 32 bits there.
    pub nb: [i32; 3],
    /// Byte of dst at which the region starts; at least 0.
    pub offset: i32,
    /// Whether the client made dst a view of a. The result is the same.
    pub in_place: bool,
}

impl Assign {
    /// The region that has the shape of `b`; `None` if its strides are negative or too large.
    pub(crate) fn region(&self, b: &TensorDesc) -> Option<TensorDesc> {
        let mut nb = [b.dtype().block_bytes(), 0, 0, 0];
        for d in 1..DIMS {
            if b.ne()[d] > 1 {
                nb[d] = usize::try_from(self.nb[d - 1]).ok()?;
            }
        }
        TensorDesc::strided(b.dtype(), b.ne(), nb).ok()
    }
}

impl OpFamily for Assign {
    fn code(&self) -> OpCode {
        if self.accumulate { OpCode::Acc } else { OpCode::Set }
    }

    fn decode(code: OpCode, params: &OpParams) -> Result<Self, ParamError> {
        let offset = params.int(3);
        if offset < 0 {
            return Err(ParamError::new(code, 3, "offset", offset, "at least 0"));
        }
        let nb = [params.int(0), params.int(1), params.int(2)];
        Ok(Assign { accumulate: code == OpCode::Acc, nb, offset, in_place: params.int(4) != 0 })
    }

    fn encode(&self) -> OpParams {
        let [nb1, nb2, nb3] = self.nb;
        let params = OpParams::default().with_int(0, nb1).with_int(1, nb2).with_int(2, nb3);
        params.with_int(3, self.offset).with_int(4, i32::from(self.in_place))
    }

    fn infer(&self, srcs: &Sources<'_>) -> Result<OutputSpec, ShapeError> {
        Ok(OutputSpec::like(srcs.required(0)?))
    }

    fn check(&self, node: &NodeView<'_>) -> Result<(), ShapeError> {
        let (a, b) = (node.src(0)?, node.src(1)?);
        node.expect_dst(OutputSpec::like(a))?;
        ensure!(node, a.is_contiguous() && node.dst.is_contiguous(), "a and dst are contiguous");
        ensure!(node, a.dtype() == b.dtype(), "a and b have one type");
        ensure!(node, b.elements() <= a.elements(), "b has no more elements than a");
        let region = self.region(b);
        ensure!(node, region.is_some_and(|region| region.is_injective()), "places of the region do not overlap");
        let end = region.and_then(|region| region.extent().checked_add(usize::try_from(self.offset).ok()?));
        ensure!(node, end.is_some_and(|end| end <= node.dst.extent()), "the region lies inside dst");
        Ok(())
    }

    fn in_place(&self, i: usize) -> bool {
        i == 0
    }

    fn may_be_empty(&self, _: usize) -> bool {
        true
    }
}

//! Which nodes a device runs: fanout's own answer, kept by op, parameters, types and shapes.

use crate::abi::Tensor;
use crate::device::Device;
use crate::guard::lock;
use crate::host;
use fanout::device::{Support, Unsupported};
use fanout::graph::validate::MAX_OP_SOURCES;
use fanout::ops::{NodeView, Op, OpParams, Sources};
use fanout::tensor::TensorDesc;
use std::collections::HashMap;
use std::sync::Mutex;

/// Limit of kept answers. A model has a few hundred kinds of nodes.
const MAX_ANSWERS: usize = 1 << 14;

/// Kept answers, by the node's numbers in the host.
#[derive(Default)]
pub(crate) struct SupportCache(Mutex<HashMap<Vec<u64>, Answer>>);

#[derive(Clone, Copy)]
struct Answer {
    runs: bool,
    offloads: bool,
}

/// Type, shape and strides of a tensor of the host; `None` for a type that fanout does not know.
pub(crate) fn describe(tensor: &Tensor) -> Option<TensorDesc> {
    let dtype = host::get().numbers.dtype(tensor.dtype)?;
    let mut ne = [0; 4];
    for (to, from) in ne.iter_mut().zip(tensor.ne) {
        *to = usize::try_from(from).ok()?;
    }
    TensorDesc::strided(dtype, ne, tensor.nb).ok()
}

impl SupportCache {
    /// Whether the device runs the node.
    ///
    /// # Safety
    /// The sources of `node` are tensors of the host.
    pub(crate) unsafe fn runs(&self, device: &Device, node: &Tensor) -> bool {
        // SAFETY: the caller's argument is this function's.
        unsafe { self.answer(device, node) }.runs
    }

    /// Whether the device runs the node so fast that copying its weights from the host's memory pays off.
    ///
    /// # Safety
    /// The sources of `node` are tensors of the host.
    pub(crate) unsafe fn offloads(&self, device: &Device, node: &Tensor) -> bool {
        // SAFETY: the caller's argument is this function's.
        unsafe { self.answer(device, node) }.offloads
    }

    unsafe fn answer(&self, device: &Device, node: &Tensor) -> Answer {
        let sources: Vec<Option<&Tensor>> = node.src[..MAX_OP_SOURCES]
            .iter()
            // SAFETY: the caller passes a node whose sources are tensors.
            .map(|&src| if std::ptr::eq(src, node) { None } else { unsafe { src.as_ref() } })
            .collect();
        let mut key = vec![u64::from(node.op)];
        key.extend(node.op_params.map(|word| u64::from(word.cast_unsigned())));
        for tensor in [Some(node)].into_iter().chain(sources.iter().copied()) {
            let Some(tensor) = tensor else {
                key.push(u64::MAX);
                continue;
            };
            key.push(u64::from(tensor.dtype));
            key.extend(tensor.ne.map(i64::cast_unsigned));
            key.extend(tensor.nb.map(|stride| stride as u64));
        }
        if let Some(&known) = lock(&self.0).get(&key) {
            return known;
        }
        let support = decide(device, node, &sources);
        // What a lost server refuses, it has not decided. The host would run the node itself, on weights that it cannot read, or end
        // the process. So the answer is yes, and the graph fails.
        if !support.runs() && device.is_away() {
            return Answer { runs: true, offloads: false };
        }
        let answer = Answer { runs: support.runs(), offloads: support == Support::Offload };
        let mut answers = lock(&self.0);
        if answers.len() >= MAX_ANSWERS {
            answers.clear();
        }
        answers.insert(key, answer);
        answer
    }
}

fn decide(device: &Device, node: &Tensor, sources: &[Option<&Tensor>]) -> Support {
    let no = |op, reason: &str| Support::No(Unsupported { op, reason: reason.to_owned() });
    let Some((code, params)) = host::get().numbers.op(node.op, &node.op_params) else {
        return no(fanout::ops::OpCode::None, "fanout has no such op");
    };
    // Nodes that compute nothing.
    if code.is_view() || node.ne.contains(&0) {
        return Support::Yes;
    }
    let Ok(Some(op)) = Op::decode(code, &OpParams(params)) else {
        return no(code, "fanout does not run the op with these parameters");
    };
    let descs: Vec<Option<TensorDesc>> = sources.iter().map(|src| src.and_then(describe)).collect();
    let all_known = descs.iter().zip(sources).all(|(desc, src)| desc.is_some() == src.is_some());
    let (Some(dst), true) = (describe(node), all_known) else {
        return no(code, "a type that fanout does not know");
    };
    let srcs: Vec<Option<&TensorDesc>> = descs.iter().map(Option::as_ref).collect();
    let view = NodeView { op: &op, dst: &dst, srcs: Sources::new(code, &srcs), aligned: true };
    match op.check(&view) {
        Ok(()) => match device.fanout() {
            Ok((fanout, _)) => fanout.support(view),
            Err(error) => no(code, &error.to_string()),
        },
        Err(error) => no(code, &error.to_string()),
    }
}

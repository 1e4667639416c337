//! Fused weights of a file: a matrix that has the rows of several. The graph knows the parts alone, so that they can be placed and split
//! over devices as those of other files.

use crate::hparams::HParams;
use fanout::gguf::{Gguf, TensorInfo};

/// Replaces fused tensors whose shape fits by their parts, which are ranges of the same bytes. Others remain, and are refused as unknown.
pub fn split_fused(gguf: &mut Gguf<'_>, hparams: &HParams) {
    let (q, kv, ff) = (hparams.heads * hparams.head_width, hparams.kv_width(), hparams.ff);
    let has_gate: Vec<String> = gguf
        .tensors
        .iter()
        .filter_map(|tensor| tensor.name.strip_suffix("ffn_gate.weight").map(str::to_owned))
        .collect();
    let tensors = std::mem::take(&mut gguf.tensors);
    let split = |tensor: TensorInfo| {
        let of = |stem: &str| tensor.name.rsplit_once(stem).filter(|(_, kind)| ["weight", "bias"].contains(kind));
        let stems: &[(&str, usize)] = if of("attn_qkv.").is_some() {
            &[("attn_q", q), ("attn_k", kv), ("attn_v", kv)]
        } else if of("ffn_up.").is_some_and(|(block, _)| !has_gate.iter().any(|other| other == block)) {
            &[("ffn_gate", ff), ("ffn_up", ff)]
        } else {
            &[]
        };
        parts(&tensor, stems).unwrap_or_else(|| vec![tensor])
    };
    gguf.tensors = tensors.into_iter().flat_map(split).collect();
}

/// The parts of a fused matrix or bias, by name and rows; `None` if it has another number of rows.
fn parts(tensor: &TensorInfo, stems: &[(&str, usize)]) -> Option<Vec<TensorInfo>> {
    let (block, kind) = tensor.name.rsplit_once('.').and_then(|(name, kind)| Some((name.rsplit_once('.')?.0, kind)))?;
    let rows_at = if kind == "weight" { 1 } else { 0 };
    let rows = stems.iter().map(|(_, rows)| rows).sum::<usize>();
    if rows == 0 || tensor.ne[rows_at] != rows || tensor.ne[rows_at + 1..].iter().any(|&n| n != 1) {
        return None;
    }
    let row_bytes = tensor.bytes.len() / rows;
    let mut start = tensor.bytes.start;
    let part = |&(stem, rows): &(&str, usize)| {
        let mut part = TensorInfo { name: format!("{block}.{stem}.{kind}"), ..tensor.clone() };
        part.ne[rows_at] = rows;
        part.bytes = start..start + rows * row_bytes;
        start = part.bytes.end;
        part
    };
    Some(stems.iter().map(part).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use super::*;
    use crate::hparams::Arch;
    use crate::model::tests::toy::ToyModel;
    use fanout::gguf::Writer;
    use fanout::tensor::DType;

    #[test]
    fn fused_tensors_become_ranges_of_their_rows() {
        let hparams = ToyModel::new(Arch::Phi3).hparams;
        let (width, q, kv, ff) = (hparams.width as u64, 48, 16, hparams.ff as u64);
        let rows = |name: &str, ne: &[u64]| Writer::new().tensor(name, ne, DType::F32).to_bytes().unwrap();
        type Row<'a> = (&'a str, &'a [u64], &'a [(&'a str, u64)]);
        let cases: [Row<'_>; 7] = [
            ("blk.1.attn_qkv.weight", &[width, q + 2 * kv], &[("attn_q", q), ("attn_k", kv), ("attn_v", kv)]),
            ("blk.1.attn_qkv.bias", &[q + 2 * kv], &[("attn_q", q), ("attn_k", kv), ("attn_v", kv)]),
            ("blk.1.ffn_up.weight", &[width, 2 * ff], &[("ffn_gate", ff), ("ffn_up", ff)]),
            ("blk.1.ffn_up.weight", &[width, ff], &[("ffn_up", ff)]),
            ("blk.1.attn_qkv.weight", &[width, q], &[("attn_qkv", q)]),
            ("blk.1.attn_qkv.scale", &[q + 2 * kv], &[("attn_qkv", q + 2 * kv)]),
            ("blk.1.ffn_down.weight", &[ff, width], &[("ffn_down", width)]),
        ];
        for (name, ne, expected) in cases {
            let bytes = rows(name, ne);
            let mut gguf = Gguf::parse(&bytes).unwrap();
            let whole = gguf.tensors[0].clone();
            split_fused(&mut gguf, &hparams);
            let (kind, row) = (name.rsplit_once('.').unwrap().1, 4 * if ne.len() > 1 { ne[0] as usize } else { 1 });
            let mut start = whole.bytes.start;
            assert_eq!(gguf.tensors.len(), expected.len(), "{name}");
            for (part, &(stem, rows)) in gguf.tensors.iter().zip(expected) {
                assert_eq!(part.name, format!("blk.1.{stem}.{kind}"));
                assert_eq!(part.ne[ne.len() - 1], rows as usize, "{name}");
                assert_eq!(part.bytes, start..start + rows as usize * row, "{name}");
                start = part.bytes.end;
            }
        }
    }
}

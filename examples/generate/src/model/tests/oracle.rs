//! The test oracle: a straightforward f64 implementation of the same models, without a KV cache or batching.

use super::toy::ToyModel;
use crate::hparams::{Experts, Temperature};
use fanout::ops::glu::GluKind;
use fanout::ops::rope::{Rope, RopeMode};
use std::f64::consts::PI;

type Rows = Vec<Vec<f64>>;

/// One row of logits per token of a sequence.
pub(crate) fn logits(toy: &ToyModel, tokens: &[u32]) -> Rows {
    let hparams = &toy.hparams;
    let table = rows(toy, "token_embd.weight", hparams.width);
    let variant = &hparams.variant;
    let mut x: Rows = tokens.iter().map(|&t| table[t as usize].clone()).collect();
    scale(&mut x, variant.embedding_scale);
    for i in 0..hparams.layers {
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let cur = norm(toy, &x, &name("attn_norm.weight"));
        let attended = attention(toy, &cur, i, &name);
        add(&mut x, &result(toy, linear(toy, &attended, &name("attn_output")), &name("post_attention_norm.weight")));
        let cur = norm(toy, &x, &name(hparams.arch.spec().ffn_norm));
        let out = match &hparams.experts {
            Some(experts) => cur.iter().map(|x| mixture(toy, experts, x, &name)).collect(),
            None => {
                let (gate, up) = (linear(toy, &cur, &name("ffn_gate")), linear(toy, &cur, &name("ffn_up")));
                let gated = gate.iter().zip(&up).map(|(g, u)| gated(variant.gate, g, u));
                linear(toy, &gated.collect::<Rows>(), &name("ffn_down"))
            }
        };
        add(&mut x, &result(toy, out, &name("post_ffw_norm.weight")));
    }
    let x = norm(toy, &x, "output_norm.weight");
    let mut logits = linear(toy, &x, if toy.has_tensor("output.weight") { "output" } else { "token_embd" });
    scale(&mut logits, variant.logit_scale);
    logits
}

/// A result of attention or of the feed-forward network before it is added.
fn result(toy: &ToyModel, x: Rows, norm_name: &str) -> Rows {
    let mut x = if toy.hparams.arch.spec().result_norms { norm(toy, &x, norm_name) } else { x };
    scale(&mut x, toy.hparams.variant.residual_scale);
    x
}

fn scale(x: &mut Rows, factor: f32) {
    x.iter_mut().flatten().for_each(|x| *x *= f64::from(factor));
}

fn attention(toy: &ToyModel, cur: &Rows, block: usize, name: &dyn Fn(&str) -> String) -> Rows {
    let hparams = &toy.hparams;
    let heads = |stem: &str, dim: usize| -> Vec<Rows> {
        let split = |row: &Vec<f64>| row.chunks(dim).map(<[f64]>::to_vec).collect::<Rows>();
        linear(toy, cur, &name(stem)).iter().map(split).collect()
    };
    let rotated = |stem: &str| {
        let mut all = heads(stem, hparams.head_width);
        for (position, heads) in all.iter_mut().enumerate() {
            let norm_name = name(&format!("{stem}_norm.weight"));
            if toy.has_tensor(&norm_name) {
                *heads = norm(toy, heads, &norm_name);
            }
            if let Some(rope) = hparams.block_rope(block) {
                heads.iter_mut().for_each(|head| rotate(toy, &rope, head, position));
            }
        }
        all
    };
    let (q, k, v) = (rotated("attn_q"), rotated("attn_k"), heads("attn_v", hparams.head_width));
    let share = hparams.heads / hparams.kv_heads;
    let sinks = hparams.arch.spec().sinks.then(|| toy.values(&name("attn_sinks.weight")));
    let one = |t: usize, h: usize| {
        let first = hparams.block_window(block).map_or(0, |window| (t + 1).saturating_sub(window.get() as usize));
        let factor = hparams.variant.attention_scale.map_or((hparams.head_width as f64).sqrt().recip(), f64::from);
        let factor = factor
            * hparams.variant.temperature.map_or(1.0, |Temperature { scale, step }| {
                f64::from(scale) * ((t as f64 / f64::from(step)).floor() + 1.0).ln() + 1.0
            });
        let scores = (first..=t).map(|past| dot(&q[t][h], &k[past][h / share]) * factor);
        // A sink is one more score, whose value is 0.
        let sink = sinks.map(|sinks| f64::from(sinks[h]));
        let shares = softmax(&scores.chain(sink).collect::<Vec<_>>());
        let value = |d| (first..=t).map(|past| shares[past - first] * v[past][h / share][d]).sum();
        (0..hparams.head_width).map(value).collect::<Vec<f64>>()
    };
    (0..cur.len()).map(|t| (0..hparams.heads).flat_map(|h| one(t, h)).collect()).collect()
}

fn rotate(toy: &ToyModel, rope: &Rope, head: &mut [f64], position: usize) {
    let (half, n) = (rope.n_dims as usize / 2, f64::from(rope.n_dims));
    let factors = toy.has_tensor("rope_freqs.weight").then(|| toy.values("rope_freqs.weight"));
    for j in 0..half {
        let (a, b) = if rope.mode == RopeMode::Normal { (2 * j, 2 * j + 1) } else { (j, j + half) };
        let step = f64::from(rope.freq_base).powf(-2.0 * j as f64 / n);
        let angle = position as f64 * step * f64::from(rope.freq_scale) / factors.map_or(1.0, |f| f64::from(f[j]));
        let (x, y) = (head[a], head[b]);
        head[a] = x * angle.cos() - y * angle.sin();
        head[b] = x * angle.sin() + y * angle.cos();
    }
}

fn mixture(toy: &ToyModel, experts: &Experts, x: &[f64], name: &dyn Fn(&str) -> String) -> Vec<f64> {
    let all = vec![x.to_vec()];
    let shares = softmax(&linear(toy, &all, &name("ffn_gate_inp"))[0]);
    let mut order: Vec<usize> = (0..experts.count).collect();
    order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
    let chosen = &order[..experts.used];
    let sum: f64 = chosen.iter().map(|&e| shares[e]).sum();
    let mut out = vec![0.0; x.len()];
    for &e in chosen {
        let product = |stem: &str, x: &[f64], m: usize| -> Vec<f64> {
            let matrices = rows(toy, &name(&format!("{stem}.weight")), x.len());
            let bias = name(&format!("{stem}.bias"));
            let bias = |row: usize| if toy.has_tensor(&bias) { f64::from(toy.values(&bias)[row]) } else { 0.0 };
            (e * m..(e + 1) * m).map(|row| dot(&matrices[row], x) + bias(row)).collect()
        };
        let (gate, up) = (product("ffn_gate_exps", x, experts.ff), product("ffn_up_exps", x, experts.ff));
        let down = product("ffn_down_exps", &gated(toy.hparams.variant.gate, &gate, &up), x.len());
        out.iter_mut().zip(down).for_each(|(y, d)| *y += shares[e] / sum * d);
    }
    out
}

fn rows(toy: &ToyModel, name: &str, width: usize) -> Rows {
    toy.values(name).chunks(width).map(|row| row.iter().map(|&v| f64::from(v)).collect()).collect()
}

fn linear(toy: &ToyModel, x: &Rows, stem: &str) -> Rows {
    let weight = rows(toy, &format!("{stem}.weight"), x[0].len());
    let bias = format!("{stem}.bias");
    let bias: Vec<f64> = match toy.has_tensor(&bias) {
        true => toy.values(&bias).iter().map(|&v| f64::from(v)).collect(),
        false => vec![0.0; weight.len()],
    };
    x.iter().map(|x| weight.iter().zip(&bias).map(|(row, b)| dot(row, x) + b).collect()).collect()
}

fn norm(toy: &ToyModel, x: &Rows, weight: &str) -> Rows {
    let weight = toy.values(weight);
    let one = |row: &Vec<f64>| {
        let scale = 1.0 / (dot(row, row) / row.len() as f64 + f64::from(toy.hparams.rms_epsilon)).sqrt();
        row.iter().zip(weight).map(|(v, &w)| v * scale * f64::from(w)).collect()
    };
    x.iter().map(one).collect()
}

fn gated(kind: GluKind, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let one = |g: f64, u: f64| match kind {
        GluKind::Geglu => 0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()) * u,
        GluKind::SwigluOai { alpha, limit } => {
            let (limit, g) = (f64::from(limit), g.min(f64::from(limit)));
            g / (1.0 + (-f64::from(alpha) * g).exp()) * (u.clamp(-limit, limit) + 1.0)
        }
        _ => g / (1.0 + (-g).exp()) * u,
    };
    gate.iter().zip(up).map(|(&g, &u)| one(g, u)).collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let top = x.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = x.iter().map(|v| (v - top).exp()).sum();
    x.iter().map(|v| (v - top).exp() / sum).collect()
}

fn add(x: &mut Rows, y: &Rows) {
    x.iter_mut().zip(y).for_each(|(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

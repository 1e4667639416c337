//! The test oracle: a straightforward f64 implementation of the same models, without a KV cache or batching.

use super::toy::ToyModel;
use crate::hparams::Experts;
use fanout::ops::rope::RopeMode;

type Rows = Vec<Vec<f64>>;

/// One row of logits per token of a sequence.
pub(crate) fn logits(toy: &ToyModel, tokens: &[u32]) -> Rows {
    let hparams = &toy.hparams;
    let table = rows(toy, "token_embd.weight", hparams.width);
    let mut x: Rows = tokens.iter().map(|&t| table[t as usize].clone()).collect();
    for i in 0..hparams.layers {
        let name = |stem: &str| format!("blk.{i}.{stem}");
        let cur = norm(toy, &x, &name("attn_norm.weight"));
        let attended = attention(toy, &cur, &name);
        add(&mut x, &linear(toy, &attended, &name("attn_output")));
        let cur = norm(toy, &x, &name("ffn_norm.weight"));
        let out = match &hparams.experts {
            Some(experts) => cur.iter().map(|x| mixture(toy, experts, x, &name)).collect(),
            None => {
                let (gate, up) = (linear(toy, &cur, &name("ffn_gate")), linear(toy, &cur, &name("ffn_up")));
                linear(toy, &gate.iter().zip(&up).map(|(g, u)| swiglu(g, u)).collect::<Rows>(), &name("ffn_down"))
            }
        };
        add(&mut x, &out);
    }
    let x = norm(toy, &x, "output_norm.weight");
    linear(toy, &x, if toy.has_tensor("output.weight") { "output" } else { "token_embd" })
}

fn attention(toy: &ToyModel, cur: &Rows, name: &dyn Fn(&str) -> String) -> Rows {
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
            heads.iter_mut().for_each(|head| rotate(toy, head, position));
        }
        all
    };
    let (q, k, v) = (rotated("attn_q"), rotated("attn_k"), heads("attn_v", hparams.head_width));
    let share = hparams.heads / hparams.kv_heads;
    let one = |t: usize, h: usize| {
        let scores = (0..=t).map(|past| dot(&q[t][h], &k[past][h / share]) / (hparams.head_width as f64).sqrt());
        let shares = softmax(&scores.collect::<Vec<_>>());
        let value = |d| (0..=t).map(|past| shares[past] * v[past][h / share][d]).sum();
        (0..hparams.head_width).map(value).collect::<Vec<f64>>()
    };
    (0..cur.len()).map(|t| (0..hparams.heads).flat_map(|h| one(t, h)).collect()).collect()
}

fn rotate(toy: &ToyModel, head: &mut [f64], position: usize) {
    let rope = &toy.hparams.rope;
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
            let matrices = rows(toy, &name(stem), x.len());
            matrices[e * m..(e + 1) * m].iter().map(|row| dot(row, x)).collect()
        };
        let (gate, up) = (product("ffn_gate_exps.weight", x, experts.ff), product("ffn_up_exps.weight", x, experts.ff));
        let down = product("ffn_down_exps.weight", &swiglu(&gate, &up), x.len());
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

fn swiglu(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
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

//! Samplers of [`fanout::sched::sampling`] on any device, and the tokens that they must give, computed in f64.

use fanout::device::{Device, MemoryBudget};
use fanout::graph::TensorId;
use fanout::sched::sampling::{LogitsLayout, SampledTokens, Sampling, add_sampler};
use fanout::sched::{Options, PreparedPlan, Scheduler, TaskBuilder};
use fanout::tensor::DType;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// The largest uniform number.
pub const BELOW_ONE: f32 = 1.0 - f32::EPSILON / 2.0;

/// Uniform numbers at both ends and between.
pub const UNIFORM: [f32; 7] = [0.0, 0.1, 0.25, 0.5, 0.77, 0.999, BELOW_ONE];

/// A sampling method.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// 0: greedy.
    pub temperature: f32,
    /// 0: all.
    pub top_k: usize,
    /// 1: all.
    pub top_p: f32,
    /// 0: all.
    pub min_p: f32,
}

impl Settings {
    /// Greedy, temperatures, and each filter alone and with others.
    pub const ALL: [Settings; 11] = [
        Settings { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Settings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Settings { temperature: 0.6, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Settings { temperature: 2.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        Settings { temperature: 1.0, top_k: 0, top_p: 0.9, min_p: 0.0 },
        Settings { temperature: 0.7, top_k: 0, top_p: 0.5, min_p: 0.0 },
        Settings { temperature: 1.0, top_k: 5, top_p: 1.0, min_p: 0.0 },
        Settings { temperature: 1.5, top_k: 40, top_p: 0.95, min_p: 0.0 },
        Settings { temperature: 1.0, top_k: 1 << 20, top_p: 0.0, min_p: 0.0 },
        Settings { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.2 },
        Settings { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05 },
    ];

    /// The library's form.
    ///
    /// # Panics
    /// For invalid settings.
    pub fn sampling(&self) -> Sampling {
        Sampling::new(self.temperature, NonZeroUsize::new(self.top_k), self.top_p)
            .and_then(|sampling| sampling.with_min_p(self.min_p))
            .unwrap()
    }
}

/// Logits of `tokens` tokens. Of `kind`, 0 to 5: scattered, flat, peaked, with minus infinity at both ends and between, minus
/// infinity but for the last token, and with equal values.
pub fn logits(kind: usize, tokens: usize, seed: u64) -> Vec<f32> {
    const LOW: f32 = f32::NEG_INFINITY;
    let mut values = crate::transformer::noise(seed, tokens);
    match kind {
        0 => values.iter_mut().for_each(|x| *x *= 6.0),
        1 => values.iter_mut().for_each(|x| *x = *x * 0.01 - 3.0),
        2 => values.iter_mut().enumerate().for_each(|(i, x)| *x = if i == tokens / 3 { 12.0 } else { 4.0 * *x }),
        3 => {
            for (i, x) in values.iter_mut().enumerate() {
                let hidden = i < tokens / 3 || i >= tokens - tokens / 4 || i % 5 == 1;
                *x = if hidden && i != tokens / 2 { LOW } else { 3.0 * *x };
            }
        }
        4 => values.iter_mut().enumerate().for_each(|(i, x)| *x = if i + 1 == tokens { -2.0 } else { LOW }),
        _ => values.iter_mut().for_each(|x| *x = (*x * 3.0).round() + 0.0), // no -0: sorted logits have it below 0
    }
    values
}

/// The distribution of a sampler, in the order in which it draws.
#[derive(Debug)]
pub struct Reference {
    /// Token and probability.
    kept: Vec<(usize, f64)>,
    /// How near the bound of top-p is to the cumulative probability of a token, or that of min-p to a probability.
    margin: f64,
}

impl Reference {
    /// The distribution for valid logits.
    pub fn new(logits: &[f32], settings: &Settings) -> Reference {
        let weight = |scale: f32| {
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            move |x: f32| (f64::from(x - top) / f64::from(scale)).exp()
        };
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let mut margin = f64::INFINITY;
        let filters_k = (1..logits.len()).contains(&settings.top_k);
        if settings.temperature == 0.0 || filters_k || settings.top_p < 1.0 || settings.min_p > 0.0 {
            order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        }
        if settings.temperature == 0.0 {
            return Reference { kept: vec![(order[0], 1.0)], margin };
        }
        if filters_k {
            order.truncate(settings.top_k);
        }
        if settings.top_p < 1.0 {
            let plain = weight(1.0);
            let total: f64 = order.iter().map(|&i| plain(logits[i])).sum();
            let (mut sum, mut kept, top_p) = (0.0, 0, f64::from(settings.top_p));
            for &i in &order {
                sum += plain(logits[i]) / total;
                kept += 1;
                margin = margin.min((sum - top_p).abs());
                if sum >= top_p {
                    break;
                }
            }
            order.truncate(kept);
        }
        if settings.min_p > 0.0 {
            let parts = order.iter().map(|&i| weight(1.0)(logits[i]) - f64::from(settings.min_p));
            margin = parts.clone().map(f64::abs).fold(margin, f64::min);
            let kept = parts.filter(|part| *part >= 0.0).count();
            order.truncate(kept.max(1));
        }
        let tempered = weight(settings.temperature);
        let total: f64 = order.iter().map(|&i| tempered(logits[i])).sum();
        Reference { kept: order.iter().map(|&i| (i, tempered(logits[i]) / total)).collect(), margin }
    }

    /// The token for a number, its probability, and how far the draw is from any other result.
    ///
    /// # Panics
    /// For a distribution without probabilities.
    pub fn draw(&self, uniform: f32) -> (usize, f64, f64) {
        let (mut before, u) = (0.0, f64::from(uniform));
        let mut last = None;
        for &(token, probability) in self.kept.iter().filter(|(_, probability)| *probability > 0.0) {
            let after = before + probability;
            if u < after {
                // Nothing is drawn below the first and above the last token.
                let below = if last.is_none() { f64::INFINITY } else { u - before };
                let above = if after > 1.0 - 1e-12 { f64::INFINITY } else { after - u };
                return (token, probability, below.min(above).min(self.margin));
            }
            last = Some((token, probability, (u - before).min(self.margin)));
            before = after;
        }
        last.unwrap()
    }

    /// The probability of a token.
    pub fn probability(&self, token: usize) -> f64 {
        self.kept.iter().find(|(kept, _)| *kept == token).map_or(0.0, |(_, probability)| *probability)
    }

    /// Checks what a device has drawn for a number. Returns whether the draw was far enough from others to compare the token.
    ///
    /// # Panics
    /// If the token is another one, has no probability, or has another than the device says.
    pub fn check(&self, uniform: f32, (token, probability): (i32, f32), what: &str) -> bool {
        let (want, _, margin) = self.draw(uniform);
        let token = usize::try_from(token).unwrap();
        let clear = margin > 1e-5;
        if clear {
            assert_eq!(token, want, "{what}, u {uniform}");
        }
        if self.margin > 1e-5 {
            let of_token = self.probability(token);
            assert!(of_token > 0.0, "{what}, u {uniform}: token {token} cannot be drawn");
            let error = (f64::from(probability) / of_token - 1.0).abs();
            assert!(error < 1e-4, "{what}, u {uniform}: {probability}, not {of_token}");
        }
        clear
    }
}

/// A sampler of logits that the host writes.
#[derive(Debug)]
pub struct HostLogits {
    scheduler: Scheduler,
    plan: PreparedPlan,
    logits: TensorId,
    sampled: SampledTokens,
    /// Number of nodes.
    pub nodes: usize,
}

impl HostLogits {
    /// A sampler on a device.
    ///
    /// # Panics
    /// If the device does not run it.
    pub fn new(
        device: Arc<dyn Device>,
        budget: &Arc<MemoryBudget>,
        [tokens, sequences]: [usize; 2],
        settings: &Settings,
        layout: LogitsLayout,
    ) -> HostLogits {
        let mut b = TaskBuilder::new();
        let logits = b.input("logits", DType::F32, [tokens, sequences, 1, 1]).unwrap();
        let sampled = add_sampler(&mut b, logits, &settings.sampling(), layout).unwrap();
        let task = Arc::new(b.build().unwrap());
        for output in [sampled.tokens, sampled.probabilities] {
            let (slot, _) = task.span(output).unwrap();
            assert_eq!(task.slot_tensor(slot), Some(output), "a view: tasks for ranks would not have it as an output");
        }
        let mut scheduler = Scheduler::new(vec![device], Options::default(), budget).unwrap();
        let plan = scheduler.build(&task).unwrap();
        HostLogits { scheduler, plan, logits, sampled, nodes: task.graph().nodes().len() }
    }

    /// The token and the probability of each sequence.
    ///
    /// # Panics
    /// If the run fails.
    pub fn run(&mut self, logits: &[f32], uniform: &[f32]) -> Vec<(i32, f32)> {
        let mut inputs = vec![(self.logits, floats_to_bytes(logits))];
        inputs.extend(self.sampled.uniform.map(|id| (id, floats_to_bytes(uniform))));
        let inputs: Vec<(TensorId, &[u8])> = inputs.iter().map(|(id, bytes)| (*id, &**bytes)).collect();
        self.scheduler.run(&mut self.plan, &inputs).unwrap();
        let mut read = |id| self.scheduler.read(&self.plan, id).unwrap().wait(None).unwrap();
        let (tokens, probabilities) = (read(self.sampled.tokens), read(self.sampled.probabilities));
        let four = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).unwrap();
        let tokens = tokens.chunks_exact(4).map(|bytes| i32::from_le_bytes(four(bytes)));
        tokens.zip(probabilities.chunks_exact(4).map(|bytes| f32::from_le_bytes(four(bytes)))).collect()
    }
}

fn floats_to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

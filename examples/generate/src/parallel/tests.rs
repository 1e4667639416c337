//! Passes over toy models: sequences that a new engine evaluates again, and prompts with invalid logits.

use super::*;
use crate::engine::tests::engine_of_groups;
use crate::hparams::Arch;
use crate::model::tests::toy::{ToyModel, prompt};
use clap::Parser;

/// Tokens of each reply.
const LIMIT: usize = 8;

/// Runs passes until every reply has an outcome; returns the jobs, and what each pass counts as. The engine is a new one before pass
/// `lost`, as after a loss, and where the caches must be cleared.
fn run(toy: &ToyModel, prompts: &[Vec<u32>], lost: Option<usize>) -> (Vec<Job>, Vec<Phase>) {
    let limit = LIMIT.to_string();
    let args = Args::parse_from(["generate", "m.gguf", "--prompts", "list", "--parallel", "4", "--predict", &limit]);
    let prompts = prompts.iter().map(|tokens| Prompt { text: None, tokens: tokens.clone() }).collect();
    let mut replies = Replies::new(&args, None, prompts, 512).unwrap();
    let sampler = Sampler::new(0.0, None, 1.0, 1);
    let mut engine = engine_of_groups(toy, 2, 2);
    let mut phases = Vec::new();
    while replies.left > 0 {
        assert!(phases.len() < 500, "the replies do not end");
        if lost == Some(phases.len()) {
            engine = engine_of_groups(toy, 2, 2);
        }
        phases.push(replies.pass(&mut engine, &sampler).unwrap().phase());
        if std::mem::take(&mut replies.is_cache_invalid) {
            engine = engine_of_groups(toy, 2, 2);
        } else {
            assert!(
                replies.alone.is_empty() || replies.running.len() == 1,
                "others run beside a job that must be alone"
            );
        }
    }
    (replies.jobs, phases)
}

#[test]
fn a_pass_that_repeats_tokens_after_a_loss_is_part_of_the_recovery() {
    let toy = ToyModel::new(Arch::Llama);
    let prompts: Vec<Vec<u32>> = [3, 5, 2, 4].map(prompt).into();
    let (want, phases) = run(&toy, &prompts, None);
    // A pass for each token, and one that reads the last.
    assert_eq!(phases, [vec![Phase::Prompt], vec![Phase::Decode; LIMIT]].concat());
    for lost in 1..LIMIT {
        let (got, phases) = run(&toy, &prompts, Some(lost));
        let mut expected = vec![Phase::Decode; LIMIT + 2];
        (expected[0], expected[lost]) = (Phase::Prompt, Phase::Recovery);
        assert_eq!(phases, expected, "lost before pass {lost}");
        for (got, want) in got.iter().zip(&want) {
            assert_eq!((&got.reply, &got.outcome), (&want.reply, &Some(Ok(()))), "lost before pass {lost}");
        }
    }
}

/// The embedding of one token is NaN, so its keys and values are, too, and with them the scores of all sequences of its group.
#[test]
fn only_the_prompts_fail_whose_own_logits_are_invalid() {
    let mut toy = ToyModel::new(Arch::Llama);
    let width = toy.hparams.width;
    let valid: Vec<Vec<u32>> = (2..8).map(prompt).collect();
    let (want, _) = run(&toy, &valid, None);
    let used: Vec<u32> = want.iter().flat_map(|job| [&*job.prompt, &*job.reply].concat()).collect();
    let damaged = (0..toy.hparams.vocab as u32).find(|token| !used.contains(token)).unwrap();
    let embeddings = &mut toy.tensors.get_mut("token_embd.weight").unwrap().1;
    embeddings[damaged as usize * width..][..width].fill(f32::NAN);
    for places in [vec![0], vec![3], vec![1, 2, 7]] {
        let mut prompts = valid.clone();
        places.iter().for_each(|&place| prompts.insert(place, vec![1, damaged, 3]));
        let (got, phases) = run(&toy, &prompts, None);
        assert!(phases.contains(&Phase::Recovery), "{places:?}: {phases:?}");
        let mut want = want.iter();
        for (number, job) in got.iter().enumerate() {
            if places.contains(&number) {
                let failed = matches!(job.outcome, Some(Err(SampleError::InvalidLogit { token: 0, .. })));
                assert!(failed && job.reply.is_empty(), "{places:?}, prompt {number}: {:?}", job.outcome);
            } else {
                let want = want.next().unwrap();
                assert_eq!((&job.reply, &job.outcome), (&want.reply, &Some(Ok(()))), "{places:?}, prompt {number}");
            }
        }
    }
}
